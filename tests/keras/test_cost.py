"""What accumulating may cost: one accumulator a variable, and no work of the inner optimizer between steps (L16)."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from optimizers import legacy_family, mainly
from replicas import RUN, CountingOps, R, mirrored
from versions import IS_KERAS_3

import accum
import accum.compat.v1

pytestmark = pytest.mark.law("L16")

tf1 = tf.compat.v1

SHAPES = [(5, 4), (4,), (7, 3)]


def made_by(function, *args):
    """How many variables `function` makes of each shape and dtype; under a strategy, on all replicas together."""
    made = Counter()

    def record(next_creator, **kwargs):
        variable = next_creator(**kwargs)
        made[tuple(variable.shape.as_list()), variable.dtype.base_dtype] += 1
        return variable

    with tf.variable_creator_scope(record):
        function(*args)
    return made


def micro_steps(optimizer, count=1):
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    for _ in range(count):
        optimizer.apply_gradients([(tf.ones(shape), var) for shape, var in zip(SHAPES, variables)])


def micro_step_on_replicas(make):
    strategy = mirrored()
    with strategy.scope():
        variables, optimizer = [tf.Variable(tf.ones(shape)) for shape in SHAPES], make()
    pairs = lambda: [(tf.ones(shape), var) for shape, var in zip(SHAPES, variables)]

    def micro_step():
        optimizer.apply_gradients(pairs())

    tf.function(lambda: getattr(strategy, RUN)(micro_step))()


def a_cycle_of_a_model(accum_steps=None):
    inputs = tf.keras.Input((5,))
    outputs = tf.keras.layers.Dense(3)(tf.keras.layers.Dense(4)(inputs))
    model = tf.keras.Model(inputs, outputs)
    if accum_steps is not None:
        model = accum.GradientAccumulateModel(accum_steps, inputs=inputs, outputs=outputs)
    model.compile("adam", "mse", run_eagerly=True)
    for _ in range(accum_steps or 1):
        model.train_on_batch(np.ones((2, 5)), np.ones((2, 3)))


def without_scalars(made):
    """The shapes in `made`, which have to be float32."""
    assert {dtype for shape, dtype in made if shape != ()} <= {tf.float32}
    return Counter({shape: count for (shape, _), count in made.items() if shape != ()})


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("accum_steps", mainly([2, 32], 32))
def test_keras_api_makes_one_accumulator_a_variable_whatever_k_is(accum_steps):
    plain = made_by(micro_steps, tf.keras.optimizers.Adam())
    ours = made_by(micro_steps, accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(), accum_steps), accum_steps)
    added = ours - plain
    # micro_step, length, weight_sum, the length asked for, and whether the last micro step made a step
    assert sum(count for (shape, _), count in added.items() if shape == ()) == 5
    assert without_scalars(added) == Counter(SHAPES)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("accum_steps", mainly([2, 8], 8))
def test_a_model_makes_one_accumulator_a_variable_whatever_k_is(accum_steps):
    plain, ours = made_by(a_cycle_of_a_model), made_by(a_cycle_of_a_model, accum_steps)
    assert without_scalars(ours - plain) == Counter([(5, 4), (4,), (4, 3), (3,)])


@pytest.mark.slow
@pytest.mark.law("L11")
@pytest.mark.tf("2.2")
def test_each_replica_has_one_accumulator_a_variable():
    plain = made_by(micro_step_on_replicas, tf.keras.optimizers.Adam)
    ours = made_by(micro_step_on_replicas, lambda: accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(), 32))
    assert without_scalars(ours - plain) == Counter(SHAPES * R)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("accum_steps", [2, 32])
def test_graph_api_makes_one_accumulator_a_variable_whatever_k_is(accum_steps, is_sparse):
    with tf.Graph().as_default():
        variable = tf1.get_variable("w", initializer=np.ones((7, 3), np.float32))
        grad = tf.ones([7, 3])
        if is_sparse:
            grad = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 2]), tf.constant([7, 3]))
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps)
        optimizer.apply_gradients([(grad, variable)])
        names = {v.op.name: v.shape.as_list() for v in tf1.global_variables()}
    expected = {
        "w": [7, 3],
        "w/AccumOptimizer/accum": [7, 3],
        "AccumOptimizer/micro_step": [],
        "AccumOptimizer/weight_sum": [],
    }
    if is_sparse:
        expected["w/AccumOptimizer/accum_rows"] = [7]
    assert names == expected


def all_ops(graph_def):
    """(function name or None, op type) of every node of a graph and of the functions in it."""
    nodes = [(None, node.op) for node in graph_def.node]
    for function in graph_def.library.function:
        nodes += [(function.signature.name, node.op) for node in function.node_def]
    return nodes


@pytest.mark.law("L2")
@pytest.mark.tf("2.2")
def test_inner_kernels_stand_in_one_branch_of_the_trace_only():
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    family = legacy_family() or tf.keras.optimizers
    optimizer = accum.GradientAccumulateOptimizer(family.Adam(), accum_steps=4)

    @tf.function
    def micro_step():
        optimizer.apply_gradients([(tf.ones(shape), var) for shape, var in zip(SHAPES, variables)])

    graph_def = micro_step.get_concrete_function().graph.as_graph_def()
    # In Keras 3 no one kernel makes a step, but nothing else here takes two roots a variable.
    kernel, count = ("Sqrt", 2) if IS_KERAS_3 else ("ResourceApplyAdam", 1)
    where = [name for name, op in all_ops(graph_def) if op == kernel]
    assert len(where) == count * len(SHAPES)
    assert None not in where
    assert len(set(where)) == 1


@pytest.mark.law("L5")
@pytest.mark.tf("2.2")
def test_a_weighed_micro_batch_is_added_in_one_pass():
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(), accum_steps=4)

    @tf.function
    def micro_step(weight):
        pairs = [(tf.ones(shape), var) for shape, var in zip(SHAPES, variables)]
        optimizer.apply_gradients(pairs, weight=weight)

    graph_def = micro_step.get_concrete_function(tf.TensorSpec([], tf.float32)).graph.as_graph_def()
    where = Counter(name for name, op in all_ops(graph_def) if op == "ResourceApplyGradientDescent")
    ((branch, count),) = where.items()
    assert count == len(SHAPES)
    # A product of its own would be written, and read again.
    assert not [op for name, op in all_ops(graph_def) if name == branch and op in ("Mul", "MulNoNan")]


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.tf("2.2")
def test_no_gradient_is_multiplied_in_the_loop_over_micro_batches():
    inputs = tf.keras.Input((5,))
    outputs = tf.keras.Sequential([tf.keras.layers.Dense(3) for _ in range(4)])(inputs)
    model = accum.GradientAccumulateModel(micro_batch_size=2, inputs=inputs, outputs=outputs)
    model.compile(tf.keras.optimizers.SGD(), "mse")
    train_step = tf.function(lambda x, y: model.train_step((x, y)))
    specs = [tf.TensorSpec([None, size], tf.float32) for size in (5, 3)]
    graph_def = train_step.get_concrete_function(*specs).graph.as_graph_def()
    where = Counter(name for name, op in all_ops(graph_def) if op == "MulNoNan")
    # The first micro-batch may be smaller, so its gradients are; elsewhere the number of the loss is.
    assert where.pop(None) >= len(model.trainable_variables)
    assert sum(where.values()) <= 2


@pytest.mark.law("L18")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("settings", [{"micro_batch_size": 2}, {"accum_steps": 2}], ids=str)
def test_few_operations_wait_for_all_gradients(settings):
    inputs = tf.keras.Input((5,))
    layers = [layer for _ in range(15) for layer in (tf.keras.layers.Dense(5), tf.keras.layers.BatchNormalization())]
    model = accum.GradientAccumulateModel(inputs=inputs, outputs=tf.keras.Sequential(layers)(inputs), **settings)
    model.compile(tf.keras.optimizers.SGD(), "mse")
    train_step = tf.function(lambda x, y: model.train_step((x, y)))
    graph_def = train_step.get_concrete_function(*[tf.TensorSpec([None, 5], tf.float32)] * 2).graph.as_graph_def()
    count = len(model.trainable_variables)
    assert waiting(graph_def, count // 2) < count // 5


@pytest.mark.law("L16")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_few_operations_of_a_train_op_wait_for_all_gradients(use_resource):
    with tf.Graph().as_default() as graph:
        batch, count = tf1.placeholder(tf.float32, [None, 5]), 40
        get = lambda number: tf1.get_variable(f"w{number}", [5], use_resource=use_resource)
        loss = tf.add_n([tf.reduce_mean((batch - get(number)) ** 2) for number in range(count)])
        accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), accum_steps=2).minimize(loss)
    assert waiting(graph.as_graph_def(), count // 2) < count // 5


def waiting(graph_def, limit):
    """How many operations wait for more than `limit` others, but those that only wait.

    If each operation of an update waited for each gradient, starting the graph would take longer by the square.
    """
    nodes = [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]
    waits = [sum(name.startswith("^") for name in node.input) for node in nodes if node.op != "NoOp"]
    return len([wait for wait in waits if wait > limit])


def kernels_run(session, op):
    """The stats of the kernels that running `op` runs."""
    options, metadata = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE), tf1.RunMetadata()
    session.run(op, options=options, run_metadata=metadata)
    return [node for device in metadata.step_stats.dev_stats for node in device.node_stats]


@pytest.mark.law("L6")
def test_an_apply_with_nothing_accumulated_touches_no_accumulator():
    with tf.Graph().as_default():
        variable = tf1.get_variable("w", initializer=np.ones((7, 3), np.float32), use_resource=True)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
        ops = optimizer.accumulation_ops(grads_and_vars=[(tf.ones([7, 3]), variable)])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            count = lambda op: len([node for node in kernels_run(session, op) if "/clear/" in node.node_name])
            assert count(ops.apply) == 0
            session.run(ops.accumulate)
            assert count(ops.apply) > 0
            assert session.run(variable).tolist() == [[0.0] * 3] * 7


@pytest.mark.law("L8")
def test_the_table_of_an_embedding_is_never_handled_whole():
    rows, made, checked = 999, [], 0
    with tf.Graph().as_default():
        table = tf1.get_variable("table", initializer=np.ones((rows, 3), np.float32), use_resource=True)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
        train_op = optimizer.minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, [3, 5, 3])))
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(4):
                nodes = kernels_run(session, train_op)
                checked += len(nodes)
                for node in nodes:
                    shapes = [[dim.size for dim in out.tensor_description.shape.dim] for out in node.output]
                    made += [node.timeline_label for shape in shapes if shape == [rows, 3]]
            assert session.run(table)[[3, 5, 6]].tolist() == [[-3.0] * 3, [-1.0] * 3, [1.0] * 3]
    assert checked > 40
    assert made == []


@pytest.mark.tf("2.2")
def test_no_accumulator_is_a_weight():
    inputs = tf.keras.Input((3,))
    outputs = tf.keras.layers.Dense(2)(inputs)
    model = accum.GradientAccumulateModel(2, inputs=inputs, outputs=outputs)
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(np.ones((4, 3)), np.ones((4, 2)), batch_size=2, verbose=0)
    assert len(model.weights) == 2
    assert model.count_params() == 8


def counted_sgd(executed):
    """An SGD that notes in `executed` whenever the kernel of a variable's update runs, which no trace can tell."""

    def note():
        tf.py_function(lambda: executed.append("kernel"), [], [])

    class CountedSGD(tf.keras.optimizers.SGD):
        def _resource_apply_dense(self, *args, **kwargs):  # up to TF 2.10
            note()
            return super()._resource_apply_dense(*args, **kwargs)

        def update_step(self, *args, **kwargs):
            note()
            return super().update_step(*args, **kwargs)

    return CountedSGD(0.1)


