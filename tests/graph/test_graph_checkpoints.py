"""Checkpoints of static graphs: killed runs, and checkpoints from before accumulation (law L12)."""

import os
import subprocess
import sys

import killed
import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical
from optimizers import legacy_family
from replicas import RUN, mirrored
from warned import silent

import accum.compat.v1

tf1 = tf.compat.v1

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "killed.py")
GRADIENTS = np.random.RandomState(0).normal(size=(6, 4)).astype("float32")


@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.parametrize("counting", [False, True], ids=["saved with steps", "saved in mid-cycle"])
def test_a_process_killed_in_mid_cycle_resumes_and_ends_on_the_same_bits(tmp_path, counting):
    folder, index = str(tmp_path / "killed"), 2 * killed.K + 2  # in the third cycle, two micro-batches are taken in
    command = [sys.executable, SCRIPT, folder, "counting" if counting else "plain", str(index)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert int(process.stdout.readline()) == index
    process.kill()
    process.communicate()
    begun = []
    resumed = killed.train(folder, counting, begun.append)
    assert begun[0] == (index if counting else 2 * killed.K)
    assert_identical(resumed, killed.train(str(tmp_path / "whole"), counting))


class Run:
    """Two variables, one of them in parts, an optimizer and a train op."""

    def __init__(self, optimizer, update_ops=False):
        self.optimizer = optimizer
        self.step = tf1.train.get_or_create_global_step()
        self.fed = tf1.placeholder(tf.float32, [4])
        with tf1.variable_scope("net", partitioner=tf1.fixed_size_partitioner(2)):
            self.weights = tf.convert_to_tensor(tf1.get_variable("w", [4], initializer=tf1.ones_initializer()))
        if update_ops:
            tf1.layers.batch_normalization(self.weights[:, None] * 1.0, training=True)
            optimizer.accumulate_update_ops()
        self.train_op = optimizer.minimize(tf.reduce_sum(self.weights * self.fed), self.step)

    def feed(self, session, gradients):
        for grad in gradients:
            session.run(self.train_op, {self.fed: grad})


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


def wrapped():
    return accum.compat.v1.AccumOptimizer(momentum(), 2)


@pytest.fixture
def plain_checkpoint(tmp_path):
    """A checkpoint of two plain steps, and the weights after the step that would have followed."""
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Run(momentum())
        session.run(tf1.global_variables_initializer())
        run.feed(session, GRADIENTS[:2])
        path = tf1.train.Saver().save(session, str(tmp_path / "plain"))
        run.feed(session, [(GRADIENTS[2] + GRADIENTS[3]) / np.float32(2.0)])
        return path, session.run(run.weights)


@pytest.mark.law("L12")
def test_a_checkpoint_from_before_accumulation_restores_with_zeroed_accumulators(plain_checkpoint):
    path, expected = plain_checkpoint
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Run(wrapped())
        saver = accum.compat.v1.Saver(run.optimizer)
        session.run(tf1.global_variables_initializer())
        run.feed(session, GRADIENTS[5:])  # what is there is forgotten
        saver.restore(session, path)
        assert session.run([run.optimizer.micro_step, run.step]) == [0, 2]
        run.feed(session, GRADIENTS[2:4])
        np.testing.assert_array_equal(session.run(run.weights), expected)
        assert session.run(run.step) == 3


class Inside(tf1.train.Optimizer):
    """A wrapper of the user's own, whose optimizer nobody else sees."""

    def __init__(self, inner):
        super().__init__(False, "Inside")
        self._inner = inner

    def apply_gradients(self, *args, **kwargs):
        return self._inner.apply_gradients(*args, **kwargs)


def adam():
    return tf1.train.AdamOptimizer(0.1)


ADAMS = {"v1": adam, "v1 in a wrapper": lambda: Inside(adam())}
if legacy_family() is not None:
    ADAMS["Keras"] = lambda: legacy_family().Adam(0.1)
KINDS = [
    pytest.param(make, use_resource, id="{}-{}".format(name, "resource" if use_resource else "ref"))
    for name, make in ADAMS.items()
    for use_resource in ([True] if name == "Keras" else [False, True])
]


@pytest.mark.law("L12")
@pytest.mark.parametrize("make,use_resource", KINDS)
def test_accumulation_renames_nothing_of_the_inner_optimizer(make, use_resource):
    def names(optimizer):
        with tf.Graph().as_default():
            with tf1.variable_scope("net", use_resource=use_resource):
                weights = tf1.get_variable("w", [2])
            with tf1.variable_scope("training"):
                optimizer.apply_gradients([(tf.ones([2]), weights)])
            return {var.op.name for var in tf1.global_variables()}

    plain = names(make())
    ours = names(accum.compat.v1.AccumOptimizer(make(), 2))
    assert len(plain) >= 5 and ours > plain


class RunOnReplicas:
    """A variable on two replicas, and a train op that each of them gives a half of the gradient."""

    def __init__(self, make, accum_steps):
        strategy = mirrored()
        with strategy.scope():
            self.weights = tf1.get_variable("w", initializer=[1.0] * 4, use_resource=True)
            self.optimizer = make() if accum_steps is None else accum.compat.v1.AccumOptimizer(make(), accum_steps)
        self.fed = tf1.placeholder(tf.float32, [4])
        done = getattr(strategy, RUN)(lambda: self.optimizer.apply_gradients([(self.fed / 2.0, self.weights)]))
        self.train_op = tf.group(*strategy.experimental_local_results(done))
        self.saver = tf1.train.Saver() if accum_steps is None else accum.compat.v1.Saver(self.optimizer)


def on_replicas(make, accum_steps, gradients, restore=None, save=None):
    """The weights after a run on two replicas."""
    with tf.Graph().as_default():
        run = RunOnReplicas(make, accum_steps)
        with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf1.global_variables_initializer())
            if restore:
                run.saver.restore(session, restore)
            for grad in gradients:
                session.run(run.train_op, {run.fed: grad})
            if save:
                run.saver.save(session, save)
            return session.run(run.weights)


