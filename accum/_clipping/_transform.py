"""Adaptive gradient clipping as the `transform` of an accumulating optimizer: choose variables and their layout."""

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from accum import _check, _config, _tf
from accum._clipping._adaptive import CLIP_FACTOR, EPS, adaptive_clip_grad, unit_axes_in
from accum._tf import Gradient, GradsAndVars, Transform, tf
from accum._tf.types import Names


class AdaptiveClipping:
    """Clip the accumulated gradient once per cycle: `adaptive_clip_grad` as a `transform`.

    A name in `exclude` or `unit_axes` matches one or more consecutive parts of a variable's name, as separated by
    slashes: "bias" matches every bias, "logits/kernel" one kernel. If a model is known, a layer's name matches all
    variables of that layer, including layers of nested models.

    Args:
      clip_factor: > 0, as for `adaptive_clip_grad`.
      eps: > 0, as for `adaptive_clip_grad`.
      exclude: the variables that are not clipped: a list of names, or a function `variable -> bool`. The paper
        excludes the last linear layer.
      unit_axes: dict `{name: axes}`, as for `unitwise_norm`, for variables whose units follow neither from their rank
        nor from `model`.
      model: a Keras model or layer. It tells the layout of depthwise and transposed kernels, of embeddings and of
        `EinsumDense`. A `GradientAccumulateModel` registers itself.
      before: another transform, applied first, or None.

    Raises:
      TypeError, ValueError: an argument does not match its description above.

    Example:
      >>> clipping = accum.AdaptiveClipping(clip_factor=0.01, exclude=["bias", "logits"], model=model)
      >>> optimizer = accum.GradientAccumulateOptimizer("sgd", accum_steps=4, transform=clipping)
    """

    def __init__(
        self,
        clip_factor: float = CLIP_FACTOR,
        eps: float = EPS,
        *,
        exclude: Names = (),
        unit_axes: Optional[Dict[str, Sequence[int]]] = None,
        model: Optional[tf.keras.layers.Layer] = None,
        before: Optional[Transform] = None,
    ) -> None:
        self._clip_factor = _check.positive("clip_factor", clip_factor)
        self._eps = _check.positive("eps", eps)
        self._exclude = _check.names_or_function("exclude", _config.from_config("exclude", exclude))
        self._unit_axes = _check.axes_by_name("unit_axes", unit_axes or {})
        self._before: Any = _check.callable_or_none("transform", _config.from_config("transform", before))
        self._models: List[tf.keras.layers.Layer] = []
        self._checked: List[List[tf.keras.layers.Layer]] = []  # the models of variables whose names have been checked
        if model is not None:
            self.watch(model)

    def watch(self, model: tf.keras.Model) -> None:
        """Read the layout of kernels from the layers of `model`, including layers that are created later."""
        if not any(watched is model for watched in self._models):
            self._models.append(model)
        if hasattr(self._before, "watch"):
            self._before.watch(model)

    def __call__(self, grads_and_vars: GradsAndVars) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        if self._before is not None:
            grads_and_vars = self._before(grads_and_vars)
        grads, variables = zip(*grads_and_vars)
        models = Known(self._models)
        self._check_names(models, variables)
        axes = [self._axes_of(var, models) for var in variables]
        clipped = adaptive_clip_grad(variables, grads, self._clip_factor, self._eps, unit_axes=axes)
        return [
            (grad if self._is_excluded(var, models) else clip, var)
            for grad, clip, var in zip(grads, clipped, variables)
        ]

    def _is_excluded(self, var: tf.Variable, models: "Known") -> bool:
        if callable(self._exclude):
            return bool(self._exclude(var))
        return any(is_part(name, models.names(var)) for name in self._exclude)

    def _axes_of(self, var: tf.Variable, models: "Known") -> Optional[Tuple[int, ...]]:
        by_name = [axes for name, axes in self._unit_axes.items() if is_part(name, models.names(var))]
        return by_name[-1] if by_name else models.unit_axes.get(_tf.variables.key_of(var))

    def _check_names(self, models: "Known", variables: Sequence[tf.Variable]) -> None:
        """Raise for a name that matches nothing; without a model only warn, as the variable may have no gradient."""
        owners = models.owners(variables)
        if owners in self._checked:
            return
        of_variables = [name for var in variables for name in models.names(var)]
        names = list(self._unit_axes) + ([] if callable(self._exclude) else list(self._exclude))
        everything = models.all_names() + of_variables
        unknown = [name for name in names if not is_part(name, everything)]
        words = (
            f"Adaptive clipping found no variable named {unknown}. Known names: {sorted(set(everything))}."
            " [accum: clipped-names]"
        )
        if unknown and self._models:
            raise ValueError(words)
        here = Known(owners).all_names() + of_variables
        if unknown:
            _check.warn(words)
        elif owners and names and not any(is_part(name, here) for name in names):
            _check.warn(
                f"Adaptive clipping found none of {names} in this model, only in another one that it has met: pass a "
                f"new `AdaptiveClipping` with the names of this one. Known names: {sorted(set(here))}."
                " [accum: clipped-names]"
            )
        self._checked.append(owners)

    def __repr__(self) -> str:
        numbers = f"clip_factor={self._clip_factor!r}, eps={self._eps!r}"
        return f"{type(self).__name__}({numbers}, exclude={self._exclude!r}, before={self._before!r})"

    def get_config(self) -> Dict[str, Any]:
        """Return the arguments; unit axes that were read from a model are stored by name."""
        models = Known(self._models)
        unit_axes = dict(models.unit_axes_by_name, **self._unit_axes)
        return {
            "clip_factor": self._clip_factor,
            "eps": self._eps,
            "exclude": _config.to_config("exclude", self._exclude) or (),
            "unit_axes": {name: list(axes) for name, axes in unit_axes.items()},
            "before": _config.to_config("transform", self._before),
        }


