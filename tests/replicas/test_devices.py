"""Nothing needs float64. On a GPU of Apple's, which has neither that nor much of int64, counters live on the host."""

import contextlib
import platform
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from optimizers import legacy_family
from versions import IS_KERAS_3

import accum.compat.v1

tf1 = tf.compat.v1
FAMILY = legacy_family() or tf.keras.optimizers
SHAPES = [(3, 2), (2,)]
CONTROL_FLOW = ("If", "StatelessIf")  # only hand on what their branches need


def nodes_of(graph):
    """Every node of a graph and of the functions in it."""
    graph_def = graph.as_graph_def()
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def uses(node, dtype):
    types = [value.type for value in node.attr.values()] + [t for value in node.attr.values() for t in value.list.type]
    return dtype.as_datatype_enum in types


def ops_with(graph, dtype, anywhere=True):
    """How often each kind of op has this dtype, in or out; with `anywhere` False, those not put on the host only."""
    nodes = [node for node in nodes_of(graph) if uses(node, dtype) and node.op not in CONTROL_FLOW]
    return Counter(node.op for node in nodes if anywhere or not node.device.endswith("/device:CPU:0"))


def traced(optimizer, is_sparse=False, **options):
    """The graph of one micro step of an optimizer."""
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]

    @tf.function
    def micro_step():
        grads = [tf.ones(shape) for shape in SHAPES]
        if is_sparse:
            grads[0] = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([0, 2]), tf.constant([3, 2]))
        optimizer.apply_gradients(zip(grads, variables), **options)

    return micro_step.get_concrete_function().graph


def inner():
    return FAMILY.SGD(0.1, momentum=0.9)


CASES = [
    ("weighed", {"accum_steps": 3}, {"weight": 8}),
    ("schedule", {"accum_steps": {0: 2, 10: 1}}, {}),
    ("running mean", {"accum_steps": 3, "reduction": "running_mean", "nonfinite": "skip_micro"}, {"weight": 8}),
    ("clipped", {"accum_steps": 3, "transform": accum.AdaptiveClipping(), "nonfinite": "skip_cycle"}, {}),
]
KERAS_CASES = pytest.mark.parametrize("what,options,call", CASES, ids=[what for what, _, _ in CASES])


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.law("L16")
@KERAS_CASES
def test_a_micro_step_needs_no_float64(what, options, call):
    optimizer = accum.GradientAccumulateOptimizer(inner(), **options)
    assert not ops_with(traced(optimizer, is_sparse=what == "weighed", **call), tf.float64)


@pytest.fixture
def metal(monkeypatch):
    """A Mac whose TensorFlow has a GPU, for all that the library asks."""
    real = tf.config.experimental.list_physical_devices
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(
        tf.config.experimental, "list_physical_devices", lambda kind=None: ["GPU"] if kind == "GPU" else real(kind)
    )


@pytest.mark.slow
@pytest.mark.tf("2.2")
@KERAS_CASES
def test_on_a_metal_gpu_counters_live_on_the_host(metal, what, options, call):
    optimizer = accum.GradientAccumulateOptimizer(inner(), **options)
    with tf.device("/device:CPU:1"):  # in the place of the GPU
        left = ops_with(traced(inner()), tf.int64, anywhere=False)
        graph = traced(optimizer, **call)
    # Keras' own count of steps, where it stands
    left["ReadVariableOp"] += isinstance(options["accum_steps"], dict) * (2 if IS_KERAS_3 else 1)
    assert ops_with(graph, tf.int64)["AssignVariableOp"] > 0
    assert not ops_with(graph, tf.int64, anywhere=False) - left


