"""Missing gradients and sparse ones (law L8)."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from models import from_model
from optimizers import families, keras_weights, new_family
from replicas import mirrored
from versions import HAS_KERAS_API, IS_WINE, XLA_ENDS
from warned import silent, warned

import accum
import accum.compat.v1

tf1 = tf.compat.v1

ROWS, WIDTH, K = 6, 2, 2
INDICES = {
    "disjoint": [[0, 2], [3, 5], [1, 2], [4, 0]],
    "overlapping": [[0, 2], [2, 3], [5, 4], [4, 5]],
    "duplicate": [[1, 1], [1, 3], [0, 0], [2, 2]],
}


def slices(indices, seed):
    values = np.random.RandomState(seed).normal(size=(len(indices), WIDTH)).astype("float32")
    return values, np.array(indices)


def union(cycle):
    """The mean of a cycle's slices as the union of their rows, ascending, each once."""
    total, touched = np.zeros((ROWS, WIDTH), "float32"), set()
    for values, indices in cycle:
        for value, row in zip(values, indices):
            total[row] += value
            touched.add(int(row))
    rows = sorted(touched)
    return total[rows] / np.float32(len(cycle)), np.array(rows)


def run(optimizer, slices_of_steps, is_traced):
    table = tf.Variable(np.ones((ROWS, WIDTH), "float32"))

    def step(values, indices):
        shape = tf.constant([ROWS, WIDTH], tf.int64)
        optimizer.apply_gradients([(tf.IndexedSlices(values, indices, shape), table)])

    if is_traced:
        step = tf.function(step, input_signature=[tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64)])
    for values, indices in slices_of_steps:
        step(tf.constant(values), tf.constant(indices, tf.int64))
    return table.numpy()


OPTIMIZERS = [
    pytest.param(functools.partial(getattr(family.values[0], name), 0.1, **options), id=family.id + "-" + name)
    for family in (families() if HAS_KERAS_API else [])
    for name, options in (("SGD", {"momentum": 0.9}), ("Adam", {}), ("Ftrl", {}))
]
EAGER_AND_MOMENTUM_TRACED = [
    pytest.param(
        *one.values, is_traced, id=f"{one.id}-{how}", marks=[pytest.mark.slow] * (is_traced and "SGD" not in one.id)
    )
    for one in OPTIMIZERS
    for is_traced, how in ((False, "eager"), (True, "function"))
]


