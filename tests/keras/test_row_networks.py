"""Of whole networks, every operation has a rule, and every batch normalisation is found (law L21)."""

import collections

import numpy as np
import pytest
import row_networks as networks
import tensorflow as tf
from versions import HAS_KERAS_API

from accum import _tf
from accum._rows import Rows, analyse

tf1 = tf.compat.v1
pytestmark = [pytest.mark.slow, pytest.mark.law("L21")]

GAPS = {
    "in_a_conditional": "OptionalFromValue, of the gradient of a conditional of TensorFlow 2, has no rule",
    "of_layers": "OptionalFromValue, of the gradient of a conditional of TensorFlow 2, has no rule",
    "recurrent": "lengths of time look like others in a gather from a captured table, or in the gradient of dropout",
    "masked": "lengths of time look like others in a gather from a captured table",
}
"""Networks in which the analysis takes some operations for meetings: never wrong, but it splits less than it could."""


def but_for_gaps(networks_or_names):
    """Parameters; those in `GAPS` have yet to pass on TensorFlow 2, and the gradient of dropout in a loop anywhere."""
    names = [getattr(one, "__name__", one) for one in networks_or_names]
    fails = {
        name: pytest.mark.xfail(HAS_KERAS_API or name == "recurrent", reason=GAPS[name], strict=True) for name in GAPS
    }
    marks = [[fails[name]] if name in fails else [] for name in names]
    return [pytest.param(one, id=name, marks=mark) for one, name, mark in zip(networks_or_names, names, marks)]


def analysis_of(graph, batch, computed):
    names = [getattr(one, "op", one).name for one in computed]
    return analyse(graph, names, {tensor.name: Rows(0, 1) for tensor in batch})


def share_with_rules(graph, analysis):
    """Return the share of the operations on the batch that have a rule."""
    count = sum(analysis.verdict(op.name) is not None for op in graph.get_operations())
    return 1 - len(analysis.unruled) / count


def met_in(graph, analysis):
    """(name, type, why) of operations in which examples meet; one with an effect runs once for the whole batch."""
    whys = [(name, graph.get_operation_by_name(name).type, analysis.verdict(name).how) for name in analysis.meets]
    return [why for why in whys if why[2] != "it has an effect"]


def static(build):
    with tf.Graph().as_default() as graph:
        batch, computed = build()
    return graph, batch, computed


STATIC = networks.STATIC + (networks.WITH_CELLS if networks.HAS_CELLS else [])


@pytest.mark.parametrize("build", but_for_gaps(STATIC))
def test_nothing_meets_in_a_network_of_a_static_graph(build):
    graph, batch, computed = static(build)
    analysis = analysis_of(graph, batch, computed)
    assert met_in(graph, analysis) == []
    assert analysis.unruled == []


def test_batch_normalisation_of_a_static_graph_is_found():
    graph, batch, computed = static(networks.batch_normalised)
    analysis = analysis_of(graph, batch, computed)
    hows = collections.Counter(analysis.verdict(name).how for name in analysis.reduces)
    assert hows["moments"] == 2  # forward and backward
    assert analysis.level(computed[0].name) >= 3


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("name", networks.APPLICATIONS.split())
def test_nothing_meets_in_a_network_of_keras(name):
    if not hasattr(tf.keras.applications, name):
        pytest.skip("this Keras does not have the network")
    graph, batch, computed = networks.application(name)
    analysis = analysis_of(graph, batch, computed)
    assert share_with_rules(graph, analysis) == 1.0
    assert met_in(graph, analysis) == []
    assert [name for name in analysis.counting if not name.startswith("gradients/")] == []
    norms = [op for op in graph.get_operations() if op.type.startswith("FusedBatchNormV")]
    trained = [op for op in norms if op.get_attr("is_training") and analysis.verdict(op.name).kind == "reduces"]
    assert len(trained) == sum("is_training" in op.node_def.attr and op.get_attr("is_training") for op in norms)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("name", but_for_gaps(networks.OF_KERAS))
def test_nothing_meets_in_layers_of_keras(name):
    if name == "attention" and not hasattr(tf.keras.layers, "MultiHeadAttention"):
        pytest.skip("this Keras does not have the layer")
    graph, batch, computed = networks.of_keras(name)
    analysis = analysis_of(graph, batch, computed)
    assert met_in(graph, analysis) == []
    assert [name for name in analysis.counting if not name.startswith("gradients/")] == []


@pytest.mark.parametrize("build", STATIC, ids=lambda build: build.__name__)
def test_rows_of_a_network_do_not_change_with_another_example(build):
    """Every tensor of rows before a reduction that can be fetched, of two batches that differ in one example."""
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        tf1.set_random_seed(3)
        batch, computed = build()
        analysis = analysis_of(graph, batch, computed)
        session.run(tf1.global_variables_initializer())
        others = [op.outputs[0] for op in graph.get_operations() if op.type == "Placeholder"]
        feeds = {tensor: np.array(1, tensor.dtype.as_numpy_dtype) for tensor in others}
        one, other = ({**feeds, **values_of(batch, changed)} for changed in (False, True))
        fetched = [
            tensor
            for op in graph.get_operations()
            for tensor in op.outputs
            if analysis.rows(tensor.name) is not None
            and analysis.level(tensor.name) == 0
            and graph.is_fetchable(tensor)
            and not _tf.graphs.is_in_control_flow(op)
            and op.type != "Merge"
            and not is_drawn(op)
            and not is_of_a_branch(op)
        ]
        before, after = session.run(fetched, one), session.run(fetched, other)
    assert len(fetched) >= 3
    for tensor, first, second in zip(fetched, before, after):
        axis, per_example = analysis.rows(tensor.name)
        kept = np.delete(np.arange(first.shape[axis]), np.arange(2 * per_example, 3 * per_example))
        np.testing.assert_array_equal(first.take(kept, axis), second.take(kept, axis), err_msg=tensor.name)


def is_drawn(op):
    """Whether an operation depends on random numbers, which are others in another run."""
    return depends_on(op, lambda kind: "Random" in kind or kind in ("TruncatedNormal", "Exit"))


def is_of_a_branch(op):
    """Whether an operation has no result if a conditional of TensorFlow 1 chooses the other branch."""
    return depends_on(op, lambda kind: kind == "Switch", but=("Merge",))


def depends_on(op, is_cause, but=()):
    waiting, seen = [op], set()
    while waiting:
        current = waiting.pop()
        if is_cause(current.type):
            return True
        if current.name not in seen and current.type not in but:
            seen.add(current.name)
            waiting.extend(tensor.op for tensor in current.inputs)
    return False


def values_of(batch, changed):
    random = np.random.RandomState(1)
    values = {}
    for tensor in batch:
        shape = [5, *(6 if length is None else length for length in tensor.shape.as_list()[1:])]
        drawn = random.randint(1, 4, shape) if tensor.dtype.is_integer else random.randn(*shape)
        if changed:
            drawn[2] = random.randint(1, 4, shape[1:]) if tensor.dtype.is_integer else random.randn(*shape[1:])
        else:
            random.randint(1, 4, shape[1:]) if tensor.dtype.is_integer else random.randn(*shape[1:])
        values[tensor] = drawn.astype(tensor.dtype.as_numpy_dtype)
    return values
