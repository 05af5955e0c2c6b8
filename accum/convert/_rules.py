"""The update rules that can be converted, and the arithmetic between what v1 and Keras keep for them. NumPy only.

What the sources of TensorFlow 1.15 to 2.15 compute, with g the gradient and r the learning rate:

    rule      v1 (`tf.compat.v1.train`)                 Keras
    momentum  m = mu m + g;  w -= r m                   v = mu v - r g;  w += v
    nesterov  m = mu m + g;  w -= r (g + mu m)          v = mu v - r g;  w += mu v - r g
    adam      w -= r' m / (sqrt(v) + e)                 the same, e beside the root ("epsilon hat") on both sides
    rmsprop   p = mu p + r g / sqrt(s + e);  w -= p     the same from 2.11 on, and in a legacy one with momentum;
                                                        a legacy one without momentum: w -= r g / (sqrt(s) + e);
                                                        2.9 and 2.10's preview: p = mu p + g / (sqrt(s) + e); w -= r p
    adagrad   w -= r g / sqrt(a)                        r g / sqrt(a + e); legacy: r g / (sqrt(a) + e)

    r' = r sqrt(1 - b2^t) / (1 - b1^t): v1 keeps the powers of the step that comes, Keras computes them from
    `iterations`. v1's s begins at 1, Keras' at 0; a state that is carried over is that of the side it came from.

Source: core/kernels/training_ops.cc, python/training/*.py, keras/optimizers/**/{sgd,adam,rmsprop,adagrad}.py.
"""

from collections import namedtuple

import numpy as np

Rule = namedtuple("Rule", ["v1_class", "v1_name", "slots"])
Rule.__doc__ = """A rule as v1 has it.

Attributes:
  v1_class: name of its class in `tf.compat.v1.train`.
  v1_name: what its slots are named by, unless the optimizer was given a name; None where it has none.
  slots: the roles of its slots, in the order in which v1 makes and numbers them.
"""

RULES = {
    "sgd": Rule("GradientDescentOptimizer", None, ()),
    "momentum": Rule("MomentumOptimizer", "Momentum", ("momentum",)),
    "adam": Rule("AdamOptimizer", "Adam", ("m", "v")),
    "rmsprop": Rule("RMSPropOptimizer", "RMSProp", ("rms", "momentum")),
    "centered rmsprop": Rule("RMSPropOptimizer", "RMSProp", ("rms", "mg", "momentum")),
    "adagrad": Rule("AdagradOptimizer", "Adagrad", ("accumulator",)),
}
V1_EPSILONS = {"adam": 1e-8, "rmsprop": 1e-10, "centered rmsprop": 1e-10}
"""The defaults of v1's constructors; Keras' is 1e-7 for all."""

Convention = namedtuple(
    "Convention", ["rule", "slots", "rate", "is_scheduled", "momentum", "epsilon", "is_beside_root", "has_rate_inside"]
)
Convention.__doc__ = """How one Keras optimizer keeps the state of its rule.

Attributes:
  rule: key of `RULES`.
  slots: the roles of the slots that it keeps.
  rate: the learning rate of the step that comes next.
  is_scheduled: whether the rate follows a schedule.
  momentum: float, 0 where it has none.
  epsilon: float, None where it has none.
  is_beside_root: whether epsilon is added to the root, not under it.
  has_rate_inside: whether RMSprop's momentum sums steps; one that does not sums what the rate multiplies later.
"""


def to_keras(role, value, convention):
    """What Keras keeps for the `role` for which v1 keeps `value`, in float64."""
    value = np.asarray(value, np.float64)
    if convention.rule == "momentum":
        return -convention.rate * value
    if convention.rule == "adagrad" and not convention.is_beside_root:
        return value - convention.epsilon
    if _is_sum_without_rate(role, convention):
        return value / convention.rate
    return value


def to_v1(role, value, convention):
    """What v1 keeps for the `role` for which Keras keeps `value`, in float64."""
    value = np.asarray(value, np.float64)
    if convention.rule == "momentum":
        return value / -convention.rate
    if convention.rule == "adagrad" and not convention.is_beside_root:
        return value + convention.epsilon
    if _is_sum_without_rate(role, convention):
        return value * convention.rate
    return value


def arithmetic(role, convention, is_to_keras):
    """What `to_keras` or `to_v1` does, in words."""
    if convention.rule == "momentum":
        return "* -{:g} (learning rate)".format(convention.rate) if is_to_keras else "/ -{:g}".format(convention.rate)
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
    """v1's powers of Adam's betas after `iterations` steps: those of the step that comes."""
    return tuple(float(np.float64(np.float32(beta)) ** (iterations + 1)) for beta in betas)


def power_disagrees(power, beta, iterations):
    """Whether a float32 `power` that v1 has multiplied up is not that of `iterations` steps.

    Each product may lose half a unit in the last place; what is about to underflow says nothing.
    """
    expected = powers([beta], iterations)[0]
    if expected < 1e-30 or power < 1e-30:
        return expected > 1e-6 or power > 1e-6
    return abs(power / expected - 1.0) > 1e-6 + 1.2e-7 * (iterations + 1)


# ----------------------------------------------------------------------------------------------------------------
# What cannot agree


def formulas(convention):
    """The step of either side as (v1, Keras), where their epsilon stands in different places; or None."""
    if not convention.is_beside_root or convention.rule == "adam":
        return None
    if convention.rule == "adagrad":
        return "g / sqrt(a)", "g / (sqrt(a) + {:g})".format(convention.epsilon)
    if convention.rule.endswith("rmsprop"):
        return "g / sqrt(s + e)", "g / (sqrt(s) + {:g})".format(convention.epsilon)
    return None


def largest_deviation(convention, second, v1_epsilon):
    """How far the next step of Keras is from v1's at most, relatively, where the slot is `second` already.

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
