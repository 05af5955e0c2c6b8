"""The calls of layers that make up a functional or Sequential model, so that they can be run in parts."""

import inspect
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from accum._tf._models import Functional
from accum._tf._steps import own_methods
from accum._tf._version import IS_KERAS_3, VERSION, tf

Key = str
"""Identifies a tensor of a model."""

Tensors = Dict[Key, Any]
"""The tensors of a model that are known so far."""


class LayerCall(NamedTuple):
    """One call of a layer.

    Attributes:
      layer: the layer, or in Keras 3 also another operation.
      inputs: keys of the tensors that it needs.
      outputs: keys of the tensors that it returns.
      training: the `training` with which the model was built for this call; None: that with which it is called.
      run: function of `Tensors`, which calls the layer and returns the list of its outputs.
    """

    layer: Any
    inputs: List[Key]
    outputs: List[Key]
    training: Optional[bool]
    run: Callable[[Tensors], List[Any]]


class LayerCalls(NamedTuple):
    """All calls of a model, in an order in which they can run; those within nested models too.

    Attributes:
      inputs: keys of the inputs.
      begin: function of the inputs, as the model runs its graph with them, which returns their `Tensors`.
      calls: list of `LayerCall`.
      outputs: nested structure of keys, as the model returns it.
    """

    inputs: List[Key]
    begin: Callable[[Any], Tensors]
    calls: List[LayerCall]
    outputs: Any


def layer_calls(model: tf.keras.Model) -> Optional[LayerCalls]:
    """Return the calls of a built model; None if it has no graph of layers, or a `call` of its own."""
    graph = graph_of(model)
    if graph is None:
        return None
    keys: List[Key] = [f"input {number}" for number, _ in enumerate(graph.inputs)]
    calls, found = _calls_within(graph, "", keys)
    outputs = tf.nest.map_structure(
        lambda tensor: found[id(tensor)], graph._outputs_struct if IS_KERAS_3 else graph._nested_outputs
    )
    if IS_KERAS_3 and isinstance(outputs, (list, tuple)) and len(outputs) == 1:  # Keras 3 unpacks it
        outputs = outputs[0]
    return LayerCalls(keys, lambda inputs: dict(zip(keys, _conformed(graph, inputs))), calls, outputs)


def graph_of(layer: Any) -> Any:
    """Return the functional model whose graph a layer runs when it is called, or None."""
    if isinstance(layer, tf.keras.Sequential) and type(layer).call is tf.keras.Sequential.call:
        if IS_KERAS_3:
            return layer._functional
        return layer if getattr(layer, "_graph_initialized", layer._is_graph_network) else None
    if isinstance(layer, Functional) and type(layer).call is Functional.call:
        return layer if IS_KERAS_3 or layer._is_graph_network else None  # on 2.2, other models are of the same class
    return None


