"""The loops of TF 1 pipelines: hooks, Supervisor, Estimator, tf-slim (laws L1, L3, L6)."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_slim as slim
from replicas import CountingOps, mirrored

import accum.compat.v1

tf1 = tf.compat.v1

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(12, 6)).astype("float32"), RANDOM.normal(size=(12, 1)).astype("float32")
FIRST = RANDOM.normal(size=(6, 1)).astype("float32")
K = 3


def momentum():
    return tf1.train.MomentumOptimizer(0.05, 0.9)


def wrapped(accum_steps=K, **options):
    return accum.compat.v1.AccumOptimizer(momentum(), accum_steps, **options)


def full_batch(steps):
    """The weights after `steps` steps of momentum on the whole batch, in float64."""
    weights, velocity = FIRST.astype("float64"), 0.0
    for _ in range(steps):
        gradient = 2.0 * X.T.dot(X.dot(weights) - Y) / len(X)
        velocity = 0.9 * velocity + gradient
        weights = weights - 0.05 * velocity
    return weights


def micro_batches(features=X, labels=Y):
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(len(X) // K).repeat()


def squares(x, y):
    weights = tf1.get_variable("w", initializer=tf.constant(FIRST))
    return weights, tf.reduce_mean((tf.matmul(x, weights) - y) ** 2)


def graph(optimizer):
    """Weights, loss and train op on the micro-batches, one after the other."""
    step = tf1.train.get_or_create_global_step()
    x, y = tf1.data.make_one_shot_iterator(micro_batches()).get_next()
    weights, loss = squares(x, y)
    return weights, loss, optimizer.minimize(loss, step)


def steps_in_events(folder):
    events = [event for path in folder.glob("events*") for event in tf1.train.summary_iterator(str(path))]
    return [event.step for event in events if any(value.tag == "loss" for value in event.summary.value)]


@pytest.mark.slow
@pytest.mark.law("L3")
def test_saver_and_summary_hooks_follow_steps(tmp_path):
    with tf.Graph().as_default():
        weights, loss, train_op = graph(wrapped())
        tf1.summary.scalar("loss", loss)
        session = tf1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path),
            save_checkpoint_steps=2,
            save_summaries_steps=1,
            hooks=[tf1.train.StopAtStepHook(last_step=5)],
        )
        runs = 0
        with session:
            while not session.should_stop():
                session.run(train_op)
                runs += 1
    assert runs == 5 * K
    saved = sorted(int(path.name.split("-")[1].split(".")[0]) for path in tmp_path.glob("model.ckpt-*.index"))
    assert saved == [0, 2, 4, 5]
    assert sorted(set(steps_in_events(tmp_path))) == [0, 1, 2, 3, 4, 5]  # the hook writes with every run of a step
    reader = tf1.train.load_checkpoint(str(tmp_path))
    np.testing.assert_allclose(reader.get_tensor("w"), full_batch(5), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L3")
def test_logging_hook_counts_runs_and_prints_micro_batches(tmp_path):
    seen = []
    with tf.Graph().as_default():
        _, loss, train_op = graph(wrapped())
        hook = tf1.train.LoggingTensorHook({"loss": loss}, every_n_iter=K, formatter=lambda now: seen.append(now) or "")
        with tf1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            for _ in range(4 * K):
                session.run(train_op)
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.law("L1")
def test_supervisor(tmp_path):
    with tf.Graph().as_default():
        weights, _, train_op = graph(wrapped())
        supervisor = tf1.train.Supervisor(logdir=str(tmp_path), save_model_secs=0, save_summaries_secs=0)
        with supervisor.managed_session() as session:
            while not supervisor.should_stop() and session.run(supervisor.global_step) < 4:
                session.run(train_op)
            np.testing.assert_allclose(session.run(weights), full_batch(4), rtol=0, atol=2e-6)
            supervisor.saver.save(session, str(tmp_path / "at"))
    assert "w/AccumOptimizer/accum" in dict(tf1.train.list_variables(str(tmp_path / "at")))


def estimator(folder, strategy=None, flushes=False):
    def model_fn(features, labels, mode):
        weights, loss = squares(features, labels)
        if mode != tf1.estimator.ModeKeys.TRAIN:
            return tf1.estimator.EstimatorSpec(mode, loss=loss)
        optimizer = wrapped()
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        saver = tf1.train.CheckpointSaverHook(str(folder), save_steps=100)
        hooks = (
            [accum.compat.v1.FlushHook(optimizer), saver] if flushes else []
        )  # Estimator's own saver would come first, and its listener evaluates
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_chief_hooks=hooks)

    config = tf1.estimator.RunConfig(str(folder), train_distribute=strategy, log_step_count_steps=None)
    return tf1.estimator.Estimator(model_fn, str(folder), config)


@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
@pytest.mark.slow
@pytest.mark.law("L1")
def test_estimator_trains_and_evaluates(tmp_path):
    made = estimator(tmp_path)
    metrics, _ = tf1.estimator.train_and_evaluate(
        made,
        tf1.estimator.TrainSpec(micro_batches, max_steps=4),
        tf1.estimator.EvalSpec(lambda: tf.data.Dataset.from_tensors((X, Y)), steps=1, throttle_secs=0),
    )
    weights = full_batch(4)
    np.testing.assert_allclose(made.get_variable_value("w"), weights, rtol=0, atol=2e-6)
    assert metrics["global_step"] == 4
    assert metrics["loss"] == pytest.approx(np.mean((X.dot(weights) - Y) ** 2), rel=1e-5)


@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
@pytest.mark.slow
@pytest.mark.law("L6")
def test_flush_hook_ends_the_last_cycle_of_an_estimator(tmp_path):
    made = estimator(tmp_path, flushes=True)
    made.train(lambda: micro_batches().take(2 * K + 2))
    reader = tf1.train.load_checkpoint(str(tmp_path))
    assert [reader.get_tensor(name) for name in ("global_step", "AccumOptimizer/micro_step")] == [3, 0]


@pytest.mark.tf(max="2.12", because="from TF 2.13 on, even a plain Estimator hangs under a MirroredStrategy")
@pytest.mark.slow
@pytest.mark.law("L11")
def test_estimator_under_a_mirrored_strategy(tmp_path):
    ops = CountingOps()
    made = estimator(tmp_path, mirrored(ops))
    # A dataset's batch goes to one replica: of the six micro-batches of a step, three to each.
    made.train(lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(len(X) // (2 * K)).repeat(), max_steps=4)
    np.testing.assert_allclose(made.get_variable_value("w"), full_batch(4), rtol=0, atol=2e-6)
    names = dict(tf1.train.list_variables(str(tmp_path)))
    assert {name for name in names if "AccumOptimizer" in name} == {
        "w/AccumOptimizer/accum",
        "AccumOptimizer/micro_step",
        "AccumOptimizer/weight_sum",
    }
    # Once a step, by the inner optimizer; and once for each of two checkpoints, which hold the sum.
    assert [size for _, size in ops.of_gradients()] == [4 * 6] * (4 + 2)


def kept_after_evaluation(folder, replicas, micro_step_count):
    """What an Estimator keeps that has trained and evaluated, with a `FlushHook`."""
    made = estimator(folder, mirrored(replicas=replicas), flushes=True)
    metrics, _ = tf1.estimator.train_and_evaluate(
        made,
        tf1.estimator.TrainSpec(lambda: micro_batches().take(micro_step_count * replicas), 5),
        tf1.estimator.EvalSpec(lambda: tf.data.Dataset.from_tensors((X, Y)), steps=1, throttle_secs=0),
    )
    kept = [made.get_variable_value(name) for name in ("global_step", "AccumOptimizer/micro_step")]
    return kept + [metrics["global_step"]]


@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
@pytest.mark.slow
@pytest.mark.law("L6")
def test_estimator_with_one_mirrored_replica_trains_evaluates_and_flushes(tmp_path):
    assert kept_after_evaluation(tmp_path, replicas=1, micro_step_count=4 * K + 2) == [5, 0, 5]


@pytest.mark.tf(max="2.12", because="from TF 2.13 on, even a plain Estimator hangs under a MirroredStrategy")
@pytest.mark.slow
@pytest.mark.law("L6")
def test_estimator_under_a_mirrored_strategy_flushes(tmp_path):
    assert kept_after_evaluation(tmp_path, replicas=2, micro_step_count=4 * K + 2) == [5, 0, 5]


@pytest.mark.slow
@pytest.mark.law("L11")
@pytest.mark.usefixtures("control_flow_of_tf_1")
@pytest.mark.parametrize("options", [{}, {"count_micro_steps": True}, {"nonfinite": "skip_cycle"}], ids=str)
def test_a_mirrored_strategy_of_one_replica_makes_the_step_of_the_full_batch(options):
    # TF 1's conditionals add what is in them to the graph itself, whose lock a critical section holds.
    strategy = mirrored(replicas=1)
    with tf.Graph().as_default(), tf1.Session() as session:
        x, y = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 1])

        def replica():
            weights, loss = squares(x, y)
            return weights, wrapped(**options).minimize(loss, tf1.train.get_or_create_global_step())

        with strategy.scope():
            weights, train_op = strategy.extended.call_for_each_replica(replica)
        weights, train_op = [strategy.experimental_local_results(value)[0] for value in (weights, train_op)]
        session.run(tf1.global_variables_initializer())
        for features, labels in zip(np.split(X, K), np.split(Y, K)):
            session.run(train_op, {x: features, y: labels})
        np.testing.assert_allclose(session.run(weights), full_batch(1), rtol=0, atol=2e-6)


class Uncounted(tf1.train.Optimizer):
    """Momentum that leaves it to its caller to advance `global_step`, as BERT's Adam does."""

    def __init__(self):
        super().__init__(False, "Uncounted")
        self._inner = momentum()

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self._inner.apply_gradients(grads_and_vars, None, name)