@pytest.mark.law("L5", "L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_dense", [False, True], ids=["rows", "dense"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("make", [param for param in OPTIMIZERS if param.id.endswith("SGD")])
def test_of_a_micro_batch_of_weight_zero_rows_are_touched_and_no_number_is_taken_in(make, index, is_dense):
    """Its rows are in the full batch's slices, with the value 0: momentum goes on moving them."""
    as_slices = lambda values, rows: tf.IndexedSlices(
        values, tf.constant(rows, tf.int64), tf.constant([ROWS, WIDTH], tf.int64)
    )
    empty = tf.fill([ROWS, WIDTH], np.nan) if is_dense else as_slices(tf.fill([1, WIDTH], np.nan), [5])
    others = [slices([0, 1], seed=3), slices([1, 2], seed=4)]
    weights, grads = [1.0, 2.0], [as_slices(*other) for other in others]
    weights.insert(index, 0.0)
    grads.insert(index, empty)
    mean = np.zeros((ROWS, WIDTH), "float32")
    for weight, (values, rows) in zip([1.0, 2.0], others):
        mean[rows] += np.float32(weight / 3) * values
    touched = list(range(ROWS)) if is_dense else [0, 1, 2, 5]

    table, twin = (tf.Variable(np.ones((ROWS, WIDTH), "float32")) for _ in range(2))
    optimizer, inner = accum.GradientAccumulateOptimizer(make(), accum_steps=3), make()
    first = as_slices(*slices([0, 5, 3], seed=5))
    for _ in range(3):
        optimizer.apply_gradients([(first, table)])
    for grad, weight in zip(grads, weights):
        optimizer.apply_gradients([(grad, table)], weight=weight)
    inner.apply_gradients([(first, twin)])
    inner.apply_gradients([(as_slices(mean[touched], touched), twin)])
    assert not np.allclose(twin.numpy()[5], 1.0)
    np.testing.assert_allclose(table.numpy(), twin.numpy(), rtol=0, atol=2e-6)


@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("pattern", sorted(INDICES))
@pytest.mark.parametrize("make, is_traced", EAGER_AND_MOMENTUM_TRACED)
def test_sparse_rows_reach_the_inner_optimizer_as_their_union(make, pattern, is_traced):
    grads = [slices(indices, seed) for seed, indices in enumerate(INDICES[pattern])]
    expected = run(make(), [union(grads[:2]), union(grads[2:])], is_traced)
    ours = run(accum.GradientAccumulateOptimizer(make(), accum_steps=K), grads, is_traced)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-7)


@pytest.mark.law("L4", "L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("pattern", sorted(INDICES))
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_running_mean_hands_over_the_touched_rows_alone(make, pattern):
    """A row of zeros is not the same: Ftrl would take back its weights, and momentum go on moving it."""
    grads = [slices(indices, seed) for seed, indices in enumerate(INDICES[pattern])]
    expected = run(make(), [union(grads[:2]), union(grads[2:])], False)
    ours = run(accum.GradientAccumulateOptimizer(make(), accum_steps=K, reduction="running_mean"), grads, False)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.parametrize("reduction", ["mean", "running_mean"])
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("pattern", sorted(INDICES))
def test_sparse_rows_in_a_session(pattern, use_resource, reduction):
    grads = [slices(indices, seed) for seed, indices in enumerate(INDICES[pattern])]

    def trained(wraps, fed_slices):
        with tf.Graph().as_default(), tf1.Session() as session:
            table = tf1.get_variable("t", initializer=np.ones((ROWS, WIDTH), "float32"), use_resource=use_resource)
            values, indices = tf1.placeholder(tf.float32, [None, WIDTH]), tf1.placeholder(tf.int64, [None])
            optimizer = tf1.train.MomentumOptimizer(0.1, 0.9)
            if wraps:
                optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps=K, reduction=reduction)
            grad = tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH], tf.int64))
            train_op = optimizer.apply_gradients([(grad, table)])
            session.run(tf1.global_variables_initializer())
            for one in fed_slices:
                session.run(train_op, dict(zip([values, indices], one)))
            return session.run(table)

    expected = trained(False, [union(grads[:2]), union(grads[2:])])
    atol = 2e-7 if reduction == "mean" else 5e-7  # a running mean is rounded at each micro step
    np.testing.assert_allclose(trained(True, grads), expected, rtol=0, atol=atol)


INPUTS = np.random.RandomState(0).normal(size=(8, ROWS)).astype("float32")
IDS = np.array([0, 1, 1, 3, 0, 3, 1, 1])
OF_TABLE = {
    "dense": (INPUTS, lambda table, x: tf.reduce_mean(tf.matmul(x, table) ** 2)),
    "rows": (IDS, lambda table, ids: tf.reduce_mean(tf.nn.embedding_lookup(table, ids) ** 2)),
}


def in_turn_in_a_session(order, momentum, accum_steps, **options):
    """The table, after a step of each loss of `OF_TABLE` in turn, three times."""
    with tf.Graph().as_default(), tf1.Session() as session:
        table = tf1.get_variable("table", initializer=np.ones((ROWS, WIDTH), "float32"), use_resource=True)
        optimizer = tf1.train.MomentumOptimizer(0.1, momentum)
        if accum_steps > 1:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps, **options)
        steps = []
        for data, loss in (OF_TABLE[kind] for kind in order):
            fed = tf1.placeholder(data.dtype, [None] + list(data.shape[1:]))
            steps.append((optimizer.minimize(loss(table, fed)), fed, data))
        session.run(tf1.global_variables_initializer())
        for train_op, fed, data in steps * 3:
            for part in np.split(data, accum_steps):
                session.run(train_op, {fed: part})
        return session.run(table)


