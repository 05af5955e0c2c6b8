"""Optimizers of the user's own, of Keras and of the lineage in a static graph (laws L1, L7)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import legacy_family
from warned import silent

import accum.compat.v1

tf1 = tf.compat.v1

K = 4
GRADIENTS = np.random.RandomState(0).normal(size=(3 * K, 5)).astype("float32")
KERAS = legacy_family()  # the new ones need eager execution


class Clipped(tf1.train.Optimizer):
    """A wrapper as pipelines have them: clips by the global norm and hands on."""

    def __init__(self, inner):
        super().__init__(False, "Clipped")
        self._inner = inner
        self.calls = 0

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self.calls += 1
        grads, variables = zip(*grads_and_vars)
        return self._inner.apply_gradients(
            list(zip(tf.clip_by_global_norm(grads, 0.5)[0], variables)), global_step=global_step, name=name
        )


def run(make, gradients):
    """Weights and steps after a train op made by `make()` has been given `gradients`."""
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        weights = tf1.get_variable("w", initializer=np.ones(5, "float32"), use_resource=True)
        fed = tf1.placeholder(tf.float32, [5])
        train_op = make().apply_gradients([(fed, weights)], global_step=step)
        session.run(tf1.global_variables_initializer())
        for grad in gradients:
            session.run(train_op, {fed: grad})
        return session.run([weights, step])


def means():
    return GRADIENTS.reshape(3, K, 5).mean(1)


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


def clipped(grad):
    return grad * min(1.0, 0.5 / np.linalg.norm(grad))


def by_momentum(gradients):
    weights, velocity = np.ones(5), 0.0
    for grad in gradients.astype("float64"):
        velocity = 0.9 * velocity + grad
        weights = weights - 0.1 * velocity
    return weights


@pytest.mark.law("L7")
def test_a_wrapper_of_the_user_s_own_inside_sees_the_accumulated_gradient():
    ours, steps = run(lambda: accum.compat.v1.AccumOptimizer(Clipped(momentum()), K), GRADIENTS)
    expected = by_momentum(np.array([clipped(mean) for mean in means()]))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L7")
def test_a_wrapper_of_the_user_s_own_around_sees_each_micro_batch():
    ours, steps = run(lambda: Clipped(accum.compat.v1.AccumOptimizer(momentum(), K)), GRADIENTS)
    expected = by_momentum(np.array([clipped(grad) for grad in GRADIENTS]).reshape(3, K, 5).mean(1))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.tf(keras=2, because="Keras 3 has no optimizer for static graphs")
@pytest.mark.law("L7")
@pytest.mark.parametrize("options", [{"clipnorm": 0.5}, {"clipvalue": 0.1}], ids=["clipnorm", "clipvalue"])
def test_clipping_of_a_keras_optimizer_acts_on_the_accumulated_gradient(options):
    ours, steps = run(lambda: accum.compat.v1.AccumOptimizer(KERAS.SGD(1.0, **options), K), GRADIENTS)
    clip = clipped if "clipnorm" in options else lambda grad: np.clip(grad, -0.1, 0.1)
    np.testing.assert_allclose(ours, 1.0 - sum(clip(mean) for mean in means()), rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L7")
def test_adaptive_clipping_acts_on_the_accumulated_gradient():
    def transform(grads_and_vars):
        grads, variables = zip(*grads_and_vars)
        return list(zip(accum.adaptive_clip_grad(variables, grads, clip_factor=0.1), variables))

    sgd = tf1.train.GradientDescentOptimizer
    ours, _ = run(lambda: accum.compat.v1.AccumOptimizer(sgd(1.0), K, transform=transform), GRADIENTS)
    weights = np.ones(5)
    for mean in means().astype("float64"):
        weights = weights - mean * min(1.0, 0.1 * max(np.linalg.norm(weights), 1e-3) / np.linalg.norm(mean))
    np.testing.assert_allclose(ours, weights, rtol=0, atol=2e-6)


class OfProgram(tf1.train.GradientDescentOptimizer):
    """An optimizer with a `compute_gradients` of its own, as programs have them."""

    def __init__(self, change):
        super().__init__(1.0)
        self._change = change

    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        return [(self._change(grad), var) for grad, var in pairs if grad is not None]


CHANGES = {
    "norm": lambda grad: tf.clip_by_norm(grad, 0.5),
    "value": lambda grad: tf.clip_by_value(grad, -0.1, 0.1),
    "sign": tf.sign,
}


def trained_by(optimizer, batches):
    with tf.Graph().as_default(), tf1.Session() as session:
        weights = tf1.get_variable("w", initializer=np.ones(5, "float32"))
        tf1.get_variable("unused", initializer=1.0)
        fed = tf1.placeholder(tf.float32, [5])
        train_op = optimizer.minimize(tf.reduce_sum(tf.sin(weights) * fed))
        session.run(tf1.global_variables_initializer())
        for batch in batches:
            session.run(train_op, {fed: batch})
        return session.run(weights)


@pytest.mark.law("L7", "L17")
@pytest.mark.parametrize("name", list(CHANGES))
def test_clipping_in_a_compute_gradients_of_the_user_s_own_is_named(name):
    expected = trained_by(OfProgram(CHANGES[name]), means())
    with pytest.warns(UserWarning, match="OfProgram.compute_gradients. changes.*transform=.*OfProgram"):
        ours = trained_by(accum.compat.v1.AccumOptimizer(OfProgram(CHANGES[name]), K), GRADIENTS)
    assert np.abs(ours - expected).max() > 1e-2
    remedy = lambda pairs: [(CHANGES[name](grad), var) for grad, var in pairs]
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), K, transform=remedy)
    np.testing.assert_allclose(trained_by(optimizer, GRADIENTS), expected, rtol=0, atol=2e-6)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "accum_steps, change",
    [
        (K, lambda grad: grad * 0.5),
        (K, tf.identity),
        (1, CHANGES["norm"]),
        (K, lambda grad: grad - tf.reduce_mean(grad, keepdims=True)),
        (K, lambda grad: grad * tf.minimum(tf.sqrt(tf.constant(0.5)), 1.0)),
    ],
)
def test_a_compute_gradients_that_changes_nothing_or_scales_is_not_named(accum_steps, change):
    with silent():
        ours = trained_by(accum.compat.v1.AccumOptimizer(OfProgram(change), accum_steps), GRADIENTS)
    batches = means() if accum_steps == K else GRADIENTS
    np.testing.assert_allclose(ours, trained_by(OfProgram(change), batches), rtol=0, atol=2e-6)


@pytest.mark.law("L1")
def test_h2g_net_s_steps_per_update_is_accum_steps():
    with pytest.warns(DeprecationWarning, match="now called `accum_steps`"):
        ours, steps = run(lambda: accum.compat.v1.AccumOptimizer(momentum(), steps_per_update=K), GRADIENTS)
    np.testing.assert_allclose(ours, by_momentum(means()), rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.tf(keras=2, because="Keras 3 has no optimizer for static graphs")
@pytest.mark.law("L1")
def test_h2g_net_s_adam_accumulated_is_adam_on_the_full_batch():
    with pytest.warns(DeprecationWarning, match="AccumOptimizer"):
        ours, steps = run(lambda: accum.compat.v1.AdamAccumulated(accumulation_steps=K, learning_rate=0.1), GRADIENTS)
    weights, m, v = np.ones(5), 0.0, 0.0
    for t, grad in enumerate(means().astype("float64"), 1):
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        weights = weights - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(ours, weights, rtol=0, atol=2e-6)
    assert steps == 3


@pytest.mark.law("L17")
def test_both_spellings_of_accum_steps_are_one_too_many():
    with pytest.raises(ValueError, match="Pass `accum_steps` only"):
        accum.compat.v1.AccumOptimizer(momentum(), 4, steps_per_update=4)
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="`steps_per_update` must be an int >= 1"):
        accum.compat.v1.AccumOptimizer(momentum(), steps_per_update=0)


class AdamOfBert(tf1.train.Optimizer):
    """Adam that gets its moments in each call of `apply_gradients`, as BERT's optimizer and LAMB do.

    Args:
      get_variable: how it gets them.
      scope: default name of the variable scope in which it does, or None.
    """

    def __init__(self, get_variable=tf1.get_variable, scope=None):
        super().__init__(False, "AdamOfBert")
        self._get_variable, self._scope = get_variable, scope

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        with tf1.variable_scope(None, default_name=self._scope) if self._scope else tf.name_scope("update"):
            moves = [self._move(grad, var) for grad, var in grads_and_vars if grad is not None]
            return tf.group(*moves + ([] if global_step is None else [global_step.assign_add(1)]), name=name)

    def _move(self, grad, var):
        m, v = [self._get_variable(name="{}/adam_{}".format(var.op.name, moment)) for moment in "mv"]
        next_m, next_v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        with tf.control_dependencies([next_m, next_v]):
            move = var.assign_sub(0.1 * next_m / (tf.sqrt(next_v) + 1e-6))
            return tf.group(move, m.assign(next_m), v.assign(next_v))


def zeros_by_name(name):
    return tf1.get_variable(name, [5], initializer=tf1.zeros_initializer(), trainable=False)


def in_scope(name, function, *args):
    with tf1.variable_scope(name):
        return function(*args)


def by_flush(optimizer, pairs):
    train_op = in_scope("training", optimizer.apply_gradients, pairs)
    return [train_op] * 5, [in_scope("later", optimizer.flush)]


def by_flush_in_a_reused_scope(optimizer, pairs):
    train_op = in_scope("training", optimizer.apply_gradients, pairs)
    with tf1.variable_scope(tf1.get_variable_scope(), reuse=True):
        return [train_op] * 5, [optimizer.flush()]


def by_two_train_ops(optimizer, pairs):
    first, second = [in_scope(name, optimizer.apply_gradients, pairs) for name in ("training", "again")]
    return [first, second, first, second, first], [optimizer.flush()]


def by_separate_ops(optimizer, pairs):
    first, second = [in_scope(name, optimizer.accumulation_ops, None, pairs) for name in ("training", "again")]
    steps = [tf.group(micro.accumulate) for micro in (first, second, first, second, first)]
    return [steps[0], (steps[1], first.apply), steps[2], (steps[3], second.apply), steps[4]], [first.apply]


def trained_as_bert(optimizer, ops_of, gradients):
    """The weights after a run, and the names of all variables. `ops_of` gives the train ops, and those that end it."""
    with tf.Graph().as_default(), tf1.Session() as session:
        fed, weights = tf1.placeholder(tf.float32, [5]), tf1.get_variable("w", initializer=np.ones(5, "float32"))
        train_ops, last = ops_of(optimizer, [(fed, weights)])
        session.run(tf1.global_variables_initializer())
        for ops, grad in zip(train_ops, gradients):
            for train_op in ops if isinstance(ops, tuple) else [ops]:
                session.run(train_op, {fed: grad})
        session.run(last)
        return session.run(weights), {var.op.name for var in tf1.global_variables()}


@pytest.fixture(params=[None, pytest.param("own", marks=pytest.mark.slow)])
def bert(request):
    """An optimizer like BERT's, in a scope of its own or not, and what plain training by full batches ends with."""

    def plain(optimizer, pairs):
        return [in_scope("training", optimizer.apply_gradients, pairs)] * 3, []

    full = [GRADIENTS[:2].mean(0), GRADIENTS[2:4].mean(0), GRADIENTS[4]]
    expected = trained_as_bert(AdamOfBert(zeros_by_name, request.param), plain, full)
    return (AdamOfBert(zeros_by_name, request.param),) + expected


