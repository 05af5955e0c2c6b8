"""One task of an Estimator's cluster, told by TF_CONFIG: `estimator_cluster.py {folder} {last step}`.

Each example is its own gradient, 0 and 2 in turns, and the update is the square of it. Of a cycle of two the mean is 1,
so that after n updates the weight is -n, in whatever order the workers make them: without accumulation it is -2n.
"""

import json
import os
import sys
import time

import tensorflow as tf

import accum.compat.v1

tf1 = tf.compat.v1

FOLDER, LAST_STEP = sys.argv[1], int(sys.argv[2])
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
GRADIENTS = [0.0, 2.0]  # of a cycle


class SquaredGradients(tf1.train.GradientDescentOptimizer):
    """Subtracts the square of the gradient."""

    def _apply_dense(self, grad, var):
        return super()._apply_dense(grad * grad, var)

    def _resource_apply_dense(self, grad, handle):
        return super()._resource_apply_dense(grad * grad, handle)


def note_of(task):
    """The file in which a task notes how its sessions began."""
    return os.path.join(FOLDER, task + ".noted")


def lines_of(file):
    if not os.path.exists(file):
        return 0
    with open(file) as lines:
        return len(list(lines))


class Note(tf1.train.SessionRunHook):
    """Notes with which update and weight each session begins. The chief waits for the worker, which begins later."""

    def __init__(self, weight):
        self._values = [tf1.train.get_global_step(), weight + 0.0]

    def after_create_session(self, session, coord):
        step, weight = session.run(self._values)
        with open(note_of(TASK), "a") as file:
            file.write(f"{step} {weight}\n")
        while TASK == "chief" and lines_of(note_of("worker")) < lines_of(note_of("chief")):
            time.sleep(0.1)

    def before_run(self, run_context):
        time.sleep(0.005)  # so that each makes some of the updates


def model_fn(features, labels, mode):
    weight = tf1.get_variable("w", initializer=0.0)
    loss = tf.reduce_mean(features) * weight
    train_op = None
    if mode == tf.estimator.ModeKeys.TRAIN:
        inner = SquaredGradients(1.0, use_locking=True)
        optimizer = accum.compat.v1.AccumOptimizer(inner, len(GRADIENTS), local_accumulators=True)
        train_op = optimizer.minimize(loss, tf1.train.get_global_step())
    hooks = [Note(weight)]
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks, evaluation_hooks=hooks)


def examples():
    return tf.data.Dataset.from_tensor_slices(GRADIENTS).repeat().batch(1)


def main():
    config = tf.estimator.RunConfig(model_dir=FOLDER, save_checkpoints_steps=20, tf_random_seed=1)
    estimator = tf.estimator.Estimator(model_fn, config=config)
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(examples, max_steps=LAST_STEP),
        tf.estimator.EvalSpec(examples, steps=2, start_delay_secs=0, throttle_secs=0),
    )


if __name__ == "__main__":
    main()