def running_as_graph(model: tf.keras.Model, function: Callable[[Any], Any]) -> Any:
    """Return a context in which a call of a model runs `function(inputs)` instead of its graph of layers.

    So layers that `function` calls are in training if the model is.
    """

    def run(inputs: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
        for value, own in zip(tf.nest.flatten(inputs), tf.nest.flatten(mask) if mask is not None else ()):
            value._keras_mask = own
        return function(inputs)

    name = "_run_through_graph" if IS_KERAS_3 else "_run_internal_graph"
    return own_methods(graph_of(model), **{name: run})


def _conformed(graph: Any, inputs: Any) -> List[Any]:
    """Return the inputs in the order, rank and dtype in which the model has declared them."""
    if IS_KERAS_3:  # which has done that
        return tf.nest.flatten(inputs)
    flat = graph._flatten_to_reference_inputs(inputs)
    masks = [getattr(value, "_keras_mask", None) for value in flat]
    conformed = [graph._conform_to_reference_input(value, ref_input=own) for value, own in zip(flat, graph.inputs)]
    for value, mask in zip(conformed, masks):
        if mask is not None:
            value._keras_mask = mask
    return conformed


def _calls_within(
    graph: Any, place: str, keys: Sequence[Key], training: Optional[bool] = None
) -> Tuple[List[LayerCall], Dict[int, Key]]:
    """Return the calls, and {id of a symbolic tensor: key}.

    Args:
      graph: a functional model.
      place: what tells this run of the graph from others.
      keys: the keys of the inputs.
      training: the `training` with which a model was built around this one for its call, or None.
    """
    found: Dict[int, Key] = {id(tensor): key for tensor, key in zip(graph.inputs, keys)}
    calls: List[LayerCall] = []
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for number, node in enumerate(graph._nodes_by_depth[depth]):
            outputs = tf.nest.flatten(node.output_tensors)
            if not all(id(tensor) in found for tensor in outputs):  # not an input
                own, own_keys = _calls_of_node(node, f"{place}{depth}.{number}/", found, training)
                calls.extend(own)
                found.update({id(tensor): key for tensor, key in zip(outputs, own_keys)})
    return calls, found


def _calls_of_node(
    node: Any, place: str, found: Dict[int, Key], around: Optional[bool]
) -> Tuple[List[LayerCall], List[Key]]:
    """Return the calls that a node stands for, and the keys of its outputs."""
    layer, args, kwargs = _arguments_of(node)
    training = None if IS_KERAS_3 else _recorded_training(layer, args, kwargs)  # Keras 3 lets the model decide
    is_inherited = training is None and around is not None
    training = around if is_inherited else training
    leaves = tf.nest.flatten((args, kwargs))
    inputs = [found[id(leaf)] for leaf in leaves if id(leaf) in found]
    graph = None if training is False else graph_of(layer)
    given = {name for name, value in kwargs.items() if value is not None} - {"training"}
    own_inputs = [found.get(id(leaf), "") for leaf in tf.nest.flatten(args)]
    is_plain = given <= ({"mask"} if IS_KERAS_3 else set())  # Keras 3 records the mask that comes with the tensor
    is_plain = is_plain and not any(isinstance(arg, dict) for arg in args)  # which is matched by names
    if graph is not None and is_plain and "" not in own_inputs and len(own_inputs) == len(graph.inputs):
        calls, found_within = _calls_within(graph, place, own_inputs, training)
        return calls, [found_within[id(tensor)] for tensor in graph.outputs]
    keys = [f"{place}{number}" for number, _ in enumerate(tf.nest.flatten(node.output_tensors))]
    passed = {"training": training} if is_inherited and _takes_training(layer) else {}

    def run(tensors: Tensors) -> List[Any]:
        def value(leaf: Any) -> Any:
            return tensors[found[id(leaf)]] if id(leaf) in found else leaf

        own_args, own_kwargs = tf.nest.map_structure(value, (args, kwargs))
        own_kwargs.update(passed)
        return tf.nest.flatten(layer(*own_args, **own_kwargs))

    return [LayerCall(layer, inputs, keys, training, run)], keys


def _takes_training(layer: Any) -> bool:
    return "training" in inspect.signature(layer.call).parameters


def _recorded_training(layer: Any, args: Any, kwargs: Dict[str, Any]) -> Optional[bool]:
    """Return the `training` of a recorded call, or None if it is that of the model."""
    value = dict(zip(inspect.signature(layer.call).parameters, args), **kwargs).get("training")
    return None if value is None or tf.is_tensor(value) else bool(value)


def _arguments_of(node: Any) -> Tuple[Any, Any, Dict[str, Any]]:
    """Return (layer, positional arguments, keyword arguments) of a recorded call."""
    if IS_KERAS_3:
        kwargs = {name: value for name, value in node.arguments.kwargs.items() if name != "training"}
        return node.operation, node.arguments.args, kwargs
    if VERSION >= (2, 3):
        return node.layer, node.call_args, node.call_kwargs
    kwargs = dict(node.arguments or {})  # dies with 2.2, which records a placeholder for the default
    if not isinstance(kwargs.get("training"), (bool, int)):
        kwargs.pop("training", None)
    return node.outbound_layer, (node.input_tensors,), kwargs
