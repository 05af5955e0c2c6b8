"""Loops that add gradients up by hand, which `python -m accum migrate` names, and code that only looks like one."""

from typing import Any, NamedTuple


class Loop(NamedTuple):
    name: Any
    line: Any
    label: Any
    recipe: Any
    code: Any


GRAPH = "TensorFlow 1: accumulate, apply, zero"
EAGER = "TensorFlow 2: a list of sums"
MODEL = "TensorFlow 2: a train_step of your own"
CLASS = "Optimizers copied into your own code"

LOOPS = [
    Loop(
        "three-ops",
        5,
        "held",
        GRAPH,
        """
import tensorflow as tf
weights = tf.trainable_variables()
held = [tf.Variable(tf.zeros_like(w.initialized_value()), trainable=False) for w in weights]
pairs = adam.compute_gradients(loss, weights)
collect = [held[n].assign_add(pair[0]) for n, pair in enumerate(pairs)]
train = adam.apply_gradients([(held[n], pair[1]) for n, pair in enumerate(pairs)])
""",
    ),
    Loop(
        "one-conditional-op-and-a-function",
        7,
        "stores",
        GRAPH,
        """
import tensorflow as tf
def train_op(loss, opt, k, step):
    pairs = opt.compute_gradients(loss / k, tf.trainable_variables())
    stores = [tf.get_variable(v.op.name + "/s", v.shape.as_list(), trainable=False) for _, v in pairs]
    grads, variables, stores = list(zip(*[(p[0], p[1], stores[n]) for n, p in enumerate(pairs)]))
    clipped, _ = tf.clip_by_global_norm(grads, 1.0)
    stores = tf.cond(first, lambda: restart(clipped), lambda: [stores[n].assign_add(g) for n, g in enumerate(clipped)])
    def update(stores):
        return opt.apply_gradients(list(zip(stores, variables)), global_step=step)
    return tf.cond(last, lambda: update(stores), lambda: tf.no_op())
""",
    ),
    Loop(
        "divided-before-they-are-applied",
        4,
        "totals",
        GRAPH,
        """
import tensorflow as tf
grads = tf.gradients(loss, variables)
totals = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
add = tf.group([total.assign_add(grad) for (total, grad) in zip(totals, grads)])
with tf.control_dependencies([add]):
    means = [total / k for total in totals]
    train_op = optimizer.apply_gradients(zip(means, variables))
""",
    ),
    Loop(
        "assigned-in-a-dict",
        7,
        "acc",
        GRAPH,
        """
import tensorflow as tf
class Trainer:
    def __init__(self):
        self.acc = {v: tf.Variable(tf.zeros_like(v)) for v in self.variables}

    def take(self, loss):
        return [tf.assign(self.acc[v], self.acc[v] + g) for g, v in self.opt.compute_gradients(loss)]

    def apply(self):
        return self.opt.apply_gradients([(total, v) for v, total in self.acc.items()])
""",
    ),
    Loop(
        "a-list-of-sums",
        6,
        "sums",
        EAGER,
        """
import tensorflow as tf
sums = [tf.zeros_like(v) for v in variables]
for i, (x, y) in enumerate(data):
    with tf.GradientTape() as tape:
        loss = model(x, y)
    sums = [s + g for s, g in zip(sums, tape.gradient(loss, variables))]
    if i % 4 == 3:
        optimizer.apply_gradients(zip(sums, variables))
        sums = [tf.zeros_like(v) for v in variables]
""",
    ),
    Loop(
        "the-first-is-taken-and-the-others-added",
        9,
        "total",
        EAGER,
        """
from tensorflow import GradientTape, keras
total = None
for x in data:
    with GradientTape() as tape:
        loss = model(x)
    gradients = tape.gradient(loss, model.trainable_variables)
    if total is None:
        total = gradients
    total = [a + b for a, b in zip(total, gradients)]
keras.optimizers.SGD(0.1).apply_gradients(zip(total, model.trainable_variables))
""",
    ),
    Loop(
        "in-a-train-step",
        7,
        "held",
        MODEL,
        """
import tensorflow as tf
class Model(tf.keras.Model):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compiled_loss(data[1], self(data[0]))
        for i, grad in enumerate(tape.gradient(loss, self.trainable_variables)):
            self.held[i].assign_add(grad)
        tf.cond(self.is_last(), self.apply, lambda: None)

    def apply(self):
        self.optimizer.apply_gradients(zip(self.held, self.trainable_variables))
""",
    ),
    Loop(
        "item-by-item",
        6,
        "sums",
        EAGER,
        """
import tensorflow as tf
with tf.GradientTape() as tape:
    loss = f()
grads = tape.gradient(loss, variables)
for i in range(len(grads)):
    sums[i] += grads[i] / 4
opt.apply_gradients((s, v) for s, v in zip(sums, variables))
""",
    ),
    Loop(
        "a-helper-of-others",
        2,
        "GradientAccumulator",
        GRAPH,
        "from transformers import GradientAccumulator, tensorflow\nmine = GradientAccumulator()\n# apply_gradients\n",
    ),
    Loop(
        "an-optimizer-of-its-own",
        2,
        "Patient",
        CLASS,
        """
from keras.optimizers import Optimizer
class Patient(Optimizer):
    def __init__(self, lr, accum_iters=2):
        pass
""",
    ),
    Loop(
        "an-optimizer-by-decorator",
        3,
        "Patient",
        CLASS,
        """
from mine import keras
def extend(BaseOptimizer):
    class Patient(BaseOptimizer):
        @arguments(grad_accum_steps=2)
        def __init__(self):
            pass
""",
    ),
    Loop(
        "appended-to-lists",
        7,
        "held",
        GRAPH,
        """
import tensorflow as tf
def train_op(opt, loss):
    pairs, adding = [], []
    for g, v in opt.compute_gradients(loss):
        held = tf.Variable(tf.zeros_like(v), trainable=False)
        pairs.append((held, v))
        adding.append(held.assign_add(g))
    with tf.control_dependencies(adding):
        return opt.apply_gradients(pairs)
""",
    ),
    Loop(
        "added-first-and-assigned-afterwards",
        5,
        "sums",
        GRAPH,
        """
import tensorflow as tf
for grad, held in zip(tf.gradients(loss, variables), sums):
    new = held + grad / k
    more.append(held)
    adding.append(tf.assign(held, new))
train_op = opt.apply_gradients(zip(more, variables))
""",
    ),
    Loop(
        "fed-back-through-placeholders",
        11,
        "totals",
        GRAPH,
        """
import tensorflow as tf
class Trainer(Base):
    def build(self):
        self.feeds = [tf.placeholder(g.dtype, g.shape) for g in self.grads]
        self.step = self.opt.apply_gradients(list(zip(self.feeds, self.variables)))

    def train(self, batches):
        totals = [self.session.run(self.grads, batch) for batch in batches][0]
        for batch in batches[1:]:
            for i, g in enumerate(self.session.run(self.grads, batch)):
                totals[i] += g
        self.session.run(self.step, {feed: total / 4 for feed, total in zip(self.feeds, totals)})
""",
    ),
    Loop(
        "fed-as-a-dict-of-pairs",
        6,
        "totals",
        GRAPH,
        """
import tensorflow as tf
feeds = [tf.placeholder(tf.float32) for _ in variables]
step = opt.apply_gradients(zip(feeds, variables))
grads = session.run(tf.gradients(loss, variables))
for i, grad in enumerate(grads):
    totals[i] += grad
session.run(step, feed_dict=dict(zip(feeds, totals)))
""",
    ),
    Loop(
        "in-a-method-called-apply",
        4,
        "held",
        GRAPH,
        """
import tensorflow as tf
class Trainer:
    def _apply_or_wait(self, grads):
        adding = [tf.assign_add(h, g) for h, g in zip(self.held, grads)]
        return self.opt.apply_gradients(zip(self.held, self.variables))
""",
    ),
    Loop(
        "applied-in-another-file",
        9,
        "grad_buffers",
        GRAPH,
        """
import tensorflow as tf
class Sums(Base):
    @property
    def grad_buffers(self):
        return [tf.Variable(tf.zeros_like(v)) for v in self.variables]

    @property
    def collect(self):
        return [tf.assign_add(buffer, grad) for buffer, grad in zip(self.grad_buffers, super().grads)]
""",
    ),
    Loop(
        "an-optimizer-of-a-factory",
        3,
        "Patient",
        CLASS,
        """
import tensorflow as tf
def patient(base_optimizer, n):
    class Patient(base_optimizer):
        def apply_gradients(self, pairs):
            grad_acc = [tf.Variable(tf.zeros_like(v)) for _, v in pairs]
            return super().apply_gradients(zip(grad_acc, variables))
    return Patient
""",
    ),
    Loop(
        "an-optimizer-with-iter-size",
        2,
        "Patient",
        CLASS,
        """
import tensorflow as tf
class Patient(tf.train.AdamOptimizer):
    def __init__(self, iter_size):
        pass
""",
    ),
    Loop(
        "counted-by-n",
        9,
        "held",
        GRAPH,
        """
import tensorflow as tf
n = tf.Variable(0, trainable=False)
held = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
def restart(grads):
    return [h.assign(g) for h, g in zip(held, grads)]
def train_op(loss):
    grads = tf.gradients(loss, variables)
    is_first = tf.equal(n % k, 0)
    adding = lambda: [h.assign_add(g) for h, g in zip(held, grads)]
    stored = tf.cond(is_first, lambda: restart(grads), adding)
    with tf.control_dependencies(stored + [n.assign_add(1)]):
        return tf.cond(tf.equal(n % k, 0), lambda: opt.apply_gradients(zip(held, variables)), lambda: tf.no_op())
""",
    ),
    Loop(
        "an-optimizer-that-counts-to-n",
        2,
        "Patient",
        CLASS,
        """
import tensorflow as tf
class Patient(tf.train.AdamOptimizer):
    def __init__(self, n):
        self.n, self.i = n, 0

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        sums = [tf.Variable(tf.zeros_like(v), trainable=False) for _, v in grads_and_vars]
        adding = tf.group(*[s.assign_add(g) for s, (g, _) in zip(sums, grads_and_vars)])
        with tf.control_dependencies([adding]):
            return super().apply_gradients([(s / self.n, v) for s, (_, v) in zip(sums, grads_and_vars)], global_step)
""",
    ),
]
LOOPS = [loop._replace(code=loop.code.lstrip("\n")) for loop in LOOPS]

