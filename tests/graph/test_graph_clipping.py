"""What a program does to gradients before it applies them acts on each micro-batch, and is named (law L7)."""

import numpy as np
import pytest
import tensorflow as tf
from warned import silent, warned

import accum.compat.v1

pytestmark = pytest.mark.law("L17")

tf1 = tf.compat.v1

K, SIZE = 2, 4
RANDOM = np.random.RandomState(1)
X = RANDOM.normal(size=(3, K * SIZE, 5)).astype("float32") * np.linspace(0.1, 2.0, K * SIZE)[:, None].astype("float32")
Y = RANDOM.normal(size=(3, K * SIZE)).astype("float32")
SPACES = [tf1.train.experimental, getattr(tf1, "mixed_precision", None)]
LOSS_SCALES = [space for space in SPACES if hasattr(space, "MixedPrecisionLossScaleOptimizer")]


def sgd():
    return tf1.train.GradientDescentOptimizer(0.1)


def clipped_by_global_norm(pairs):
    grads, variables = zip(*pairs)
    return list(zip(tf.clip_by_global_norm(grads, 0.3)[0], variables))


def each(change):
    return lambda pairs: [(change(grad), var) for grad, var in pairs]


class Problem:
    """A linear regression in a graph."""

    def __init__(self):
        self.x, self.y = tf1.placeholder(tf.float32, [None, 5]), tf1.placeholder(tf.float32, [None])
        self.weights = tf1.get_variable("w", initializer=np.ones(5, "float32"))
        self.bias = tf1.get_variable("b", initializer=0.0)
        self.variables = [self.weights, self.bias]
        self.each = (tf.linalg.matvec(self.x, self.weights) + self.bias - self.y) ** 2
        self.loss = tf.reduce_mean(self.each)

    def pairs(self, optimizer, **options):
        return [pair for pair in optimizer.compute_gradients(self.loss, **options) if pair[0] is not None]

    def trained(self, train_op, parts):
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for x, y in zip(X.reshape(-1, len(X[0]) // parts, 5), Y.reshape(-1, len(X[0]) // parts)):
                session.run(train_op, {self.x: x, self.y: y})
            return session.run(self.weights)


def by_program(change, optimizer, uses_tf_gradients=False, parts=1):
    """The weights that a program ends with which changes gradients before it applies them."""
    with tf.Graph().as_default():
        problem = Problem()
        if uses_tf_gradients:
            pairs = list(zip(tf.gradients(problem.loss, problem.variables), problem.variables))
        else:
            pairs = problem.pairs(optimizer)
        return problem.trained(optimizer.apply_gradients(change(pairs)), parts)


CHANGES = {
    "global norm": clipped_by_global_norm,
    "norm": each(lambda grad: tf.clip_by_norm(grad, 0.3)),
    "value": each(lambda grad: tf.clip_by_value(grad, -0.1, 0.1)),
    "sign": each(tf.sign),
    "threshold": each(lambda grad: tf1.where(tf.abs(grad) > 0.3, tf.zeros_like(grad), grad)),
}


@pytest.mark.slow
@pytest.mark.law("L7")
@pytest.mark.parametrize("uses_tf_gradients", [False, True], ids=["compute_gradients", "tf.gradients"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_clipping_before_the_gradients_are_applied_is_named(name, uses_tf_gradients):
    expected = by_program(CHANGES[name], sgd(), uses_tf_gradients)
    optimizer = accum.compat.v1.AccumOptimizer(sgd(), K)
    with pytest.warns(UserWarning, match="each micro-batch are changed.*transform=.*Received: operations of type"):
        ours = by_program(CHANGES[name], optimizer, uses_tf_gradients, K)
    assert np.abs(ours - expected).max() > 1e-3
    remedy = accum.compat.v1.AccumOptimizer(sgd(), K, transform=CHANGES[name])
    with silent():
        ours = by_program(lambda pairs: pairs, remedy, uses_tf_gradients, K)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.law("L7")
def test_clipping_before_separate_ops_is_named_and_said_once():
    with tf.Graph().as_default(), warned("changed after they are computed") as said:
        problem, optimizer = Problem(), accum.compat.v1.AccumOptimizer(sgd())
        pairs = clipped_by_global_norm(problem.pairs(optimizer))
        optimizer.accumulation_ops(grads_and_vars=pairs)
        optimizer.apply_gradients(pairs)
    assert len(said) == 1


def with_noise(grads_and_vars):
    return [(grad + tf.random.normal(tf.shape(grad), stddev=0.1), var) for grad, var in grads_and_vars]


def divided_by_a_number(grads_and_vars):
    """That of a shape, which is none of the gradient's entries."""
    return [(grad / tf.sqrt(tf.cast(tf.size(grad), tf.float32)), var) for grad, var in grads_and_vars]


@pytest.mark.law("L7")
@pytest.mark.parametrize("change, is_named", [(with_noise, True), (divided_by_a_number, False)])
def test_noise_is_named_and_what_is_linear_is_not(change, is_named):
    """The mean of as many draws as there are micro-batches has less noise."""
    with tf.Graph().as_default(), warned("changed after they are computed") as said:
        problem, optimizer = Problem(), accum.compat.v1.AccumOptimizer(sgd(), K)
        optimizer.apply_gradients(change(problem.pairs(optimizer)))
    assert len(said) == is_named
    with tf.Graph().as_default(), silent():
        accum.compat.v1.AccumOptimizer(sgd(), K, transform=change).minimize(Problem().loss)


@pytest.mark.law("L7")
def test_clipping_in_an_optimizer_around_is_named():
    class Clips(tf1.train.Optimizer):
        """As `tf.contrib.estimator.clip_gradients_by_norm` makes it."""

        def __init__(self, inner):
            super().__init__(False, "Clips")
            self._inner = inner

        def compute_gradients(self, *args, **kwargs):
            return self._inner.compute_gradients(*args, **kwargs)

        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            return self._inner.apply_gradients(clipped_by_global_norm(grads_and_vars), global_step, name)

    ours = accum.compat.v1.AccumOptimizer
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="transform="):
        Clips(ours(sgd(), K)).minimize(Problem().loss)
    with tf.Graph().as_default(), silent():
        ours(Clips(sgd()), K).minimize(Problem().loss)


@pytest.mark.law("L7")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scale", [4.0, "dynamic"], ids=["fixed", "dynamic"])
@pytest.mark.skipif(not LOSS_SCALES, reason="this TensorFlow has no loss scale for static graphs")
def test_a_loss_scale_around_is_not_named_but_clipping_within_it_is(scale, clips):
    class Clips(accum.compat.v1.AccumOptimizer):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            listed = list(grads_and_vars)
            return super().apply_gradients(clipped_by_global_norm(listed) if clips else listed, *args, **kwargs)

    with tf.Graph().as_default(), warned("changed after they are computed") as said:
        optimizer = LOSS_SCALES[-1].MixedPrecisionLossScaleOptimizer(Clips(sgd(), K), scale)
        optimizer.minimize(Problem().loss)
    assert len(said) == clips


def of_two_towers(problem, optimizer):
    half = tf.shape(problem.x)[0] // 2
    losses = [tf.reduce_mean(problem.each[:half]), tf.reduce_mean(problem.each[half:])]
    towers = [optimizer.compute_gradients(loss) for loss in losses]
    stacked = [tf.stack([grad for grad, _ in pairs]) for pairs in zip(*towers)]
    return [(tf.reduce_mean(grads, 0), var) for grads, (_, var) in zip(stacked, towers[0])]


def with_a_penalty(problem, optimizer):
    """As WGAN-GP: the norm of a gradient is a part of the loss."""
    slope = tf.gradients(problem.each, problem.x)[0]
    penalty = tf.reduce_mean((tf.sqrt(tf.reduce_sum(slope**2, 1) + 1e-6) - 1.0) ** 2)
    return optimizer.compute_gradients(problem.loss + 10.0 * penalty)


def penalty_of(slope, factor):
    return tf.reduce_mean((factor * tf.norm(slope, axis=1) - 1.0) ** 2)


def with_a_penalty_under_a_name(problem, optimizer):
    slope = tf.gradients(problem.each, problem.x)[0]
    loss = problem.loss + penalty_of(slope, problem.bias)
    return list(zip(tf.gradients(loss, problem.variables, name="d_grads"), problem.variables))


def with_a_penalty_by_a_tape(problem, optimizer):
    weights = tf1.get_variable("resource", initializer=np.ones(5, "float32"), use_resource=True)
    with tf.GradientTape() as tape:
        output = tf.linalg.matvec(problem.x, weights)
        loss = tf.reduce_mean(output**2) + penalty_of(tf.gradients(output, problem.x)[0], tf.reduce_sum(weights))
    return [(tape.gradient(loss, weights), weights)]


def clipped_by_example(problem, optimizer):
    """As differential privacy does."""

    def of_one(row):
        loss = (tf.reduce_sum(row[:5] * problem.weights) + problem.bias - row[5]) ** 2
        return tf.clip_by_norm(tf.gradients(loss, problem.weights)[0], 0.3)

    rows = tf.concat([problem.x, problem.y[:, None]], 1)
    return [(tf.reduce_mean(tf.map_fn(of_one, rows), 0), problem.weights)]


def unscaled(problem, optimizer):
    pairs = optimizer.compute_gradients(problem.loss * 8.0)
    return [(tf.cast(tf.cast(grad, tf.float64) / 8.0, tf.float32), var) for grad, var in pairs]


def multiplied(problem, optimizer):
    """By rates that follow a step counter."""
    rate = tf.minimum(1.0, tf.sqrt(tf.cast(tf1.train.get_or_create_global_step(), tf.float32) + 1.0))
    return [(grad * rate, var) for grad, var in optimizer.compute_gradients(problem.loss)]


def decayed(problem, optimizer):
    pairs = optimizer.compute_gradients(problem.loss)
    return [(grad + 0.1 * tf.sign(var), var) for grad, var in pairs]


def finite(problem, optimizer):
    pairs = optimizer.compute_gradients(problem.loss)
    return [(tf1.where(tf1.is_nan(grad), tf.zeros_like(grad), grad), var) for grad, var in pairs]


def printed(problem, optimizer):
    pairs = optimizer.compute_gradients(problem.loss)
    norm = tf1.global_norm([grad for grad, _ in pairs])
    tf1.summary.scalar("norm", norm)
    return [(tf1.Print(grad, [norm]), var) for grad, var in pairs]


def computed_by_hand(problem, optimizer):
    """A gradient that no `tf.gradients` computes, of a loss that is not linear."""
    grads = tf.sign(tf.linalg.matvec(problem.x, problem.weights) - problem.y)[:, None] * problem.x
    return [(tf.reduce_mean(grads, 0), problem.weights)]


def fed(problem, optimizer):
    return [(tf1.placeholder(tf.float32, var.shape), var) for var in problem.variables]


PENALTIES = [with_a_penalty, with_a_penalty_under_a_name, with_a_penalty_by_a_tape]
LINEAR = PENALTIES + [of_two_towers, clipped_by_example, unscaled, multiplied, decayed, finite, printed]


@pytest.mark.parametrize("program", LINEAR + [computed_by_hand, fed], ids=lambda program: program.__name__)
def test_what_is_linear_is_not_named(program):
    with tf.Graph().as_default(), silent():
        optimizer = accum.compat.v1.AccumOptimizer(sgd(), K)
        optimizer.apply_gradients(program(Problem(), optimizer))


@pytest.mark.slow
@pytest.mark.law("L14")
def test_nothing_is_named_where_nothing_accumulates():
    with silent():
        optimizer = accum.compat.v1.AccumOptimizer(sgd())
        ours = by_program(clipped_by_global_norm, optimizer)
        by_program(clipped_by_global_norm, accum.compat.v1.AccumOptimizer(sgd(), nonfinite="skip_micro"))
        by_program(clipped_by_global_norm, accum.compat.v1.AccumOptimizer(sgd(), transform=lambda pairs: pairs))
        weighted = accum.compat.v1.AccumOptimizer(sgd())
        with weighted.weighing(2.0):
            by_program(clipped_by_global_norm, weighted)
    np.testing.assert_array_equal(ours, by_program(clipped_by_global_norm, sgd()))


def test_each_operation_is_looked_at_once():
    """A chain in which each operation uses the one before it twice has as many paths as two to its length."""
    with tf.Graph().as_default(), silent():
        problem, optimizer = Problem(), accum.compat.v1.AccumOptimizer(sgd(), K)
        ((grad, var),) = optimizer.compute_gradients(problem.loss, var_list=[problem.weights])
        for _ in range(200):
            grad = grad + grad
        optimizer.apply_gradients([(grad, var)])