def in_a_loop(strategy, inner, after_micro_step):
    with strategy.scope():
        weights = tf.Variable(tf.ones((3, 2)))
        optimizer = accum.GradientAccumulateOptimizer(inner(), accum_steps=3)

    def micro_step():
        optimizer.apply_gradients([(tf.ones((3, 2)), weights)])

    run = tf.function(lambda: getattr(strategy, RUN)(micro_step))
    for _ in range(6):
        run()
        after_micro_step()


def in_fit(strategy, inner, after_micro_step):
    with strategy.scope():
        inputs = tf.keras.Input((3,))
        outputs = tf.keras.layers.Dense(2, use_bias=False)(inputs)
        model = accum.GradientAccumulateModel(3, inputs=inputs, outputs=outputs)
        model.compile(inner(), "mse")
    tell = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after_micro_step())
    data = tf.data.Dataset.from_tensor_slices((np.ones((24, 3)), np.ones((24, 2)))).batch(4)
    model.fit(data, callbacks=[tell], verbose=0)


@pytest.mark.law("L2")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("train", [in_a_loop, pytest.param(in_fit, marks=pytest.mark.slow)])
def test_a_micro_step_that_ends_no_cycle_runs_no_inner_kernel(train):
    executed, seen = [], []
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    train(strategy, lambda: counted_sgd(executed), lambda: seen.append(len(executed)))
    assert seen == [0, 0, 1, 1, 1, 2]