@pytest.mark.tf(max="2.12", because="from TF 2.13 on, even a plain Estimator hangs under a MirroredStrategy")
@pytest.mark.slow
@pytest.mark.law("L3")
def test_estimator_under_a_mirrored_strategy_counts_each_step_once(tmp_path):
    def model_fn(features, labels, mode):
        _, loss = squares(features, labels)
        optimizer = accum.compat.v1.AccumOptimizer(Uncounted(), K, count_steps=True)
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = tf1.estimator.RunConfig(str(tmp_path), train_distribute=mirrored(), log_step_count_steps=None)
    made = tf1.estimator.Estimator(model_fn, str(tmp_path), config)
    made.train(lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(len(X) // (2 * K)).repeat(), max_steps=4)
    assert made.get_variable_value("global_step") == 4
    np.testing.assert_allclose(made.get_variable_value("w"), full_batch(4), rtol=0, atol=2e-6)


@pytest.mark.law("L12")
def test_a_saver_has_nothing_to_warn_of_in_the_graph():
    with tf.Graph().as_default():
        graph(wrapped())
        tf1.train.export_meta_graph()
        assert not tf1.get_collection("critical_section_executions")


def trained_by_slim(optimizer, create_train_op=slim.learning.create_train_op, **options):
    """The weights after one full batch, in micro-batches if `optimizer` is ours."""
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.train.get_or_create_global_step()
        x, y = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 1])
        weights, loss = squares(x, y)
        train_op = create_train_op(loss, optimizer, **options)
        session.run(tf1.global_variables_initializer())
        size = len(X) // K if isinstance(optimizer, accum.compat.v1.AccumOptimizer) else len(X)
        for i in range(0, len(X), size):
            session.run(train_op, {x: X[i : i + size], y: Y[i : i + size]})
        return session.run(weights)


