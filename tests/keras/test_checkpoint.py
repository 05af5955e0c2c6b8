"""Checkpoints in mid-cycle, and from plain to wrapped and back (law L12)."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical
from optimizers import EAGER_AND_TRACED, families, mainly, random_gradients
from warned import silent, warned

import accum
import accum.compat.v1

pytestmark = pytest.mark.law("L12")

tf1 = tf.compat.v1

SHAPES, K = [(3, 2), (2,)], 3

ADAMS = families(lambda module: module.Adam)


class Run:
    """Two variables, an optimizer, and the checkpoint of both."""

    def __init__(self, optimizer, is_traced):
        self.variables = [tf.Variable(value) for value in random_gradients(1, SHAPES, seed=1)[0]]
        self.optimizer = optimizer
        self.checkpoint = tf.train.Checkpoint(variables=self.variables, optimizer=optimizer)
        self.take = tf.function(self._take) if is_traced else self._take

    def _take(self, *grads):
        self.optimizer.apply_gradients(zip(grads, self.variables))

    def feed(self, gradients):
        for grads in gradients:
            self.take(*map(tf.constant, grads))
        return self

    def values(self):
        return [v.numpy() for v in self.variables]


def wrapped(make, accum_steps=K):
    return accum.GradientAccumulateOptimizer(make(0.1), accum_steps)


@functools.lru_cache(maxsize=None)
def uninterrupted(make, is_traced):
    return Run(wrapped(make), is_traced).feed(random_gradients(9, SHAPES)).values()


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", EAGER_AND_TRACED)
@pytest.mark.parametrize("stop", mainly([2, 3, 5], 2) + [pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 4)])
@pytest.mark.parametrize("make", ADAMS)
def test_a_run_restored_after_any_micro_step_ends_as_the_uninterrupted_one(tmp_path, make, stop, is_traced):
    gradients = random_gradients(9, SHAPES)
    path = Run(wrapped(make), is_traced).feed(gradients[:stop]).checkpoint.save(str(tmp_path / "at"))
    resumed = Run(wrapped(make), is_traced)
    resumed.checkpoint.restore(path)
    assert_identical(resumed.feed(gradients[stop:]).values(), uninterrupted(make, is_traced))
    assert int(resumed.optimizer.iterations.numpy()) == 3


@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("restores_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_sums_return_to_their_variables_though_other_variables_have_gradients_now(tmp_path, is_sparse, restores_first):
    """The second variable has a gradient before the checkpoint alone, the third one after it too."""

    def made():
        optimizer = wrapped(tf.keras.optimizers.SGD)
        variables = [tf.Variable([[0.0]]) for _ in range(4)]
        return optimizer, variables, tf.train.Checkpoint(optimizer=optimizer, variables=variables)

    def take(*values):
        grads = [None if value is None else tf.constant([[value]]) for value in values]
        if is_sparse:
            row, shape = tf.constant([0]), tf.constant([1, 1])
            grads = [grad if grad is None else tf.IndexedSlices(grad, row, shape) for grad in grads]
        optimizer.apply_gradients(zip(grads, variables))

    optimizer, variables, saved = made()
    take(30.0, 300.0, None, None)
    take(30.0, None, 60.0, None)
    path = saved.save(str(tmp_path / "at"))
    optimizer, variables, restored = made()
    if restores_first:
        restored.restore(path)
    else:  # into an optimizer that has begun a cycle
        take(1.0, None, 1.0, None)
        restored.restore(path)
    take(30.0, None, 60.0, None)
    moved = [float(var[0][0]) for var in variables]
    np.testing.assert_allclose(moved, [-3.0, -10.0, -4.0, 0.0], rtol=1e-6)


@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_dense_sums_are_not_restored_as_rows(tmp_path, micro_steps):
    """Between cycles, a dense sum is still there; rows are zeros then."""

    def made(sparse):
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), 2, sparse=sparse)
        var = tf.Variable(tf.zeros([3, 1]))
        return optimizer, var, tf.train.Checkpoint(optimizer=optimizer, var=var)

    def take(optimizer, var, value):
        row = tf.IndexedSlices(tf.constant([[value]]), tf.constant([0]), tf.constant([3, 1]))
        optimizer.apply_gradients([(row, var)])

    optimizer, var, saved = made("dense")
    for value in (4.0, 2.0)[:micro_steps]:
        take(optimizer, var, value)
    path = saved.save(str(tmp_path / "at"))
    optimizer, var, restored = made("rows")
    restored.restore(path)
    with pytest.raises(ValueError, match="pass `sparse='dense'` again"):
        take(optimizer, var, 1.0)
    optimizer, var, restored = made("dense")
    restored.restore(path)
    for value in (1.0, 1.0)[: 3 - micro_steps]:
        take(optimizer, var, value)
    expected = -2.5 if micro_steps == 1 else -3.0
    np.testing.assert_allclose(var.numpy()[:, 0], [expected, 0.0, 0.0], rtol=1e-6)


@pytest.mark.tf("2.2")
def test_a_resumed_cycle_with_fewer_variables_is_refused(tmp_path):
    one, variables = tf.constant([1.0]), [tf.Variable([0.0]) for _ in range(3)]
    optimizer = wrapped(tf.keras.optimizers.SGD)
    optimizer.apply_gradients([(one, var) for var in variables])
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "at"))
    optimizer = wrapped(tf.keras.optimizers.SGD)
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    with pytest.raises(ValueError, match="more variables than were passed"):
        optimizer.apply_gradients([(one, variables[0]), (one, variables[2])])
    for _ in range(K - 1):  # nothing is lost
        optimizer.apply_gradients([(one, variables[0]), (None, variables[1]), (one, variables[2])])
    np.testing.assert_allclose([float(var[0]) for var in variables], [-0.1, -0.1 / K, -0.1], rtol=1e-6)


@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("call", ["flush", "reset"])
def test_a_restored_cycle_that_is_not_known_yet_is_not_left_in_silence(tmp_path, call):
    var = tf.Variable([0.0])
    optimizer = wrapped(tf.keras.optimizers.SGD)
    optimizer.apply_gradients([(tf.constant([1.0]), var)])
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "at"))
    optimizer = wrapped(tf.keras.optimizers.SGD)
    getattr(optimizer, call)()  # nothing was restored, and nothing is said
    tf.train.Checkpoint(optimizer=optimizer).restore(path)
    with warned("Nothing was flushed") as said:
        getattr(optimizer, call)()
    assert len(said) == (call == "flush")
    assert int(optimizer.micro_step) == (call == "flush")
    with silent():
        for gradient in (2.0, 3.0, 4.0):
            optimizer.apply_gradients([(tf.constant([gradient]), var)])
    moved = -0.1 * np.mean([1.0, 2.0, 3.0] if call == "flush" else [2.0, 3.0, 4.0])
    np.testing.assert_allclose(var.numpy(), [moved], rtol=1e-6)


@pytest.mark.tf("2.2")
def test_where_a_restored_cycle_is_can_be_read_before_its_next_micro_batch(tmp_path):
    """A program that skips the data it has seen asks for it then."""

    def made():
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model = accum.GradientAccumulateModel.from_model(model, K)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    x, y = (np.random.RandomState(at).normal(size=(5, at)) for at in (2, 1))
    model, checkpoint = made()
    for at in range(5):
        model.train_on_batch(x[at : at + 1], y[at : at + 1])
    path = checkpoint.save(str(tmp_path / "at"))
    model, checkpoint = made()
    checkpoint.restore(path)
    assert int(model.optimizer.micro_step) == 5 - K
    model.optimizer.reset()
    assert int(model.optimizer.micro_step) == 0


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("then", ["flush", "reset"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_a_cycle_restored_into_another_one_is_flushed_or_reset_as_a_whole(tmp_path, is_sparse, then):
    """The second variable has a gradient in the restored cycle alone, so its accumulator does not exist before."""

    def grad(value):
        row = tf.constant([[value]])
        return tf.IndexedSlices(row, tf.constant([0]), tf.constant([1, 1])) if is_sparse else row

    def made():
        optimizer, variables = wrapped(tf.keras.optimizers.SGD), [tf.Variable([[0.0]]) for _ in range(2)]
        return optimizer, variables, tf.train.Checkpoint(optimizer=optimizer, variables=variables)

    optimizer, variables, saved = made()
    optimizer.apply_gradients([(grad(30.0), var) for var in variables])
    path = saved.save(str(tmp_path / "at"))
    optimizer, variables, restored = made()
    optimizer.apply_gradients([(grad(1.0), variables[0]), (None, variables[1])])
    restored.restore(path)
    getattr(optimizer, then)()
    for _ in range(K):
        optimizer.apply_gradients([(grad(10.0), var) for var in variables])
    moved = [float(var[0][0]) for var in variables]
    np.testing.assert_allclose(moved, [-4.0, -4.0] if then == "flush" else [-1.0, -1.0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", ADAMS)
def test_a_plain_checkpoint_restores_into_the_wrapper_and_back(tmp_path, make):
    gradients = random_gradients(2, SHAPES)
    expected = Run(make(0.1), True).feed(gradients).values()
    plain = Run(make(0.1), True).feed(gradients[:1]).checkpoint.save(str(tmp_path / "plain"))
    ours = Run(wrapped(make, accum_steps=2), True)
    ours.checkpoint.restore(plain)
    ours.feed([gradients[1], gradients[1]])  # the mean of a gradient and itself
    assert_identical(ours.values(), expected)

    again = Run(make(0.1), True)
    again.checkpoint.restore(ours.checkpoint.save(str(tmp_path / "ours"))).expect_partial()
    expected = Run(make(0.1), True).feed(gradients + gradients[:1]).values()
    assert_identical(again.feed(gradients[:1]).values(), expected)


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("before, after", [(4, 2), ({0: 4}, {0: 2}), (4, {0: 2, 9: 3}), ({0: 1, 1: 4}, 2)], ids=str)
@pytest.mark.parametrize("make", ADAMS)
def test_other_accum_steps_on_resume_keep_iterations_and_finish_the_cycle_begun(tmp_path, make, before, after):
    micro_steps = 2 if before == {0: 1, 1: 4} else 5
    gradients = random_gradients(micro_steps, SHAPES)
    path = Run(wrapped(make, before), True).feed(gradients).checkpoint.save(str(tmp_path / "at"))
    resumed = Run(wrapped(make, after), True)
    resumed.checkpoint.restore(path)
    steps = []
    for grads in random_gradients(7, SHAPES):
        resumed.feed([grads])
        steps.append(int(resumed.optimizer.iterations.numpy()))
    assert steps == [1, 1, 2, 2, 3, 3, 4]


def run_graph(use_resource, grads_of_steps, restore=None, save=None):
    """The weights and the global step of a static graph that was given some gradients."""
    with tf.Graph().as_default(), tf1.Session() as session:
        with tf1.variable_scope("net", use_resource=use_resource):
            first = random_gradients(1, SHAPES, seed=1)[0]
            variables = [tf1.get_variable("w%d" % i, initializer=value) for i, value in enumerate(first)]
        fed = [tf1.placeholder(tf.float32, shape) for shape in SHAPES]
        step = tf1.train.get_or_create_global_step()
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.AdamOptimizer(0.1), accum_steps=K)
        train_op, saver = optimizer.apply_gradients(list(zip(fed, variables)), step), tf1.train.Saver()
        session.run(tf1.global_variables_initializer())
        if restore:
            saver.restore(session, restore)
        for grads in grads_of_steps:
            session.run(train_op, dict(zip(fed, grads)))
        if save:
            saver.save(session, save)
        return session.run(variables + [step])


@functools.lru_cache(maxsize=None)
def uninterrupted_graph(use_resource):
    return run_graph(use_resource, random_gradients(6, SHAPES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "use_resource", [pytest.param(False, id="ref", marks=pytest.mark.slow), pytest.param(True, id="resource")]
)
@pytest.mark.parametrize("stop", [3] + [pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 2, 4)])
def test_a_run_restored_by_a_saver_in_mid_cycle_ends_as_the_uninterrupted_one(tmp_path, stop, use_resource):
    gradients, path = random_gradients(6, SHAPES), str(tmp_path / "at")
    run_graph(use_resource, gradients[:stop], save=path)
    assert_identical(run_graph(use_resource, gradients[stop:], restore=path), uninterrupted_graph(use_resource))