@pytest.mark.slow
@pytest.mark.law("L11", "L12")
@pytest.mark.parametrize("name", [name for name in ADAMS if name != "v1 in a wrapper"])
def test_checkpoints_of_replicas_go_from_plain_runs_to_accumulating_ones_and_back(tmp_path, name):
    first, second, mean = str(tmp_path / "plain"), str(tmp_path / "ours"), GRADIENTS[1:3].mean(axis=0)
    expected = on_replicas(ADAMS[name], None, [GRADIENTS[0], mean, GRADIENTS[3]])
    on_replicas(ADAMS[name], None, GRADIENTS[:1], save=first)
    on_replicas(ADAMS[name], 2, GRADIENTS[1:3], restore=first, save=second)
    ours = on_replicas(ADAMS[name], None, GRADIENTS[3:4], restore=second)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)


TOUCHED = [[1, 12, 23, 34], [1, 12, 23, 34], [22, 2, 10, 40], [2, 1, 40, 1]]
"""Four examples of each micro-batch, as 10 * row + gradient. The second cycle touches row 1, by 0, and not row 3."""


def sparse_gradient(examples):
    rows = examples // 10
    return tf.IndexedSlices(tf.cast(examples - 10 * rows, tf.float32)[:, None], rows, tf.constant([5, 1]))


def table_on_replicas(replicas, accum_steps, batches, restore=None, save=None):
    """A table after a run by the examples of each batch, which the replicas share."""
    strategy = mirrored() if replicas == 2 else None
    with tf.Graph().as_default(), tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 2})) as session:
        fed = tf1.placeholder(tf.int32, [None])
        with strategy.scope() if strategy else tf.name_scope("one"):
            table = tf1.get_variable("w", initializer=np.ones([5, 1], "float32"), use_resource=True)
            optimizer = momentum() if accum_steps is None else accum.compat.v1.AccumOptimizer(momentum(), accum_steps)

        def micro_step(examples):
            return optimizer.apply_gradients([(sparse_gradient(examples), table)])

        def on_replica():
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
            return micro_step(tf.reshape(fed, [2, -1])[number])

        done = getattr(strategy, RUN)(on_replica) if strategy else micro_step(fed)
        train_op = tf.group(*strategy.experimental_local_results(done)) if strategy else done
        saver = tf1.train.Saver()
        session.run(tf1.global_variables_initializer())
        if restore:
            saver.restore(session, restore)
        for examples in batches:
            session.run(train_op, {fed: examples})
        if save:
            saver.save(session, save)
        return session.run(table)[:, 0]


