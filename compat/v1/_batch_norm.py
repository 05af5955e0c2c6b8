"""Take over UPDATE_OPS: update batch normalisation's averages once per cycle, as the full batch would (law L13)."""

from typing import Any, List, Optional, Sequence

from accum._engine._cycle import Cycle
from accum._tf import tf
from accum.compat.v1._engine_adapter import GraphAdapter
from accum.compat.v1._moving_statistics import MovingAverages
from accum.compat.v1._update_ops import (
    Average,
    averages_in_conditionals,
    averages_of_layers,
    read_averages,
    still,
)

OTHERS_STAY = (
    "Pass only the other ops as `update_ops`; these then stay in UPDATE_OPS, and take effect whenever they are run."
)


def take_over(update_ops: Optional[Sequence[Any]], cycle: Cycle, adapter: GraphAdapter) -> List[Any]:
    """Let `cycle` update the moving averages, and remove the ops that did so from the graph's UPDATE_OPS.

    The cycle accumulates the moments of the full batch. When it makes the step, it updates the averages by the formula
    of the ops. The ops themselves no longer change anything.

    Args:
      update_ops: list of update ops; None: all in the graph.
      cycle: the optimizer's `Cycle`.
      adapter: its `GraphAdapter`.

    Returns:
      List of the ops that were taken over.

    Raises:
      ValueError: an op can't be taken over, a train op exists already, there are several replicas, or `update_ops` is
        None and an average is not updated by UPDATE_OPS.
    """
    collection = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.UPDATE_OPS)
    taken = list(collection) if update_ops is None else list(update_ops)
    if cycle.is_built:
        raise ValueError(
            "`accumulate_update_ops` must be called before the first train op is created, which updates the averages."
        )
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            "`accumulate_update_ops` does not support several replicas: run the ops in UPDATE_OPS on each replica."
            " [accum: replicas]"
        )
    averages = read_averages(taken, OTHERS_STAY)
    if update_ops is None:
        _require_no_others(tf.compat.v1.get_default_graph(), collection)
    for mean, variance in averages:
        _statistics_of(mean, cycle, adapter).add(mean, variance)
    adapter.gathered, adapter.state = adapter.gathered + adapter.state, []
    collection[:] = [left for left in collection if not any(left is update_op for update_op in taken)]
    with tf.control_dependencies(None):
        still(averages)
    return taken


def _statistics_of(mean: Average, cycle: Cycle, adapter: GraphAdapter) -> MovingAverages:
    """Return the listener for the layer that updates the average `mean`, one for all calls of the layer."""
    for listener in cycle.listeners:
        if isinstance(listener, MovingAverages) and listener.is_of(mean):
            return listener
    made = MovingAverages(adapter)
    cycle.listeners.append(made)
    return made


def _require_no_others(graph: tf.Graph, update_ops: Sequence[Any]) -> None:
    """Raise if averages of batch normalisation are updated by other ops than those in UPDATE_OPS."""
    others = [average.var for average in averages_of_layers(graph, update_ops)]
    names = sorted({var.op.name for var in others + averages_in_conditionals(graph)})
    if names:
        raise ValueError(
            "Averages of batch normalisation must be updated by ops in UPDATE_OPS, to be moved once per cycle. If a "
            "layer updates them in place, pass `updates_collections=tf.compat.v1.GraphKeys.UPDATE_OPS` to it instead "
            "of None. If it keeps its update ops elsewhere, such as Keras in `layer.updates`, pass these and those in "
            f"UPDATE_OPS as `update_ops`; averages that are not passed move in every run. Received: {names}."
            " [accum: moving-averages]"
        )
