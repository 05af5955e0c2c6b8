"""The options of an accumulating optimizer, declared once for every API: `Plan`."""

from typing import TYPE_CHECKING, NamedTuple, Optional, Tuple

from accum import _check
from accum._tf import Transform, tf
from accum._tf.types import AccumSteps, Dtype, Nonfinite, Reduction, Sparse

if TYPE_CHECKING:
    from typing_extensions import TypedDict  # novm

    class OptimizerOptions(TypedDict, total=False):
        """What an accumulating optimizer of any API, and a model for its optimizers, takes by name."""

        transform: Optional[Transform]
        nonfinite: Nonfinite
        accumulator_dtype: Optional[Dtype]
        sparse: Sparse


REDUCTIONS = ("mean", "sum", "running_mean")
NONFINITE = ("propagate", "skip_micro", "skip_cycle")
SPARSE = ("rows", "dense")


class Plan(NamedTuple):
    """The checked options of an accumulating optimizer. A step is one update of the weights, a cycle its micro steps.

    Everything else follows from this file: the arguments of both optimizers and of the model, what configs hold, what
    the model's optimizers have to share, and what can't be changed later. An option is a field here, a parameter of
    `of`, with its default, its check and its description for users, and a key of `OptimizerOptions`, for editors and
    mypy.
    """

    accum_steps: AccumSteps
    reduction: str
    transform: Optional[Transform]
    nonfinite: str
    accumulator_dtype: Optional[tf.DType]
    sparse: str

    @classmethod
    def of(
        cls,
        accum_steps: AccumSteps = _check.LEFT_OUT,
        reduction: Reduction = "mean",
        *,
        transform: Optional[Transform] = None,
        nonfinite: Nonfinite = "propagate",
        accumulator_dtype: Optional[Dtype] = None,
        sparse: Sparse = "rows",
    ) -> "Plan":
        """Check the options.

        Args:
          transform: function `grads_and_vars -> grads_and_vars`, called once per cycle with the accumulated gradients.
          nonfinite: how a NaN or Inf in a gradient is handled. "propagate": as in a full batch. "skip_micro": leave out
            this micro-batch and take one more. "skip_cycle": finish the cycle without a step.
          accumulator_dtype: dtype of the accumulators. None: the dtype of the variable, but float32 for a 16-bit
            variable.
          sparse: how `tf.IndexedSlices` reach the inner optimizer. "rows": as the union of the cycle's rows. "dense":
            as a dense gradient.

        Raises:
          TypeError, ValueError: an argument does not match its description (law L17).
        """
        if isinstance(accum_steps, dict):
            accum_steps = dict(_check.schedule(accum_steps))
        else:
            accum_steps = _check.accum_steps(accum_steps)
        dtype = None if accumulator_dtype is None else tf.as_dtype(accumulator_dtype)
        return cls(
            accum_steps,
            _check.one_of("reduction", reduction, REDUCTIONS),
            _check.callable_or_none("transform", transform),
            _check.one_of("nonfinite", nonfinite, NONFINITE),
            None if dtype is None else _check.floating_dtype("accumulator_dtype", dtype),
            _check.one_of("sparse", sparse, SPARSE),
        )

    # ----------------------------------------------------------------------------------------------------------------
    # What follows from `accum_steps`

    def shown_steps(self) -> AccumSteps:
        """Return `accum_steps` for users, who may change what they get."""
        return dict(self.accum_steps) if isinstance(self.accum_steps, dict) else self.accum_steps

    @property
    def is_schedule(self) -> bool:
        """Whether `accum_steps` is a schedule `{first step: accum_steps}`."""
        return isinstance(self.accum_steps, dict)

    @property
    def schedule(self) -> Tuple[Tuple[int, int], ...]:
        """Pairs of (first step, accum_steps from that step on), in ascending order."""
        return tuple(self.accum_steps.items()) if isinstance(self.accum_steps, dict) else ((0, self.accum_steps),)

    @property
    def longest(self) -> int:
        """The largest number of micro steps in a cycle."""
        return max(accum_steps for _, accum_steps in self.schedule)

    @property
    def is_one_micro_step(self) -> bool:
        """Whether every cycle is always one micro step, so that no gradient has to be stored."""
        return not self.is_schedule and self.accum_steps == 1

    @property
    def is_running_mean(self) -> bool:
        """Whether accumulators hold means, and never a sum."""
        return self.reduction == "running_mean"

    @property
    def changes_updates(self) -> bool:
        """Whether the gradient of each update is changed, for which it has to be whole and without a loss scale."""
        return self.transform is not None

    @property
    def has_single(self) -> bool:
        """Whether any cycle of the plan is one micro step long."""
        return any(accum_steps == 1 for _, accum_steps in self.schedule)

    @property
    def increments(self) -> Tuple[Tuple[int, int], ...]:
        """The schedule as (first step, change of accum_steps), whose changes up to a step sum to the cycle length."""
        lengths = [0] + [accum_steps for _, accum_steps in self.schedule]
        return tuple((first, new - old) for (first, new), old in zip(self.schedule, lengths))
