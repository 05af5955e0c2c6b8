"""Adaptive gradient clipping as the `transform` of an accumulating optimizer: which variables, in which layout."""

import warnings

from accum import _check, _config, _tf
from accum._agc import adaptive_clip_grad, unit_axes_in


class AdaptiveClipping:
    """`adaptive_clip_grad` as a `transform`: it clips the accumulated gradient, once a cycle.

    A name, in `exclude` and `unit_axes`, is one or more consecutive parts of a variable's name between its slashes:
    "bias" means every bias, "logits/kernel" one kernel. Where a model is known, a layer's name stands for all variables
    in it, those of a model within the model too.

    Args:
      clip_factor: float > 0, as for `adaptive_clip_grad`.
      eps: float > 0, as for `adaptive_clip_grad`.
      exclude: what is not clipped: a list of names, or a function `variable -> bool`. The paper leaves out the last
        linear layer.
      unit_axes: dict `{name: axes}`, as for `unitwise_norm`, for variables of which neither the rank nor `model` says
        which axes number the units.
      model: a Keras model or layer, which tells the layout of depthwise and transposed kernels, of
        embeddings and of `EinsumDense`. A `GradientAccumulateModel` makes itself known.
      before: another transform, which acts before, or None.

    Raises:
      TypeError, ValueError: for any argument that is none of these.

    Example:
      >>> clipping = accum.AdaptiveClipping(clip_factor=0.01, exclude=["bias", "logits"], model=model)
      >>> optimizer = accum.GradientAccumulateOptimizer("sgd", accum_steps=4, transform=clipping)
    """

    def __init__(self, clip_factor=0.01, eps=1e-3, *, exclude=(), unit_axes=None, model=None, before=None):
        self._clip_factor = _check.positive("clip_factor", clip_factor)
        self._eps = _check.positive("eps", eps)
        self._exclude = _check.names_or_function("exclude", _config.from_config("exclude", exclude))
        self._unit_axes = _check.axes_by_name("unit_axes", unit_axes or {})
        self._before = _check.callable_or_none("transform", _config.from_config("transform", before))
        self._models = []
        self._has_met = False
        if model is not None:
            self.watch(model)

    def watch(self, model):
        """Take the layout of kernels from the layers of `model`, also of those that are made later."""
        if not any(known is model for known in self._models):
            self._models.append(model)
        if hasattr(self._before, "watch"):
            self._before.watch(model)

    def __call__(self, grads_and_vars):
        if self._before is not None:
            grads_and_vars = self._before(grads_and_vars)
        grads, variables = zip(*grads_and_vars)
        known = Known(self._models)
        self._check_names(known, variables)
        axes = [self._axes_of(var, known) for var in variables]
        clipped = adaptive_clip_grad(variables, grads, self._clip_factor, self._eps, unit_axes=axes)
        return [
            (grad if self._is_excluded(var, known) else clip, var) for grad, clip, var in zip(grads, clipped, variables)
        ]

    def _is_excluded(self, var, known):
        if callable(self._exclude):
            return bool(self._exclude(var))
        return any(is_part(name, known.names(var)) for name in self._exclude)

    def _axes_of(self, var, known):
        by_name = [axes for name, axes in self._unit_axes.items() if is_part(name, known.names(var))]
        return by_name[-1] if by_name else known.unit_axes.get(_tf.variable_key(var))

    def _check_names(self, known, variables):
        """A name that means nothing is a mistake; without a model, it may mean a variable without a gradient."""
        if self._has_met:
            return
        everything = known.all_names() + [name for var in variables for name in known.names(var)]
        names = list(self._unit_axes) + ([] if callable(self._exclude) else list(self._exclude))
        unknown = [name for name in names if not is_part(name, everything)]
        words = "Adaptive clipping names no variable by {}. Known: {}.".format(unknown, sorted(set(everything)))
        if unknown and self._models:
            raise ValueError(words)
        if unknown:
            warnings.warn(words, stacklevel=2)
        self._has_met = True

    def get_config(self):
        """The arguments; what is known from a model is written down by name."""
        known = Known(self._models)
        unit_axes = dict(known.unit_axes_by_name, **self._unit_axes)
        return {
            "clip_factor": self._clip_factor,
            "eps": self._eps,
            "exclude": _config.to_config("exclude", self._exclude) or (),
            "unit_axes": {name: list(axes) for name, axes in unit_axes.items()},
            "before": _config.to_config("transform", self._before),
        }


class Known:
    """What the layers of some models tell of their variables.

    Attributes:
      by_layer: {variable key: names}, "<layer>/<variable>" for each layer that the variable is in, models within the
        model included. On TF 2.2 its own name may hold "logits_1" where the layer is called "logits".
      unit_axes: {variable key: unit axes}, where the rank says something else.
      unit_axes_by_name: the same by "<layer>/<variable>".
    """

    def __init__(self, models):
        self.by_layer = {}
        self.unit_axes = {}
        self.unit_axes_by_name = {}
        for layer in [layer for model in models for layer in [model] + _tf.layers_of(model) if layer.built]:
            for var in layer.weights:
                self.by_layer.setdefault(_tf.variable_key(var), []).append(_name_in(layer, var))
            for var, axes in unit_axes_in(layer):
                self.unit_axes[_tf.variable_key(var)] = self.unit_axes_by_name[_name_in(layer, var)] = axes

    def names(self, var):
        """All names by which a variable is known."""
        return [_plain_name(var)] + self.by_layer.get(_tf.variable_key(var), [])

    def all_names(self):
        return [name for names in self.by_layer.values() for name in names]


def _plain_name(var):
    return _tf.path_of(var)


def _name_in(layer, var):
    return "{}/{}".format(layer.name, _plain_name(var).split("/")[-1])


def is_part(name, names):
    """Whether `name` is one or more consecutive parts of any of `names`."""
    wanted = name.split(":")[0].split("/")
    listed = [known.split("/") for known in names]
    return any(parts[start : start + len(wanted)] == wanted for parts in listed for start in range(len(parts)))


_tf.register_keras_class(AdaptiveClipping, "accum>AdaptiveClipping")
