"""Kill a run at each of its micro steps, resume it, and compare: `killed_everywhere.py KIND FOLDER`.

TensorFlow is imported once; each run has a process of its own, forked from there. Prints how many runs were killed.
"""

import os
import signal
import sys

import numpy as np
import tensorflow as tf

import accum
import accum.compat.v1

tf1 = tf.compat.v1

K, MICRO_STEPS, SIZE = 3, 8, 4
RANDOM = np.random.RandomState(0)
X, Y = (RANDOM.normal(size=(MICRO_STEPS * SIZE, width)).astype("float32") for width in (5, 2))


def part(index):
    return slice(index * SIZE, (index + 1) * SIZE)


def fit(folder, reach):
    """`fit` in one epoch, which a callback saves after each micro-batch. Returns what the run has ended with."""
    inputs = tf.keras.Input((5,))
    hidden = tf.keras.layers.Dense(3, activation="tanh", kernel_initializer="ones")(inputs)
    net = tf.keras.Model(inputs, tf.keras.layers.Dense(2, kernel_initializer="ones")(hidden))
    model = accum.GradientAccumulateModel.from_model(net, accum_steps=K)
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    made = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, made=made)
    # All are kept, because eagerly the inner optimizer's variables, and so what they restore, come with the first step.
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=None)
    checkpoint.restore(manager.latest_checkpoint)

    class Save(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            reach(2 * int(made.numpy()))

        def on_train_batch_end(self, batch, logs=None):
            reach(2 * int(made.numpy()) + 1)
            made.assign_add(1)
            manager.save()

    begin = int(made.numpy()) * SIZE
    model.fit(X[begin:], Y[begin:], batch_size=SIZE, shuffle=False, verbose=0, callbacks=[Save()])
    inner = model.optimizer.optimizer
    variables = inner.variables() if callable(inner.variables) else inner.variables
    # TF 2.2 makes restored variables in another order, and leaves the optimizer's name out of some of theirs.
    variables = sorted(variables, key=lambda var: getattr(var, "path", var.name).split("SGD/")[-1])
    return [var.numpy() for var in list(model.weights) + variables]


def graph(features, targets, **options):
    """A static graph that counts micro steps. Returns (train op, loss, what the run ends with)."""
    step = tf1.train.get_or_create_global_step()
    w1 = tf1.get_variable("w1", [5, 3], initializer=tf1.ones_initializer())
    w2 = tf1.get_variable("w2", [3, 2], initializer=tf1.ones_initializer())
    loss = tf.reduce_mean((tf.matmul(tf.tanh(tf.matmul(features, w1)), w2) - targets) ** 2)
    inner = tf1.train.AdamOptimizer(0.1)
    optimizer = accum.compat.v1.AccumOptimizer(inner, K, count_micro_steps=True)
    train_op = optimizer.minimize(loss, step)
    return train_op, loss, [step, w1, w2] + [inner.get_slot(var, name) for var in (w1, w2) for name in "mv"]


class Reach(tf1.train.SessionRunHook):
    """Tells before each micro step which one it is, and after the step, before it is saved, once more."""

    def __init__(self, reach):
        self._reach = reach

    def begin(self):
        self._step = tf1.train.get_global_step()

    def after_create_session(self, session, coord):
        self._index = int(session.run(self._step))

    def before_run(self, context):
        self._reach(2 * self._index)

    def after_run(self, context, values):
        self._reach(2 * self._index + 1)
        self._index += 1


def monitored_session(folder, reach):
    with tf.Graph().as_default():
        features, targets = (tf1.placeholder(tf.float32, [SIZE, width]) for width in (5, 2))
        train_op, _, ending = graph(features, targets)
        step = ending[0]
        hooks = [Reach(reach)]
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks, save_checkpoint_steps=1) as session:
            read = lambda fetches: session.run_step_fn(lambda step_context: step_context.session.run(fetches))
            for index in range(int(read(step)), MICRO_STEPS):
                session.run(train_op, {features: X[part(index)], targets: Y[part(index)]})
            return read(ending)


def estimator(folder, reach):
    def model_fn(features, labels, mode):
        train_op, loss, _ = graph(features, labels)
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def input_fn():
        latest = tf.train.latest_checkpoint(folder)
        made = 0 if latest is None else int(tf.train.load_variable(latest, "global_step"))
        return tf1.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE, drop_remainder=True).skip(made)

    config = tf1.estimator.RunConfig(save_checkpoints_steps=1, tf_random_seed=1)
    made = tf1.estimator.Estimator(model_fn, folder, config)
    made.train(input_fn, hooks=[Reach(reach)], max_steps=MICRO_STEPS)
    names = sorted(made.get_variable_names())
    return [made.get_variable_value(name) for name in names]


KINDS = {"fit": fit, "MonitoredTrainingSession": monitored_session, "Estimator": estimator}


def in_process(kind, folder, dies_at=None):
    """Run in a forked process. Returns the signal that ended it, or None."""
    child = os.fork()
    if child == 0:

        def reach(index):
            if index == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            ended = KINDS[kind](folder, reach)
            np.savez(os.path.join(folder, "ended.npz"), *ended)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert status == 0, "a run has failed"
    return None


def ended(folder):
    with np.load(os.path.join(folder, "ended.npz")) as file:
        return [file[name] for name in file.files]


def kill_everywhere(kind, folder):
    whole = os.path.join(folder, "whole")
    os.makedirs(whole)
    assert in_process(kind, whole) is None
    for index in range(2 * MICRO_STEPS):
        killed = os.path.join(folder, str(index))
        os.makedirs(killed)
        assert in_process(kind, killed, dies_at=index) == signal.SIGKILL, index
        assert in_process(kind, killed) is None
        for mine, theirs in zip(ended(killed), ended(whole)):
            np.testing.assert_array_equal(mine, theirs, err_msg=f"killed at {index / 2} micro steps")
    return 2 * MICRO_STEPS


if __name__ == "__main__":
    print(kill_everywhere(sys.argv[1], sys.argv[2]))