def clip(grads_and_vars):
    return [(tf.clip_by_norm(grad, 0.5), var) for grad, var in grads_and_vars]


@pytest.mark.slow
@pytest.mark.law("L7")
def test_what_slim_does_to_gradients_can_be_done_to_the_accumulated_one():
    create_train_op = slim.training.create_train_op
    theirs = trained_by_slim(momentum(), create_train_op, transform_grads_fn=clip)
    ours = trained_by_slim(wrapped(transform=clip), create_train_op)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)
    per_micro_batch = trained_by_slim(
        wrapped(), create_train_op, transform_grads_fn=clip
    )  # slim transforms each micro-batch, as it says
    assert np.abs(per_micro_batch - theirs).max() > 1e-3


@pytest.mark.tf(max="2.12", because="tf_slim 1.1.0 takes this from a module that Keras 2.13 dropped")
@pytest.mark.law("L7")
@pytest.mark.parametrize(
    "options", [{"clip_gradient_norm": 0.5}, {"gradient_multipliers": {"w": 0.5}}], ids=["clip", "scale"]
)
def test_slim_s_own_clipping_and_multipliers_act_on_each_micro_batch(options):
    ours = trained_by_slim(wrapped(), **options)
    weights = FIRST.astype("float64")
    parts = [2.0 * x.T.dot(x.dot(weights) - y) / len(x) for x, y in zip(np.split(X, K), np.split(Y, K))]
    if "clip_gradient_norm" in options:
        parts = [part * min(1.0, 0.5 / np.linalg.norm(part)) for part in parts]
    else:
        parts = [0.5 * part for part in parts]
    np.testing.assert_allclose(ours, weights - 0.05 * np.mean(parts, axis=0), rtol=0, atol=2e-6)


