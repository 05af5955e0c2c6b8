"""Has Python code that was traced drawn or counted? Then another trace of it is not the same: `PythonState`."""

import pickle
import random
from typing import Any, List, Sequence, Set

import numpy as np

from accum._tf.version import tf


class PythonState:
    """What `random` and `numpy.random` draw next, and the plain attributes and generators of some objects.

    Args:
      parts: objects with attributes, such as layers.
    """

    def __init__(self, parts: Sequence[Any] = ()) -> None:
        self._parts = parts
        self._numpy = _numpy_state()
        self._others = self._states()

    def has_moved(self, graph: tf.Graph) -> bool:
        """Whether it is another now, but for seeds that Keras 2 draws for the operations of the graph traced since."""
        return self._others != self._states() or self._has_drawn(graph)

    def _has_drawn(self, graph: tf.Graph) -> bool:
        now = pickle.dumps(_numpy_state())
        if pickle.dumps(self._numpy) == now:
            return False
        seeds, as_keras = _seeds_in(graph), np.random.RandomState()
        try:
            as_keras.set_state(self._numpy)
        except (TypeError, ValueError):  # of another kind of generator
            return True
        while as_keras.randint(int(10e6)) in seeds:  # as `tf.keras.backend.random_normal` draws them
            if pickle.dumps(_numpy_state(as_keras)) == now:
                return False
        return True

    def _states(self) -> bytes:
        states: List[Any] = [random.getstate()]
        for part in self._parts:
            for name, value in vars(part).items():
                if isinstance(value, random.Random):
                    states.append(value.getstate())
                elif isinstance(value, np.random.RandomState):
                    states.append(_numpy_state(value))
                elif hasattr(value, "bit_generator"):  # a `numpy.random.Generator`
                    states.append(value.bit_generator.state)
                elif type(value) in (bool, int, float, str):
                    states.append((name, value))
        return pickle.dumps(states)


def _numpy_state(source: Any = np.random) -> Any:
    try:
        return source.get_state(legacy=False)
    except TypeError:  # NumPy before 1.17 knows one kind of generator
        return source.get_state()


def _seeds_in(graph: tf.Graph) -> Set[int]:
    """Return the seeds of the random operations of a graph and of its functions."""
    graph_def = graph.as_graph_def()
    bodies = [graph_def.node, *[function.node_def for function in graph_def.library.function]]
    return {node.attr["seed2"].i for nodes in bodies for node in nodes if "seed2" in node.attr}
