"""What a `GradientAccumulateModel` was asked to do: checked at once, written into its config, read from it."""

from accum import _check, _config, _tf
from accum._callbacks import LAST_CYCLE
from accum._clipping import AdaptiveClipping
from accum._cycle import check_options
from accum._tf import tf

WEIGHTS = ("examples", "equal")
FUNCTIONS = ("transform", "micro_batch_weight", "agc_exclude")


class Settings:
    """The checked arguments of a model.

    Attributes:
      arguments: dict of them, as they were given.
      options: dict of those that its optimizers take.
      last_cycle: "flush", "carry" or "drop".
    """

    def __init__(self, arguments, options, last_cycle, weight):
        self.arguments = arguments
        self.options = options
        self.last_cycle = last_cycle
        self._weight = weight

    @classmethod
    def of(
        cls,
        *,
        accum_steps=1,
        use_agc=False,
        clip_factor=0.01,
        eps=1e-3,
        agc_exclude=(),
        reduction="mean",
        last_cycle="flush",
        micro_batch_weight="examples",
        transform=None,
        nonfinite="propagate",
        accumulator_dtype=None,
        sparse="rows",
    ):
        """Check the arguments, in the words of law L17."""
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
        if micro_batch_weight != "equal" and _tf.in_static_graph():
            raise ValueError(
                "Keras in graph mode never calls `train_step`, by which micro-batches are weighed: compile a plain "
                "model with `GradientAccumulateOptimizer`, or give micro_batch_weight='equal'."
            )
        return cls(arguments, options, last_cycle, micro_batch_weight)

    @property
    def weighs_as_keras(self):
        """Whether micro-batches weigh what Keras' losses divide by: elsewhere than under a mask, their examples."""
        return not callable(self._weight) and self._weight == "examples"

    def weight_of(self, data):
        """The weight of what a `train_step` is given, a scalar tensor, or None for 1."""
        if self._weight == "equal":
            return None
        if callable(self._weight):
            return self._weight(*_tf.unpack_data(data))
        return _tf.count_examples(data)

    def get_config(self):
        """The arguments as JSON; a function that is not registered is left out, with a warning."""
        config = dict(self.arguments, accum_steps=_config.int_keys_to_config(self.arguments["accum_steps"]))
        if config["accumulator_dtype"] is not None:
            config["accumulator_dtype"] = tf.as_dtype(config["accumulator_dtype"]).name
        for name in FUNCTIONS:
            config[name] = _config.to_config(name, config[name])
        if config["micro_batch_weight"] is None:
            config["micro_batch_weight"] = "examples"
        return config

    @staticmethod
    def arguments_from(config, custom_objects=None):
        """The arguments that `get_config` wrote down, among other things."""
        arguments = {name: config[name] for name in Settings.of.__kwdefaults__ if name in config}
        arguments["accum_steps"] = _config.int_keys_from_config(arguments["accum_steps"])
        for name in FUNCTIONS:
            arguments[name] = _config.from_config(name, arguments.get(name), custom_objects)
        return arguments
