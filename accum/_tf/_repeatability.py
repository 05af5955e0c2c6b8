"""Find what would not compute the same if it were run again, in the graph of a function that is being traced."""

import re
from typing import Any, Dict, Iterator, List, Sequence, Set

from accum._tf._models import layers_of
from accum._tf._steps import captures_of
from accum._tf._version import tf

_DRAW = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}
"""Operations that draw random numbers from a state that nobody can read or set."""


class RepeatabilityWatch:
    """Remembers where a graph ends, to look later at what was added to it. Finds nothing in eager execution."""

    def __init__(self) -> None:
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._count = 0 if self._graph is None else len(self._graph.get_operations())

    def found(self, model: tf.keras.Model, known: Sequence[tf.Variable]) -> List[str]:
        """Return the names of layers, or else of operations, that can't repeat what they do.

        Args:
          model: a Keras model.
          known: variables that are set back before something is run again. Any other must not be changed.
        """
        if self._graph is None:
            return []
        inside = {id(outer): id(inner) for outer, inner in captures_of(self._graph)}
        handles = {inside.get(id(var.handle), id(var.handle)) for var in known}
        names = []
        for operation in self._graph.get_operations()[self._count :]:
            changes = operation.type.startswith(("Assign", "Rng", "Stateful")) and bool(operation.inputs)
            is_change = changes and operation.inputs[0].dtype == tf.resource and id(operation.inputs[0]) not in handles
            if operation.type in _DRAW or (is_change and not operation.type.startswith("StatefulPartitioned")):
                names.append(operation.name)
        names += [name for name, kind in self._within_functions() if kind in _DRAW]
        return sorted({_layer_in(name, {layer.name for layer in layers_of(model)}) for name in names})

    def _within_functions(self) -> Iterator[Any]:
        """Return (name, type) of the operations in functions that the new operations call."""
        assert self._graph is not None
        called = [
            (operation.name, function)
            for operation in self._graph.get_operations()[self._count :]
            for function in _functions_of(operation.node_def)
        ]
        if not called:
            return
        library: Dict[str, Any] = {each.signature.name: each for each in self._graph.as_graph_def().library.function}
        seen = set()
        while called:
            name, function = called.pop()
            if function in library and function not in seen:
                seen.add(function)
                for node in library[function].node_def:
                    yield f"{name}/{node.name}", node.op
                    called += [(f"{name}/{node.name}", inner) for inner in _functions_of(node)]


def _functions_of(node_def: Any) -> List[str]:
    values = node_def.attr.values()
    return [value.func.name for value in values if value.func.name] + [
        function.name for value in values for function in value.list.func
    ]


def _layer_in(name: str, layers: Set[str]) -> str:
    """Return the layer whose scope is in the name of an operation, or else that name."""
    scopes = [re.sub(r"_\d+$", "", part) for part in name.split("/")]
    return next((scope for pair in zip(name.split("/"), scopes) for scope in pair if scope in layers), name)