@pytest.mark.slow
@pytest.mark.law("L8", "L12")
@pytest.mark.parametrize("before,after", [(2, 2), (2, 1), (1, 2)])
def test_a_saver_keeps_the_rows_that_any_replica_has_touched(tmp_path, before, after):
    def mean(cycle):  # one example for each touched row: its gradient, divided by the two micro steps
        rows = sorted({example // 10 for example in np.ravel(cycle)})
        return [10 * row + sum(e % 10 for e in np.ravel(cycle) if e // 10 == row) // 2 for row in rows]

    expected = table_on_replicas(1, None, [mean(TOUCHED[:2]), mean(TOUCHED[2:])])
    path = str(tmp_path / "cycle")
    table_on_replicas(before, 2, TOUCHED[:3], save=path)
    resumed = table_on_replicas(after, 2, TOUCHED[3:], restore=path)
    np.testing.assert_allclose(resumed, expected, rtol=0, atol=2e-6)


@pytest.mark.law("L12")
def test_the_same_saver_restores_its_own_checkpoints_in_mid_cycle(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Run(wrapped())
        saver = accum.compat.v1.Saver(run.optimizer)
        session.run(tf1.global_variables_initializer())
        run.feed(session, GRADIENTS[:3])
        path = saver.save(session, str(tmp_path / "ours"))
        run.feed(session, GRADIENTS[3:4])
        expected = session.run(run.weights)
        run.feed(session, GRADIENTS[4:5])
        saver.restore(session, path)
        assert session.run(run.optimizer.micro_step) == 1
        run.feed(session, GRADIENTS[3:4])
        np.testing.assert_array_equal(session.run(run.weights), expected)


@pytest.mark.slow
@pytest.mark.law("L12")
def test_a_scaffold_takes_it(plain_checkpoint):
    path, expected = plain_checkpoint
    with tf.Graph().as_default():
        run = Run(wrapped())
        scaffold = tf1.train.Scaffold(saver=accum.compat.v1.Saver(run.optimizer))
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=os.path.dirname(path), scaffold=scaffold) as session:
            run.feed(session, GRADIENTS[2:4])
            np.testing.assert_array_equal(session.run(run.weights), expected)


@pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
@pytest.mark.slow
@pytest.mark.law("L12")
def test_averages_taken_over_later_begin_at_zero(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Run(wrapped())
        tf1.layers.batch_normalization(run.weights[:, None] * 1.0, training=True)
        session.run(tf1.global_variables_initializer())
        run.feed(session, GRADIENTS[:1])
        path = tf1.train.Saver().save(session, str(tmp_path / "before"))
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Run(wrapped(), update_ops=True)
        saver = accum.compat.v1.Saver([run.optimizer])
        with pytest.warns(UserWarning, match="from the middle of a cycle.*moving_mean/AccumOptimizer/accum"):
            saver.restore(session, path)
        assert session.run(run.optimizer.micro_step) == 1
        run.feed(session, GRADIENTS[1:2])
        assert session.run(run.step) == 1


class Losses:
    """Two losses, one or both of which are minimised, and a run that may end or begin in the middle of a cycle."""

    def __init__(self, number, accum_steps):
        self.fed = tf1.placeholder(tf.float32, [2])
        self.weight = tf1.get_variable("w", initializer=1.0)
        losses = [self.weight * self.fed[0], self.weight * self.fed[1]]
        self.optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps)
        if number == 1:
            self.train_op = self.optimizer.minimize(losses[0], tf1.train.get_or_create_global_step())
        else:
            self.train_op = self.optimizer.minimize(losses, tf1.train.get_or_create_global_step(), weight=[1.0, 1.0])
        self.reset, self.flush = self.optimizer.reset(), self.optimizer.flush()
        self.saver = accum.compat.v1.Saver(self.optimizer)


def weight_after(number, accum_steps, batches, save=None, restore=None, begins_with=None):
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Losses(number, accum_steps)
        session.run(tf1.global_variables_initializer())
        if restore:
            run.saver.restore(session, restore)
        if begins_with:
            session.run(getattr(run, begins_with))
        for batch in batches:
            session.run(run.train_op, {run.fed: batch})
        if save:
            run.saver.save(session, save)
        return session.run(run.weight)


@pytest.mark.slow
@pytest.mark.law("L12", "L17")
@pytest.mark.parametrize(
    "before, after, accum_steps, name",
    [(1, 2, 2, "count_0"), (2, 1, 2, "count_0"), (1, 1, 1, "micro_step"), (2, 2, 1, "micro_step")],
    ids=["one loss, then two", "two losses, then one", "without accumulation", "two losses without accumulation"],
)
def test_other_options_in_the_middle_of_a_cycle_are_named(tmp_path, before, after, accum_steps, name):
    path, boundary = str(tmp_path / "middle"), str(tmp_path / "boundary")
    (first, second, third), ways = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]), [1.0, 1.0]
    weight_after(before, 2, [first], save=path)
    ours = weight_after(before, 2, [second], restore=path)  # the cycle as it began
    ways = [1.0, 0.0] if before == 1 else [1.0, 1.0]
    assert abs(ours - (1.0 - np.mean([first, second], axis=0).dot(ways))) < 2e-6
    rest = [second] if accum_steps == 2 else []
    with pytest.warns(UserWarning, match="from the middle of a cycle.*run `reset..`.*AccumOptimizer/" + name):
        changed = weight_after(after, accum_steps, rest, restore=path)
    assert abs(changed - ours) > 1e-2
    with silent():
        weight_after(before, 2, [first, second], save=boundary)  # between cycles, options may change
        weight_after(after, accum_steps, rest, restore=boundary)
    ways = [1.0, 0.0] if after == 1 else [1.0, 1.0]
    with pytest.warns(UserWarning, match="from the middle of a cycle"):
        remedied = weight_after(after, accum_steps, [second, third], restore=path, begins_with="reset")
    mean = np.sum([second, third], axis=0) / accum_steps
    assert abs(remedied - (1.0 - mean.dot(ways))) < 2e-6


def mean_of(batches):
    return np.sum(batches) / len(batches)


TOO_MANY = "holds as many micro-batches as `accum_steps`, or more.*run `flush..`.*or `reset..`"
LONGER = [[number, 0.0] for number in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)]


@pytest.mark.slow
@pytest.mark.law("L12", "L17")
@pytest.mark.parametrize("accum_steps", [2, 3, {0: 2, 9: 3}], ids=str)
@pytest.mark.parametrize("kind", ["Saver", "accum's Saver"])
def test_a_restored_cycle_takes_no_micro_batch_that_is_one_too_many_for_a_smaller_accum_steps(
    tmp_path, accum_steps, kind
):
    path, batches = str(tmp_path / "model.ckpt-0"), LONGER
    weight_after(1, 4, batches[:3], save=path)
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Losses(1, accum_steps)
        saver = tf1.train.Saver() if kind == "Saver" else run.saver
        session.run(tf1.global_variables_initializer())
        saver.restore(session, path)
        with pytest.raises(tf.errors.InvalidArgumentError, match=TOO_MANY):
            session.run(run.train_op, {run.fed: batches[3]})
        assert session.run([run.weight, run.optimizer.micro_step]) == [1.0, 3]
        session.run(run.flush)
        assert abs(session.run(run.weight) - (1.0 - mean_of(batches[:3]))) < 2e-6


@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.parametrize("hook", ["FlushHook", "CheckpointSaverHook"])
def test_a_hook_makes_the_step_of_a_restored_cycle_that_is_longer_than_a_new_one(tmp_path, hook):
    weight_after(1, 4, LONGER[:3], save=str(tmp_path / "model.ckpt-0"))
    with tf.Graph().as_default():
        run = Losses(1, 2)
        arguments = [] if hook == "FlushHook" else [str(tmp_path / "later")]
        hooks = [getattr(accum.compat.v1, hook)(run.optimizer, *arguments)]
        scaffold = tf1.train.Scaffold(saver=run.saver)
        creator = tf1.train.ChiefSessionCreator(scaffold, checkpoint_filename_with_path=str(tmp_path / "model.ckpt-0"))
        with tf1.train.MonitoredSession(creator, hooks=hooks) as session:
            assert abs(session.run(run.weight) - (1.0 - mean_of(LONGER[:3]))) < 2e-6
            for batch in LONGER[3:5]:
                session.run(run.train_op, {run.fed: batch})
            expected = 1.0 - mean_of(LONGER[:3]) - mean_of(LONGER[3:5])
            assert abs(session.run(run.weight) - expected) < 2e-5


@pytest.mark.law("L17")
def test_what_is_missing_for_another_reason_is_still_missed(plain_checkpoint):
    path, _ = plain_checkpoint
    with tf.Graph().as_default(), tf1.Session() as session:
        run = Run(wrapped())
        tf1.get_variable("new", [1])
        with pytest.raises(tf.errors.NotFoundError):
            accum.compat.v1.Saver(run.optimizer).restore(session, path)


@pytest.mark.law("L17")
def test_a_saver_needs_optimizers_with_a_train_op():
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="needs a train op: create it first"):
            accum.compat.v1.Saver(wrapped())
        with pytest.raises(TypeError, match="must be `AccumOptimizer`s"):
            accum.compat.v1.Saver(momentum())
        run = Run(wrapped())
        with pytest.raises(TypeError, match="`var_list` must be a list"):
            accum.compat.v1.Saver(run.optimizer, {"step": run.step})