@pytest.mark.law("L1", "L6")
@pytest.mark.parametrize("ops_of", [by_flush, by_flush_in_a_reused_scope, by_two_train_ops, by_separate_ops])
def test_an_optimizer_that_gets_its_variables_in_each_call_keeps_one_set_of_them(ops_of, bert):
    inner, expected, names = bert
    weights, ours = trained_as_bert(accum.compat.v1.AccumOptimizer(inner, 2), ops_of, GRADIENTS)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)
    assert {name for name in ours if "AccumOptimizer" not in name} == names


@pytest.mark.law("L6")
def test_flush_hook_finds_the_variables_of_the_train_op(tmp_path, bert):
    inner, expected, names = bert
    with tf.Graph().as_default():
        step = tf1.train.get_or_create_global_step()
        fed, weights = tf1.placeholder(tf.float32, [5]), tf1.get_variable("w", initializer=np.ones(5, "float32"))
        optimizer = accum.compat.v1.AccumOptimizer(inner, 2)
        train_op = in_scope("training", optimizer.apply_gradients, [(fed, weights)], step)
        hooks = [accum.compat.v1.FlushHook(optimizer)]
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(tmp_path), chief_only_hooks=hooks) as session:
            for grad in GRADIENTS[:5]:
                session.run(train_op, {fed: grad})
    reader = tf1.train.load_checkpoint(str(tmp_path))
    np.testing.assert_allclose(reader.get_tensor("w"), expected, rtol=0, atol=2e-6)
    saved = {name for name in reader.get_variable_to_shape_map() if "AccumOptimizer" not in name}
    assert saved == names | {"global_step"}


@pytest.mark.law("L17")
def test_an_optimizer_that_creates_new_variables_in_each_call_is_refused():
    def new(name):
        return tf.Variable(lambda: tf.zeros([5]), name=name, trainable=False)

    with tf.Graph().as_default():
        weights = tf1.get_variable("w", initializer=np.ones(5, "float32"))
        optimizer = accum.compat.v1.AccumOptimizer(AdamOfBert(new), 2)
        optimizer.apply_gradients([(tf.ones([5]), weights)])
        with pytest.raises(ValueError, match="creates a variable in each call.*get_variable.*adam_m"):
            optimizer.flush()
