"""Find the layers that this version of Keras has, and recognise calls of a layer that do not compute anything."""

import functools
import importlib
import inspect
import os
import sys
from typing import Any, Sequence, Tuple

from accum._tf.version import IS_KERAS_3, tf


def keras_layers(*names: str) -> Tuple[Any, ...]:
    """Return the Keras layers with these names that this version has, including experimental ones."""
    homes = tf.keras.layers, getattr(tf.keras.layers, "experimental", None)
    layers = [getattr(home, name, None) for home in homes for name in names]
    return tuple(layer for layer in layers if layer is not None)


DEPTHWISE_CONVOLUTIONS = keras_layers("DepthwiseConv1D", "DepthwiseConv2D")
"""Layers whose kernels are [..., in, multiplier]. Up to Keras 2 they are called `depthwise_kernel`."""

TRANSPOSED_CONVOLUTIONS = keras_layers("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
"""Layers whose kernels are [..., out, in]. The first exists from 2.3 on."""

EINSUM_LAYERS = keras_layers("EinsumDense")
"""Layers whose `equation` names the axes of the kernel; experimental in 2.3, public from 2.4 on."""


def is_no_real_call() -> bool:
    """Whether Keras calls its layers to lay out a functional model or to export one, rather than to compute.

    There is no public API for this. The module that defines `Layer` knows, except for exports in some versions (2.9,
    2.10), which are recognised by the names of their traces.
    """
    if IS_KERAS_3:
        return importlib.import_module(tf.keras.Model.__module__.split(".models")[0] + ".backend").in_stateless_scope()
    context = sys.modules[tf.keras.layers.Layer.__module__].base_layer_utils.call_context()
    if getattr(context, "saving", False) or getattr(context, "in_keras_graph", False):
        return True
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if "_layer_call_" in getattr(graph, "name", ""):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _folder_of(name: str) -> str:
    """Return the folder of the package of a module."""
    folder = str(sys.modules[name].__file__)
    for _ in range(name.count(".")):
        folder = os.path.dirname(folder)
    return os.path.join(folder, "")


_FOLDERS = tuple(_folder_of(part.__module__) for part in (tf.keras.layers.Layer, tf.Variable))
"""Those of Keras, and of TensorFlow, by whose decorators some functions of Keras are wrapped."""


def comes_with_keras(part: Any) -> bool:
    """Whether a function or class is defined in Keras, and not only named like one, as by `functools.wraps`."""
    path = str(getattr(part, "__module__", "")).split(".")
    if not (path[0] in ("keras", "tf_keras") or path[1:3] == ["python", "keras"]):  # the second dies with 2.5
        return False
    if isinstance(part, functools.partial):
        return False
    return not inspect.isfunction(part) or part.__code__.co_filename.startswith(_FOLDERS)


def is_stateful_rnn(layer: Any) -> bool:
    """Whether a recurrent layer begins each batch with the states in which it has left the one before it.

    Other layers are `stateful` in Keras 2 for other reasons.
    """
    return isinstance(layer, tf.keras.layers.RNN) and bool(layer.stateful)


def replace_added_losses(layer: Any, added: Sequence[Tuple[Any, tf.Tensor]]) -> None:
    """Let what a layer and the layers in it have added as losses in its latest call be pairs of (layer, loss)."""
    layer._clear_losses()
    for one, loss in added:
        (one._losses if IS_KERAS_3 else one._eager_losses).append(loss)