NO_LOOPS = {
    "gradients of several losses": """
import tensorflow as tf
sums = {v: 0.0 for v in variables}
for loss in losses:
    for grad, v in opt.compute_gradients(loss):
        sums[v] += grad
train_op = opt.apply_gradients([(total, v) for v, total in sums.items()])
""",
    "statistics of gradients": """
import tensorflow as tf
grads = tf.gradients(loss, variables)
stats = [tf.matmul(grad, grad) for grad in grads]
update = [kept.assign_add(stat) for kept, stat in zip(factors, stats)]
train_op = opt.apply_gradients([(tf.matmul(f, g), v) for f, g, v in zip(factors, grads, variables)])
""",
    "what a sum is divided by": """
import tensorflow as tf
count.assign_add(tf.size(grads[0]))
opt.apply_gradients([(grad / count, v) for grad, v in zip(grads, variables)])
""",
    "a loss beside gradients": """
import tensorflow as tf
loss, grads = model.compute_gradients(x)
total.assign_add(loss)
opt.apply_gradients([(total * grad, v) for grad, v in zip(grads, variables)])
""",
    "an optimizer's slots": """
import tensorflow as tf
class Plain(tf.train.Optimizer):
    def apply_gradients(self, pairs):
        for grad, v in pairs:
            m = tf.get_variable(v.op.name, initializer=tf.zeros_initializer())
            new = m * 0.9 + grad
            m.assign(new)
        return super().apply_gradients([(m, v)])
""",
    "an optimizer of n workers": """
import tensorflow as tf
class Mean(tf.train.Optimizer):
    def __init__(self, opt, n):
        self.opt, self.n = opt, n
        self.steps = tf.Variable(tf.zeros([]))

    def apply_gradients(self, pairs):
        self.steps.assign_add(1.0)
        return self.opt.apply_gradients([(summed(grad) / self.n, v) for grad, v in pairs])
""",
    "Adadelta's sums": """
from keras.optimizers import Optimizer
class Mine(Optimizer):
    def update(self, grad, accum_grad, accum_var):
        pass
""",
    "PyTorch": """
import tensorflow as tf, torch
totals = [tf.zeros_like(g) for g in grads]
totals = [total + grad for total, grad in zip(totals, grads)]
opt.apply_gradients(zip(totals, grads))
""",
    "a moving average": """
import tensorflow as tf
averages = [tf.Variable(tf.zeros_like(v), trainable=False) for v in variables]
keep = [a.assign_add(0.1 * (v - a)) for a, v in zip(averages, variables)]
train_op = opt.apply_gradients(opt.compute_gradients(loss))
""",
    "sharpness-aware minimization": """
import tensorflow as tf
with tf.GradientTape() as tape:
    loss = f()
grads = tape.gradient(loss, variables)
for v, g in zip(variables, grads):
    v.assign_add(0.05 * g)
with tf.GradientTape() as second:
    loss = f()
sharp = second.gradient(loss, variables)
opt.apply_gradients(zip(sharp, variables))  # no accumulator
""",
    "weight decay": """
import tensorflow as tf
grads = tf.gradients(loss, variables)
grads = [g + 0.1 * v + tf.zeros_like(g) for g, v in zip(grads, variables)]
opt.apply_gradients(zip(grads, variables))
""",
    "a list that grows": """
import tensorflow as tf
accumulated = []
for tower in towers:
    accumulated += opt.compute_gradients(tower)
opt.apply_gradients(accumulated)
""",
    "the mean over towers": """
import tensorflow as tf
accumulated = []
for tower in towers:
    accumulated.append(opt.compute_gradients(tower))
means = [(tf.add_n([g for g, _ in pairs]) / 4, pairs[0][1]) for pairs in zip(*accumulated)]
opt.apply_gradients(means)
""",
    "a total that is logged": """
import tensorflow as tf
accum = 0.0
for x in data:
    grads = tape.gradient(loss, variables)
    accum += tf.linalg.global_norm(grads)
    opt.apply_gradients(zip(grads, variables))
print(accum)
""",
    "an offset into gradients": """
import tensorflow as tf
offset = 0
for grad in all_grads:
    offset += grad.shape.num_elements()
    opt.apply_gradients([(flat[offset:], v)])
""",
    "an optimizer's own update": """
import tensorflow as tf
class Plain(tf.train.Optimizer):
    def _resource_apply_dense(self, grad, var):
        return var.assign_add(-grad)
Plain(1.0).apply_gradients([(grad, var)])
""",
    "Adagrad's accumulator": """
from keras.optimizers import Optimizer
class Mine(Optimizer):
    def __init__(self, initial_accumulator_value=0.1):
        pass
""",
    "JAX": """
import jax, tensorflow
sums = jax.tree_map(lambda g: zeros_like(g), grads)
sums = [s + g for s, g in zip(sums, grads)]
state = state.apply_gradients(sums)
""",
}
