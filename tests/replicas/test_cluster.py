"""Parameter servers as TF 1 ran them: one, and two workers that share its variables (laws L1, L11)."""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
import versions
from addresses import free_addresses

import accum.compat.v1

tf1 = tf.compat.v1

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "cluster.py")
TASKS = [("ps", 0), ("worker", 0), ("worker", 1)]
PATIENCE = 240


def environment_of_task():
    """Environment variables of a process that talks to others on this machine, without a GPU."""
    left = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "http_proxy")}
    return dict(left, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")


def start(folder, *arguments):
    """Start a parameter server and two workers. Returns {name: process}."""
    server, chief, other = free_addresses(3)
    cluster = json.dumps({"ps": [server], "worker": [chief, other]})
    processes = {}
    for job, task in TASKS:
        with open(str(folder / f"{job}{task}.log"), "a") as log:
            command = [sys.executable, SCRIPT, cluster, job, str(task)] + list(arguments)
            processes[f"{job}{task}"] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=environment_of_task()
            )
    return processes


def reported(processes, count, folder):
    """Return what the chief reports, as {name: results}, and kill the processes."""
    timer = threading.Timer(PATIENCE, lambda: [process.kill() for process in processes.values()])
    timer.start()
    try:
        lines = [processes["worker0"].stdout.readline() for _ in range(count)]
    finally:
        timer.cancel()
        for process in processes.values():
            process.kill()
            process.communicate()
    assert lines[-1], (folder / "worker0.log").read_text()[-3000:]
    return dict(json.loads(line.decode()) for line in lines)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the chief of the cluster came to."""
    folder = tmp_path_factory.mktemp("cluster")
    return reported(start(folder), 2, folder)


@pytest.mark.slow
@pytest.mark.law("L1")
def test_workers_that_apply_as_they_come_lose_no_gradient(results):
    weights, steps, device = results["asynchronous"]
    # 2 workers x 400 micro-batches, the mean of a cycle 0.5, and on each worker an unfinished cycle of 1
    assert (weights, steps) == (-202.0, 402)
    assert device.startswith("/job:worker/task:0")


@pytest.mark.slow
@pytest.mark.law("L1")
def test_workers_that_wait_for_each_other_make_the_steps_of_the_whole_batch(results):
    weights, steps, _ = results["synchronous"]
    assert steps >= 20
    assert weights == pytest.approx(momentum_steps(steps), rel=2e-6)


def momentum_steps(count):
    """Return the weight after so many steps of momentum with the gradient 2.0."""
    weight = velocity = 0.0
    for _ in range(count):
        velocity = 0.9 * velocity + 2.0
        weight -= 0.1 * velocity
    return weight


@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.skipif(
    versions.TF_VERSION not in ((1, 15), (2, 15)), reason="long: runs on TensorFlow 1, and the last with Keras 2"
)
def test_workers_that_wait_for_each_other_go_on_after_all_were_killed(tmp_path):
    first_run = start(tmp_path, str(tmp_path), "1000000")
    wait_until(lambda: last_saved(tmp_path) >= 30, first_run, tmp_path)
    resumed_from = last_saved(tmp_path)
    second_run = start(tmp_path, str(tmp_path), str(resumed_from + 15))
    weights, steps, begin = reported(second_run, 1, tmp_path)["synchronous"]
    assert steps >= resumed_from + 15
    # The queue runner may make an update between the name of a checkpoint and its content, or within the content; on a
    # busy machine a few.
    torn = begin - resumed_from
    assert 0 <= torn <= 3
    assert weights == pytest.approx(momentum_steps(steps), rel=0.05 * torn or 2e-6)


@pytest.fixture(scope="module")
def split_results(tmp_path_factory):
    """What the chief of a cluster came to whose workers split their batches of 7 into micro-batches of 3."""
    folder = tmp_path_factory.mktemp("split")
    return reported(start(folder, "split", "3"), 2, folder)


@pytest.mark.slow
@pytest.mark.law("L11", "L21")
def test_workers_that_split_their_batches_apply_them_as_they_come(split_results):
    weights, steps, batches = split_results["asynchronous"]
    gradients = np.mean(batches, axis=1)
    expected = np.array([0.1, 0.2, 0.3]) - 20 * gradients.sum(0)
    assert steps == 40
    np.testing.assert_allclose(np.ravel(weights), expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.law("L11", "L21")
def test_workers_that_split_their_batches_wait_for_each_other_as_the_program_says(split_results):
    weights, steps, batches = split_results["synchronous"]
    x, expected, velocity = np.array(batches[0]), np.array([0.1, 0.2, 0.3]), np.zeros(3)
    for _ in range(steps):
        errors = x @ expected - 1.0
        velocity = 0.9 * velocity + errors @ x / len(x) / np.sqrt(np.mean(errors**2))
        expected = expected - 0.1 * velocity
    assert steps >= 20
    np.testing.assert_allclose(np.ravel(weights), expected, rtol=0, atol=2e-5)


ESTIMATOR = os.path.join(os.path.dirname(SCRIPT), "estimator_cluster.py")


def start_estimators(folder, last_step):
    """Start a parameter server, a chief, a worker and an evaluator. Returns {type: process}."""
    addresses = dict(zip(("ps", "chief", "worker"), free_addresses(3)))
    cluster = {job: [address] for job, address in addresses.items()}
    environment = environment_of_task()
    processes = {}
    for job in list(cluster) + ["evaluator"]:
        environment["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
        with open(str(folder / (job + ".log")), "a") as log:
            command = [sys.executable, ESTIMATOR, str(folder), str(last_step)]
            processes[job] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    return processes


def last_saved(folder):
    """The update after which the last checkpoint was saved, 0 before the first."""
    state = tf1.train.get_checkpoint_state(str(folder))
    return int(state.model_checkpoint_path.rsplit("-", 1)[1]) if state else 0


def wait_until(is_so, processes, logs):
    """Wait, and kill the processes however that ends."""
    began = time.time()
    try:
        while not is_so():
            died = [job for job, process in processes.items() if process.poll()]
            if died or time.time() - began > PATIENCE:
                pytest.fail((logs / ((died or sorted(processes))[0] + ".log")).read_text()[-3000:])
            time.sleep(0.1)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
@pytest.mark.slow
@pytest.mark.law("L11")
@pytest.mark.skipif(
    versions.TF_VERSION not in ((1, 15), (2, 15)), reason="long: runs on the first and last with Estimators"
)
def test_estimators_of_a_killed_cluster_go_on_to_the_weights_of_the_whole_batches(tmp_path):
    """`train_and_evaluate` with TF_CONFIG: all tasks are killed in mid-run, and started again."""
    last = 200
    first_run = start_estimators(tmp_path, 10 * last)
    wait_until(lambda: last_saved(tmp_path) >= 60, first_run, tmp_path)
    resumed_from = last_saved(tmp_path)
    second_run = start_estimators(tmp_path, last)
    ends = [second_run[job] for job in ("chief", "worker", "evaluator")]
    wait_until(lambda: all(process.poll() == 0 for process in ends), second_run, tmp_path)

    noted = {}
    for job in ("chief", "worker", "evaluator"):
        lines = (tmp_path / (job + ".noted")).read_text().splitlines()
        noted[job] = [tuple(map(float, line.split())) for line in lines]
    assert noted["chief"][0] == (0.0, 0.0) and len(noted["chief"]) == 2
    assert (
        0 <= noted["chief"][1][0] - resumed_from <= 2
    )  # the worker may go on between a checkpoint's name and its content
    assert len(noted["worker"]) == 2 and 60 <= noted["worker"][-1][0] < last  # it trained, too
    assert noted["evaluator"][-1][0] >= last
    for step, weight in sum(noted.values(), []):
        # The worker may have been between its weight and its step at this save, and at the one that was resumed from.
        assert abs(weight + step) <= 2.0, noted


def on_a_parameter_server(build):
    """Call `build(variable, global_step)` where variables stand on a parameter server."""
    cluster = tf1.train.ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2", "localhost:3"]})
    setter = tf1.train.replica_device_setter(cluster=cluster, worker_device="/job:worker/task:1")
    with tf.Graph().as_default(), tf1.device(setter):
        return build(tf1.get_variable("w", initializer=[0.0]), tf1.train.get_or_create_global_step())


def gradient_descent():
    return tf1.train.GradientDescentOptimizer(1.0)


def sync(optimizer):
    return tf1.train.SyncReplicasOptimizer(optimizer, 2, total_num_replicas=2)


@pytest.mark.law("L11")
def test_synchronous_steps_are_made_of_whole_cycles():
    """One worker alone, whose queue runner is run by hand. Others are killed, and in processes of their own."""
    with tf.Graph().as_default(), tf1.Session() as session:
        fed, variable = tf1.placeholder(tf.float32, [1]), tf1.get_variable("w", initializer=[0.0])
        step = tf1.train.get_or_create_global_step()
        inner = tf1.train.SyncReplicasOptimizer(gradient_descent(), 1, total_num_replicas=1)
        optimizer = accum.compat.v1.AccumOptimizer(inner, 3, local_accumulators=True)
        ops = optimizer.accumulation_ops(grads_and_vars=[(fed, variable)], global_step=step)
        tokens, (makes_step,) = inner.get_init_tokens_op(), inner.get_chief_queue_runner().enqueue_ops
        session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
        session.run(inner.chief_init_op)
        session.run(tokens)
        for grads in ([1.0, 2.0, 6.0], [0.0, 0.0, 3.0]):
            session.run(inner.local_step_init_op)  # as if this worker had waited for the step before
            for grad in grads:
                session.run(ops.accumulate, {fed: [grad]})
            session.run(ops.apply)
            session.run(makes_step)
        assert session.run([variable, step]) == [[-4.0], 2]


@pytest.mark.law("L17")
def test_accumulators_that_workers_would_share_are_refused():
    def build(variable, step):
        accum.compat.v1.AccumOptimizer(gradient_descent(), 2).apply_gradients([(tf.ones([1]), variable)], step)

    with pytest.raises(ValueError, match="pass `local_accumulators=True`"):
        on_a_parameter_server(build)


@pytest.mark.law("L11")
def test_local_accumulators_stand_on_the_worker_and_no_saver_saves_them():
    def build(variable, step):
        optimizer = accum.compat.v1.AccumOptimizer(gradient_descent(), 2, local_accumulators=True)
        optimizer.apply_gradients([(tf.ones([1]), variable)], step)
        assert {v.op.name for v in tf1.global_variables()} == {"w", "global_step"}
        state = tf1.local_variables()
        assert len(state) == 3
        assert {v.device for v in state} == {"/job:worker/task:1"}

    on_a_parameter_server(build)


@pytest.mark.law("L17")
@pytest.mark.parametrize("is_around", [False, True], ids=["inside", "around"])
def test_a_conditional_op_that_waits_for_other_workers_is_refused(is_around):
    def build(variable, step):
        grads_and_vars = [(tf.ones([1]), variable)]
        options = {"accum_steps": 2, "local_accumulators": True}
        if is_around:
            optimizer = sync(accum.compat.v1.AccumOptimizer(gradient_descent(), **options))
        else:
            optimizer = accum.compat.v1.AccumOptimizer(sync(gradient_descent()), **options)
        optimizer.apply_gradients(grads_and_vars, step)

    with pytest.raises(ValueError, match="run the ops of `accumulation_ops`"):
        on_a_parameter_server(build)
