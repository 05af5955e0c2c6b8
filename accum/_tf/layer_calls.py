"""Read the `training` argument with which the layers of a functional model were called."""

import inspect
from typing import Any, Dict, List, Optional, Tuple

from accum._tf.batch_norm import BATCH_NORMS
from accum._tf.models import Functional, layers_of
from accum._tf.version import IS_KERAS_3, VERSION, tf


def batch_norms_always_in_training(model: tf.keras.Model) -> List[Any]:
    """Return the batch normalisation layers that a model was built to run in training even in prediction.

    Keras 3 lets the model decide.
    """
    graph = None if IS_KERAS_3 else _graph_of(model)
    nodes = [] if graph is None else [node for nodes in graph._nodes_by_depth.values() for node in nodes]
    layers: List[Any] = []
    for node in nodes:
        layer, args, kwargs = _arguments_of(node)
        training = _recorded_training(layer, args, kwargs)
        if training:
            layers += [one for one in [layer] + layers_of(layer) if isinstance(one, BATCH_NORMS)]
        elif training is None:
            layers += batch_norms_always_in_training(layer)
    return layers


def _graph_of(layer: Any) -> Any:
    """Return the functional model whose graph a layer runs when it is called, or None."""
    if isinstance(layer, tf.keras.Sequential) and type(layer).call is tf.keras.Sequential.call:
        return layer if getattr(layer, "_graph_initialized", layer._is_graph_network) else None
    if isinstance(layer, Functional) and type(layer).call is Functional.call:
        return layer if layer._is_graph_network else None  # on 2.2, other models are of the same class
    return None


def _recorded_training(layer: Any, args: Any, kwargs: Dict[str, Any]) -> Optional[bool]:
    """Return the `training` of a recorded call, or None if it is that of the model."""
    value = dict(zip(inspect.signature(layer.call).parameters, args), **kwargs).get("training")
    return None if value is None or tf.is_tensor(value) else bool(value)


def _arguments_of(node: Any) -> Tuple[Any, Any, Dict[str, Any]]:
    """Return (layer, positional arguments, keyword arguments) of a recorded call."""
    if VERSION >= (2, 3):
        return node.layer, node.call_args, node.call_kwargs
    kwargs = dict(node.arguments or {})  # dies with 2.2, which records a placeholder for the default
    if not isinstance(kwargs.get("training"), (bool, int)):
        kwargs.pop("training", None)
    return node.outbound_layer, (node.input_tensors,), kwargs
