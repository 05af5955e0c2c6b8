"""The swap: a model's batch normalisation for one that moves its statistics once a cycle."""

import warnings

from accum import _check, _tf
from accum._batch_norm import AccumBatchNormalization
from accum._tf import tf

POSITIONS = ("replace",)


def replace_batchnorm_layers(model, accum_steps, position="replace"):
    """Make a copy of `model` with `AccumBatchNormalization` in the place of every `tf.keras.layers.BatchNormalization`.

    Weights, moving statistics, momentum, epsilon, axis, dtype and names stay, so `predict` gives the same bits. Models
    within the model are copied too; a layer or model that is used several times stays one. The model itself is left as
    it is, and shares no variable with the copy, which has to be compiled.

    Args:
      model: a functional or Sequential model.
      accum_steps: int >= 1, the calls a cycle where no `GradientAccumulateModel`'s clock is followed.
      position: "replace".

    Returns:
      A `tf.keras.Model`, or a `tf.keras.Sequential` for one.

    Raises:
      TypeError: `model` is no functional or Sequential model: Keras knows how to copy no other.
      ValueError: another `position`; `accum_steps` is no int >= 1; a layer has `renorm` or `virtual_batch_size`.

    Example:
      >>> model = accum.replace_batchnorm_layers(tf.keras.applications.MobileNetV2(weights=None), accum_steps=8)
      >>> model = accum.GradientAccumulateModel(accum_steps=8, inputs=model.inputs, outputs=model.outputs)
    """
    accum_steps = _check.accum_steps(accum_steps)
    _check.one_of("position", position, POSITIONS)
    if not _tf.is_layered_model(model):
        raise TypeError("`model` must be a functional or Sequential model. Received: model={!r}.".format(model))
    return _Swap(accum_steps).whole(model)


class _Swap:
    """One call: a layer that is met in several places gets one copy."""

    def __init__(self, accum_steps):
        self._accum_steps = accum_steps
        self._copies = {}  # id of a layer -> (the layer, its copy)

    def whole(self, model):
        copy = self.copy_model(model)
        self._match_trainable(model, copy)  # which settles the order of weights
        copy.set_weights(model.get_weights())
        return copy

    def copy_model(self, model):
        copy = tf.keras.models.clone_model(model, clone_function=self.copy)
        if model.built and not copy.built:
            copy.build(_tf.shape_built_for(model))
        return copy

    def _match_trainable(self, model, copy):
        copy.trainable = model.trainable  # and so that of all layers in it, each of which may differ
        for layer in model.layers:
            _, its_copy = self._copies.get(id(layer), (None, None))
            if _tf.is_layered_model(layer):
                self._match_trainable(layer, its_copy)
            elif its_copy is not None:
                its_copy.trainable = layer.trainable

    def copy(self, layer):
        if id(layer) not in self._copies:
            self._copies[id(layer)] = layer, self._copied(layer)
        return self._copies[id(layer)][1]

    def _copied(self, layer):
        if _tf.is_layered_model(layer):
            return self.copy_model(layer)
        if type(layer) in _tf.BATCH_NORMS or isinstance(layer, AccumBatchNormalization):
            config = dict(layer.get_config(), accum_steps=self._accum_steps)
            return AccumBatchNormalization(**dict(config, synchronized=_tf.is_synchronized(layer)))
        if hasattr(layer, "moving_variance"):
            words = "{} is a {}, which has moving statistics and code of its own: it stays as it is."
            warnings.warn(words.format(layer.name, type(layer).__name__), stacklevel=2)
        return type(layer).from_config(layer.get_config())
