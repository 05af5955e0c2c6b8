"""The update rules that can be converted, and the arithmetic between v1's slots and Keras' slots. NumPy only.

The rules in the sources of TensorFlow 1.15 to 2.15, where g is the gradient and r the learning rate:

    rule      v1 (`tf.compat.v1.train`)                 Keras
    momentum  m = mu m + g;  w -= r m                   v = mu v - r g;  w += v
    nesterov  m = mu m + g;  w -= r (g + mu m)          v = mu v - r g;  w += mu v - r g
    adam      w -= r' m / (sqrt(v) + e)                 the same, e beside the root ("epsilon hat") on both sides
    rmsprop   p = mu p + r g / sqrt(s + e);  w -= p     the same from 2.11 on, and in a legacy one with momentum;
                                                        a legacy one without momentum: w -= r g / (sqrt(s) + e);
                                                        2.9 and 2.10's preview: p = mu p + g / (sqrt(s) + e); w -= r p
    adagrad   w -= r g / sqrt(a)                        r g / sqrt(a + e); legacy: r g / (sqrt(a) + e)

    r' = r sqrt(1 - b2^t) / (1 - b1^t): v1 stores the powers for the next step, Keras computes them from `iterations`.
    v1's s starts at 1, Keras' at 0; a converted run keeps the s of the side that started it.

Source: core/kernels/training_ops.cc, python/training/*.py, keras/optimizers/**/{sgd,adam,rmsprop,adagrad}.py.
"""

from typing import NamedTuple, Optional, Tuple

import numpy as np


class Rule(NamedTuple):
    """A rule in v1.

    Attributes:
      v1_class: name of its class in `tf.compat.v1.train`.
      v1_name: the name of its slots, unless the optimizer was given another; None if it has no slots.
      slots: the roles of its slots, in the order in which v1 creates and numbers them.
    """

    v1_class: str
    v1_name: Optional[str]
    slots: Tuple[str, ...]


RULES = {
    "sgd": Rule("GradientDescentOptimizer", None, ()),
    "momentum": Rule("MomentumOptimizer", "Momentum", ("momentum",)),
    "adam": Rule("AdamOptimizer", "Adam", ("m", "v")),
    "rmsprop": Rule("RMSPropOptimizer", "RMSProp", ("rms", "momentum")),
    "centered rmsprop": Rule("RMSPropOptimizer", "RMSProp", ("rms", "mg", "momentum")),
    "adagrad": Rule("AdagradOptimizer", "Adagrad", ("accumulator",)),
}
V1_EPSILONS = {"adam": 1e-8, "rmsprop": 1e-10, "centered rmsprop": 1e-10}
"""The defaults in v1's constructors; in Keras it is 1e-7 for all."""


class Convention(NamedTuple):
    """How a Keras optimizer stores the state of its rule.

    Attributes:
      rule: key of `RULES`.
      slots: the roles of its slots.
      rate: the learning rate of the next step.
      is_scheduled: whether the rate follows a schedule.
      momentum: float, 0 if it has none.
      epsilon: float, None if it has none.
      is_beside_root: whether epsilon is added outside the square root, not inside.
      has_rate_inside: whether RMSprop's momentum is a sum of steps, learning rate included.
    """

    rule: str
    slots: Tuple[str, ...]
    rate: float
    is_scheduled: bool
    momentum: float
    epsilon: Optional[float]
    is_beside_root: bool
    has_rate_inside: bool


def to_keras(role, value, convention):
    """Convert `value` of a slot with this `role` from v1 to Keras, in float64."""
    value = np.asarray(value, np.float64)
    if convention.rule == "momentum":
        return -convention.rate * value
    if convention.rule == "adagrad" and not convention.is_beside_root:
        return value - convention.epsilon
    if _is_sum_without_rate(role, convention):
        return value / convention.rate
    return value


def to_v1(role, value, convention):
    """Convert `value` of a slot with this `role` from Keras to v1, in float64."""
    value = np.asarray(value, np.float64)
    if convention.rule == "momentum":
        return value / -convention.rate
    if convention.rule == "adagrad" and not convention.is_beside_root:
        return value + convention.epsilon
    if _is_sum_without_rate(role, convention):
        return value * convention.rate
    return value


def arithmetic(role, convention, is_to_keras):
    """Describe what `to_keras` or `to_v1` does, for the report."""
    if convention.rule == "momentum":
        return f"* -{convention.rate:g} (learning rate)" if is_to_keras else f"/ -{convention.rate:g}"
    if convention.rule == "adagrad" and not convention.is_beside_root:
        return "{} {:g} (epsilon)".format("-" if is_to_keras else "+", convention.epsilon)
    if _is_sum_without_rate(role, convention):
        return "{} {:g} (learning rate)".format("/" if is_to_keras else "*", convention.rate)
    return ""


def uses_rate(convention):
    """Whether the arithmetic needs a learning rate other than 0."""
    return convention.rule == "momentum" or _is_sum_without_rate("momentum", convention)


def _is_sum_without_rate(role, convention):
    is_there = convention.rule.endswith("rmsprop") and "momentum" in convention.slots
    return role == "momentum" and is_there and not convention.has_rate_inside


# ----------------------------------------------------------------------------------------------------------------
# Counters


def powers(betas, iterations):
    """Return v1's powers of Adam's betas after `iterations` steps, which are those for the next step."""
    return tuple(float(np.float64(np.float32(beta)) ** (iterations + 1)) for beta in betas)


def power_disagrees(power, beta, iterations):
    """Whether v1's `power`, a repeated product in float32, disagrees with `iterations` steps.

    Each product may lose half a unit in the last place. A value close to underflow is not judged.
    """
    expected = powers([beta], iterations)[0]
    if expected < 1e-30 or power < 1e-30:
        return expected > 1e-6 or power > 1e-6
    return abs(power / expected - 1.0) > 1e-6 + 1.2e-7 * (iterations + 1)


# ----------------------------------------------------------------------------------------------------------------
# Differences between the two sides


def formulas(convention):
    """Return the formulas of both sides as (v1, Keras) if epsilon is in different places; otherwise None."""
    if not convention.is_beside_root or convention.rule == "adam":
        return None
    if convention.rule == "adagrad":
        return "g / sqrt(a)", f"g / (sqrt(a) + {convention.epsilon:g})"
    if convention.rule.endswith("rmsprop"):
        return "g / sqrt(s + e)", f"g / (sqrt(s) + {convention.epsilon:g})"
    return None


def largest_deviation(convention, second, v1_epsilon):
    """Compute the largest relative difference between the next steps of Keras and v1, given the slot `second`.

    Args:
      convention: a `Convention` that has `formulas`.
      second: list of arrays, v1's Adagrad accumulators or mean squares.
      v1_epsilon: v1's epsilon.
    """
    inside = 0.0 if convention.rule == "adagrad" else v1_epsilon
    flat = np.concatenate([np.ravel(value).astype(np.float64) for value in second] or [np.zeros(0)])
    if not flat.size:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(flat + inside) / (np.sqrt(flat) + convention.epsilon)
    return float(np.max(np.abs(ratio - 1.0)))
