"""Replicas through `fit` and through loops: what is communicated, what counts, which strategies serve (law L11)."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_addresses
from equality import assert_near
from loss_scales import apply_scaled
from optimizers import families, legacy_family
from replicas import RUN, CountingOps, R, mirrored
from versions import IS_KERAS_3

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L11")]

RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(37, 5)).astype("float32")
Y = RANDOM.normal(size=(37, 1)).astype("float32")
FIRST = RANDOM.normal(size=(5, 1)).astype("float32")


def through_fit(scope, batch_size, accum_steps, api="model", rate=0.1, count=37, **compiling):
    """The weights and the optimizer after two epochs; in a plain model the cycle goes over their end."""
    with scope:
        inputs = tf.keras.Input((5,))
        outputs = tf.keras.layers.Dense(1, use_bias=False)(inputs)
        optimizer = tf.keras.optimizers.SGD(rate, momentum=0.9)
        if api == "model":
            model = accum.GradientAccumulateModel(accum_steps, inputs=inputs, outputs=outputs)
        else:
            model = tf.keras.Model(inputs, outputs)
            optimizer = accum.GradientAccumulateOptimizer(optimizer, accum_steps)
        model.compile(optimizer, "mse", **compiling)
    model.set_weights([FIRST])
    model.fit(tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(batch_size), epochs=2, verbose=0)
    return model.get_weights()[0], model.optimizer


def on_one_device(batch_size, count=37):
    """The weights that full batches end at; this need not be traced."""
    return through_fit(tf.name_scope("one"), batch_size, 1, count=count, run_eagerly=True)[0]


def assert_equal(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L5")
def test_fit_talks_once_a_step_and_weighs_unequal_replicas(steps_per_execution):
    # 37 examples in micro-batches of 9: replicas of 5 and 4, and at the end of 1 and 0. Keras 3 looks at the first
    # micro-batch beforehand, which has to be equal on both.
    ops, size = CountingOps(), 10 if IS_KERAS_3 else 9
    weights, optimizer = through_fit(mirrored(ops).scope(), size, 3, **steps_per_execution)
    assert_equal(weights, on_one_device(3 * size))
    assert int(optimizer.iterations.numpy()) == 4
    gradient_and_weight = (2, FIRST.nbytes + 4)
    assert ops.of_gradients() == [gradient_and_weight] * 4


SEVERAL = pytest.mark.tf("2.4", because="`steps_per_execution` came with TF 2.4")


@pytest.fixture(
    params=[
        pytest.param({}, id="one by one"),
        pytest.param({"steps_per_execution": 2}, id="several in one execution", marks=SEVERAL),
    ]
)
def steps_per_execution(request):
    return request.param


@pytest.mark.slow
def test_fit_of_the_optimizer_wrapper_on_two_replicas_equals_fit_on_one_device():
    ours = through_fit(mirrored().scope(), 6, 3, api="optimizer", count=36)[0]
    assert_equal(ours, on_one_device(18, count=36))


@pytest.mark.slow
def test_fit_under_a_strategy_of_one_device_equals_fit_without():
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    assert_equal(through_fit(strategy.scope(), 9, 3)[0], on_one_device(27))


def on_each_replica(strategy, function, micro_steps):
    """Run `function` in a `tf.function` for each of `micro_steps`, on replica r with `micro_steps[i][r]`."""
    values = np.asarray(micro_steps, "float32")
    data = tf.data.Dataset.from_tensor_slices(values.ravel()).batch(values.shape[1])
    run = tf.function(lambda now: getattr(strategy, RUN)(function, args=(now,)))
    for now in strategy.experimental_distribute_dataset(data):
        run(now)


def move_by(strategy, optimizer, micro_steps, **kwargs):
    """How far the weight of each replica moved under gradients given as `[[of replica 0, of replica 1], …]`."""
    with strategy.scope():
        weight = tf.Variable([0.0])

    def micro_step(grad):
        optimizer.apply_gradients([(tf.reshape(grad, [1]), weight)], **kwargs)

    on_each_replica(strategy, micro_step, micro_steps)
    return [float(part.numpy()[0]) for part in strategy.experimental_local_results(weight)]


REDUCED = {True: ("experimental_aggregate_gradients", False), False: ("skip_gradients_aggregation", True)}
FAMILIES = [
    pytest.param(*param.values, *REDUCED[param.values[0] is legacy_family()], id=param.id) for param in families()
]


@pytest.mark.slow
@pytest.mark.parametrize("family,argument,value", FAMILIES)
def test_gradients_that_the_user_has_reduced_are_not_reduced_again(family, argument, value):
    ops = CountingOps()
    strategy = mirrored(ops)
    with strategy.scope():
        optimizer = accum.GradientAccumulateOptimizer(family.SGD(1.0), accum_steps=2)
    assert move_by(strategy, optimizer, [[2.0, 2.0], [4.0, 4.0]], **{argument: value}) == [-3.0] * R
    assert ops.executed == []


@pytest.mark.law("L17")
@pytest.mark.parametrize("family,argument,value", FAMILIES)
def test_gradients_that_the_user_has_reduced_can_t_be_weighted(family, argument, value):
    strategy = mirrored()
    with strategy.scope():
        optimizer = accum.GradientAccumulateOptimizer(family.SGD(1.0), accum_steps=2)
    with pytest.raises(ValueError, match="already reduced over replicas can't be weighted: pass each replica's own"):
        move_by(strategy, optimizer, [[2.0, 2.0]], weight=2.0, **{argument: value})


@pytest.mark.slow
@pytest.mark.law("L6")
@pytest.mark.parametrize(
    "reduction,expected",
    [("mean", -4.0), ("sum", -8.0), pytest.param("running_mean", -4.0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("family,argument,value", FAMILIES)
def test_a_flush_of_reduced_gradients_takes_them_once(family, argument, value, reduction, expected):
    strategy = mirrored()
    with strategy.scope():
        optimizer = accum.GradientAccumulateOptimizer(family.SGD(1.0), accum_steps=3, reduction=reduction)
        variable = tf.Variable([0.0])

    def micro_step(grad):
        optimizer.apply_gradients([(tf.reshape(grad, [1]), variable)], **{argument: value})

    on_each_replica(strategy, micro_step, [[3.0, 3.0], [5.0, 5.0]])
    optimizer.flush()
    assert variable.numpy() == [expected]
    on_each_replica(strategy, micro_step, [[4.0, 4.0]] * 3)
    assert variable.numpy() == [expected - (12.0 if reduction == "sum" else 4.0)]


@pytest.mark.law("L17")
@pytest.mark.parametrize("weight", [None, 4.0])
def test_gradients_that_belong_to_no_replica_are_an_error(weight):
    strategy = mirrored()
    with strategy.scope():
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
        variable = tf.Variable([0.0])
        with pytest.raises(RuntimeError, match="must be called on each, in the function that `strategy.run` runs"):
            optimizer.apply_gradients([(tf.constant([1.0]), variable)], weight=weight)


@pytest.mark.law("L5")
@pytest.mark.parametrize("where", ["around", "inside"])
def test_weighing_holds_for_all_replicas(where):
    strategy = mirrored()
    with strategy.scope():
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
        variable = tf.Variable([0.0])

    def micro_step(grad):
        with optimizer.weighing(2.0) if where == "inside" else tf.name_scope("weighed"):
            optimizer.apply_gradients([(tf.reshape(grad, [1]), variable)])

    with optimizer.weighing(2.0) if where == "around" else tf.name_scope("weighed"):
        on_each_replica(strategy, micro_step, [[1.0, 3.0], [5.0, 7.0]])
    np.testing.assert_allclose(variable.numpy(), [-8.0], rtol=1e-6)  # as Keras scales: the sum over both, of their mean
    assert optimizer._internals.weight is None


@pytest.mark.law("L4", "L12")
@pytest.mark.parametrize("after", [1, R])
@pytest.mark.parametrize("reduction", ["mean", "running_mean"])
def test_a_cycle_of_unequal_replicas_goes_on(tmp_path, reduction, after):
    """Replicas have 3 and 2 of 5 examples; a running mean of each replica says nothing of its weight."""
    data = np.random.RandomState(1).rand(15, 3).astype("float32")

    def run(replicas, numbers, restore=None):
        strategy = mirrored() if replicas == R else tf.distribute.OneDeviceStrategy("CPU:0")
        with strategy.scope():
            variable = tf.Variable([1.0, 1.0, 1.0])
            optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), 3, reduction=reduction)
            checkpoint = tf.train.Checkpoint(variable=variable, optimizer=optimizer)
            if restore:
                checkpoint.restore(restore)

        def micro_step(number, parts):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            begin = 5 * number + tf.cast(replica, tf.int32) * 3
            x = tf.constant(data)[begin : tf.minimum(begin + 3, 5 * number + 5) if replicas > 1 else begin + 5]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tensordot(x, variable, 1) ** 2) / parts
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)], weight=tf.shape(x)[0])

        for number in numbers:
            getattr(strategy, RUN)(micro_step, args=(number, replicas))
        return variable.numpy(), checkpoint

    _, checkpoint = run(R, [0, 1])
    moved, _ = run(after, [2], checkpoint.save(str(tmp_path / "at")))
    np.testing.assert_allclose(moved, 1.0 - 2.0 * data.T.dot(data.sum(1)) / len(data), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L6")
def test_replicas_may_flush_in_their_own_step():
    strategy = mirrored()
    with strategy.scope():
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=3)
        variable = tf.Variable([0.0])

    def micro_step(grad):
        optimizer.apply_gradients([(tf.reshape(grad, [1]) / R, variable)])

    on_each_replica(strategy, micro_step, [[3.0, 5.0], [6.0, 10.0]])
    getattr(strategy, RUN)(lambda: optimizer.flush() and None)
    assert variable.numpy() == [-6.0]  # the mean over four parts


@pytest.mark.tf("2.4", because="TF 2.2 and 2.3 do not clip under a strategy")
@pytest.mark.slow
@pytest.mark.law("L7")
@pytest.mark.parametrize("family", families())
def test_the_inner_optimizer_clips_the_reduced_mean(family):
    strategy = mirrored()
    with strategy.scope():
        optimizer = accum.GradientAccumulateOptimizer(family.SGD(1.0, clipnorm=1.0), accum_steps=2)
    # Two cycles; clipped one by one, the second's would move by nothing.
    assert move_by(strategy, optimizer, [[10.0, 0.0], [0.0, 0.0], [10.0, -9.5], [0.0, 0.0]]) == [-1.25] * R


@pytest.mark.slow
@pytest.mark.law("L4", "L12")
@pytest.mark.parametrize(
    "before,after,reduction,weight",
    [
        (2, 1, "mean", 2.0),
        (1, 2, "mean", None),
        pytest.param(2, 1, "sum", None, marks=pytest.mark.slow),
        (1, 2, "sum", 2.0),
        (2, 1, "running_mean", None),
    ],
)
def test_a_cycle_goes_on_with_another_number_of_replicas(tmp_path, before, after, reduction, weight):
    """Micro-batches whose gradients are 1, 3, 5 and 7 on average, however they are spread."""

    def run(replicas, micro_steps, restore=None):
        strategy = mirrored() if replicas == 2 else tf.distribute.OneDeviceStrategy("CPU:0")
        with strategy.scope():
            variable = tf.Variable([0.0])
            inner = tf.keras.optimizers.SGD(1.0)
            optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps=4, reduction=reduction)
            checkpoint = tf.train.Checkpoint(variable=variable, optimizer=optimizer)
            if restore:
                checkpoint.restore(restore)

        def micro_step(grad):
            own = None if weight is None else weight / replicas
            optimizer.apply_gradients([(tf.reshape(grad, [1]), variable)], weight=own)

        # On two replicas as Keras scales them: each the gradient of half its loss.
        spread = [[mean] if replicas == 1 else [(mean - 0.5) / 2, (mean + 0.5) / 2] for mean in micro_steps]
        on_each_replica(strategy, micro_step, spread)
        return variable.numpy(), checkpoint

    _, checkpoint = run(before, [1.0, 3.0, 5.0, 7.0, 1.0])
    moved, _ = run(after, [3.0, 5.0, 7.0], checkpoint.save(str(tmp_path / "at")))
    step = 4.0 if reduction != "sum" else 16.0 * (weight or 1.0)
    np.testing.assert_allclose(moved, [-2.0 * step], rtol=1e-6)


TOUCHED = [[1, 12, 23, 34], [1, 12, 23, 34], [21, 10, 2, 40], [2, 1, 40, 1]]
"""Four examples of each micro-batch, as 10 * row + gradient. The second cycle touches row 1, by 0, and not row 3."""


def sparse_gradient(examples):
    rows = tf.cast(examples, tf.int64) // 10
    return tf.IndexedSlices(tf.cast(examples, tf.float32)[:, None] - 10.0 * tf.cast(rows[:, None], tf.float32), rows)


@pytest.mark.slow
@pytest.mark.law("L8", "L12")
@pytest.mark.parametrize("before,after", [(2, 2), (2, 1), (1, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", families())
def test_a_row_that_any_replica_has_touched_is_touched_after_a_restore(tmp_path, family, before, after):
    def run(replicas, micro_steps, restore=None):
        strategy = mirrored(replicas=replicas) if replicas > 1 else tf.distribute.OneDeviceStrategy("CPU:0")
        with strategy.scope():
            table = tf.Variable(tf.ones([5, 1]))
            optimizer = accum.GradientAccumulateOptimizer(family.SGD(0.1, momentum=0.9), accum_steps=2)
            checkpoint = tf.train.Checkpoint(table=table, optimizer=optimizer)
            if restore:
                checkpoint.restore(restore)

        def micro_step(examples):
            optimizer.apply_gradients([(sparse_gradient(examples), table)])

        on_each_replica(strategy, micro_step, micro_steps)
        return table.numpy()[:, 0], checkpoint

    plain, expected = family.SGD(0.1, momentum=0.9), tf.Variable(tf.ones([5, 1]))
    for cycle in (TOUCHED[:2], TOUCHED[2:]):
        grad = sparse_gradient(np.ravel(cycle))
        rows, segments = tf.unique(grad.indices)
        mean = tf.math.unsorted_segment_sum(grad.values, segments, tf.size(rows)) / 2.0
        plain.apply_gradients([(tf.IndexedSlices(mean, rows, tf.constant([5, 1], tf.int64)), expected)])
    _, checkpoint = run(before, TOUCHED[:3])
    resumed, _ = run(after, TOUCHED[3:], checkpoint.save(str(tmp_path / "at")))
    np.testing.assert_allclose(resumed, expected.numpy()[:, 0], rtol=0, atol=2e-6)


def clipped(grads_and_vars):
    return [(tf.clip_by_norm(grad, 1.0), var) for grad, var in grads_and_vars]


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.parametrize("transform", [None, clipped], ids=["alone", "clipped"])
@pytest.mark.parametrize("family", families())
def test_a_row_that_several_replicas_touch_reaches_the_optimizer_once(family, transform):
    """Adam squares a row's gradient, and a norm squares it too: the sum of squares is not the square of the sum."""
    cycle = [[0, 1], [1, 3], [3, 3]]  # the row of each replica, in each micro step
    strategy = mirrored()
    with strategy.scope():
        table = tf.Variable(tf.ones([5, 1]))
        inner = family.Adam(1.0, epsilon=1.0)
        optimizer = accum.GradientAccumulateOptimizer(inner, 3, transform=transform)

    def micro_step(row):
        optimizer.apply_gradients([(tf.IndexedSlices(tf.fill([1, 1], 3.0), tf.cast(row, tf.int64)), table)])

    on_each_replica(strategy, micro_step, cycle)
    mean = np.array([1.0, 2.0, 0.0, 3.0, 0.0])[:, None]
    mean *= 1.0 if transform is None else 1.0 / np.sqrt(14.0)
    moved = np.sqrt(0.001) * mean / (np.sqrt(0.001) * mean + 1.0)  # Adam's first step: rate sqrt(0.001) / 0.1
    np.testing.assert_allclose(table.numpy(), 1.0 - moved, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L1")
def test_a_model_split_over_two_devices_accumulates_where_its_weights_stand():
    layers = []

    def forward(inputs):
        for device, layer in zip(("CPU:0", "CPU:1"), layers):
            with tf.device(device):
                inputs = layer(inputs)
        return inputs

    for device, units in (("CPU:0", 3), ("CPU:1", 1)):
        with tf.device(device):
            layers.append(tf.keras.layers.Dense(units, kernel_initializer="ones"))
            layers[-1].build((None, 5 if units == 3 else 3))
    variables = [variable for layer in layers for variable in layer.trainable_variables]
    made = []

    def record(next_creator, **kwargs):
        made.append(next_creator(**kwargs))
        return made[-1]

    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)

    @tf.function
    def micro_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    with tf.variable_creator_scope(record):
        micro_step(X[:10], Y[:10])
    placed = {tuple(var.shape.as_list()): var.device[-5:] for var in made if var.shape.rank}
    assert placed[5, 3] == placed[3,] == "CPU:0"
    assert placed[3, 1] == placed[1,] == "CPU:1"
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((forward(X[:20]) - Y[:20]) ** 2)
    expected = [var - 0.1 * grad for var, grad in zip(variables, tape.gradient(loss, variables))]
    micro_step(X[10:20], Y[10:20])
    for ours, theirs in zip(variables, expected):
        assert_equal(ours.numpy(), theirs.numpy())


