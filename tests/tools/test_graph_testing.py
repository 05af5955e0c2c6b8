"""The check of a program that builds a static graph: is its own full batch a baseline, and does accumulation agree?"""

import time

import numpy as np
import pytest
import tensorflow as tf
from warned import silent

import accum.compat.v1
from accum.testing import assert_graph_accumulation_equals_full_batch, order_updates, sum_duplicate_rows
from accum.testing._order import unordered_variables

tf1 = tf.compat.v1

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(24, 5)).astype("float32"), RANDOM.normal(size=24).astype("float32")
IDS = np.array([0, 0, 0, 1, 2, 1, 0, 0, 1, 1, 3, 3], "int64")


def variables(use_resource):
    step = tf1.get_variable(
        "global_step",
        [],
        tf.int64,
        tf1.zeros_initializer(),
        trainable=False,
        use_resource=use_resource,
        collections=[tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.GLOBAL_STEP],
    )
    return step, tf1.get_variable("w", [5], use_resource=use_resource)


def regression(accum_steps, x, y, use_resource=True, **options):
    """A program without faults."""
    step, weights = variables(use_resource)
    loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
    optimizer = tf1.train.MomentumOptimizer(0.1, 0.9)
    if accum_steps > 1:
        optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps, **options)
    return optimizer.minimize(loss, step)


def racing(use_resource, is_forced=False):
    """A program as published: the step is counted beside the update, whose learning rate reads it.

    If forced, the one happens first in one run, and the other in the next, as threads may have it.
    """

    def build(accum_steps, x, y):
        step, weights = variables(use_resource)
        loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
        is_slow = is_forced and accum_steps == 1
        with tf.control_dependencies([pause(1)] if is_slow else []):
            count = tf.cast(step.read_value() if use_resource else step, tf.float32)
        optimizer = tf1.train.GradientDescentOptimizer(0.1 * 0.1**count)
        if accum_steps > 1:
            return accum.compat.v1.AccumOptimizer(optimizer, accum_steps).minimize(loss, step)
        with tf.control_dependencies([pause(0)] if is_slow else []):
            counted = step.assign_add(1)
        return tf.group(optimizer.minimize(loss), counted)

    return build


def pause(turn):
    """An op that takes its time in each second run."""
    runs = []

    def sleep():
        time.sleep(0.1 if len(runs) % 2 == turn else 0.0)
        runs.append(turn)
        return np.float32(1.0)

    return tf1.py_func(sleep, [], tf.float32, stateful=True)


KINDS = pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])


@pytest.mark.slow
@KINDS
@pytest.mark.law("L1")
def test_a_program_that_agrees_is_reported(use_resource):
    build = lambda accum_steps, x, y: regression(accum_steps, x, y, use_resource)
    report = assert_graph_accumulation_equals_full_batch(build, (X, Y), 4, batch_size=8)
    assert report.is_equal and report.steps == 3 and report.sensitivity > 100
    assert {"w", "global_step", "w/Momentum"} <= set(report.deviations)


@pytest.mark.slow
@pytest.mark.law("L1")
@pytest.mark.parametrize("kind", ["many arrays", "one array", "a list of batches"])
def test_data_are_any_number_of_arrays_or_batches(kind):
    def build(accum_steps, x, *others):
        return regression(accum_steps, x, tf.add_n(others) if others else x[:, 0])

    data = {"many arrays": (X, Y, Y, Y, Y), "one array": X, "a list of batches": [(X[:8], Y[:8]), (X[8:16], Y[8:16])]}
    size = None if kind == "a list of batches" else 8
    assert assert_graph_accumulation_equals_full_batch(build, data[kind], 4, batch_size=size).is_equal


@pytest.mark.slow
@pytest.mark.law("L1")
def test_a_program_that_diverges_is_named_with_the_causes_in_its_graph():
    def build(accum_steps, x, y):
        step, weights = variables(True)
        loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        if accum_steps > 1:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
        grads, listed = zip(*optimizer.compute_gradients(loss))
        return optimizer.apply_gradients(zip(tf.clip_by_global_norm(grads, 0.1)[0], listed), step)

    with pytest.raises(AssertionError, match="diverges from the full batch at step 1: `w`.*\n.*(.*\n)*.*clipping: .*"):
        assert_graph_accumulation_equals_full_batch(build, (X, Y), 4, batch_size=8)


@pytest.mark.slow
@pytest.mark.law("L3")
def test_a_step_counter_that_counts_micro_batches_is_named():
    def build(accum_steps, x, y):
        step, weights = variables(True)
        loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        if accum_steps > 1:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
        with tf.control_dependencies([optimizer.minimize(loss)]):
            return step.assign_add(1)

    with pytest.raises(AssertionError, match="(.*\n)*.*`global_step`: it counts micro-batches.*count_steps=True"):
        assert_graph_accumulation_equals_full_batch(build, (X, Y), 4, batch_size=8)