def in_turn_eagerly(order, momentum, accum_steps, **options):
    table = tf.Variable(np.ones((ROWS, WIDTH), "float32"))
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=momentum)
    if accum_steps > 1:
        optimizer = accum.GradientAccumulateOptimizer(optimizer, accum_steps, **options)
    for data, loss in [OF_TABLE[kind] for kind in order] * 3:
        for part in np.split(data, accum_steps):
            with tf.GradientTape() as tape:
                value = loss(table, tf.constant(part))
            optimizer.apply_gradients([(tape.gradient(value, table), table)])
    return table.numpy()


@pytest.mark.law("L8")
@pytest.mark.parametrize(
    "in_turn",
    [in_turn_in_a_session, pytest.param(in_turn_eagerly, marks=pytest.mark.tf("2.2"))],
    ids=["graph", "keras"],
)
def test_rows_after_dense_gradients_of_a_variable_are_named_and_before_them_exact(in_turn):
    with warned("does not tell rows apart", accum.InexactWarning) as said:
        ours = in_turn(["dense", "rows"], 0.9, accum_steps=K)
    assert len(said) == 1
    if in_turn is in_turn_in_a_session:  # some optimizers of Keras move all rows in any case
        assert np.abs(ours - in_turn(["dense", "rows"], 0.9, accum_steps=1)).max() > 1e-3
    for order, momentum, options in ((["rows", "dense"], 0.9, {}), (["dense", "rows"], 0.0, {"sparse": "dense"})):
        expected = in_turn(order, momentum, accum_steps=1)
        with silent(accum.InexactWarning):
            ours = in_turn(order, momentum, accum_steps=K, **options)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.law("L6", "L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_reset_discards_the_rows_of_the_cycle_and_that_they_were_touched(make):
    grads = [slices([0, 2], 0), slices([2, 3], 1), slices([4, 2], 2)]
    expected = run(make(), [union(grads[1:])], False)
    optimizer = accum.GradientAccumulateOptimizer(make(), accum_steps=K)
    table = tf.Variable(np.ones((ROWS, WIDTH), "float32"))
    for index, (values, indices) in enumerate(grads):
        grad = tf.IndexedSlices(values, tf.constant(indices, tf.int64), tf.constant([ROWS, WIDTH], tf.int64))
        optimizer.apply_gradients([(grad, table)])
        if index == 0:
            optimizer.reset()
    np.testing.assert_allclose(table.numpy(), expected, rtol=0, atol=2e-7)


@pytest.mark.slow
@pytest.mark.law("L6", "L8")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_zero_discards_the_rows_of_the_cycle_in_a_session(use_resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        table = tf1.get_variable("t", initializer=np.zeros((ROWS, WIDTH), "float32"), use_resource=use_resource)
        indices = tf1.placeholder(tf.int64, [1])
        grad = tf.IndexedSlices(tf.ones([1, WIDTH]), indices, tf.constant([ROWS, WIDTH], tf.int64))
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=K)
        ops = optimizer.accumulation_ops(grads_and_vars=[(grad, table)])
        session.run(tf1.global_variables_initializer())
        for op, row in ((ops.accumulate, 1), (ops.zero, 1), (ops.accumulate, 4), (ops.apply, 4)):
            session.run(op, {indices: [row]})
        moved = session.run(table)
    np.testing.assert_array_equal(np.nonzero(moved.sum(axis=1))[0], [4])
    np.testing.assert_array_equal(moved[4], [-1.0] * WIDTH)


@pytest.mark.slow
@pytest.mark.law("L15")
def test_rows_of_a_ref_variable_are_read_after_they_are_written():
    """The tensor that a ref variable was made with waits for nothing: elsewhere, it may be an earlier one."""
    with tf.Graph().as_default() as graph:
        table = tf1.get_variable("t", initializer=np.ones((ROWS, WIDTH), "float32"), use_resource=False)
        grad = tf.IndexedSlices(tf.ones([1, WIDTH]), tf.constant([1]), tf.constant([ROWS, WIDTH]))
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=K)
        optimizer.apply_gradients([(grad, table)])
        sources = [op.inputs[0].op for op in graph.get_operations() if op.type == "GatherV2"]
    while any(op.type == "Switch" for op in sources):
        sources = [op.inputs[0].op if op.type == "Switch" else op for op in sources]
    assert sources
    assert not [op.name for op in sources if op.name == "t/AccumOptimizer/accum/read"]


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("sparse,expected", [("rows", tf.IndexedSlices), ("dense", tf.Tensor)])
def test_sparse_argument_says_what_the_inner_optimizer_receives(sparse, expected):
    seen = []

    def record(grads_and_vars):
        seen.extend(grad for grad, _ in grads_and_vars)
        return grads_and_vars

    optimizer = accum.GradientAccumulateOptimizer("SGD", accum_steps=K, sparse=sparse, transform=record)
    run(optimizer, [slices(indices, 0) for indices in INDICES["disjoint"][:2]], is_traced=False)
    assert len(seen) == 1
    assert isinstance(seen[0], expected)
    if sparse == "rows":
        np.testing.assert_array_equal(seen[0].indices.numpy(), [0, 2, 3, 5])


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_missing_gradient_counts_as_zero_in_its_cycle(index):
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=3)
    for _ in range(2):  # the second meets what the first left in the buffers
        for micro_step in range(3):
            grad = None if micro_step == index else tf.constant([3.0])
            optimizer.apply_gradients([(tf.constant([1.0]), one), (grad, other)])
    np.testing.assert_allclose([one.numpy(), other.numpy()], [[-2.0], [-4.0]])


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "function"])
def test_a_variable_without_any_gradient_is_not_handed_on(is_traced):
    handed = []

    def record(grads_and_vars):
        handed.append([var.name for _, var in grads_and_vars])
        return grads_and_vars

    used, unused = tf.Variable([0.0], name="used"), tf.Variable([5.0], name="unused")
    optimizer = accum.GradientAccumulateOptimizer("Adam", accum_steps=2, transform=record)

    def step():
        optimizer.apply_gradients([(tf.constant([1.0]), used), (None, unused)])

    step = tf.function(step) if is_traced else step
    for _ in range(2):
        step()
    assert handed and all(names == ["used:0"] for names in handed)
    np.testing.assert_array_equal(unused.numpy(), [5.0])