@pytest.mark.slow
@pytest.mark.law("L11")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("train", [in_a_loop, pytest.param(in_fit, marks=pytest.mark.slow)])
def test_replicas_rest_until_the_cycle_ends(train):
    """Neither a kernel of the inner optimizer nor a reduction of gradients runs before."""
    executed, seen, ops = [], [], CountingOps()
    strategy = mirrored(ops)
    after_micro_step = lambda: seen.append((len(executed), len(ops.of_gradients())))
    train(strategy, lambda: counted_sgd(executed), after_micro_step)
    assert seen == [(0, 0)] * 2 + [(R, 1)] * 3 + [(2 * R, 2)]


@pytest.mark.slow
@pytest.mark.law("L11")
def test_replicas_of_a_session_rest_until_the_cycle_ends():
    seen, ops = [], CountingOps()
    with tf.Graph().as_default():
        strategy = mirrored(ops)
        with strategy.scope():
            variable = tf1.get_variable("w", initializer=np.ones((3, 2), np.float32), use_resource=True)
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.AdamOptimizer(), accum_steps=3)
        done = getattr(strategy, RUN)(lambda: optimizer.apply_gradients([(tf.ones((3, 2)), variable)]))
        train_op = tf.group(*strategy.experimental_local_results(done))
        with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(6):
                nodes = kernels_run(session, train_op)
                kernels = [node for node in nodes if "= ResourceApplyAdam(" in node.timeline_label]
                seen.append((len(kernels), len(ops.of_gradients())))
    assert seen == [(0, 0), (0, 0), (R, 1), (0, 1), (0, 1), (R, 2)]
