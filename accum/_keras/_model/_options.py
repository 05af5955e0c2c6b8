"""The options of a `GradientAccumulateModel`, checked: `ModelOptions`."""

import inspect
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple

from accum import _check, _config, _tf
from accum._clipping._adaptive import CLIP_FACTOR, EPS
from accum._clipping._transform import AdaptiveClipping
from accum._engine._plan import Plan
from accum._keras._step_listener import StepListener
from accum._tf import Data, Options, Scalar, tf
from accum._tf.types import (
    AccumSteps,
    Config,
    CustomObjects,
    LastCycle,
    MicroBatchSize,
    MicroBatchWeight,
    Names,
    Reduction,
    ReplicasPerGroup,
    SequenceLengths,
    WholeBatch,
)

if TYPE_CHECKING:
    from accum._engine._plan import OptimizerOptions

    class OptionsByName(OptimizerOptions, total=False):
        """What an accumulating model takes by name."""

        agc: bool
        agc_exclude: Names
        reduction: Reduction
        last_cycle: LastCycle
        micro_batch_weight: MicroBatchWeight
        micro_batch_size: MicroBatchSize
        micro_batch_tokens: Optional[int]
        sequence_lengths: Optional[SequenceLengths]
        whole_batch: Optional[WholeBatch]
        replicas_per_group: ReplicasPerGroup
        recompute: bool
        memory_limit: Optional[int]


LAST_CYCLE = ("flush", "carry", "drop")
WEIGHTS = ("examples", "equal")

OF_ACCUM_ALONE = frozenset(
    ["accumulator_dtype", "last_cycle", "memory_limit", "micro_batch_tokens", "micro_batch_weight", "nonfinite"]
    + ["replicas_per_group", "sequence_lengths", "whole_batch"]
)
"""Names of options that nobody else is likely to give to an attribute: assigning to one warns."""

LISTENERS: Dict[str, Callable[[tf.distribute.Strategy, tf.keras.optimizers.Optimizer], StepListener]] = {}
"""{option that logs something of each step: class of its listener}. Each optimizer gets a listener of its own."""


class ModelOptions:
    """The checked arguments of a model.

    Both ways to create a model take what is declared here, and configs and clones hold all of it. An option is a
    parameter of `of`, with its default and its check, and a key of `OptionsByName`, for editors and mypy; one of the
    optimizers is declared in `Plan` alone.

    Attributes:
      arguments: dict of all arguments, checked.
      plan: the `Plan` of its optimizers.
      last_cycle: "flush", "carry" or "drop".
    """

    NAMES: Tuple[str, ...]

    def __init__(self, arguments: Options, plan: Plan) -> None:
        self.arguments = arguments
        self.plan = plan
        self.last_cycle: str = arguments["last_cycle"]
        self._weight: MicroBatchWeight = arguments["micro_batch_weight"]

    @classmethod
    @_check.taking(Plan.of)
    def of(
        cls,
        *,
        accum_steps: AccumSteps = _check.LEFT_OUT,
        use_agc: bool = False,
        agc: bool = False,
        clip_factor: float = CLIP_FACTOR,
        eps: float = EPS,
        agc_exclude: Names = (),
        last_cycle: Any = "flush",
        micro_batch_weight: Any = "examples",
        micro_batch_size: MicroBatchSize = None,
        micro_batch_tokens: Optional[int] = None,
        sequence_lengths: Optional[SequenceLengths] = None,
        whole_batch: Any = None,
        replicas_per_group: ReplicasPerGroup = None,
        recompute: bool = True,
        memory_limit: Optional[int] = None,
        **of_optimizers: Any,
    ) -> "ModelOptions":
        """Check the arguments, with the error messages of law L17."""
        micro_batch_size = _check.micro_batch_size(micro_batch_size)
        micro_batch_tokens = _check.micro_batch_tokens(micro_batch_tokens, micro_batch_size, whole_batch or ())
        if whole_batch is not None:
            whole_batch = _check.whole_batch(whole_batch, micro_batch_size)
        sequence_lengths = _check.sequence_lengths(sequence_lengths, micro_batch_tokens)
        _check.replicas_per_group(replicas_per_group, whole_batch or ())
        recompute = _check.flag("recompute", recompute)
        memory_limit = _check.memory_limit(memory_limit, micro_batch_size)
        if accum_steps is _check.LEFT_OUT and (micro_batch_size, micro_batch_tokens) != (None, None):
            accum_steps = 1
        if accum_steps is _check.LEFT_OUT:
            _check.warn(
                "`accum_steps` was not given, so every batch makes a step and nothing accumulates: pass `accum_steps`, "
                "`micro_batch_size` or `micro_batch_tokens`. [accum: no-accumulation]",
            )
            accum_steps = 1
        use_agc = bool(use_agc or agc)
        agc_exclude = _check.names_or_function("agc_exclude", agc_exclude)
        last_cycle = _check.one_of("last_cycle", last_cycle, LAST_CYCLE)
        if not callable(micro_batch_weight):
            micro_batch_weight = _check.one_of("micro_batch_weight", micro_batch_weight, WEIGHTS)
        arguments = {name: value for name, value in locals().items() if name not in ("cls", "agc", "of_optimizers")}
        plan = Plan.of(accum_steps, **of_optimizers)
        arguments.update(plan._asdict())
        if use_agc:
            clipping = AdaptiveClipping(clip_factor, eps, exclude=agc_exclude, before=plan.transform)
            plan = plan._replace(transform=clipping)
        if micro_batch_tokens is not None and micro_batch_weight == "equal" and plan.reduction != "sum":
            raise ValueError(
                "`micro_batch_tokens` makes micro-batches of different sizes, and micro_batch_weight='equal' would "
                "count their means alike: leave `micro_batch_weight` out, pass a function that counts what the loss "
                "divides by, or pass `reduction='sum'` for a compiled loss with the reduction SUM. [accum: arguments]"
            )
        splits = (micro_batch_size, micro_batch_tokens) != (None, None)
        if (splits or micro_batch_weight != "equal") and _tf.graphs.in_static_graph():
            raise ValueError(
                "Keras in graph mode never calls `train_step`, which would split batches and weight micro-batches: "
                "compile a plain model with `GradientAccumulateOptimizer`, around an optimizer of "
                "`tf.keras.optimizers.legacy` where there are such, or pass `accum_steps` alone and "
                "micro_batch_weight='equal'. [accum: graph-mode]"
            )
        return cls(arguments, plan)

    @property
    def weighs_as_keras(self) -> bool:
        """Whether a micro-batch's weight is the number by which Keras' losses divide: without a mask, its examples."""
        return not callable(self._weight) and self._weight == "examples"

    def weight_of(self, data: Data) -> Optional[Scalar]:
        """Compute the weight of the data that a `train_step` receives: a scalar tensor, or None for 1."""
        if self._weight == "equal":
            return None
        if callable(self._weight):
            return self._weight(*_tf.losses.unpack_data(data))
        return _tf.losses.count_examples(data)

    def get_config(self) -> Config:
        """Return the arguments as JSON; a function that is not registered is left out, with a warning."""
        config = _config.options_to_config(self.arguments)
        if config["micro_batch_weight"] is None:
            config["micro_batch_weight"] = "examples"
        return config

    @staticmethod
    def arguments_from(config: Config, custom_objects: CustomObjects = None) -> Options:
        """Read the arguments from a config that contains what `get_config` returned."""
        return _config.options_from_config(config, ModelOptions.NAMES, custom_objects)


ModelOptions.NAMES = tuple(inspect.signature(ModelOptions.of).parameters)