def _keras(momentum=0.9):
    return tf.keras.optimizers.SGD(1.0, momentum=momentum)


def _twice_then_absent(last):
    """Return the micro-batches of two cycles for two variables, and the gradients of their full batches.

    The second variable has a gradient in the first cycle. In the second cycle it has none, or those of `last`.
    """
    one = tf.constant([1.0])
    return [(one, one), (one, one), (one, last[0]), (one, last[1])], [(one, one), (one, last[2])]


LAST_CYCLES = {"none": (None, None, None), "zeros": (0.0, 0.0, 0.0), "one": (None, 2.0, 1.0)}


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("ends_by", ["full cycle", "flush"])
@pytest.mark.parametrize("last", sorted(LAST_CYCLES))
def test_momentum_moves_a_variable_only_if_the_full_batch_has_a_gradient_for_it(last, ends_by):
    last = [value if value is None else tf.constant([value]) for value in LAST_CYCLES[last]]
    micro_batches, whole_batches = _twice_then_absent(last)
    expected, actual = ([tf.Variable([1.0]), tf.Variable([1.0])] for _ in range(2))
    plain = _keras()
    for grads in whole_batches:
        plain.apply_gradients([pair for pair in zip(grads, expected) if pair[0] is not None])
    optimizer = accum.GradientAccumulateOptimizer(_keras(), accum_steps=2 if ends_by == "full cycle" else 3)
    for number, grads in enumerate(micro_batches):
        optimizer.apply_gradients(zip(grads, actual))
        if number % 2 and ends_by == "flush":
            optimizer.flush()
    for mine, theirs in zip(actual, expected):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    assert (float(expected[1][0]) == 0.0) == (last[2] is None)  # momentum would have moved it to -0.9


