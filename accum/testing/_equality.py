"""The public check of a user's model against the full batch."""

from typing import Any, Callable, Optional

from accum.testing._report import EqualityReport


def assert_accumulation_equals_full_batch(
    build_model: Callable[[], Any],
    data: Any,
    accum_steps: int,
    *,
    batch_size: Optional[int] = None,
    steps: int = 3,
    tolerance: Optional[float] = None,
    **options: Any,
) -> EqualityReport:
    """Assert that `accum_steps` micro-batches train a model as the full batch does, step by step.

    Two models are built and given the same weights. Plain Keras trains one on full batches; `GradientAccumulateModel`
    trains the other on their micro-batches. After each step every weight of the model, moving statistics included, must
    satisfy

        max |accumulated - full batch| <= tolerance * max(1, max |full batch|)

    The tolerance is absolute for variables whose elements are at most 1, and relative to the largest element otherwise.
    Metrics and the state of the optimizer are not compared.

    If all weights agree, a third model shows whether a mistake would have been seen. It drops all micro-batches of a
    step but the first, and must end at least 100 tolerances away from the full batch (10 with 16-bit types, whose
    rounding errors reach hundredths of a step). So a very small learning rate raises an error.

    Args:
      build_model: function without arguments that returns a new compiled `tf.keras.Model` at each call. The model must
        not accumulate. It may start from random weights: those of the first model are copied to the others.
      data: a tuple `(x, y)` or `(x, y, sample_weight)`, each an array or a nest of arrays whose first axis is that of
        the examples. Any other array or nest of arrays is `x` alone, as in Keras. Or an iterable of such full batches:
        a `tf.data.Dataset`, a `keras.utils.Sequence`, a generator.
      accum_steps: int >= 1, the micro-batches per step. Each full batch is split into that many, whose sizes differ by
        at most 1. A batch smaller than the first has fewer, as in `fit`, and its cycle is flushed. With `whole_batch`,
        the model splits each batch itself, into micro-batches of as many examples as the largest of these.
      batch_size: int >= `accum_steps`, the examples per full batch; None makes one batch of all examples. Only for
        arrays.
      steps: int >= 1, the steps to compare. If the data end sooner, they start over.
      tolerance: float > 0. None: 2e-6; but 3e-4 if a layer computes in float16, 2.4e-3 if one computes in bfloat16, and
        two units in the last place if variables are stored in 16 bits.
      **options: `reduction`, `micro_batch_weight`, `nonfinite`, `accumulator_dtype`, `sparse` and `whole_batch`, as for
        `GradientAccumulateModel`. Plain Keras has nothing to compare its other options with.

    Returns:
      An `EqualityReport`.

    Raises:
      AssertionError: the runs diverge. The message names the first step that does, the variable that is furthest off
        and by how much, and what in the model can cause it, each with a remedy. The attribute `report` is the
        `EqualityReport`.
      TypeError, ValueError: an argument is not valid; the check can't tell a wrong step from rounding, because the
        weights hardly move; or the full batch itself ends in NaN or Inf.
      NotImplementedError: Keras runs in a static graph. Use `record` and `compare` there.

    Example:
      >>> def build_model():
      ...     model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
      ...     model.compile("adam", "mse")
      ...     return model
      >>> print(accum.testing.assert_accumulation_equals_full_batch(build_model, (x, y), accum_steps=4))
    """
    from accum.testing._training import train_both_ways  # needs TensorFlow

    report = train_both_ways(build_model, data, accum_steps, batch_size, steps, tolerance, options)
    if not report.is_equal:
        error = AssertionError(str(report))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report