@pytest.mark.tf("2.2")
def test_on_a_metal_gpu_counters_are_made_on_the_host_and_accumulators_are_not(metal, monkeypatch):
    device, entered, made = tf.device, [], []

    @contextlib.contextmanager
    def recorded(name):
        entered.append(name)
        with device(name):
            yield
        entered.pop()

    def record(next_creator, **kwargs):
        variable = next_creator(**kwargs)
        made.append((variable.dtype, list(entered)))
        return variable

    monkeypatch.setattr(tf, "device", recorded)
    optimizer, weights = accum.GradientAccumulateOptimizer(FAMILY.SGD(0.1), accum_steps=2), tf.Variable([1.0])
    assert int(optimizer.iterations) == 0  # Keras makes its own now
    with tf.variable_creator_scope(record):
        for _ in range(3):
            optimizer.apply_gradients([(tf.constant([2.0]), weights)])
    assert [where for dtype, where in made if dtype == tf.int64] == [["/device:CPU:0"]] * 3
    assert not any(where for dtype, where in made if dtype not in (tf.int64, tf.bool))
    assert abs(float(weights[0]) - 0.8) < 2e-6


@pytest.mark.tf("2.2")
def test_elsewhere_counters_stand_where_tensorflow_puts_them():
    """XLA compiles no function for a GPU that uses a variable of the host."""
    graph = traced(accum.GradientAccumulateOptimizer(inner(), accum_steps=3))
    assert not [node.name for node in nodes_of(graph) if uses(node, tf.int64) and node.device]


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_a_train_step_needs_no_float64_and_counts_on_the_host(metal):
    def graph_of(accum_steps, norm):
        inputs = tf.keras.Input((4,))
        outputs = tf.keras.layers.Dense(1)(norm(tf.keras.layers.Dense(3)(inputs)))
        model = tf.keras.Model(inputs, outputs)
        if accum_steps:
            model = accum.GradientAccumulateModel(accum_steps, inputs=inputs, outputs=outputs, use_agc=True)
        model.compile(inner(), "mse")
        spec = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])
        return tf.function(lambda x, y: model.train_step((x, y))).get_concrete_function(*spec).graph

    plain = graph_of(None, tf.keras.layers.BatchNormalization())
    ours = graph_of(4, accum.AccumBatchNormalization())
    assert not ops_with(ours, tf.float64) - ops_with(plain, tf.float64)
    assert not ops_with(ours, tf.int64, anywhere=False) - ops_with(plain, tf.int64, anywhere=False)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_a_static_graph_needs_no_float64(is_sparse):
    with tf.Graph().as_default() as graph:
        weights = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32))
        grad = tf.ones([3, 2])
        if is_sparse:
            grad = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([0, 2]), tf.constant([3, 2]))
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), accum_steps=3)
        step = tf1.train.get_or_create_global_step()
        optimizer.apply_gradients([(grad, weights)], step, weight=tf.constant(8))
        optimizer.accumulation_ops(grads_and_vars=[(grad, weights)], global_step=step)
        assert not ops_with(graph, tf.float64)
        assert not [node.name for node in nodes_of(graph) if uses(node, tf.int64) and "GPU" in node.device]


def graph_of_split(make, *options):
    """The graph of a train step whose batch is split, or of the plain model's."""
    model = make()
    model = accum.GradientAccumulateModel.from_model(model, **options[0]) if options else model
    model.compile(inner(), "mse")
    spec = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])
    return tf.function(lambda x, y: model.train_step((x, y))).get_concrete_function(*spec).graph


def empty_constants(graph, dtype):
    constants = [node.attr["value"].tensor for node in nodes_of(graph) if node.op == "Const" and uses(node, dtype)]
    return [value for value in constants if any(dim.size == 0 for dim in value.tensor_shape.dim)]


def dense_with_norm():
    inputs = tf.keras.Input((4,))
    hidden = tf.keras.layers.BatchNormalization()(tf.keras.layers.Dense(3)(inputs))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("whole_batch", [(), "all"], ids=["micro-batches", "whole batch"])
def test_a_split_batch_puts_no_float64_and_no_int64_state_on_a_metal_gpu(metal, whole_batch):
    with tf.device("/device:CPU:1"):  # in the place of the GPU
        plain = graph_of_split(dense_with_norm)
        ours = graph_of_split(dense_with_norm, {"micro_batch_size": 2, "whole_batch": whole_batch})
    assert not ops_with(ours, tf.float64) - ops_with(plain, tf.float64)
    more = ops_with(ours, tf.int64, anywhere=False) - ops_with(plain, tf.int64, anywhere=False)
    # those of `TensorArray.concat`, which it takes on the host
    assert not more - Counter(Const=len(empty_constants(ours, tf.int64)))
