"""The additions of a function call to the collections of a graph, and a choice of those that stay."""

from typing import Any, Callable, Dict, Iterable, List

from accum import _tf
from accum._tf import tf

CONTROL_FLOW = (tf.compat.v1.GraphKeys.COND_CONTEXT, tf.compat.v1.GraphKeys.WHILE_CONTEXT)


class Additions:
    """What has been added to the collections of a graph since this was created."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._before: Dict[Any, int] = {key: len(graph.get_collection_ref(key)) for key in self._keys()}

    def _keys(self) -> List[Any]:
        return [key for key in self._graph.get_all_collection_keys() if key not in CONTROL_FLOW]

    def of(self, key: Any) -> List[Any]:
        """Return what has been added to the collection `key`."""
        return self._graph.get_collection_ref(key)[self._before.get(key, 0) :]

    def is_new(self, key: Any, added: Any) -> bool:
        """Whether an addition to the collection `key` was not in it before."""
        return not any(added is earlier for earlier in self._graph.get_collection_ref(key)[: self._before.get(key, 0)])

    def keep(self, is_kept: Callable[[Any, Any], bool]) -> None:
        """Take out of each collection the additions for which `is_kept(key, addition)` is false."""
        for key in self._keys():
            kept = [added for added in self.of(key) if is_kept(key, added)]
            self._graph.get_collection_ref(key)[self._before.get(key, 0) :] = kept


def depends_on(value: Any, sources: Iterable[Any]) -> bool:
    """Whether a tensor or op is computed from one of `sources`, which are ops. False for anything else."""
    if not isinstance(value, (tf.Tensor, tf.Operation)):
        return False
    source_ids = {id(source) for source in sources}
    return any(id(op) in source_ids for op in _tf.op_walks.ancestors([op_of(value)]))


def is_in_loop(value: Any) -> bool:
    """Whether this is a tensor or op in a loop or a conditional, which nothing outside of it can use."""
    return isinstance(value, (tf.Tensor, tf.Operation)) and not value.graph.is_fetchable(value)


def ops_of(structure: Any) -> List[tf.Operation]:
    """Return the ops that compute the tensors in a nested structure."""
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [op_of(value) for value in flat if isinstance(value, (tf.Tensor, tf.Operation))]


def op_of(value: Any) -> tf.Operation:
    """Return the op that computes a tensor, or an op itself."""
    return value if isinstance(value, tf.Operation) else value.op
