"""The sums that are recorded for each step that a `StepLogger` follows."""

from typing import NamedTuple, Optional, Sequence

from accum._engine._gradients import squared_norm
from accum._tf import Gradient, Scalar, tf


class StepSums(NamedTuple):
    """What a replica adds up for a step, in float32. The first five are those of `SquaredNorms`."""

    squares: Scalar = 0.0
    weight: Scalar = 0.0
    per_size: Scalar = 0.0
    squares_per_size: Scalar = 0.0
    parts: Scalar = 0.0
    sizes: Scalar = 0.0  # sum(b_i)
    divisor: Scalar = 0.0  # by which the gradient of the step is divided to give the mean, if it is a sum
    examples: Scalar = 0.0
    loss: Scalar = 0.0  # sum over examples
    loss_weight: Scalar = 0.0
    # Of the step, the same on each replica:
    steps: Scalar = 0.0  # 1 if a step was made
    squared_norm: Scalar = 0.0  # of the gradient of the step, before `transform`
    learning_rate: Scalar = 0.0
    number: Scalar = 0.0  # how many steps there were before


def norms_of_micro_batch(grads: Sequence[Optional[Gradient]], weight: Optional[Scalar], size: Scalar) -> StepSums:
    """Return what a micro-batch adds to the sums.

    Args:
      grads: its gradients.
      weight: its weight, which then is also the measure of its size; None: 1.
      size: its number of examples.
    """
    size = tf.cast(size if weight is None else weight, tf.float32)
    weight = tf.constant(1.0) if weight is None else tf.cast(weight, tf.float32)
    per_size = tf.math.divide_no_nan(weight, size)
    return StepSums(
        divisor=weight,
        squares=tf.math.multiply_no_nan(squared_norm(grads), weight),
        weight=weight,
        per_size=per_size,
        squares_per_size=weight * per_size,
        parts=tf.cast(weight > 0.0, tf.float32),
        sizes=size,
    )


def as_vector(sums: StepSums) -> tf.Tensor:
    return tf.stack([tf.cast(value, tf.float32) for value in sums])
