"""The public check of a user's model against the full batch."""

from typing import Any, Callable, Optional

from accum.testing._report import EqualityReport


def assert_accumulation_equals_full_batch(
    build_model: Callable[[], Any],
    data: Any,
    accum_steps: Optional[int] = None,
    *,
    micro_batch_size: Optional[int] = None,
    batch_size: Optional[int] = None,
    steps: int = 3,
    tolerance: Optional[float] = None,
    **options: Any,
) -> EqualityReport:
    """Assert that micro-batches train a model as the full batch does, step by step.

    Pass `accum_steps` or `micro_batch_size`, whichever you pass to `GradientAccumulateModel`.

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
        at most 1 without a `batch_size`. A batch smaller than the first has fewer, as in `fit`, and its cycle is
        flushed. With `whole_batch`, the model splits each batch itself, into micro-batches of as many examples as the
        largest of these.
      micro_batch_size: int >= 1, the examples per micro-batch, into which the model splits each full batch itself.
      batch_size: int >= 1, as in `fit`: with `accum_steps` the examples per micro-batch, so that a full batch has
        `accum_steps * batch_size`; with `micro_batch_size` the examples per full batch. None makes one full batch of
        all examples. Only for arrays.
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

    report = train_both_ways(build_model, data, accum_steps, micro_batch_size, batch_size, steps, tolerance, options)
    return _require_equal(report)


def assert_graph_accumulation_equals_full_batch(
    build_graph: Callable[..., Any],
    data: Any,
    accum_steps: int,
    *,
    batch_size: Optional[int] = None,
    steps: int = 3,
    tolerance: float = 2e-6,
    baseline: str = "own",
    runs: int = 3,
) -> EqualityReport:
    """Assert that a program that builds a static graph trains on micro-batches as it does on its own full batch.

    The plain program is built with `accum_steps=1` and run several times from the same values. If these runs differ,
    the program races or draws random numbers, and can't be a baseline: the error names the variables that it reads and
    changes in no fixed order. Otherwise the program is built once more with accumulation, starts from the same values,
    and all global variables that both have must agree after each step, `global_step` included:

        max |accumulated - full batch| <= tolerance * max(1, max |full batch|)

    If all agree, a further run of the full-batch program drops all micro-batches of a step but the first. It must end
    at least 100 tolerances away from the full batch, or else the check could not have failed and raises an error.

    Args:
      build_graph: function `(accum_steps, *batch)` that is called in a new graph, with placeholders for the arrays of
        `data`. It returns the train op. If `accum_steps` is 1, it is the plain program for full batches.
      data: a tuple of arrays, or of nests of arrays, whose first axis is that of the examples; or an iterable of full
        batches, each such a tuple.
      accum_steps: int >= 1, the micro-batches per step.
      batch_size: int >= `accum_steps`, the examples per full batch; None makes one batch of all examples. Only for
        arrays.
      steps: int >= 1, the steps to compare. If the data end sooner, they start over.
      tolerance: float > 0.
      baseline: "own": the full-batch program as it is. "ordered": the same, but every update waits until everything
        that does not depend on an update is computed, as `accum.testing.order_updates` says.
      runs: int >= 2, how often the full-batch program runs.

    Returns:
      An `EqualityReport`.

    Raises:
      AssertionError: the runs diverge. The message names the first step that does, the variable that is furthest off
        and by how much, and what in the graph can cause it, each with a remedy. The attribute `report` is the
        `EqualityReport`.
      TypeError, ValueError: an argument is not valid, equal runs of the full batch differ, or the check can't tell a
        wrong step from rounding.

    Example:
      >>> def build_graph(accum_steps, x, y):
      ...     loss = tf.reduce_mean((network(x) - y) ** 2)
      ...     optimizer = tf.compat.v1.train.AdamOptimizer(0.01)
      ...     if accum_steps > 1:
      ...         optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
      ...     return optimizer.minimize(loss, tf.compat.v1.train.get_or_create_global_step())
      >>> print(accum.testing.assert_graph_accumulation_equals_full_batch(build_graph, (x, y), accum_steps=4))
    """
    from accum.testing._graph_equality import check_graph  # needs TensorFlow

    report = check_graph(build_graph, data, accum_steps, batch_size, steps, tolerance, baseline, runs)
    return _require_equal(report)


def _require_equal(report: EqualityReport) -> EqualityReport:
    if not report.is_equal:
        error = AssertionError(str(report))
        error.report = report  # type: ignore[attr-defined]
        raise error
    return report