def act_alike(one: Optional[Transform], other: Optional[Transform]) -> bool:
    """Whether two transforms are the same, or equal as a file makes them: of one class, with equal arguments.

    The `unit_axes` of `AdaptiveClipping` are not compared, because they may have been read from a model.
    """
    if isinstance(one, AdaptiveClipping) and isinstance(other, AdaptiveClipping):
        excluded = [clip._exclude if callable(clip._exclude) else list(clip._exclude) for clip in (one, other)]
        same_numbers = (one._clip_factor, one._eps) == (other._clip_factor, other._eps)
        return same_numbers and excluded[0] == excluded[1] and act_alike(one._before, other._before)
    if type(one) is type(other) and hasattr(one, "get_config"):
        return bool(one.get_config() == other.get_config())  # type: ignore[union-attr]
    return one == other


class Known:
    """Names and unit axes of variables, read from the layers of some models.

    Attributes:
      by_layer: {variable key: names}, with a name "<layer>/<variable>" for each layer that contains the variable,
        including nested models. On TF 2.2 a variable's own name may contain "logits_1" although its layer is "logits".
      unit_axes: {variable key: unit axes}, for variables whose units the rank does not tell.
      unit_axes_by_name: the same, by "<layer>/<variable>".
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self.by_layer: Dict[int, List[str]] = {}
        self.unit_axes: Dict[int, Tuple[int, ...]] = {}
        self.unit_axes_by_name: Dict[str, Tuple[int, ...]] = {}
        self._keys: List[Tuple[Any, Set[int]]] = [(model, set()) for model in models]
        for model, keys in self._keys:
            for layer in [layer for layer in [model] + _tf.models.layers_of(model) if layer.built]:
                for var in layer.weights:
                    keys.add(_tf.variables.key_of(var))
                    self.by_layer.setdefault(_tf.variables.key_of(var), []).append(_name_in(layer, var))
                for var, axes in unit_axes_in(layer):
                    self.unit_axes[_tf.variables.key_of(var)] = self.unit_axes_by_name[_name_in(layer, var)] = axes

    def owners(self, variables: Sequence[tf.Variable]) -> List[Any]:
        """Return the models that have all of some variables; if there are none, those that have some of them."""
        wanted = set(map(_tf.variables.key_of, variables))
        return [model for model, keys in self._keys if wanted <= keys] or [
            model for model, keys in self._keys if wanted & keys
        ]

    def names(self, var: tf.Variable) -> List[str]:
        """Return all names by which a variable is known."""
        return [_plain_name(var)] + self.by_layer.get(_tf.variables.key_of(var), [])

    def all_names(self) -> List[str]:
        return [name for names in self.by_layer.values() for name in names]


def _plain_name(var: tf.Variable) -> str:
    return _tf.variables.path_of(var)


def _name_in(layer: tf.keras.layers.Layer, var: tf.Variable) -> str:
    return f"{layer.name}/{_plain_name(var).split('/')[-1]}"


def is_part(name: str, names: Sequence[str]) -> bool:
    """Whether `name` equals one or more consecutive parts of any of `names`."""
    wanted = name.split(":")[0].split("/")
    listed = [name.split("/") for name in names]
    return any(parts[start : start + len(wanted)] == wanted for parts in listed for start in range(len(parts)))


_tf.optimizers.register_keras_class(AdaptiveClipping, "accum>AdaptiveClipping")
