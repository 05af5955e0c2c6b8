"""The check of a model of the user's own against the full batch: its public face, and what it reports."""

from typing import Dict, List, NamedTuple, Optional

Suspect = NamedTuple("Suspect", [("what", str), ("reason", str), ("remedy", str)])
Suspect.__doc__ = """What makes a model's micro-batches differ from its full batch, why, and what to do about it."""

Deviation = NamedTuple("Deviation", [("variable", str), ("size", float), ("allowed", float)])
Deviation.__doc__ = (
    """How far a variable is off: the largest absolute difference of its elements, and what is allowed."""
)

SHOWN = 5  # further variables in a message


class EqualityReport(NamedTuple):
    """What the check of a model has found.

    Attributes:
      steps: int, the steps that were compared.
      accum_steps: int, the micro-batches a step.
      tolerance: float, as it was asked for.
      deviations: dict of the name of each variable to the largest absolute difference of its elements in any step.
      diverged_at: int, the first step past the tolerance, from 1 on; None if there was none.
      diverged: list of `(variable, size, allowed)` of that step, the one that is furthest past the tolerance first.
      suspects: list of `(what, reason, remedy)`, of what can't agree in this model, if it diverged.
    """

    steps: int
    accum_steps: int
    tolerance: float
    deviations: Dict[str, float]
    diverged_at: Optional[int] = None
    diverged: List[Deviation] = []
    suspects: List[Suspect] = []

    @property
    def is_equal(self):
        """Whether no variable has left the tolerance."""
        return self.diverged_at is None

    def __str__(self):
        return self._equal() if self.is_equal else "\n".join(self._divergence() + self._explanation())

    def _equal(self):
        name = max(self.deviations, key=lambda name: self.deviations[name])
        return (
            "Accumulation equals the full batch: {} of {} micro-batches, and the largest deviation is {:.1e}, of `{}` "
            "(tolerance {:.0e}).".format(
                _counted(self.steps, "step"), self.accum_steps, self.deviations[name], name, self.tolerance
            )
        )

    def _divergence(self):
        first, others = self.diverged[0], self.diverged[1:]
        lines = [
            "Accumulation diverges from the full batch at step {}: `{}` is off by {:.1e}, where {:.1e} is allowed "
            "(accum_steps={}, tolerance {:.0e}).".format(
                self.diverged_at, first.variable, first.size, first.allowed, self.accum_steps, self.tolerance
            )
        ]
        if others:
            shown = ["`{}` by {:.1e}".format(other.variable, other.size) for other in others[:SHOWN]]
            more = len(others) - len(shown)
            lines.append("Also off: {}{}.".format(", ".join(shown), " and {} more".format(more) if more else ""))
        return lines

    def _explanation(self):
        return ["What can make it so in this model:"] + [
            "  - {}: {}. {}.".format(suspect.what, suspect.reason, suspect.remedy) for suspect in self.suspects
        ]


def assert_accumulation_equals_full_batch(
    build_model, data, accum_steps, *, batch_size=None, steps=3, tolerance=None, **options
):
    """Assert that `accum_steps` micro-batches train a model as the full batch does, step by step.

    Two models are built and given the same weights. One is trained on full batches by plain Keras, the other, as a
    `GradientAccumulateModel`, on their micro-batches. After each step every weight of the model, moving statistics
    included, has to satisfy

        max |accumulated - full batch| <= tolerance * max(1, max |full batch|)

    so that the tolerance is absolute for weights of order 1 and below, and relative to the largest element of a
    variable above. Metrics and the state of the optimizer are not compared.

    Args:
      build_model: function without arguments that makes a compiled `tf.keras.Model` that does not accumulate, a new one
        at each call. It may start from random weights: those of the first model are copied to the second.
      data: arrays `(x, y)` or `(x, y, sample_weight)` in a tuple, each an array or nest of arrays whose first axis is
        that of the examples; anything else that is or nests arrays is `x` alone, as in Keras. Or full batches of that
        form, one after the other: a `tf.data.Dataset`, a `keras.utils.Sequence`, a generator.
      accum_steps: int >= 1, the micro-batches a step. Each full batch is cut into as many, of sizes that differ by 1 at
        most; one that is smaller than the first into as few as `fit` would, and its cycle is flushed.
      batch_size: int >= `accum_steps`, the examples of a full batch; None: all arrays are one. Only for arrays.
      steps: int >= 1, the steps to compare. Data that end before begin again.
      tolerance: float > 0; None: 2e-6, or 3e-4 where a layer computes in float16, 2.4e-3 where it does in bfloat16, and
        two units of their last place where variables have 16 bit themselves.
      **options: as for `GradientAccumulateModel`: `reduction`, `micro_batch_weight`, `nonfinite`, `accumulator_dtype`,
        `sparse`. There are no others, as plain Keras has nothing to compare them with.

    Returns:
      An `EqualityReport`.

    Raises:
      AssertionError: the runs diverge. Its message names the first step that does, the variable that is furthest off
        and by how much, and what in the model can't agree, each with what to do about it; its attribute `report` is the
        `EqualityReport`.
      TypeError, ValueError: an argument is none of these, or the check could not fail: no weight moves by more than the
        tolerance, or the full batch itself ends in a NaN or an infinity.
      NotImplementedError: Keras runs in a static graph, where `record` and `compare` serve.

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
        error.report = report
        raise error
    return report


def _counted(number, what):
    return "{} {}{}".format(number, what, "" if number == 1 else "s")
