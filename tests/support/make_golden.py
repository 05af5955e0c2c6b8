"""Write the golden trajectories with NumPy in float64, by the update rules in the papers. No TensorFlow.

    python tests/support/make_golden.py          write problem.json, and <optimizer>.txt for each rule, to golden/
    python tests/support/make_golden.py --check  exit 1 if a file is not up to date

A small network (5 inputs, 4 tanh units, 3 classes, softmax cross-entropy) takes 10 steps, each on the mean gradient of
a full batch of 12 examples. Every API, on every TensorFlow, has to arrive at the same weights from micro-batches.
Epsilon is always 1e-16, so that its place in the formulas does not matter.
"""

import json
import os
import sys

import numpy as np

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden")
STEPS, BATCH, INPUTS, UNITS, CLASSES = 10, 12, 5, 4, 3
EPSILON = 1e-16


def make_problem():
    """Create data for two batches and initial weights, rounded to three decimals, which JSON stores exactly."""
    random = np.random.RandomState(2020)
    shapes = [(INPUTS, UNITS), (UNITS,), (UNITS, CLASSES), (CLASSES,)]
    return {
        "x": np.round(random.normal(size=(2 * BATCH, INPUTS)), 3).tolist(),
        "y": random.randint(CLASSES, size=2 * BATCH).tolist(),
        "weights": [np.round(0.5 * random.normal(size=shape), 3).tolist() for shape in shapes],
    }


def gradients(weights, x, y):
    """Compute the gradients of the mean softmax cross-entropy over the batch, derived by hand."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1 + b1)
    logits = hidden @ w2 + b2
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    d_logits = (exps / exps.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]) / len(x)
    d_hidden = (d_logits @ w2.T) * (1.0 - hidden**2)
    return [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]


def sgd(w, g, state, t):
    return w - 0.5 * g


def momentum(w, g, state, t):
    """Polyak 1964: v = 0.9 v + g."""
    state["v"] = 0.9 * state.get("v", 0.0) + g
    return w - 0.1 * state["v"]


def nesterov(w, g, state, t):
    """Sutskever et al. 2013, written as a step from the look-ahead point."""
    state["v"] = 0.9 * state.get("v", 0.0) + g
    return w - 0.1 * (g + 0.9 * state["v"])


def adam(w, g, state, t):
    """Kingma and Ba 2015, in the form given at the end of section 2 (epsilon hat)."""
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
    rate = 0.02 * np.sqrt(1.0 - 0.999**t) / (1.0 - 0.9**t)
    return w - rate * state["m"] / (np.sqrt(state["v"]) + EPSILON)


def rmsprop(w, g, state, t):
    """Tieleman and Hinton 2012; the mean square starts at zero."""
    state["s"] = 0.9 * state.get("s", 0.0) + 0.1 * g**2
    return w - 0.01 * g / np.sqrt(state["s"] + EPSILON)


def adagrad(w, g, state, t):
    """Duchi, Hazan and Singer 2011; the accumulator starts at 0.1."""
    state["a"] = state.get("a", 0.1) + g**2
    return w - 0.1 * g / np.sqrt(state["a"] + EPSILON)


RULES = {rule.__name__: rule for rule in (sgd, momentum, nesterov, adam, rmsprop, adagrad)}


def trajectory(problem, rule):
    """Compute the flat weights after each step: shape [STEPS, number of weights]."""
    x, y = np.array(problem["x"]), np.array(problem["y"])
    weights = [np.array(w) for w in problem["weights"]]
    states = [{} for _ in weights]
    rows = []
    for step in range(STEPS):
        batch = slice(BATCH * (step % 2), BATCH * (step % 2 + 1))
        grads = gradients(weights, x[batch], y[batch])
        weights = [rule(w, g, state, step + 1) for w, g, state in zip(weights, grads, states)]
        rows.append(np.concatenate([w.ravel() for w in weights]))
    return np.array(rows)


def files():
    problem = make_problem()
    yield "problem.json", json.dumps(problem, indent=None, separators=(",", ":")).replace("],[", "],\n[") + "\n"
    for name, rule in RULES.items():
        lines = [" ".join(f"{value:.9f}" for value in row) for row in trajectory(problem, rule)]
        head = f"# {name}: one line a step; w1 [5,4], b1 [4], w2 [4,3], b2 [3], row by row"
        yield name + ".txt", "\n".join([head] + lines) + "\n"


def main():
    stale = []
    for name, text in files():
        path = os.path.join(GOLDEN, name)
        if "--check" in sys.argv:
            with open(path) as old:
                stale += [name] if old.read() != text else []
        else:
            with open(path, "w") as new:
                new.write(text)
    if stale:
        sys.exit("stale: " + ", ".join(stale))


if __name__ == "__main__":
    main()
