"""Where do the examples of a traced function meet, other than at its barriers (law L19)?

Between two barriers, the results of an example must not depend on other examples. `accum._rows` proves that from the
operations of the graph. Whatever it has no rule for may mix examples, and is reported.
"""

from typing import List

from accum import _rows
from accum._engine._statistics import Moments
from accum._engine._trace import Key, LossMark, Trace
from accum._tf import tf

OF_EXAMPLES = _rows.Rows(0, 1)


def meetings(trace: Trace, are_means: bool = False) -> List[str]:
    """Return the names of the operations in which examples meet, or may meet; none if all results are proven apart.

    Args:
      trace: the function. All that it takes of an example must be dense.
      are_means: whether the outputs are a mean over the examples and its weight, spread over the examples.
    """
    graph = trace.graph
    unknown = [key for key in trace.inputs if graph.get_tensor_by_name(key).shape.rank is None]
    if unknown:
        return list(map(_name_of, unknown))
    given = trace.inputs + trace.drawn + [part for mark in trace.wholes for part in mark.parts]
    inputs = {key: OF_EXAMPLES for key in given if _has_examples(graph.get_tensor_by_name(key))}
    rows = trace.outputs + [key for mark in trace.wholes for key in mark.inputs]
    moments = [key for mark in trace.statistics for key in mark.moments]
    names = list(dict.fromkeys(map(_name_of, rows + moments + [loss.value for loss in trace.losses])))
    try:
        found = _rows.analyse(graph, names, inputs)
    except _rows.ConstantBatchSize as error:
        return [error.operation]
    except Exception:  # what can't be looked at isn't proven
        return names
    levels = dict.fromkeys(trace.outputs if are_means else [], 1)
    own = set(map(_name_of, moments))  # and what spreads a mean
    own |= {tensor.op.name for key in levels for tensor in graph.get_tensor_by_name(key).op.inputs}
    counting = [name for name in found.counting if name not in own]
    unlike = [_name_of(loss.value) for loss in trace.losses if not _adds_up(found, loss)]
    are_apart = all(_is_apart(found, key, levels.get(key, 0)) for key in rows)
    if are_apart and not counting and all(_pools(found, mark.moments) for mark in trace.statistics):
        return unlike
    met = [name for name in found.meets if graph.get_operation_by_name(name).outputs]
    return met or counting or [name for name in found.reduces if name not in own] or names


def _name_of(key: Key) -> str:
    return key.rpartition(":")[0]


def _has_examples(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape.as_list()[0] is None


def _is_apart(found: _rows.Analysis, key: Key, level: int) -> bool:
    """Whether a tensor has one entry for each example, or does not depend on them."""
    return not found.depends(key) or (found.rows(key) == OF_EXAMPLES and found.level(key) <= level)


def _pools(found: _rows.Analysis, moments: Moments) -> bool:
    """Whether moments are those of examples that have not met: a variance is the mean of what lies behind a mean."""
    is_first = max(found.level(moments.count), found.level(moments.mean), found.level(moments.variance) - 1) < 2
    return is_first and not any(map(found.has_met, moments))


def _adds_up(found: _rows.Analysis, loss: LossMark) -> bool:
    """Whether an added loss of the batch is the sum, or the mean weighted by examples, of those of its parts."""
    return found.combination(loss.value) in ("constant", "sum" if loss.is_sum else "mean")