@pytest.mark.slow
@pytest.mark.law("L8", "L9")
@pytest.mark.tf("2.2")
def test_a_skipped_micro_batch_gives_no_variable_a_gradient():
    used, other = tf.Variable([1.0]), tf.Variable([1.0])
    optimizer = accum.GradientAccumulateOptimizer(_keras(), accum_steps=2, nonfinite="skip_micro")
    for grads in [(1.0, 1.0)] * 2 + [(1.0, None), (1.0, float("nan")), (1.0, None)]:
        grads = [value if value is None else tf.constant([value]) for value in grads]
        optimizer.apply_gradients(zip(grads, [used, other]))
    assert int(optimizer.iterations) == 2
    np.testing.assert_array_equal(other.numpy(), [0.0])


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.skipif(new_family() is None, reason="averages of the weights came with new-style optimizers")
def test_averages_stay_with_their_variables_if_one_has_no_gradient():
    first, second = keras_weights([np.array([1.0], "float32"), np.array([101.0], "float32")])
    inner = new_family().SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps=2)
    optimizer.build([first, second])
    one = tf.constant([1.0])
    for grads in [(one, one)] * 2 + [(None, one)] * 2:
        optimizer.apply_gradients(zip(grads, [first, second]))
    inner.finalize_variable_values([first, second])
    assert 0.0 <= float(first.numpy()[0]) <= 1.0
    assert 99.0 <= float(second.numpy()[0]) <= 101.0


@pytest.mark.slow
@pytest.mark.law("L8", "L12")
@pytest.mark.tf("2.2")
def test_a_restored_sum_is_applied_though_no_gradient_of_it_was_seen(tmp_path):
    def made():
        optimizer = accum.GradientAccumulateOptimizer(_keras(momentum=0.0), accum_steps=2)
        variables = [tf.Variable([1.0]), tf.Variable([1.0])]
        return optimizer, variables, tf.train.Checkpoint(optimizer=optimizer, variables=variables)

    one = tf.constant([1.0])
    optimizer, variables, saved = made()
    optimizer.apply_gradients(zip([one, one], variables))
    path = saved.save(str(tmp_path / "run"))
    optimizer, variables, restored = made()
    for grads in [(one, one)] * 2 + [(one, None)]:
        optimizer.apply_gradients(zip(grads, variables))
    restored.restore(path)
    optimizer.apply_gradients(zip((one, None), variables))
    np.testing.assert_array_equal([float(var[0]) for var in variables], [0.0, 0.5])


