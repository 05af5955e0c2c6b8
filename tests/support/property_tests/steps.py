"""Random train steps of two networks, in micro-batches and in plain Keras on the full batch (law L21).

A case is a dict of plain values:

    "encoder", "head": lists of names of `LAYERS`
    "phases": list of dicts, the parts of the train step, one after the other:
        "reads": what the losses read: "both" networks, the "head" of other features, or the "teacher" too
        "losses": list of names of `LOSSES`
        "by_inputs": whether the squares of the gradient by the inputs are a loss too
        "change": a name of `CHANGES`, what is made of the gradients
        "optimizer": "first" or "second"
        "trains": "all", "encoder" or "head"
        "after": list of names of `AFTER`, what follows the update
    "sizes": the numbers of examples of the batches
    "micro_batch_size": an int
    "run_eagerly"
    "seed"

It is checked in float64, where a mistake can't hide in rounding.
"""

import warnings

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from versions import IS_KERAS_3, TF_VERSION

import accum
from property_tests.plain import precision

layers = tf.keras.layers
FEATURES, INPUTS, OUTPUTS = 4, 5, 3
TOLERANCE = 1e-7
JIT = {"jit_compile": False} if IS_KERAS_3 else {}


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn


class Computed(layers.Layer):
    """A layer without weights, which computes a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


class Moving(layers.Layer):
    """Follows the mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.mean = tf.Variable(tf.zeros([FEATURES], "float64"), trainable=False)

    def call(self, inputs):
        self.mean.assign(0.7 * self.mean + 0.3 * tf.reduce_mean(inputs, axis=0))
        return inputs - self.mean


class Changing(layers.Layer):
    """Multiplies by a scale, and then changes it where nothing takes the result.

    Args:
      change: function of the layer and its inputs.
    """

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.scale = tf.Variable(tf.ones([], "float64"), trainable=False)
        self.calls = tf.Variable(tf.zeros([], tf.int32), trainable=False)

    def call(self, inputs):
        outputs = self.scale * inputs
        self.change(self, inputs)
        return outputs

    def shrink(self):
        self.scale.assign(0.8 * self.scale)
        return tf.constant(1)

    @tf.function
    def follow(self, inputs):
        self.scale.assign(0.7 * self.scale + 0.3 * tf.reduce_mean(tf.abs(inputs)))


def _each_second_time(layer, _):
    layer.calls.assign_add(1)
    tf.cond(layer.calls % 2 == 0, layer.shrink, lambda: tf.constant(0))


