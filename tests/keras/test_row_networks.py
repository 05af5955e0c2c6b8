"""Of whole networks, every operation has a rule, and every batch normalisation is found (law L21)."""

import collections

import numpy as np
import pytest
import row_networks as networks
import tensorflow as tf

from accum import _tf
from accum._rows import Rows, analyse

tf1 = tf.compat.v1
pytestmark = pytest.mark.slow


def analysis_of(graph, batch, computed):
    names = [getattr(one, "op", one).name for one in computed]
    return analyse(graph, names, {tensor.name: Rows(0, 1) for tensor in batch})


def share_with_rules(graph, analysis):
    """Return the share of the operations on the batch that have a rule."""
    count = sum(analysis.verdict(op.name) is not None for op in graph.get_operations())
    return 1 - len(analysis.unruled) / count


def static(build):
    with tf.Graph().as_default() as graph:
        batch, computed = build()
    return graph, batch, computed


STATIC = networks.STATIC + (networks.WITH_CELLS if networks.HAS_CELLS else [])


@pytest.mark.law("L21")
@pytest.mark.parametrize("build", STATIC, ids=lambda build: build.__name__)
def test_nothing_meets_in_a_network_of_a_static_graph(build):
    graph, batch, computed = static(build)
    analysis = analysis_of(graph, batch, computed)
    met = {name: (graph.get_operation_by_name(name).type, analysis.verdict(name).how) for name in analysis.meets}
    effects = {name for name, (kind, how) in met.items() if how == "it has an effect"}
    assert {name: what for name, what in met.items() if name not in effects} == {}
    assert analysis.unruled == []


@pytest.mark.law("L21")
def test_batch_normalisation_of_a_static_graph_is_found():
    graph, batch, computed = static(networks.batch_normalised)
    analysis = analysis_of(graph, batch, computed)
    hows = collections.Counter(analysis.verdict(name).how for name in analysis.reduces)
    assert hows["moments"] == 2  # forward and backward
    assert analysis.level(computed[0].name) >= 3


@pytest.mark.law("L21")
@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("name", networks.APPLICATIONS.split())
def test_nothing_meets_in_a_network_of_keras(name):
    if not hasattr(tf.keras.applications, name):
        pytest.skip("this Keras does not have the network")
    graph, batch, computed = networks.application(name)
    analysis = analysis_of(graph, batch, computed)
    assert share_with_rules(graph, analysis) == 1.0
    assert [(met, analysis.verdict(met).how) for met in analysis.meets] == []
    norms = [op for op in graph.get_operations() if op.type.startswith("FusedBatchNormV")]
    trained = [op for op in norms if op.get_attr("is_training") and analysis.verdict(op.name).kind == "reduces"]
    assert len(trained) == sum("is_training" in op.node_def.attr and op.get_attr("is_training") for op in norms)


@pytest.mark.law("L21")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("name", networks.OF_KERAS)
def test_nothing_meets_in_layers_of_keras(name):
    if name == "attention" and not hasattr(tf.keras.layers, "MultiHeadAttention"):
        pytest.skip("this Keras does not have the layer")
    graph, batch, computed = networks.of_keras(name)
    analysis = analysis_of(graph, batch, computed)
    assert [(met, analysis.verdict(met).how) for met in analysis.meets] == []


@pytest.mark.law("L21")
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
            and op.type not in ("Switch", "Merge")
            and not is_drawn(op)
        ]
        before, after = session.run(fetched, one), session.run(fetched, other)
    assert len(fetched) > 3
    for tensor, first, second in zip(fetched, before, after):
        axis, per_example = analysis.rows(tensor.name)
        kept = np.delete(np.arange(first.shape[axis]), np.arange(2 * per_example, 3 * per_example))
        np.testing.assert_array_equal(first.take(kept, axis), second.take(kept, axis), err_msg=tensor.name)


def is_drawn(op):
    """Whether an operation depends on random numbers, which are others in another run."""
    waiting, seen = [op], set()
    while waiting:
        current = waiting.pop()
        if "Random" in current.type or current.type in ("TruncatedNormal", "Exit"):
            return True
        if current.name not in seen:
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