@pytest.mark.slow
@pytest.mark.law("L17")
def test_replicas_that_share_their_variables_are_refused():
    make = tf.distribute.experimental.CentralStorageStrategy
    strategy = make(compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0")
    with strategy.scope(), pytest.raises(ValueError, match="CentralStorageStrategy share every variable"):
        accum.GradientAccumulateOptimizer("sgd", accum_steps=2)
    optimizer = accum.GradientAccumulateOptimizer("sgd", accum_steps=2)
    with pytest.raises(ValueError, match="CentralStorageStrategy share every variable"):
        move_by(strategy, optimizer, [[1.0, 1.0]])


PARAMETER_SERVER = """
import sys
import tensorflow as tf
import accum

cluster = tf.train.ClusterSpec({"worker": [sys.argv[1]], "ps": [sys.argv[2]]})
servers = [tf.distribute.Server(cluster, job_name=job, protocol="grpc") for job in ("worker", "ps")]
is_of_tf2 = hasattr(tf.distribute.experimental, "coordinator")  # that of 2.2 and 2.3 is a worker itself
itself = {} if is_of_tf2 else {"task_type": "worker", "task_id": 0}
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc", **itself)
strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
with strategy.scope():
    accum.GradientAccumulateOptimizer("sgd", accum_steps=1)
    try:
        accum.GradientAccumulateOptimizer("sgd", accum_steps=2)
    except ValueError as error:
        print(error, flush=True)
"""


@pytest.mark.slow  # a process of its own: it connects to a cluster for good
@pytest.mark.law("L17")
def test_workers_that_run_by_themselves_are_refused():
    command = [sys.executable, "-c", PARAMETER_SERVER] + free_addresses(2)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    assert b"run independently and would mix their micro-batches" in done.stdout, done.stderr[-2000:]
    assert b"local_accumulators=True" in done.stdout


@pytest.mark.tf("2.4", because="TF 2.2 and 2.3 have an experimental `LossScaleOptimizer` with another interface")
@pytest.mark.slow
@pytest.mark.law("L10")
def test_a_loss_scale_shares_one_scalar_a_micro_step_and_gradients_once_a_step():
    ops = CountingOps()
    strategy = mirrored(ops)
    with strategy.scope():
        weights = tf.Variable(FIRST)
        inner = accum.GradientAccumulateOptimizer(families()[-1].values[0].SGD(1.0), accum_steps=3)
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=1.0)

    def micro_step(factor):
        apply_scaled(optimizer, [tf.fill([5, 1], tf.reshape(factor, []))], [weights])

    on_each_replica(strategy, micro_step, [[1.0, 1.0]] * 6)
    assert ops.of_gradients() == [(2, FIRST.nbytes + 4)] * 2
    assert len(ops.executed) <= 2 + 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 2, "whole_batch": "batch_norm"}, {"micro_batch_size": 2, "whole_batch": "all"}, {}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Batch normalization updates")
