"""Pass a run, stopped in mid-cycle, from one TensorFlow to another: in one process (test_convert.py) or several (tox).

    python tests/support/convert_environments.py write FOLDER    stop each run after 21 micro steps; save it in FOLDER
    python tests/support/convert_environments.py read FOLDER     continue the runs, and compare with the oracle

A static graph writes with its `Saver`, and Keras reads with `from_v1`. Keras writes with `to_v1`, and a plain `Saver`
reads. If TensorFlow has Keras, this is the Keras side, unless the last argument is `graph`.
"""

import contextlib
import os
import sys

import numpy as np
import tensorflow as tf
from make_golden import gradients, make_problem
from versions import IS_KERAS_3

import accum
import accum.compat.v1
import accum.convert

tf1 = tf.compat.v1

K, STEPS, STOP = 8, 4, 21  # in the third cycle, 5 of 8 micro steps are made
SIZE = 3  # 8 micro-batches are the 24 examples
NAMES = ["hidden/kernel", "hidden/bias", "outputs/kernel", "outputs/bias"]
EPSILON = 1e-3  # large, so that its place in the formula matters
TOLERANCE = 2e-6

PROBLEM = make_problem()
X, Y = np.array(PROBLEM["x"]), np.array(PROBLEM["y"])
WEIGHTS = [np.array(value) for value in PROBLEM["weights"]]

train = tf1.train
RULES = {
    "sgd": (lambda: train.GradientDescentOptimizer(0.5), lambda keras: keras.SGD(0.5)),
    "momentum": (lambda: train.MomentumOptimizer(0.1, 0.9), lambda keras: keras.SGD(0.1, 0.9)),
    "nesterov": (
        lambda: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        lambda keras: keras.SGD(0.1, 0.9, nesterov=True),
    ),
    "adam": (lambda: train.AdamOptimizer(0.02, epsilon=EPSILON), lambda keras: keras.Adam(0.02, epsilon=EPSILON)),
    "rmsprop": (
        lambda: train.RMSPropOptimizer(0.02, 0.9, epsilon=EPSILON),
        lambda keras: keras.RMSprop(0.02, 0.9, epsilon=EPSILON),
    ),
    "rmsprop with momentum": (
        lambda: train.RMSPropOptimizer(0.02, 0.9, 0.5, EPSILON),
        lambda keras: keras.RMSprop(0.02, 0.9, 0.5, EPSILON),
    ),
    "centered rmsprop": (
        lambda: train.RMSPropOptimizer(0.02, 0.9, 0.5, EPSILON, centered=True),
        lambda keras: keras.RMSprop(0.02, 0.9, 0.5, EPSILON, centered=True),
    ),
    "adagrad": (lambda: train.AdagradOptimizer(0.1), lambda keras: keras.Adagrad(0.1, epsilon=EPSILON)),
}


# ----------------------------------------------------------------------------------------------------------------
# The oracle: the full batch, in NumPy and float64


def oracle(rule, begun_by):
    """Compute the weights after `STEPS` steps of a run that started in `begun_by`, "graph" or "keras"."""
    weights, state = list(WEIGHTS), [{} for _ in WEIGHTS]
    for step in range(1, STEPS + 1):
        grads = gradients(weights, X, Y)
        weights = [w - _step(rule, g, s, step, begun_by) for w, g, s in zip(weights, grads, state)]
    return weights


def _step(rule, g, state, t, begun_by):
    if rule == "sgd":
        return 0.5 * g
    if rule in ("momentum", "nesterov"):
        state["m"] = 0.9 * state.get("m", 0.0) + g
        return 0.1 * (state["m"] if rule == "momentum" else g + 0.9 * state["m"])
    if rule == "adam":
        state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
        state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
        rate = 0.02 * np.sqrt(1.0 - 0.999**t) / (1.0 - 0.9**t)
        return rate * state["m"] / (np.sqrt(state["v"]) + EPSILON)
    if rule == "adagrad":  # v1 has no epsilon; Keras' epsilon under the root never decays
        state["a"] = state.get("a", 0.1 if begun_by == "graph" else 0.1 + EPSILON) + g**2
        return 0.1 * g / np.sqrt(state["a"])
    state["s"] = 0.9 * state.get("s", 1.0 if begun_by == "graph" else 0.0) + 0.1 * g**2
    state["g"] = 0.9 * state.get("g", 0.0) + 0.1 * g
    centre = state["g"] ** 2 if rule == "centered rmsprop" else 0.0
    moved = 0.02 * g / np.sqrt(state["s"] - centre + EPSILON)
    state["p"] = (0.0 if rule == "rmsprop" else 0.5) * state.get("p", 0.0) + moved
    return state["p"]