@pytest.mark.tf(max="2.12", because="tf_slim 1.1.0 takes this from a module that Keras 2.13 dropped")
@pytest.mark.law("L7")
def test_slim_s_own_functions_serve_as_transform():
    theirs = trained_by_slim(momentum(), clip_gradient_norm=0.5)
    ours = trained_by_slim(wrapped(transform=lambda grads: slim.learning.clip_gradient_norms(grads, 0.5)))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.law("L5")
def test_train_ops_that_slim_makes_can_be_weighed():
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        x, y = tf1.placeholder(tf.float32, [None, 6]), tf1.placeholder(tf.float32, [None, 1])
        weights, loss = squares(x, y)
        optimizer = wrapped()
        with optimizer.weighing(tf.shape(x)[0]):
            train_op = slim.learning.create_train_op(loss, optimizer)
        session.run(tf1.global_variables_initializer())
        for features, labels in zip(np.split(X, (5, 9)), np.split(Y, (5, 9))):
            session.run(train_op, {x: features, y: labels})
        np.testing.assert_allclose(session.run(weights), full_batch(1), rtol=0, atol=2e-6)
        assert session.run(step) == 1


@pytest.mark.tf(keras=2, because="tf_slim's batch normalisation needs Keras 2")
@pytest.mark.law("L13")
def test_slim_runs_the_update_ops_that_are_left():
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.train.get_or_create_global_step()
        _, loss = squares(tf1.layers.batch_normalization(tf.constant(X), training=True), tf.constant(Y))
        count = tf1.get_variable("count", [], trainable=False, initializer=tf1.zeros_initializer())
        norm = tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, tf1.assign_add(count, 1.0))
        optimizer = wrapped()
        optimizer.accumulate_update_ops(norm)
        train_op = slim.learning.create_train_op(loss, optimizer)
        session.run(tf1.global_variables_initializer())
        mean = [v for v in tf1.global_variables() if v.op.name.endswith("moving_mean")][0]
        for micro_step in range(1, K + 1):
            session.run(train_op)
            assert session.run(count) == micro_step
            assert bool(session.run(mean).any()) == (micro_step == K)
        np.testing.assert_allclose(session.run(mean), 0.01 * X.mean(0), rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def of_tf_1(tmp_path_factory):
    """What loops come to that need TF 2's behaviour off in the whole process."""
    script = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "tf1_loops.py")
    command = [sys.executable, script, str(tmp_path_factory.mktemp("tf1"))]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(done.stdout.decode().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.law("L1")
def test_slim_trains_end_to_end(of_tf_1):
    np.testing.assert_allclose(of_tf_1["slim"]["w"], full_batch(4), rtol=0, atol=2e-6)
    assert of_tf_1["slim"]["global_step"] == 4
    assert of_tf_1["slim"]["AccumOptimizer/micro_step"] == 0
    assert of_tf_1["slim"]["logged"] >= 4


@pytest.mark.slow
@pytest.mark.law("L3")
def test_documented_answers_to_a_global_step_that_stands_still(of_tf_1):
    warned = of_tf_1["warned"]
    assert warned == {"as it comes": 5, "count_micro_steps": 0, "log_step_count_steps=None": 0}
