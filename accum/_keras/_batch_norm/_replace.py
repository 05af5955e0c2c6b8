"""Replace a model's batch normalisation by layers that update their statistics once per cycle."""

from typing import Dict, Tuple

from accum import _check, _tf
from accum._keras._batch_norm._layer import AccumBatchNormalization
from accum._tf import tf

POSITIONS = ("replace",)


def replace_batchnorm_layers(model: tf.keras.Model, accum_steps: int, position: str = "replace") -> tf.keras.Model:
    """Copy `model`, replacing every `tf.keras.layers.BatchNormalization` with `AccumBatchNormalization`.

    Weights, moving statistics, momentum, epsilon, axis, dtype and names are kept, so `predict` returns bitwise equal
    results. Nested models are copied too, and a layer or model that is used several times is copied once. `model`
    itself is not changed. It shares no variable with the copy, which must be compiled.

    Batch normalisation inside another layer, such as a wrapper or a layer of your own, is not replaced, and a warning
    names it.

    Args:
      model: a functional or Sequential model.
      accum_steps: calls per cycle, >= 1, for layers that are not in a `GradientAccumulateModel`.
      position: "replace".

    Returns:
      A `tf.keras.Model`; for a `tf.keras.Sequential`, a `tf.keras.Sequential`.

    Raises:
      TypeError: `model` is not a functional or Sequential model, the only kinds that Keras can copy; `accum_steps` is
        not an int.
      ValueError: `position` is not "replace"; `accum_steps` is less than 1; a layer uses `renorm` or
        `virtual_batch_size`.

    Example:
      >>> model = accum.replace_batchnorm_layers(tf.keras.applications.MobileNetV2(weights=None), accum_steps=8)
      >>> model = accum.GradientAccumulateModel(accum_steps=8, inputs=model.inputs, outputs=model.outputs)
    """
    accum_steps = _check.accum_steps(accum_steps)
    _check.one_of("position", position, POSITIONS)
    if not _tf.models.is_layered_model(model):
        raise TypeError(f"`model` must be a functional or Sequential model. Received: model={model!r}.")
    return _Replacer(accum_steps).whole(model)


class _Replacer:
    """The state of one call: a layer that appears in several places is copied once."""

    def __init__(self, accum_steps: int) -> None:
        self._accum_steps = accum_steps
        # id of a layer -> (the layer, its copy):
        self._copies: Dict[int, Tuple[tf.keras.layers.Layer, tf.keras.layers.Layer]] = {}

    def whole(self, model: tf.keras.Model) -> tf.keras.Model:
        copy = self.copy_model(model)
        self._match_trainable(model, copy)  # determines the order of the weights
        _tf.models.copy_weights(model, copy)
        return copy

    def copy_model(self, model: tf.keras.Model) -> tf.keras.Model:
        copy = tf.keras.models.clone_model(model, clone_function=self.copy)
        if model.built and not copy.built:
            copy.build(_tf.models.shape_built_for(model))
        return copy

    def _match_trainable(self, model: tf.keras.Model, copy: tf.keras.Model) -> None:
        pairs = [(model, copy)]
        for layer, its_copy in self._copies.values():
            pairs.append((layer, its_copy))
            if not _tf.models.is_layered_model(layer):  # what is in it has been copied by its class
                pairs += zip(_tf.models.layers_of(layer), _tf.models.layers_of(its_copy))
        # Setting a layer also sets all layers in it, so a layer comes before those in it, which have fewer in them:
        for layer, its_copy in sorted(pairs, key=lambda pair: -len(_tf.models.layers_of(pair[0]))):
            its_copy.trainable = layer.trainable

    def copy(self, layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
        if id(layer) not in self._copies:
            self._copies[id(layer)] = layer, self._copied(layer)
        return self._copies[id(layer)][1]

    def _copied(self, layer: tf.keras.layers.Layer) -> tf.keras.layers.Layer:
        if _tf.models.is_layered_model(layer):
            return self.copy_model(layer)
        if type(layer) in _tf.batch_norm.BATCH_NORMS or isinstance(layer, AccumBatchNormalization):
            config = dict(layer.get_config(), accum_steps=self._accum_steps)
            return AccumBatchNormalization(**dict(config, synchronized=_tf.batch_norm.is_synchronized(layer)))
        if hasattr(layer, "moving_variance"):
            words = (
                "{} is a {}, which has its own moving statistics and code: it is not replaced. [accum: batch-norm-kept]"
            )
            _check.warn(words.format(layer.name, type(layer).__name__), _check.InexactWarning)
        norms = _tf.batch_norm.batch_norms_in(layer)
        inner = [norm.name for norm in norms if not isinstance(norm, AccumBatchNormalization)]
        if inner:
            _check.warn(
                f"{layer.name} is a {type(layer).__name__}, whose inner layers {_check.shown(inner)} are not replaced: "
                "use `accum.AccumBatchNormalization` in the layer's own code, or in the wrapper."
                " [accum: batch-norm-kept]",
                _check.InexactWarning,
            )
        return type(layer).from_config(layer.get_config())