def micro_gradients(weights, number):
    """Return the float32 gradients of micro-batch `number`."""
    start = SIZE * number % len(X)
    grads = gradients([np.asarray(value, np.float64) for value in weights], X[start:][:SIZE], Y[start:][:SIZE])
    return [grad.astype(np.float32) for grad in grads]


def distance(weights, expected):
    return max(np.abs(one - other).max() for one, other in zip(weights, expected))


# ----------------------------------------------------------------------------------------------------------------
# The two sides


def run_graph(rule, numbers, restore=None, save=None, accum_steps=K):
    """Process the micro-batches in `numbers` in a static graph. Returns its weights."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variables = [tf1.get_variable(n, initializer=value.astype("float32")) for n, value in zip(NAMES, WEIGHTS)]
        fed = [tf1.placeholder(tf.float32, value.shape) for value in WEIGHTS]
        optimizer = accum.compat.v1.AccumOptimizer(RULES[rule][0](), accum_steps)
        train_op = optimizer.apply_gradients(list(zip(fed, variables)), tf1.train.get_or_create_global_step())
        session.run(tf1.global_variables_initializer())
        saver = tf1.train.Saver()
        if restore:
            saver.restore(session, restore)
        for number in numbers:
            session.run(train_op, dict(zip(fed, micro_gradients(session.run(variables), number))))
        if save:
            saver.save(session, save)
        return session.run(variables)


def variable(value, name):
    """Create a trainable variable of the kind that this TensorFlow's Keras optimizers accept."""
    if not IS_KERAS_3:
        return tf.Variable(value, dtype=tf.float32, name=name)
    *scopes, leaf = name.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(tf.keras.name_scope(scope))
        return tf.keras.Variable(value, dtype="float32", name=leaf)


class Keras:
    """Variables and their accumulating optimizer."""

    def __init__(self, rule, family, accum_steps=K):
        self.variables = [variable(value, n) for n, value in zip(NAMES, WEIGHTS)]
        self.optimizer = accum.GradientAccumulateOptimizer(RULES[rule][1](family), accum_steps)

    def forget(self):
        """Overwrite every variable with a value that occurs in no run."""
        for var in self.variables:
            var.assign(np.full(var.shape, 7.0, "float32"))
        return self

    def feed(self, numbers):
        for number in numbers:
            grads = micro_gradients(self.values(), number)
            self.optimizer.apply_gradients([(tf.constant(g), var) for g, var in zip(grads, self.variables)])
        return self

    def values(self):
        return [var.numpy() for var in self.variables]


# ----------------------------------------------------------------------------------------------------------------
# From environment to environment


def write(folder, side):
    for rule in RULES:
        path = os.path.join(folder, "by-" + side, tf.__version__, rule.replace(" ", "-"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if side == "graph":
            run_graph(rule, range(STOP), save=path)
        else:
            run = Keras(rule, tf.keras.optimizers).feed(range(STOP))
            accum.convert.to_v1(run.variables, path, run.optimizer, overwrite=True)
        print(f"{tf.__version__} wrote {path}")


def read(folder, side):
    """Continue every run that the other side has stopped. Returns whether all end at the expected weights."""
    other = {"graph": "keras", "keras": "graph"}[side]
    home = os.path.join(folder, "by-" + other)
    deviations = []
    for version in sorted(os.listdir(home)):
        for rule in RULES:
            path = os.path.join(home, version, rule.replace(" ", "-"))
            deviations.append(distance(_finish(side, rule, path), oracle(rule, other)))
            print(f"{version} -> {tf.__version__}  {rule:24} off by {deviations[-1]:.1e}")
    return bool(deviations) and max(deviations) <= TOLERANCE


def _finish(side, rule, path):
    if side == "graph":
        return run_graph(rule, range(STOP, K * STEPS), restore=path)
    run = Keras(rule, tf.keras.optimizers).forget()
    accum.convert.from_v1(path, run.variables, run.optimizer)
    return run.feed(range(STOP, K * STEPS)).values()


def main(what, folder, side=None):
    has_keras = hasattr(accum, "GradientAccumulateOptimizer")
    side = side or ("keras" if has_keras else "graph")
    if what == "write":
        write(folder, side)
        return 0
    return 0 if read(folder, side) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
