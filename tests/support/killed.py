"""A MonitoredTrainingSession that test_graph_checkpoints.py kills: `killed.py folder counting|plain place`."""

import sys
import time

import numpy as np
import tensorflow as tf

import accum.compat.v1

tf1 = tf.compat.v1

K, MICRO_STEPS = 4, 24
GRADIENTS = np.random.RandomState(0).normal(size=(MICRO_STEPS, 5)).astype("float32")


def train(folder, counts_micro_steps, report=lambda index: None):
    """Continue from the checkpoint in `folder`, if there is one. Returns the weights and Adam's moment."""
    with tf.Graph().as_default():
        step = tf1.train.get_or_create_global_step()
        weights = tf1.get_variable("w", initializer=np.ones(5, "float32"))
        fed = tf1.placeholder(tf.float32, [5])
        inner = tf1.train.AdamOptimizer(0.1)
        optimizer = accum.compat.v1.AccumOptimizer(inner, K, count_micro_steps=counts_micro_steps)
        train_op = optimizer.apply_gradients([(fed, weights)], step)
        position = step if counts_micro_steps else step * K + optimizer.micro_step
        moment = inner.get_slot(weights, "m")
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=folder, save_checkpoint_steps=1) as session:
            for index in range(session.run(position), MICRO_STEPS):
                report(index)
                session.run(train_op, {fed: GRADIENTS[index]})
            return session.run([weights, moment])


def wait_to_be_killed(index):
    if index == int(sys.argv[3]):
        print(index, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2] == "counting", wait_to_be_killed)