@KINDS
def test_variables_that_are_read_and_changed_in_no_fixed_order_are_found(use_resource):
    with tf.Graph().as_default():
        x, y = tf1.placeholder(tf.float32, [None, 5]), tf1.placeholder(tf.float32, [None])
        assert unordered_variables(racing(use_resource)(1, x, y)) == ["global_step"]
    with tf.Graph().as_default():
        x, y = tf1.placeholder(tf.float32, [None, 5]), tf1.placeholder(tf.float32, [None])
        train_op = racing(use_resource)(1, x, y)
        order_updates(train_op)
        assert unordered_variables(train_op) == []


def test_weights_of_which_one_is_updated_before_another_gradient_has_read_it_are_found():
    with tf.Graph().as_default():
        first, second = [tf1.get_variable(name, [3, 3], use_resource=False) for name in "ab"]
        loss = tf.reduce_sum(tf.matmul(first, second))
        grads = tf.gradients(loss, [first, second])
        ungated = tf1.train.GradientDescentOptimizer(0.1).apply_gradients(zip(grads, [first, second]))
        assert unordered_variables(ungated) == ["a", "b"]
        order_updates(ungated)
        assert unordered_variables(ungated) == []


@pytest.mark.slow
@KINDS
@pytest.mark.law("L1")
def test_a_full_batch_that_races_is_said_to_and_an_ordered_one_agrees(use_resource):
    build = racing(use_resource, is_forced=True)
    with pytest.raises(ValueError, match="Two equal runs of your own full batch differ: .*`?global_step.*ordered"):
        assert_graph_accumulation_equals_full_batch(build, (X, Y), 4, batch_size=8)
    report = assert_graph_accumulation_equals_full_batch(build, (X, Y), 4, batch_size=8, baseline="ordered")
    assert report.is_equal and report.deviations["w"] < 2e-6


def late_counter(accum_steps, x, y):
    """The same race, in which the step happens to be counted last in every run."""
    step, weights = variables(True)
    loss = tf.reduce_mean((tf.linalg.matvec(x, weights) - y) ** 2)
    optimizer = tf1.train.GradientDescentOptimizer(0.1 * 0.1 ** tf.cast(step.read_value(), tf.float32))
    if accum_steps > 1:
        return accum.compat.v1.AccumOptimizer(optimizer, accum_steps).minimize(loss, step)
    with tf.control_dependencies([tf1.py_func(lambda: time.sleep(0.1), [], [], stateful=True)]):
        counted = step.assign_add(1)
    return tf.group(optimizer.minimize(loss), counted)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_race_that_ends_alike_in_all_runs_is_said_too():
    with pytest.warns(UserWarning, match="agree, but by chance: .*no fixed order.*global_step"):
        report = assert_graph_accumulation_equals_full_batch(late_counter, (X, Y), 4, batch_size=8)
    assert report.is_equal
    with silent():
        assert_graph_accumulation_equals_full_batch(late_counter, (X, Y), 4, batch_size=8, baseline="ordered")


def unseeded(accum_steps, x, y):
    noise = tf1.py_func(lambda x: np.random.normal(size=x.shape).astype("float32"), [x], tf.float32, stateful=True)
    noise.set_shape(x.shape)
    return regression(accum_steps, x + noise, y)


@pytest.mark.law("L17")
@pytest.mark.parametrize("baseline", ["own", "ordered"])
def test_a_full_batch_that_draws_at_random_is_no_baseline(baseline):
    with pytest.raises(ValueError, match="Two equal runs of your own full batch differ.*turn off dropout"):
        assert_graph_accumulation_equals_full_batch(unseeded, (X, Y), 4, batch_size=8, baseline=baseline)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_dropout_is_named():
    build = lambda accum_steps, x, y: regression(accum_steps, tf1.nn.dropout(x, keep_prob=0.5), y)
    with pytest.raises(AssertionError, match="(.*\n)*.*random ops, such as dropout"):
        assert_graph_accumulation_equals_full_batch(build, (X, Y), 4, batch_size=8)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_loss_with_several_denominators_is_named():
    def build(accum_steps, x, y):
        step, weights = variables(True)
        errors, mask = (tf.linalg.matvec(x, weights) - y) ** 2, tf.cast(x[:, 0] > 0.0, tf.float32)
        loss = tf.reduce_sum(errors * mask) / tf.maximum(tf.reduce_sum(mask), 1.0) + 0.5 * tf.reduce_mean(errors)
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        if accum_steps > 1:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
        return optimizer.minimize(loss, step)

    message = r"(.*\n)*.*the loss: it may be a mean over something else.*`minimize\(\[losses\], weight=\[counts\]\)`"
    with pytest.warns(accum.InexactWarning, match="accum: loss-counts"):
        with pytest.raises(AssertionError, match=message):
            assert_graph_accumulation_equals_full_batch(build, (X, Y), 4, batch_size=8)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"baseline": "mine"}, ValueError, "`baseline` must be"),
        ({"runs": 1}, ValueError, "`runs` must be at least 2"),
        ({"accum_steps": 9}, ValueError, "at least `accum_steps` examples"),
        ({"tolerance": 0.0}, ValueError, "`tolerance`"),
        ({"tolerance": 1.0}, ValueError, "can't tell a wrong step from rounding"),
        ({"build_graph": None}, TypeError, "`build_graph` must be a function"),
        ({"build_graph": lambda *args: None}, TypeError, "must return a train op"),
        ({"build_graph": lambda *args: tf.no_op()}, ValueError, "at least one trainable variable"),
    ],
)
def test_what_cannot_be_checked_is_refused(change, error, message):
    arguments = dict({"build_graph": regression, "data": (X, Y), "accum_steps": 4, "batch_size": 8}, **change)
    with pytest.raises(error, match=message):
        assert_graph_accumulation_equals_full_batch(**arguments)