def test_several_strategies_in_one_process(options):
    """As in cross-validation. TensorFlow takes the collectives of two strategies for each other's."""
    for units, used in ((4, {"micro_batch_size": 2}), (7, options or {"accum_steps": 2}), (5, {"accum_steps": 2})):
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            between = [tf.keras.layers.Dense(units), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(1)]
            model = tf.keras.Sequential([tf.keras.Input((5,))] + between)
            model = accum.GradientAccumulateModel.from_model(model, **used)
            model.compile("sgd", "mse")
        history = model.fit(X[:16], Y[:16], batch_size=8, verbose=0).history
        assert np.isfinite(history["loss"]).all()


def split_over(scope, count, loss="mse", rate=0.1, **options):
    """The weights and logs after two epochs of batches of 8, and the number of steps."""
    with scope:
        inputs = tf.keras.Input((5,))
        hidden = tf.keras.layers.BatchNormalization()(inputs) if "whole_batch" in options else inputs
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False)(hidden))
        if options.pop("is_split", True):
            model = accum.GradientAccumulateModel.from_model(model, **options)
        model.compile(
            tf.keras.optimizers.SGD(rate, momentum=0.9), loss, **({"jit_compile": False} if IS_KERAS_3 else {})
        )
    model.layers[-1].set_weights([FIRST])
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(8), epochs=2, verbose=0
    ).history
    return model.get_weights(), history["loss"], int(model.optimizer.iterations.numpy())


