"""The golden problem and small models, which tests build in the same way for every API."""

import json
import os

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
BATCH = 12
RAGGED = (5, 4, 3)  # micro-batches of one batch


def golden_problem():
    """Return x [24, 5] float32, y [24] int, and the initial weights of the golden network."""
    with open(os.path.join(GOLDEN, "problem.json")) as file:
        problem = json.load(file)
    weights = [np.array(w, np.float32) for w in problem["weights"]]
    return np.array(problem["x"], np.float32), np.array(problem["y"]), weights


def golden_trajectory(name):
    """Return the golden trajectory of an optimizer, float64 [steps, weights]."""
    return np.loadtxt(os.path.join(GOLDEN, name + ".txt"))


def golden_micro_batches(steps=10):
    """Yield (x, y) of each micro-batch: `RAGGED` parts of the two batches in turn."""
    x, y, _ = golden_problem()
    for step in range(steps):
        start = BATCH * (step % 2)
        for size in RAGGED:
            yield x[start : start + size], y[start : start + size]
            start += size


def forward(x, weights):
    w1, b1, w2, b2 = weights
    return tf.matmul(tf.tanh(tf.matmul(x, w1) + b1), w2) + b2


def cross_entropy(x, y, weights):
    """Compute the mean softmax cross-entropy over the examples."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=forward(x, weights))
    return tf.reduce_mean(losses)


def golden_model():
    """Build the golden network as a functional Keras model with its initial weights."""
    inputs = tf.keras.Input((5,))
    hidden = tf.keras.layers.Dense(4, activation="tanh")(inputs)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(3)(hidden))
    model.set_weights(golden_problem()[2])
    return model


def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights])


def assert_follows(trajectory, golden, tolerance=2e-6):
    """Fail at the first step at which a trajectory leaves the golden one."""
    assert len(trajectory) == len(golden)
    for step, (ours, theirs) in enumerate(zip(trajectory, golden), start=1):
        off = np.abs(ours - theirs).max()
        assert off <= tolerance, f"diverged at step {step}: {off:.2e} > {tolerance:.0e}"