# ----------------------------------------------------------------------------------------------------------------
# Duplicate rows


def embedded(sums_rows):
    """A program that clips the gradient of an embedding, in which ids repeat."""

    def build(accum_steps, ids):
        table = tf1.get_variable("table", [4, 3], initializer=tf1.ones_initializer())
        targets = tf.cast(ids, tf.float32)[:, None]
        loss = tf.reduce_mean((tf.nn.embedding_lookup(table, ids) - targets) ** 2)
        optimizer = tf1.train.GradientDescentOptimizer(0.5)

        def clip(grads_and_vars):
            grads, listed = zip(*grads_and_vars)
            grads = sum_duplicate_rows(grads) if sums_rows else grads
            return list(zip(tf.clip_by_global_norm(grads, 0.1)[0], listed))

        if accum_steps > 1:
            return accum.compat.v1.AccumOptimizer(optimizer, accum_steps, transform=clip).minimize(loss)
        return optimizer.apply_gradients(clip(optimizer.compute_gradients(loss)))

    return build


@pytest.mark.slow
@pytest.mark.law("L8")
def test_clipping_over_duplicate_rows_is_named_and_summed_rows_agree():
    with pytest.raises(AssertionError, match="(.*\n)*.*clipping over an embedding.*sum_duplicate_rows"):
        assert_graph_accumulation_equals_full_batch(embedded(False), (IDS,), 4)
    assert assert_graph_accumulation_equals_full_batch(embedded(True), (IDS,), 4).is_equal


def test_summed_rows_are_the_gradient_and_dense_gradients_stay():
    with tf.Graph().as_default(), tf1.Session() as session:
        table = tf1.get_variable("table", [4, 3], initializer=tf1.ones_initializer())
        (grad,) = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(table, IDS) * 2.0), [table])
        summed, dense, none = sum_duplicate_rows([grad, tf.ones([2]), None])
        session.run(tf1.global_variables_initializer())
        rows, values, same = session.run([summed.indices, summed.values, dense])
    assert sorted(rows) == [0, 1, 2, 3] and none is None and same.tolist() == [1.0, 1.0]
    np.testing.assert_array_equal(values[np.argsort(rows)], 2.0 * np.bincount(IDS)[:, None] * np.ones(3))


@pytest.mark.slow
def test_a_variable_that_rounding_decides_is_named_and_no_other_reason_is_given():
    def build(accum_steps, x, y):
        weights = tf1.get_variable("w", [5])
        shift = tf1.get_variable("shift", [5, 1], initializer=tf1.ones_initializer())
        scores = tf.nn.softmax(tf.stack([x * weights, -x], 2) + shift)  # the shift changes nothing but rounding
        loss = tf.reduce_mean((tf.reduce_sum(scores[:, :, 0], 1) - y) ** 2)
        optimizer = tf1.train.AdamOptimizer(0.1, epsilon=1e-30)
        if accum_steps > 1:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
        return optimizer.minimize(loss)

    with pytest.raises(AssertionError) as raised:
        assert_graph_accumulation_equals_full_batch(build, (X, Y), accum_steps=4, batch_size=8)
    assert "rounding, in `shift`" in str(raised.value) and "UPDATE_OPS" not in str(raised.value)
    assert "the loss" not in str(raised.value)


@pytest.mark.law("L15")
def test_ordered_updates_are_made_also_where_a_branch_is_not_taken(control_flow):
    """The gradient of a conditional may have zeros that are not computed if its branch is not taken."""
    with tf.Graph().as_default(), tf1.Session() as session:
        training = tf1.placeholder_with_default(True, [])
        weights = tf1.get_variable("w", [3, 1], initializer=tf1.ones_initializer())
        mean = tf.reduce_mean(weights, 0)
        chosen = tf.cond(training, lambda: 2.0 * mean, lambda: tf.zeros([1]))
        train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum((weights - chosen) ** 2))
        order_updates(train_op)
        session.run(tf1.global_variables_initializer())
        session.run(train_op)
        assert np.abs(session.run(weights) - 1.0).max() > 0.05
