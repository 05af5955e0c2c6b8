"""One task of a TF 1 cluster, run by test_cluster.py: `cluster.py {addresses as JSON} job task [folder last_step]`.

With a folder, workers that wait for each other save there, and go on from what they find there. With "split" in its
place, and a size, workers split their batches into micro-batches.
"""

import json
import sys
import time

import numpy as np
import tensorflow as tf

import accum.compat.v1

tf1 = tf.compat.v1

ADDRESSES, JOB, TASK = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
CLUSTER = tf1.train.ClusterSpec(ADDRESSES)
IS_CHIEF = TASK == 0
MICRO_BATCHES, SYNC_STEPS = 400, 20
GRADIENTS = np.array([1.0, 3.0, 2.0], "float32")  # of a cycle: K = 3, mean 2


def build(accum_steps, make_inner):
    """Create variables on the parameter server, and an optimizer with accumulators on this worker."""
    worker = f"/job:worker/task:{TASK}"
    with tf1.device(tf1.train.replica_device_setter(cluster=CLUSTER, worker_device=worker)):
        with tf1.variable_scope("", use_resource=True):
            step = tf1.train.get_or_create_global_step()
            weights = tf1.get_variable("w", initializer=[0.0])
            done = tf1.get_variable("done", [], tf.int32, tf1.zeros_initializer(), trainable=False)
        fed = tf1.placeholder(tf.float32, [1])
        inner = make_inner()
        optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps, local_accumulators=True)
    return step, weights, done, fed, inner, optimizer


def session_of(target, hooks=(), folder=None):
    """Create a monitored session, without the 30 seconds by default between a worker's checks for variables."""
    if not IS_CHIEF:
        missing = tf1.report_uninitialized_variables(tf1.global_variables())
        while True:
            with tf1.Session(target) as session:
                if not len(session.run(missing)):
                    break
            time.sleep(0.1)
    return tf1.train.MonitoredTrainingSession(
        target, IS_CHIEF, folder, hooks=hooks, save_checkpoint_steps=10, save_summaries_secs=0, log_step_count_steps=0
    )


def asynchronous(target):
    """Train with workers that apply asynchronously. Reports weights, steps and the device of the accumulator."""
    with tf.Graph().as_default() as graph, graph.container("asynchronous"):
        step, weights, done, fed, _, optimizer = build(
            2, lambda: tf1.train.GradientDescentOptimizer(1.0, use_locking=True)
        )
        worker = f"/job:worker/task:{TASK}"
        with tf1.device(tf1.train.replica_device_setter(cluster=CLUSTER, worker_device=worker)):
            train_op = optimizer.apply_gradients([(fed, weights)], step)
            finish = done.assign_add(1, read_value=False)
        with session_of(target, [accum.compat.v1.FlushHook(optimizer)]) as session:
            for _ in range(MICRO_BATCHES // 2):
                session.run(train_op, {fed: [0.0]})
                session.run(train_op, {fed: [1.0]})
            session.run(train_op, {fed: [1.0]})  # whose step the hook makes
        with tf1.Session(target) as session:
            session.run(finish)
            while IS_CHIEF and session.run(done) < 2:
                pass
            values = session.run([weights, step])
        device = optimizer.get_slot(weights, "accum").device
        report("asynchronous", [float(values[0][0]), int(values[1]), device])


def synchronous(target, folder=None, last_step=SYNC_STEPS):
    """Train with steps that use one cycle of each worker. Reports weights, steps, and the step at the beginning."""
    with tf.Graph().as_default() as graph, graph.container("synchronous"):
        step, weights, _, fed, inner, optimizer = build(
            len(GRADIENTS),
            lambda: tf1.train.SyncReplicasOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), 2, total_num_replicas=2),
        )
        worker = f"/job:worker/task:{TASK}"
        with tf1.device(tf1.train.replica_device_setter(cluster=CLUSTER, worker_device=worker)):
            ops = optimizer.accumulation_ops(grads_and_vars=[(fed, weights)], global_step=step)
        hooks = [inner.make_session_run_hook(IS_CHIEF)]
        with session_of(target, hooks, folder) as session:
            values = session.run([weights, step])
            begin = int(values[1])
            while values[1] < last_step or not IS_CHIEF:  # the test ends the other worker
                for grad in GRADIENTS:
                    session.run(ops.accumulate, {fed: [grad]})
                session.run(ops.apply)
                values = session.run([weights, step])
            # Report before the session closes. Its queue runner and the workers wait for each other, up to two minutes.
            report("synchronous", [float(values[0][0]), int(values[1]), begin])


def split(target, size, is_synchronous):
    """Train with `split_batch`. Reports the weights and steps."""
    random, name = np.random.RandomState(0), "synchronous" if is_synchronous else "asynchronous"
    batches = random.normal(size=(2, 7, 3)).astype("float32")  # of both workers
    with tf.Graph().as_default() as graph, graph.container("split-" + name):
        setter = tf1.train.replica_device_setter(cluster=CLUSTER, worker_device=f"/job:worker/task:{TASK}")
        with tf1.device(setter):
            step = tf1.train.get_or_create_global_step()
            weights = tf1.get_variable("w", initializer=[[0.1], [0.2], [0.3]])
            done = tf1.get_variable("done", [], tf.int32, tf1.zeros_initializer(), trainable=False)
            finish = tf1.assign_add(done, 1)
            x = tf1.placeholder(tf.float32, [None, 3])
            rows = tf.matmul(x, weights)
            if is_synchronous:
                loss = tf.sqrt(tf.reduce_mean((rows - 1.0) ** 2))
                optimizer = tf1.train.SyncReplicasOptimizer(
                    tf1.train.MomentumOptimizer(0.1, 0.9), 2, total_num_replicas=2
                )
            else:  # of a gradient that depends on no weights, so that the order of the updates does not matter
                loss = tf.reduce_mean(rows)
                optimizer = tf1.train.GradientDescentOptimizer(1.0, use_locking=True)
            loss = accum.compat.v1.split_batch(loss, x, size)
            train_op = optimizer.minimize(loss, step)
        hooks = [optimizer.make_session_run_hook(IS_CHIEF)] if is_synchronous else []
        with session_of(target, hooks) as session:
            if not is_synchronous:
                for _ in range(SYNC_STEPS):
                    session.run(train_op, {x: batches[TASK]})
                session.run(finish)
                while IS_CHIEF and session.run(done) < 2:
                    time.sleep(0.1)
            values = session.run([weights, step])
            while is_synchronous and (values[1] < SYNC_STEPS or not IS_CHIEF):
                session.run(train_op, {x: batches[0]})  # of both, since one may contribute twice
                values = session.run([weights, step])
            report(name, [values[0].tolist(), int(values[1]), batches.tolist()])


def report(name, result):
    print(json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    server = tf1.train.Server(CLUSTER, job_name=JOB, task_index=TASK)
    if JOB == "ps":
        server.join()
    if sys.argv[4:5] == ["split"]:
        for waits in (False, True):
            split(server.target, int(sys.argv[5]), waits)
    elif sys.argv[4:]:
        synchronous(server.target, sys.argv[4], int(sys.argv[5]))
    else:
        asynchronous(server.target)
        synchronous(server.target)