@pytest.mark.slow
@pytest.mark.law("L8", "L12")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("restores_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("last", ["step", "flush"])
@pytest.mark.parametrize("later", [None, 2.0], ids=["none", "one"])
def test_a_variable_without_a_gradient_gets_zeros_in_the_cycle_in_which_the_run_is_resumed(
    tmp_path, later, last, restores_first
):
    def made():
        optimizer = accum.GradientAccumulateOptimizer(_keras(), accum_steps=3 if last == "step" else 4)
        variables = [tf.Variable([1.0]), tf.Variable([1.0])]
        return optimizer, variables, tf.train.Checkpoint(optimizer=optimizer, variables=variables)

    def run(optimizer, variables, *cycle):
        for grads in cycle:
            grads = [value if value is None else tf.constant([value]) for value in grads]
            optimizer.apply_gradients(zip(grads, variables))

    optimizer, variables, saved = made()
    run(optimizer, variables, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    optimizer.flush()
    run(optimizer, variables, (1.0, None), (1.0, None))
    path = saved.save(str(tmp_path / "run"))
    optimizer, variables, restored = made()
    if not restores_first:
        run(optimizer, variables, (1.0, 1.0))
    restored.restore(path)
    run(optimizer, variables, (1.0, later))
    optimizer.flush()

    plain, expected = _keras(), [tf.Variable([1.0]), tf.Variable([1.0])]
    run(plain, expected, (1.0, 1.0))
    run(plain, expected, (1.0, (later or 0.0) / 3.0))
    np.testing.assert_allclose(
        [float(var[0]) for var in variables], [float(var[0]) for var in expected], rtol=0, atol=2e-6
    )
    assert float(expected[1][0]) != 0.0  # where it would be in a cycle of one process, without `later`


@pytest.mark.slow
@pytest.mark.law("L8", "L11")
@pytest.mark.tf("2.2")
def test_on_two_replicas_a_variable_without_a_gradient_rests_too():
    strategy, half = mirrored(), tf.constant([0.5])
    with strategy.scope():
        variables = [tf.Variable([1.0]), tf.Variable([1.0])]
        optimizer = accum.GradientAccumulateOptimizer(_keras(), accum_steps=2)
    for other in (half, half, None, None):
        strategy.run(lambda other=other: optimizer.apply_gradients(zip([half, other], variables)))
    np.testing.assert_allclose([float(var.numpy()[0]) for var in variables], [1.0 - 1.0 - 1.9, 0.0], atol=1e-6)


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "function"])
def test_variables_without_a_gradient_may_come_and_go(is_traced):
    used, unused = tf.Variable([0.0]), tf.Variable([5.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)

    def step(has_unused):
        pairs = [(tf.constant([1.0]), used)] + ([(None, unused)] if has_unused else [])
        optimizer.apply_gradients(pairs)

    step = tf.function(step) if is_traced else step
    for has_unused in (False, True, True, False):
        step(has_unused)
    np.testing.assert_array_equal(used.numpy(), [-2.0])


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.tf("2.2")
def test_a_gradient_that_an_older_trace_would_lose_is_refused():
    first, second = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer("SGD", accum_steps=2)

    @tf.function
    def micro_step(has_second):
        grad = tf.constant([1.0])
        optimizer.apply_gradients([(grad, first), (grad if has_second else None, second)])

    micro_step(False)
    with pytest.raises(ValueError, match="had no gradient"):
        micro_step(True)


@pytest.mark.slow
@pytest.mark.law("L8")
def test_a_missing_gradient_in_a_session_is_put_back_by_position():
    with tf.Graph().as_default(), tf1.Session() as session:
        variables = [tf1.get_variable(name, initializer=[0.0]) for name in ("a", "b", "c")]
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
        grads = [tf.constant([1.0]), None, tf.constant([3.0])]
        train_op = optimizer.apply_gradients(list(zip(grads, variables)))
        session.run(tf1.global_variables_initializer())
        for _ in range(2):
            session.run(train_op)
        assert session.run(variables) == [[-1.0], [0.0], [-3.0]]


@pytest.mark.law("L1", "L8")
@pytest.mark.tf("2.5", because="models are not compiled by XLA before")
@pytest.mark.skipif(IS_WINE, reason=XLA_ENDS)
@pytest.mark.parametrize(
    "name",
    [
        "sgd",
        pytest.param("momentum", marks=pytest.mark.tf("2.11", because="XLA has no kernel for it before")),
        pytest.param("adam", marks=pytest.mark.tf("2.11", keras=2, because="Keras 3 squares repeated rows one by one")),
    ],
)
@pytest.mark.parametrize("options", [{"accum_steps": 2}, {"micro_batch_size": 3, "nonfinite": "skip_cycle"}], ids=str)
def test_under_xla_rows_are_those_of_the_full_batch(options, name):
    """The row 0 has a gradient, and others have none."""
    ids, y = np.array([[0], [0], [1], [2], [1], [0], [3], [3]]), np.cos(np.arange(8.0, dtype="float32"))[:, None]
    optimizers = {
        "sgd": lambda: tf.keras.optimizers.SGD(0.5),
        "momentum": lambda: tf.keras.optimizers.SGD(0.5, momentum=0.9),
        "adam": lambda: tf.keras.optimizers.Adam(0.1, epsilon=1e-3),
    }
    ended = []
    for is_ours in (False, True):
        parts = [tf.keras.Input((1,)), tf.keras.layers.Embedding(5, 2), tf.keras.layers.Flatten()]
        model = tf.keras.Sequential([*parts, tf.keras.layers.Dense(1)])
        model.set_weights([np.cos(np.arange(np.size(part))).reshape(np.shape(part)) for part in model.get_weights()])
        model = from_model(model, **options) if is_ours else model
        model.compile(optimizers[name](), "mse", jit_compile=is_ours)
        size = 8 // options.get("accum_steps", 1) if is_ours else 8
        model.fit(ids, y, batch_size=size, epochs=3, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    assert_near(*ended)