class Penalized(layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


@tf.custom_gradient
def _clipped_together(inputs):
    return tf.identity(inputs), lambda grad: tf.clip_by_norm(grad, 0.1)


@tf.custom_gradient
def _scaled(inputs):
    return tf.identity(inputs), lambda grad: 0.5 * grad


def _in_halves(inputs):
    """Each example beside the one half a batch further."""
    count = tf.shape(inputs)[0]
    return 0.5 * (inputs + tf.gather(inputs, (tf.range(count) + count // 2) % count))


def _count(x):
    return tf.shape(x)[0]


def _only_if(question):
    """Twice the inputs if their number is an answer to `question`."""
    return lambda x: tf.cond(question(_count(x)), lambda: 2.0 * x, lambda: tf.identity(x))


def _first_half_weighs_more(x):
    half = _count(x) // 2
    return x * tf.concat([tf.fill([half, 1], tf.cast(1.5, x.dtype)), tf.ones([_count(x) - half, 1], x.dtype)], 0)


def _in_two_columns(x):
    """Each example beside the next one, if their number is even."""
    count = _count(x)
    even = count - count % 2
    pairs = tf.reshape(x[:even], [even // 2, 2 * FEATURES])
    return tf.concat([tf.reshape(tf.nn.softmax(pairs), [-1, FEATURES]), x[even:]], 0)


FUNCTIONS = {
    "tanh": tf.tanh,
    "swish": tf.nn.silu if hasattr(tf.nn, "silu") else tf.nn.swish,
    "softmax": lambda x: tf.nn.softmax(x, axis=-1),
    "flattened": lambda x: tf.reshape(tf.reshape(x, [-1]), [-1, FEATURES]),
    "transposed": lambda x: tf.transpose(2.0 * tf.transpose(x)),
    "centred": lambda x: x - tf.reduce_mean(x, axis=0),
    "largest": lambda x: x - tf.reduce_max(x, axis=0, keepdims=True),
    "softmax of the batch": lambda x: x * tf.nn.softmax(x, axis=0),
    "summed up": lambda x: 0.1 * tf.cumsum(x, axis=0),
    "rolled": lambda x: x + tf.roll(x, 1, axis=0),
    "reversed": lambda x: x + x[::-1],
    "sorted": lambda x: tf.sort(x, axis=0),
    "attention": lambda x: tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x),
    "by count": lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
    "by place": lambda x: x * tf.cast(tf.range(tf.shape(x)[0])[:, None], x.dtype) / 5.0,
    "in halves": _in_halves,
    "six only": _only_if(lambda count: tf.equal(count, 6)),
    "more than five": _only_if(lambda count: count > 5),
    "about seven": _only_if(lambda count: tf.abs(count - 7) < 2),
    "even": _only_if(lambda count: tf.equal(count % 2, 0)),
    "at most five": lambda x: x / tf.cast(tf.minimum(_count(x), 5), x.dtype),
    "first five": lambda x: x - tf.reduce_mean(x[:5], axis=0),
    "other count": lambda x: x * tf.cast(tf.where(_count(x) < 6, _count(x), 3), x.dtype),
    "weighted halves": _first_half_weighs_more,
    "two columns": _in_two_columns,
    "first": lambda x: x - x[:1],
    "all": lambda x: x / (1.0 + tf.reduce_sum(x**2)),
    "cut": lambda x: tf.where(x > tf.reduce_mean(x), x, 0.1 * x),
    "in a loop": lambda x: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y + tf.sin(y)), [0, x])[1],
    "in a condition": lambda x: tf.cond(tf.reduce_mean(x) > 0.0, lambda: 2.0 * x, lambda: -x),
    "each": lambda x: tf.map_fn(tf.nn.softmax, x),
    "clipped together": _clipped_together,
    "scaled gradient": _scaled,
}
LAYERS = dict(
    {name: (lambda function=function: Computed(function)) for name, function in FUNCTIONS.items()},
    **{
        "dense": lambda: layers.Dense(FEATURES, activation="tanh"),
        "regularized": lambda: layers.Dense(FEATURES, kernel_regularizer="l2"),
        "batch norm": lambda: layers.BatchNormalization(momentum=0.7),
        "layer norm": layers.LayerNormalization,
        "moving": Moving,
        "changed each second time": lambda: Changing(_each_second_time),
        "changed for many": lambda: Changing(
            lambda layer, x: tf.cond(_count(x) > 5, layer.shrink, lambda: tf.constant(0))
        ),
        "changed in a loop": lambda: Changing(
            lambda layer, _: tf.while_loop(lambda i: i < 2, lambda i: (i + layer.shrink(),), [0])
        ),
        "changed in a function": lambda: Changing(lambda layer, x: layer.follow(x)),
        "mean penalty": lambda: Penalized(lambda x: tf.reduce_mean(x**2)),
        "root penalty": lambda: Penalized(lambda x: tf.sqrt(tf.reduce_mean(x**2) + 0.1)),
        "summed penalty": lambda: Penalized(lambda x: 0.01 * tf.reduce_sum(x**2)),
    },
)


def _similarity(y, z, _x):
    unit = tf.math.l2_normalize(z, axis=1)
    logits = 3.0 * tf.matmul(unit, tf.math.l2_normalize(y, axis=1), transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(z)[0]), logits))


def _masked(y, z, x):
    kept = tf.cast(x[:, :1] > 0.3, z.dtype)
    return tf.reduce_sum(kept * (y - z) ** 2) / (tf.reduce_sum(kept) + 0.1)


def _by_counts(y, z, _x):
    share = tf.reduce_mean(tf.cast(y > 0.0, z.dtype), axis=0)
    return tf.reduce_mean((y - z) ** 2 / (share + 0.2))


def _covariance(_y, z, _x):
    apart = z - tf.reduce_mean(z, axis=0)
    return tf.reduce_sum(tf.matmul(apart, apart, transpose_a=True) ** 2) / tf.cast(tf.shape(z)[0], z.dtype) ** 2


LOSSES = {
    "mean": lambda y, z, x: tf.reduce_mean((y - z) ** 2),
    "sum": lambda y, z, x: 0.1 * tf.reduce_sum(tf.abs(y - z)),
    "root": lambda y, z, x: tf.sqrt(tf.reduce_mean((y - z) ** 2) + 0.01),
    "largest": lambda y, z, x: tf.reduce_max(tf.reduce_mean((y - z) ** 2, axis=1)),
    "masked": _masked,
    "by counts": _by_counts,
    "similarity": _similarity,
    "covariance": _covariance,
    "pairs": lambda y, z, x: tf.reduce_mean(tf.nn.relu(0.5 + z[:, None, 0] - z[None, :, 1])),
    "halves": lambda y, z, x: tf.reduce_mean(z[: tf.shape(z)[0] // 2]) ** 2,
    "product": lambda y, z, x: tf.reduce_mean(z[:, 0]) * tf.reduce_mean(y[:, 0] * z[:, 1]),
    "by number": lambda y, z, x: tf.reduce_sum((y - z) ** 2) / tf.cast(tf.maximum(tf.shape(z)[0] - 3, 2), z.dtype),
    "of a number": lambda y, z, x: tf.reduce_mean(tf.where(tf.shape(y)[0] > 6, tf.abs(y - z), (y - z) ** 2)),
    "first five": lambda y, z, x: tf.reduce_mean((y - z)[:5] ** 2),
}
CHANGES = {
    "none": lambda grads, step: grads,
    "clip all": lambda grads, step: tf.clip_by_global_norm(grads, 0.3)[0],
    "clip each": lambda grads, step: [tf.clip_by_norm(grad, 0.1) for grad in grads],
    "clip values": lambda grads, step: [tf.clip_by_value(grad, -0.02, 0.02) for grad in grads],
    "normalise": lambda grads, step: [grad / (0.1 + tf.norm(grad)) for grad in grads],
    "decay": lambda grads, step: [grad / (1.0 + step) for grad in grads],
}
AFTER = ("teacher", "queue", "shrink", "count", "clip weights")


def names(table):
    return st.sampled_from(sorted(table))


@st.composite
def sizes(draw):
    """Batches are mostly of one size, because each further one is traced."""
    first = draw(st.integers(4, 9))
    return [first] * draw(st.integers(1, 2)) + draw(st.sampled_from([[], [], [], [first // 2 + 1]]))


@st.composite
def step_cases(draw):
    def stack(most):
        return draw(st.lists(names(LAYERS), max_size=most))

    def phase(_):
        return {
            "reads": draw(st.sampled_from(["both", "head", "teacher", "parts"])),
            "losses": draw(st.lists(names(LOSSES), min_size=1, max_size=2)),
            "by_inputs": draw(st.integers(0, 4)) == 0,
            "change": draw(names(CHANGES)),
            "optimizer": draw(st.sampled_from(["first", "second"])),
            "trains": draw(st.sampled_from(["all", "all", "encoder", "head"])),
            "after": draw(st.lists(st.sampled_from(AFTER), max_size=2, unique=True)),
        }

    return {
        "encoder": stack(3),
        "head": stack(2),
        "phases": [phase(n) for n in range(draw(st.sampled_from([1, 1, 2, 2, 3])))],
        "sizes": draw(sizes()),
        "micro_batch_size": draw(st.integers(1, 4)),
        "run_eagerly": draw(st.integers(0, 5)) == 0,
        "seed": draw(st.integers(0, 2**16)),
    }


# ----------------------------------------------------------------------------------------------------------------------
# The model


def network(names, inputs, outputs):
    stack = [tf.keras.Input((inputs,)), layers.Dense(FEATURES, activation="tanh")]
    return tf.keras.Sequential(stack + [LAYERS[name]() for name in names] + [layers.Dense(outputs)])


class Drawn(tf.keras.Model):
    """The model of a case."""

    def __init__(self, case):
        super().__init__()
        self.phases = lambda: case["phases"]  # a list would be wrapped
        self.encoder, self.head = network(case["encoder"], INPUTS, FEATURES), network(case["head"], FEATURES, OUTPUTS)
        self.teacher = network([], INPUTS, FEATURES)
        self.steps = tf.Variable(tf.zeros([], "float64"), trainable=False)
        self.queue = tf.Variable(tf.zeros([OUTPUTS], "float64"), trainable=False)

    def compile(self, **options):
        super().compile(**options)
        optimizers = tf.keras.optimizers.SGD(0.05), tf.keras.optimizers.SGD(0.03, momentum=0.9)
        for optimizer in optimizers:
            if hasattr(optimizer, "build"):  # it updates some variables in one phase and others in another one
                optimizer.build(self.encoder.trainable_variables + self.head.trainable_variables)
        self.first, self.second = optimizers

    def call(self, inputs, training=None):
        return self.head(self.encoder(inputs, training=training), training=training)

    def outputs_of(self, phase, x):
        if phase["reads"] == "head":
            return self.head(x[:, :FEATURES] + 0.1 * self.queue[0], training=True)
        if phase["reads"] == "teacher":
            return self.head(self.encoder(x, training=True) - tf.stop_gradient(self.teacher(x)), training=True)
        if phase["reads"] == "parts":
            features = self.encoder(x, training=True)
            return self.head(features + tf.reduce_mean(features, axis=0), training=True)
        return self(x, training=True)

    def train_step(self, data):
        x, y = data
        losses = {}
        for number, phase in enumerate(self.phases()):
            with tf.GradientTape() as tape:
                with tf.GradientTape() as of_inputs:
                    if phase["by_inputs"]:
                        of_inputs.watch(x)
                    z = self.outputs_of(phase, x)
                    added = (self.head if phase["reads"] == "head" else self).losses
                    loss = tf.add_n([LOSSES[name](y, z, x) for name in phase["losses"]] + list(added))
                if phase["by_inputs"]:
                    loss += tf.reduce_mean(of_inputs.gradient(loss, x) ** 2)
            trained = {"all": [self.encoder, self.head], "encoder": [self.encoder], "head": [self.head]}
            weights = [var for part in trained[phase["trains"]] for var in part.trainable_variables]
            pairs = [pair for pair in zip(tape.gradient(loss, weights), weights) if pair[0] is not None]
            if pairs:
                grads = CHANGES[phase["change"]]([grad for grad, _ in pairs], self.steps)
                getattr(self, phase["optimizer"]).apply_gradients(zip(grads, [var for _, var in pairs]))
            for name in phase["after"]:
                self.after(name, z)
            losses[f"loss_{number}"] = loss
        return losses

    def after(self, name, z):
        if name == "teacher":
            for slow, fast in zip(self.teacher.trainable_variables, self.encoder.trainable_variables):
                slow.assign(0.8 * slow + 0.2 * fast) if slow.shape == fast.shape else None
        elif name == "queue":
            self.queue.assign(0.5 * self.queue + tf.reduce_max(z, axis=0))
        elif name == "shrink":
            for var in self.head.trainable_variables:
                var.assign(0.99 * var)
        elif name == "count":
            self.steps.assign_add(1.0)
        else:
            for var in self.encoder.trainable_variables:
                var.assign(tf.clip_by_value(var, -0.8, 0.8))


# ----------------------------------------------------------------------------------------------------------------------
# The check


def trained(case, **options):
    """Return the variables and losses after each batch."""
    model = Drawn(case)
    random = np.random.RandomState(case["seed"])
    for part in (model.encoder, model.head, model.teacher):
        for var in part.trainable_variables:
            var.assign(random.normal(size=var.shape) * 0.6)
    if options:
        model = accum.GradientAccumulateModel.from_model(model, **options)
    # The oracle needs no trace, but TensorFlow 2.2 has another gradient of `tf.map_fn` eagerly than in a graph.
    model.compile(run_eagerly=case["run_eagerly"] or not (options or TF_VERSION < (2, 3)), **JIT)
    found = []
    for size in case["sizes"]:
        x, y = random.normal(size=(size, INPUTS)), random.normal(size=(size, OUTPUTS))
        logs = model.fit(x, y, batch_size=size, shuffle=False, verbose=0).history
        parts = model.encoder, model.head, model.teacher
        state = [var for part in parts for var in part.variables if "seed" not in var.name] + [model.steps, model.queue]
        found.append([np.array(tf.convert_to_tensor(var)) for var in state])
        found[-1] += [] if IS_KERAS_3 else [logs[key] for key in sorted(logs)]
    return found


_how_it_ended = []


def check(case):
    """Raise `AssertionError` if the case in micro-batches is not that of the full batch, and nothing says so."""
    del _how_it_ended[:]
    with precision("float64"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(case)
        warnings.simplefilter("error", accum.InexactWarning)
        warnings.filterwarnings("ignore", message="With .*, (the )?Python code")
        try:
            found = trained(case, micro_batch_size=case["micro_batch_size"])
        except (ValueError, accum.InexactWarning) as error:
            if "[accum: " not in str(error):
                raise
            _how_it_ended.append("named")
            return
    for step, (own, full) in enumerate(zip(found, expected)):
        for index, (value, goal) in enumerate(zip(own, full)):
            message = f"after batch {step + 1}, value {index}"
            np.testing.assert_allclose(value, goal, rtol=TOLERANCE, atol=TOLERANCE, err_msg=message)
    _how_it_ended.append("exact")


def laws(_case):
    """Return what the last case that was checked counts for."""
    return {"L21", *_how_it_ended}