UNEQUAL = [
    {"micro_batch_size": 3},
    {"micro_batch_size": "auto"},
    {"micro_batch_size": 3, "whole_batch": "batch_norm"},
    {"micro_batch_size": "auto", "whole_batch": "batch_norm"},
]


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("count", [21, 17], ids=["last batch of 3 and 2", "last batch of 1 and 0"])
@pytest.mark.parametrize("options", UNEQUAL, ids=str)
def test_a_split_batch_weighs_unequal_replicas(options, count):
    """Plain Keras averages the means of the replicas, so one example counts for more than another."""
    whole = {name: value for name, value in options.items() if name == "whole_batch"}
    ours = split_over(mirrored().scope(), count, **options)
    theirs = split_over(tf.name_scope("one"), count, is_split=False, **whole)
    assert_near(ours[0], theirs[0], atol=2e-6 if not whole else 2e-5)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=2e-5)
    assert ours[2] == theirs[2]
    if not whole:
        averaged = split_over(mirrored().scope(), count, is_split=False)
        assert np.abs(averaged[0][0] - theirs[0][0]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.tf(keras=2, because="Keras 3 divides a sum by the replicas, too")
def test_sums_of_unequal_replicas_are_added_up_as_they_are():
    loss = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.SUM)
    ours = split_over(mirrored().scope(), 21, loss, rate=0.005, micro_batch_size=3, whole_batch="batch_norm")
    theirs = split_over(tf.name_scope("one"), 21, loss, rate=0.005, is_split=False, whole_batch="batch_norm")
    for one, other in zip(ours[0], theirs[0]):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
