"""The options of a `GradientAccumulateModel`, checked: `ModelOptions`."""

import inspect
from typing import Any, Optional, Tuple

from accum import _check, _config, _tf
from accum._clipping._adaptive import CLIP_FACTOR, EPS
from accum._clipping._transform import AdaptiveClipping
from accum._engine._cycle import check_options
from accum._tf import Data, Options, Scalar, Transform, tf
from accum._tf.types import (
    AccumSteps,
    Config,
    CustomObjects,
    Dtype,
    MicroBatchSize,
    MicroBatchWeight,
    Names,
    Nonfinite,
    Reduction,
    ReplicasPerGroup,
    SequenceLengths,
    Sparse,
)

LAST_CYCLE = ("flush", "carry", "drop")
WEIGHTS = ("examples", "equal")
FUNCTIONS = ("transform", "micro_batch_weight", "agc_exclude", "sequence_lengths")


class ModelOptions:
    """The checked arguments of a model.

    Attributes:
      arguments: dict of all arguments, as passed.
      for_optimizers: dict of the arguments for its optimizers.
      last_cycle: "flush", "carry" or "drop".
    """

    NAMES: Tuple[str, ...]

    def __init__(self, arguments: Options, options: Options, last_cycle: str, weight: MicroBatchWeight) -> None:
        self.arguments = arguments
        self.for_optimizers = options
        self.last_cycle = last_cycle
        self._weight = weight

    @classmethod
    def of(
        cls,
        *,
        accum_steps: AccumSteps = _check.LEFT_OUT,
        use_agc: bool = False,
        clip_factor: float = CLIP_FACTOR,
        eps: float = EPS,
        agc_exclude: Names = (),
        reduction: Reduction = "mean",
        last_cycle: Any = "flush",
        micro_batch_weight: Any = "examples",
        transform: Optional[Transform] = None,
        nonfinite: Nonfinite = "propagate",
        accumulator_dtype: Optional[Dtype] = None,
        sparse: Sparse = "rows",
        micro_batch_size: MicroBatchSize = None,
        micro_batch_tokens: Optional[int] = None,
        sequence_lengths: Optional[SequenceLengths] = None,
        whole_batch: Any = None,
        replicas_per_group: ReplicasPerGroup = None,
        recompute: bool = True,
        memory_limit: Optional[int] = None,
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
        agc_exclude = _check.names_or_function("agc_exclude", agc_exclude)
        arguments = {name: value for name, value in locals().items() if name != "cls"}
        if use_agc:
            transform = AdaptiveClipping(clip_factor, eps, exclude=agc_exclude, before=transform)
        options = {name: arguments[name] for name in ("accum_steps", "reduction", "nonfinite", "sparse")}
        options.update(transform=transform, accumulator_dtype=accumulator_dtype)
        check_options(**options)
        last_cycle = _check.one_of("last_cycle", last_cycle, LAST_CYCLE)
        if not callable(micro_batch_weight):
            micro_batch_weight = _check.one_of("micro_batch_weight", micro_batch_weight, WEIGHTS)
        if micro_batch_tokens is not None and micro_batch_weight == "equal" and reduction != "sum":
            raise ValueError(
                "`micro_batch_tokens` makes micro-batches of different sizes, and micro_batch_weight='equal' would "
                "count their means alike: leave `micro_batch_weight` out, pass a function that counts what the loss "
                "divides by, or pass `reduction='sum'` for a loss that is a sum. [accum: arguments]"
            )
        splits = (micro_batch_size, micro_batch_tokens) != (None, None)
        if (splits or micro_batch_weight != "equal") and _tf.graphs.in_static_graph():
            raise ValueError(
                "Keras in graph mode never calls `train_step`, which would split batches and weight micro-batches: "
                "compile a plain model with `GradientAccumulateOptimizer`, or pass `accum_steps` alone and "
                "micro_batch_weight='equal'. [accum: graph-mode]"
            )
        return cls(arguments, options, last_cycle, micro_batch_weight)

    @staticmethod
    def among(passed: Options, **others: object) -> Options:
        """Return the arguments for `of` among those of a function, and `others`."""
        return dict({name: value for name, value in passed.items() if name in ModelOptions.NAMES}, **others)

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
        config = dict(self.arguments, accum_steps=_config.int_keys_to_config(self.arguments["accum_steps"]))
        if config["accumulator_dtype"] is not None:
            config["accumulator_dtype"] = tf.as_dtype(config["accumulator_dtype"]).name
        for name in FUNCTIONS:
            config[name] = _config.to_config(name, config[name])
        if config["micro_batch_weight"] is None:
            config["micro_batch_weight"] = "examples"
        return config

    @staticmethod
    def arguments_from(config: Config, custom_objects: CustomObjects = None) -> Options:
        """Read the arguments from a config that contains what `get_config` returned."""
        arguments = {name: config[name] for name in inspect.signature(ModelOptions.of).parameters if name in config}
        arguments["accum_steps"] = _config.int_keys_from_config(arguments["accum_steps"])
        for name in FUNCTIONS:
            arguments[name] = _config.from_config(name, arguments.get(name), custom_objects)
        return arguments


ModelOptions.NAMES = tuple(inspect.signature(ModelOptions.of).parameters)
