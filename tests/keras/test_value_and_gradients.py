"""`accum.value_and_gradients`: the gradients of a whole batch in a loop of one's own, in micro-batches (law L18)."""

import functools
import gc
import inspect

import numpy as np
import pytest
import tensorflow as tf
from optimizers import mainly
from replicas import RUN, mirrored
from versions import IS_WINE, XLA_ENDS
from warned import silent, warned

import accum

pytestmark = pytest.mark.tf("2.2")

N, ROWS = 11, 6
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(N, 4)).astype("float32")
Y = RANDOM.normal(size=(N, 2)).astype("float32")
WORDS = RANDOM.randint(0, ROWS, (N, 3))
TABLE = RANDOM.normal(size=(ROWS, 4)).astype("float32")
KERNEL = RANDOM.normal(size=(4, 2)).astype("float32")
SIZES = [1, 3, 8, N, 20]
TF_VERSION = tuple(int(part) for part in tf.__version__.split(".")[:2])
XLA = "jit_compile" if "jit_compile" in inspect.signature(tf.function).parameters else "experimental_compile"


class Model(tf.Module):
    """A mean over examples of an embedding and a linear layer, with a regularization loss and an unused variable."""

    def __init__(self):
        super().__init__()
        self.table, self.kernel, self.unused = tf.Variable(TABLE), tf.Variable(KERNEL), tf.Variable([1.0])
        self.variables_ = [self.kernel, self.unused, self.table]

    def loss(self, data, labels):
        features = data["x"] + tf.reduce_mean(tf.gather(self.table, data["words"]), axis=1)
        errors = tf.reduce_mean((tf.matmul(features, self.kernel) - labels) ** 2)
        return errors + 0.1 * tf.reduce_sum(self.kernel**2)

    def whole(self, data, labels):
        with tf.GradientTape() as tape:
            value = self.loss(data, labels)
        return value, tape.gradient(value, self.variables_)

    def parts(self, size, **options):
        return lambda data, labels: accum.value_and_gradients(
            self.loss, (data, labels), self.variables_, size, **options
        )


def batch(part=slice(None)):
    return {"x": tf.constant(X[part]), "words": tf.constant(WORDS[part])}, tf.constant(Y[part])


SIGNATURE = [
    {"x": tf.TensorSpec([None, 4]), "words": tf.TensorSpec([None, 3], tf.int64)},
    tf.TensorSpec([None, 2]),
]
WAYS = {
    "eager": lambda function: function,
    "function": tf.function,
    "unknown": lambda function: tf.function(function, input_signature=SIGNATURE),
    "compiled": lambda function: tf.function(function, **{XLA: True}),
}


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-6)
    assert [type(grad) for grad in ours[1]] == [type(grad) for grad in theirs[1]]
    for one, other in zip(ours[1], theirs[1]):
        if other is not None:
            assert one.dtype == other.dtype
            expected = tf.convert_to_tensor(other).numpy()
            np.testing.assert_allclose(
                tf.convert_to_tensor(one).numpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max()
            )


# ----------------------------------------------------------------------------------------------------------------
# It equals the full batch


@pytest.mark.law("L18")
@pytest.mark.parametrize("way", mainly(sorted(WAYS), "eager", "function"))
@pytest.mark.parametrize("size", mainly(SIZES, 3))
def test_value_and_gradients_equal_the_full_batch(size, way):
    model = Model()
    value, grads = WAYS[way](model.parts(size))(*batch())
    assert isinstance(grads[2], tf.IndexedSlices) and grads[1] is None
    assert_close((value, grads), model.whole(*batch()))


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("size", [3, N])
def test_a_loss_of_unknown_rank_is_a_scalar(size):
    """Such as one of Python code. Summaries and metrics ask for its shape."""
    model, ranks = Model(), []

    def loss(data, labels):
        return tf.compat.v1.placeholder_with_default(model.loss(data, labels), None)

    @tf.function
    def step(data, labels):
        value, grads = accum.value_and_gradients(loss, (data, labels), model.variables_, size)
        ranks.append(value.shape.rank)
        return value, grads

    assert_close(step(*batch()), model.whole(*batch()))
    assert set(ranks) == {0}


@pytest.mark.slow
@pytest.mark.law("L19")
def test_the_rank_of_data_may_be_unknown_with_barriers():
    kernel, features = tf.Variable(KERNEL), []

    def outputs(x, y):
        return tf.matmul(x, kernel), y

    def loss(outs, x, y):
        features.append(outs[0].shape.as_list()[-1])
        return tf.reduce_mean((outs[0] - tf.reshape(outs[1], tf.shape(outs[0]))) ** 2) ** 2

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec(None)])
    def step(x, y):
        return accum.value_and_gradients(outputs, (x, y), [kernel], 3, loss=loss)

    with tf.GradientTape() as tape:
        value = loss(outputs(tf.constant(X), tf.constant(Y)), X, Y)
    assert_close(step(X, Y), (value, tape.gradient(value, [kernel])))
    assert set(features) == {2}  # what is known of the outputs is known in the loss


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("way", ["eager", "function"])
def test_without_weights_the_mean_would_be_another(way):
    """The same comparison finds a difference where micro-batches count equally, whatever they hold."""
    model = Model()
    value, grads = WAYS[way](model.parts(3, weight="equal"))(*batch())
    parts = [model.whole(*batch(part)) for part in (slice(2), slice(2, 5), slice(5, 8), slice(8, 11))]
    np.testing.assert_allclose(value, np.mean([value for value, _ in parts]), rtol=2e-6)
    whole = model.whole(*batch())
    assert abs(value - whole[0]) > 1e-2
    assert np.abs(grads[0] - whole[1][0]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("way", ["eager", "function"])
def test_a_weight_of_the_user_s_own_makes_a_masked_mean_exact(way):
    kernel = tf.Variable(KERNEL)
    mask = tf.constant(RANDOM.uniform(size=N) < 0.4)

    def masked(x, y, mask):
        errors = tf.reduce_sum((tf.matmul(x, kernel) - y) ** 2, axis=1)
        return tf.reduce_mean(tf.boolean_mask(errors, mask))

    def count(x, y, mask):
        return tf.reduce_sum(tf.cast(mask, tf.int32))

    with tf.GradientTape() as tape:
        value = masked(X, Y, mask)
    theirs = value, tape.gradient(value, [kernel])

    def run(size, **how):
        return WAYS[way](lambda: accum.value_and_gradients(masked, (X, Y, mask), [kernel], size, **how))()

    assert_close(run(3, weight=count), theirs)
    assert_close(run(1, weight=count), theirs)  # some are NaN, and count for nothing
    assert_close(run(3), theirs)
    assert abs(run(8, whole_batch=())[0] - theirs[0]) > 1e-3


MASK = (np.arange(N)[:, None] % 4 > np.arange(2)).astype("float32")  # of the two targets of an example, 0 to 2 count


def count_of(x, y, mask):
    return tf.reduce_sum(mask)


def errors_of(kernel, x, y, mask):
    return tf.reduce_sum(mask * (tf.matmul(x, kernel) - y) ** 2)


LOSSES = {
    "plain mean": lambda kernel, x, y, mask: tf.reduce_mean((tf.matmul(x, kernel) - y) ** 2),
    "masked mean": lambda kernel, *data: errors_of(kernel, *data) / count_of(*data),
    "and a constant": lambda kernel, *data: errors_of(kernel, *data) / count_of(*data) + tf.reduce_sum(kernel**2),
    "two means": lambda kernel, *data: (
        errors_of(kernel, *data) / count_of(*data) + tf.reduce_mean((tf.matmul(data[0], kernel) - 1.0) ** 2)
    ),
    "root": lambda kernel, *data: tf.sqrt(errors_of(kernel, *data) / count_of(*data)),
    "root of a mean": lambda kernel, *data: tf.sqrt(tf.reduce_mean((tf.matmul(data[0], kernel) - data[1]) ** 2)),
    "other quotient": lambda kernel, *data: errors_of(kernel, *data) / (1.0 + tf.reduce_sum(data[1] ** 2)),
    "over the number of examples": lambda kernel, x, y, mask: tf.reduce_mean(
        (tf.matmul(x, kernel) - y) ** 2 / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "by the number of examples": lambda kernel, x, y, mask: tf.reduce_mean(
        tf.cond(tf.shape(x)[0] > 4, lambda: 2.0 * tf.matmul(x, kernel), lambda: tf.matmul(x, kernel)) ** 2
    ),
}
ONE_PASS = {("plain mean", "examples"), ("masked mean", count_of), ("and a constant", count_of)}


@pytest.mark.law("L18", "L21")
@pytest.mark.parametrize("weight", ["examples", count_of], ids=["examples", "count"])
@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("way", mainly(["function", "eager"], "function"))
def test_a_loss_that_is_no_mean_over_examples_is_that_of_the_batch(name, weight, way):
    kernel, calls = tf.Variable(KERNEL), []

    def function(*data):
        calls.append(1)
        return LOSSES[name](kernel, *data)

    data = tf.constant(X), tf.constant(Y), tf.constant(MASK)
    with tf.GradientTape() as tape:
        value = function(*data)
    theirs = value, tape.gradient(value, [kernel])
    with silent():
        ours = WAYS[way](lambda *data: accum.value_and_gradients(function, data, [kernel], 4, weight=weight))(*data)
    assert_close(ours, theirs)
    plain = accum.value_and_gradients(function, data, [kernel], 4, weight=weight, whole_batch=())
    is_exact_plainly = (name, weight) in ONE_PASS
    assert (np.abs(plain[1][0] - theirs[1][0]).max() > 1e-3) != is_exact_plainly


@pytest.mark.law("L18")
def test_eagerly_each_weight_has_a_proof_of_its_own():
    kernel = tf.Variable(KERNEL)

    def masked(*data):
        return LOSSES["masked mean"](kernel, *data)

    data = tf.constant(X), tf.constant(Y), tf.constant(MASK)
    with tf.GradientTape() as tape:
        value = masked(*data)
    theirs = value, tape.gradient(value, [kernel])
    for weight in (count_of, lambda x, y, mask: tf.reduce_sum(y**2), count_of):
        assert_close(accum.value_and_gradients(masked, data, [kernel], 4, weight=weight), theirs)


COMPILED = pytest.param("compiled", marks=pytest.mark.skipif(IS_WINE, reason=XLA_ENDS))


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("way", ["eager", "function", "unknown", COMPILED])
def test_second_order(way):
    """The gradient of the gradient's norm, through a tape of the user's own."""
    model = Model()

    def of_norm(first_order):
        def second_order(data, labels):
            with tf.GradientTape() as tape:
                value, grads = first_order(data, labels)
                norm = value + tf.reduce_sum(grads[0] ** 2) + tf.reduce_sum(tf.convert_to_tensor(grads[2]) ** 2)
            return norm, tape.gradient(norm, [model.kernel, model.table])

        return second_order

    theirs = of_norm(model.whole)(*batch())
    for size in (3, N):
        value, grads = WAYS[way](of_norm(model.parts(size)))(*batch())
        assert_close((value, map(tf.convert_to_tensor, grads)), (theirs[0], map(tf.convert_to_tensor, theirs[1])))


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("way", ["eager", "function", "unknown"])
@pytest.mark.parametrize("size", SIZES)
def test_no_call_sees_more_than_a_micro_batch(size, way):
    sizes, model = [], Model()

    def recorded(data, labels):
        seen = tf.py_function(lambda x, y: sizes.append((len(x), len(y))) or 0.0, [data["x"], labels], tf.float32)
        return model.loss(data, labels) + tf.stop_gradient(tf.reshape(seen, []))

    WAYS[way](lambda *data: accum.value_and_gradients(recorded, data, [model.kernel], size, whole_batch=()))(*batch())
    first = (N - 1) % size + 1
    assert sizes == [(first, first)] + [(size, size)] * ((N - first) // size)


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("way", ["eager", "function", "unknown"])
def test_a_batch_without_examples_counts_for_nothing(way):
    value, grads = WAYS[way](Model().parts(3))(*batch(slice(0)))
    assert float(value) == 0.0 and not np.any(grads[0])


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("way", ["eager", "function"])
def test_ragged_and_sparse_tensors_and_what_is_no_tensor(way):
    words = tf.ragged.constant([[1, 2], [], [3], [0, 1, 2], [5]])
    sparse = tf.sparse.from_dense(RANDOM.normal(size=(5, 4)).astype("float32").clip(min=0))
    table, kernel = tf.Variable(TABLE), tf.Variable(KERNEL)

    def loss(ragged, matrix, scale, nothing):
        assert nothing is None
        rows = tf.RaggedTensor.from_row_splits(tf.gather(table, ragged.values), ragged.row_splits)
        features = tf.reduce_sum(rows, axis=1) + scale * tf.sparse.sparse_dense_matmul(matrix, tf.eye(4))
        return tf.reduce_mean(tf.matmul(features, kernel) ** 2)

    with tf.GradientTape() as tape:
        value = loss(words, sparse, 2.0, None)
    theirs = value, tape.gradient(value, [table, kernel])
    for size in (1, 2, 5):
        ours = WAYS[way](
            lambda size=size: accum.value_and_gradients(loss, (words, sparse, 2.0, None), [table, kernel], size)
        )()
        assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.law("L18")
def test_data_that_is_no_tuple_is_one_argument():
    kernel = tf.Variable(KERNEL)
    calls = [
        (lambda x: tf.reduce_mean(tf.matmul(x, kernel)), X),
        (lambda data: tf.reduce_mean(tf.matmul(data["x"], kernel)), {"x": X}),
        (lambda x: tf.reduce_mean(tf.matmul(x, kernel)), [tf.constant(X)]),
    ]
    for loss, data in calls:
        value, _ = accum.value_and_gradients(loss, data, [kernel], 4)
        np.testing.assert_allclose(value, X.dot(KERNEL).mean(), rtol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L18")
def test_conditions_in_python_are_those_of_a_tf_function():
    kernel = tf.Variable(KERNEL)

    def loss(x):
        value = tf.reduce_mean(tf.matmul(x, kernel))
        if value > 0.0:
            value = 2.0 * value
        return value

    eager = accum.value_and_gradients(loss, X, [kernel], 2)
    traced = tf.function(lambda x: accum.value_and_gradients(loss, x, [kernel], 2))(tf.constant(X))
    assert_close(traced, eager)


@pytest.mark.slow
@pytest.mark.law("L8", "L18")
def test_a_variable_that_python_code_uses_in_some_micro_batches_only():
    """Also where its gradient is sparse; in the others it counts as zero."""
    one, other, table = tf.Variable([1.0, 1.0]), tf.Variable([1.0, 1.0]), tf.Variable(TABLE)

    def loss(x):
        if float(x[0]) == 1.0:
            return tf.reduce_sum(one) * tf.reduce_mean(x)
        return tf.reduce_sum(other) * tf.reduce_mean(x) + tf.reduce_sum(tf.gather(table, [int(x[0])]))

    for data in ([1.0, 2.0, 1.0, 3.0], [3.0, 1.0, 2.0, 1.0]):
        value, grads = accum.value_and_gradients(loss, np.float32(data), [one, other, table], 1, whole_batch=())
        np.testing.assert_allclose(grads[0], [0.5, 0.5])
        np.testing.assert_allclose(grads[1], [1.25, 1.25])
        rows = np.zeros_like(TABLE)
        rows[[2, 3]] = 0.25
        np.testing.assert_allclose(tf.convert_to_tensor(grads[2]), rows)


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("way", ["eager", "function"])
def test_16_bit_variables_are_summed_in_32_bits(way):
    """One large gradient and many small ones: a float16 sum would lose every small one."""
    half = tf.Variable(tf.ones([1], tf.float16))
    x = tf.constant([[2048.0]] + [[1.0]] * 64, tf.float16)

    def run():
        options = {"weight": lambda x: 1.0, "whole_batch": ()}
        return accum.value_and_gradients(lambda x: tf.reduce_sum(half * x), x, [half], 1, **options)

    value, (grad,) = WAYS[way](run)()
    assert value.dtype == grad.dtype == tf.float16
    np.testing.assert_array_equal(np.array(grad), np.float16([2112.0 / 65.0]))


@pytest.mark.slow
@pytest.mark.law("L11", "L18")
@pytest.mark.parametrize("split", [7, 10, N])
def test_two_replicas_with_different_numbers_of_examples(split):
    """Each computes the mean of its part; weighted by the numbers of examples, they are the mean of the whole batch."""
    strategy = mirrored()
    with strategy.scope():
        model = Model()

    @tf.function
    def of_whole_batch():
        def of_replica():
            context = tf.distribute.get_replica_context()
            is_first = tf.equal(context.replica_id_in_sync_group, 0)
            start, end = tf.where(is_first, 0, split), tf.where(is_first, split, N)
            data = {"x": tf.constant(X)[start:end], "words": tf.constant(WORDS)[start:end]}
            value, grads = model.parts(3)(data, tf.constant(Y)[start:end])
            share = tf.cast(end - start, tf.float32) / N
            parts = [share * tf.convert_to_tensor(part) for part in (value, grads[0], grads[2])]
            return context.all_reduce(tf.distribute.ReduceOp.SUM, parts)

        return getattr(strategy, RUN)(of_replica)

    results = (
        strategy.experimental_local_results(of_whole_batch()[0]),
        [strategy.experimental_local_results(part)[0] for part in of_whole_batch()[1:]],
    )
    value, grads = Model().whole(*batch())
    expected = [tf.convert_to_tensor(grads[index]) for index in (0, 2)]
    assert_close((results[0][0], results[1]), (value, expected))


@pytest.mark.slow
@pytest.mark.law("L18")
def test_an_accumulating_optimizer_takes_the_gradients_of_replicas_by_their_weight():
    strategy, split = mirrored(), 8
    with strategy.scope():
        variable = tf.Variable(KERNEL)
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), accum_steps=2)

    def loss(x, y):  # scaled as Keras scales it
        return tf.reduce_mean((tf.matmul(x, variable) - y) ** 2) / strategy.num_replicas_in_sync

    @tf.function
    def micro_step():
        def of_replica():
            is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            start, end = tf.where(is_first, 0, split), tf.where(is_first, split, N)
            data = tf.constant(X)[start:end], tf.constant(Y)[start:end]
            _, grads = accum.value_and_gradients(loss, data, [variable], 3)
            optimizer.apply_gradients(zip(grads, [variable]), weight=end - start)

        getattr(strategy, RUN)(of_replica)

    micro_step()
    micro_step()
    gradient = 2.0 * X.T.dot(X.dot(KERNEL) - Y) / Y.size
    np.testing.assert_allclose(variable.numpy(), KERNEL - 0.1 * gradient, rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------
# Arguments

KNOWN = tf.Variable(KERNEL, name="known")


def of_known(x, y):
    return tf.reduce_mean((tf.matmul(x, KNOWN) - y) ** 2)


REFUSED = [
    ({"micro_batch_size": 0}, ValueError, "`micro_batch_size` must be an int >= 1. Received: micro_batch_size=0."),
    ({"micro_batch_size": -1}, ValueError, "Received: micro_batch_size=-1."),
    ({"micro_batch_size": 2.5}, TypeError, "Received: micro_batch_size=2.5."),
    ({"micro_batch_size": "4"}, TypeError, "Received: micro_batch_size='4'."),
    ({"micro_batch_size": True}, TypeError, "Received: micro_batch_size=True."),
    ({"micro_batch_size": None}, TypeError, "None and 'auto' are for `GradientAccumulateModel`"),
    ({"micro_batch_size": "auto"}, ValueError, "None and 'auto' are for `GradientAccumulateModel`"),
    ({"weight": "tokens"}, ValueError, "`weight` must be one of ['examples', 'equal']"),
    ({"weight": 3.0}, ValueError, "`weight` must be one of ['examples', 'equal']"),
    ({"weight": lambda x, y: -1.0, "whole_batch": ()}, ValueError, "`weight` must be a scalar >= 0"),
    ({"weight": lambda x, y: y, "whole_batch": ()}, ValueError, "`weight` must be a scalar >= 0"),
    ({"function": 3}, TypeError, "`function` must be a function. Received: function=3."),
    ({"function": lambda x, y: of_known(x, y) * y}, ValueError, "must return a scalar loss"),
    ({"function": lambda x, y: None}, TypeError, "must return a scalar loss"),
    ({"function": lambda x, y: (of_known(x, y), y)}, TypeError, "must return a scalar loss"),
    ({"function": lambda x, y: tf.size(x)}, TypeError, "must return a scalar loss"),
    ({"function": lambda x, y: tf.reduce_mean(x)}, ValueError, "No gradient for any variable in"),
    ({"variables": []}, ValueError, "`variables` must hold at least one variable. Received: an empty list."),
    ({"variables": None}, TypeError, "`variables` must be a list of variables. Received: None."),
    ({"variables": KNOWN}, TypeError, "`variables` must be a list of variables"),
    ({"variables": [tf.zeros([2])]}, TypeError, "`variables` must be a list of variables"),
    ({"variables": ["known"]}, TypeError, "`variables` must be a list of variables"),
    ({"data": (X, Y[:5])}, ValueError, "first axes of lengths [5, 11]"),
    ({"data": (3.0, None)}, ValueError, "There is no batch to split into micro-batches"),
    ({"data": (X, tf.data.Dataset.range(3))}, TypeError, "can't split this"),
]


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("way", ["eager", "function"])
@pytest.mark.parametrize(
    "options,error,words", REFUSED, ids=["-".join(row[0]) + str(i) for i, row in enumerate(REFUSED)]
)
def test_bad_arguments_are_refused(options, error, words, way):
    options = dict({"function": of_known, "data": (X, Y), "variables": [KNOWN], "micro_batch_size": 3}, **options)
    with pytest.raises(error) as caught:
        WAYS[way](lambda: accum.value_and_gradients(**options))()
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_batches_of_different_lengths_are_refused_when_a_traced_function_runs():
    function = tf.function(
        lambda x, y: accum.value_and_gradients(of_known, (x, y), [KNOWN], 3)[0],
        input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2])],
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be the batch in all of them"):
        function(tf.constant(X), tf.constant(Y[:5]))


@pytest.mark.slow
@pytest.mark.law("L17")
def test_gradients_that_change_between_dense_and_sparse_are_refused():
    table = tf.Variable(TABLE)

    def loss(x):
        return tf.reduce_sum(table if float(x[0]) else tf.gather(table, [1]))

    with pytest.raises(ValueError, match="A micro-batch computes other gradients or values than the one before it"):
        accum.value_and_gradients(loss, np.float32([0.0, 1.0]), [table], 1, whole_batch=())


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_static_graph_is_refused():
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="use `accum.compat.v1.value_and_gradients`"):
        accum.value_and_gradients(of_known, (X, Y), [KNOWN], 3)


# ----------------------------------------------------------------------------------------------------------------
# Over the whole batch


IMAGES = (RANDOM.normal(size=(N, 6, 6, 2)) * np.linspace(0.2, 3.0, N)[:, None, None, None]).astype("float32")
CLASSES = RANDOM.randint(0, 3, N)


def variable(*shape):
    return tf.Variable(np.random.RandomState(len(shape)).normal(0.1, 0.4, shape).astype("float32"))


class NormalisesByHand(tf.Module):
    """A fused batch normalisation and `tf.nn.moments`, whose average it keeps itself, without Keras."""

    def __init__(self):
        super().__init__()
        self.kernels = [variable(3, 3, 2, 4), variable(3, 3, 4, 5)]
        self.scales, self.offsets = [variable(4), variable(5)], [variable(4, 1), variable(5, 1)]
        self.last = variable(5, 3)
        self.average = tf.Variable(tf.zeros(5), trainable=False)

    def __call__(self, images):
        hidden = tf.nn.conv2d(images, self.kernels[0], 1, "SAME")
        hidden, _, _ = tf.compat.v1.nn.fused_batch_norm(hidden, 1 + self.scales[0], self.offsets[0][:, 0])
        hidden = tf.nn.conv2d(tf.nn.relu(hidden), self.kernels[1], 1, "SAME")
        mean, variance = self.moments(hidden)
        self.average.assign_sub((self.average - mean) * 0.1)
        hidden = (hidden - mean) * tf.math.rsqrt(variance + 1e-3) * (1 + self.scales[1]) + self.offsets[1][:, 0]
        return tf.reduce_mean(tf.nn.relu(hidden), axis=[1, 2]) @ self.last

    def moments(self, hidden):
        return tf.nn.moments(hidden, [0, 1, 2])


class NormalisesByArithmetic(NormalisesByHand):
    def moments(self, hidden):
        mean = tf.reduce_mean(hidden, axis=[0, 1, 2])
        return mean, tf.reduce_mean((hidden - mean) ** 2, axis=[0, 1, 2])


class NormalisesByDeviation(NormalisesByHand):
    """With an `if` on a tensor, as AutoGraph allows it."""

    def moments(self, hidden):
        if tf.shape(hidden)[1] < 3:
            hidden = 2.0 * hidden
        hidden = tf.ensure_shape(hidden, [None, 6, 6, 5])
        return tf.reduce_mean(hidden, [0, 1, 2]), tf.math.reduce_std(hidden, [0, 1, 2], keepdims=True) ** 2


class WithinFunction(NormalisesByHand):
    @tf.function
    def __call__(self, images):
        return super().__call__(images)


class OfKeras(tf.keras.Model):
    """A model as others write it, with its batch normalisation within."""

    def __init__(self):
        super().__init__()
        layers, first = tf.keras.layers, tf.keras.initializers.RandomNormal(stddev=0.1, seed=3)
        self.stem = layers.Conv2D(4, 3, use_bias=False, kernel_initializer=first)
        self.norm = layers.BatchNormalization()
        self.flat, self.other = layers.Flatten(), layers.BatchNormalization()
        self.last = layers.Dense(3, kernel_initializer=first)

    def call(self, images, training=True):
        hidden = tf.nn.relu(self.norm(self.stem(images), training=training))
        return self.last(self.other(self.flat(hidden), training=training))


def contrast(logits, images, classes):
    """A loss that compares examples."""
    pairs = tf.matmul(logits, logits, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(classes, tf.int32), pairs))


def in_turn(net, way, how, size=4, loss=contrast):
    """Value, gradients and state. `how`: "plain", or options of `value_and_gradients`."""
    if isinstance(net, tf.keras.Model):
        net(tf.constant(IMAGES))
        forward = functools.partial(net, training=True)  # TF 2.2 would take a learning phase that another test has set
    else:
        forward = net
    trained = list(net.trainable_variables)
    state = [var for var in net.variables if not any(var is one for one in trained)]
    for var in state:
        var.assign(tf.zeros_like(var))

    def step(images, classes):
        if how == "plain":
            with tf.GradientTape() as tape:
                value = loss(forward(images), images, classes)
            return value, tape.gradient(value, trained)
        if "loss" in how:
            return accum.value_and_gradients(lambda images, _: forward(images), (images, classes), trained, size, **how)
        return accum.value_and_gradients(
            lambda images, classes: loss(forward(images), images, classes), (images, classes), trained, size, **how
        )

    value, gradients = (tf.function(step) if way == "function" else step)(tf.constant(IMAGES), tf.constant(CLASSES))
    return [value] + list(gradients) + [tf.convert_to_tensor(var) for var in state]


def apart(ours, theirs, least=1e-2):
    """The largest difference, relative to the largest entry of each, or to `least`."""
    pairs = [(np.array(one), np.array(other)) for one, other in zip(ours, theirs)]
    return max(np.abs(one - other).max() / max(np.abs(other).max(), least) for one, other in pairs)


NETS = [NormalisesByHand, NormalisesByArithmetic, WithinFunction, OfKeras, NormalisesByDeviation]


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.filterwarnings("ignore:`function` changes variables once per micro-batch")
@pytest.mark.parametrize("way", ["eager", "function"])
@pytest.mark.parametrize("net", NETS)
def test_batch_normalisation_and_the_loss_see_the_whole_batch(net, way):
    plain = in_turn(net(), way, "plain")
    # A gradient before a normalisation is the small difference of large ones: 2.2e-7 off on TF 2.2, of at most 0.01.
    assert apart(in_turn(net(), way, {"whole_batch": "all", "loss": contrast}), plain, least=2e-2) < 2e-5
    assert apart(in_turn(net(), way, {"loss": contrast, "whole_batch": ()}), plain) > 1e-2


def errors(logits, images, classes):
    return tf.reduce_mean((logits - tf.one_hot(classes, 3)) ** 2)


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.parametrize("net,size", [(NETS[0], size) for size in SIZES] + [(NETS[3], 4)])
def test_batch_normalisation_sees_the_whole_batch_in_a_loss_of_micro_batches(net, size):
    plain = in_turn(net(), "function", "plain", loss=errors)
    assert apart(in_turn(net(), "function", {"whole_batch": "batch_norm"}, size, errors), plain) < 2e-5
    if size < N:
        assert apart(in_turn(net(), "function", {"whole_batch": ()}, size, errors), plain) > 1e-2


@pytest.mark.slow
@pytest.mark.law("L19")
def test_a_masked_mean_is_that_of_the_batch_with_barriers():
    """It is exact with a weight and without, other than in plain micro-batches."""
    mask = tf.constant(np.arange(N) % 4 != 1, tf.float32)

    def step(how):
        net = NormalisesByHand()

        def masked(images, mask):
            losses = tf.reduce_mean(net(images) ** 2, axis=1)
            return tf.math.divide_no_nan(tf.reduce_sum(mask * losses), tf.reduce_sum(mask))

        if how is None:
            with tf.GradientTape() as tape:
                value = masked(tf.constant(IMAGES), mask)
            return [value] + list(tape.gradient(value, net.trainable_variables))
        value, gradients = accum.value_and_gradients(
            masked,
            (tf.constant(IMAGES), mask),
            net.trainable_variables,
            3,
            **dict({"whole_batch": "batch_norm"}, **how),
        )
        return [value] + gradients

    assert apart(step({"weight": lambda images, mask: tf.reduce_sum(mask)}), step(None)) < 2e-5
    assert apart(step({}), step(None)) < 2e-5
    assert apart(step({"whole_batch": ()}), step(None)) > 1e-3


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.tf("2.8", because="XLA knows all ops since 2.8")
def test_xla_compiles_the_whole_batch():
    net = NormalisesByHand()
    compiled = tf.function(
        lambda images, classes: accum.value_and_gradients(
            lambda images, _: net(images),
            (images, classes),
            net.trainable_variables,
            4,
            whole_batch="all",
            loss=lambda logits, images, classes: tf.reduce_mean((logits - tf.one_hot(classes, 3)) ** 2),
        ),
        **{XLA: True},
    )
    value, gradients = compiled(tf.constant(IMAGES), tf.constant(CLASSES))
    plain = in_turn(NormalisesByHand(), "function", "plain", loss=errors)
    assert apart([value] + gradients, plain[: 1 + len(gradients)]) < 2e-5


@pytest.mark.slow
@pytest.mark.law("L11", "L19")
def test_each_replica_takes_the_statistics_of_its_part_of_the_batch():
    strategy = mirrored()
    with strategy.scope():
        net = NormalisesByHand()
        kind = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.MEAN}
        net.average = tf.Variable(tf.zeros(5), trainable=False, **kind)

    @tf.function
    def of_replicas(**how):
        def of_replica():
            begin = 5 * tf.distribute.get_replica_context().replica_id_in_sync_group
            images, classes = tf.constant(IMAGES)[begin : begin + 5], tf.constant(CLASSES)[begin : begin + 5]
            if how:
                value, gradients = accum.value_and_gradients(
                    lambda images, classes: errors(net(images), images, classes),
                    (images, classes),
                    net.trainable_variables,
                    3,
                    **how,
                )
            else:
                with tf.GradientTape() as tape:
                    value = errors(net(images), images, classes)
                gradients = tape.gradient(value, net.trainable_variables)
            return [value] + list(gradients)

        return getattr(strategy, RUN)(of_replica)

    def results(**how):
        of_passes = map(strategy.experimental_local_results, of_replicas(**how))
        return [one for both in of_passes for one in both]

    plain = results()
    assert apart(results(whole_batch="batch_norm"), plain) < 1e-4  # the gradients of kernels nearly cancel
    assert apart(results(whole_batch=()), plain) > 1e-2


@pytest.mark.slow
@pytest.mark.law("L19")
def test_the_value_of_a_whole_batch_is_differentiated_by_another_tape():
    """Eagerly; a graph would have to keep what that needs for ever, so it says what to do."""
    net = NormalisesByHand()
    data = (tf.constant(IMAGES), tf.constant(CLASSES))

    def outer(whole):
        with tf.GradientTape() as tape:
            if whole:
                value, _ = accum.value_and_gradients(
                    lambda images, classes: errors(net(images), images, classes),
                    data,
                    net.trainable_variables,
                    4,
                    whole_batch="batch_norm",
                )
            else:
                value = errors(net(data[0]), *data)
            value **= 2
        return tape.gradient(value, net.trainable_variables)

    assert apart(outer(True), outer(False)) < 2e-5
    with pytest.raises(ValueError, match="has been differentiated once and can't be again.*use the gradients"):
        tf.function(outer)(True)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_options_of_the_whole_batch_that_can_t_hold():
    net = NormalisesByHand()

    def step(function, **options):
        return accum.value_and_gradients(function, tf.constant(IMAGES), net.trainable_variables, 4, **options)

    def mean(images):
        return tf.reduce_mean(net(images))

    with pytest.raises(ValueError, match="pass `loss=`"):
        step(mean, whole_batch="loss")
    with pytest.raises(ValueError, match="leave out `weight`"):
        step(mean, loss=lambda outputs, images: outputs, weight="equal")
    with pytest.raises(TypeError, match="must return tensors with one entry for each example"):
        step(lambda images: "logits", loss=lambda outputs, images: outputs)
    with pytest.raises(ValueError, match="`loss` must return a scalar loss"):
        step(net, loss=lambda outputs, images: outputs, whole_batch="all")
    with pytest.raises(ValueError, match="within a loop, a conditional"):
        step(lambda images: tf.reduce_mean(looped(images)), whole_batch="batch_norm")
    with pytest.warns(UserWarning, match="look across the examples of each micro-batch"):
        step(lambda images: tf.reduce_mean(net(images) / tf.reduce_max(net(images), 0)), whole_batch="batch_norm")
    with pytest.warns(UserWarning, match="`function` changes variables once per micro-batch"):
        step(net, loss=lambda outputs, images: tf.reduce_mean(outputs), whole_batch="loss")


def looped(images):
    def body(step, images):
        mean, variance = tf.nn.moments(images, [0, 1, 2])
        return step + 1, (images - mean) * tf.math.rsqrt(variance + 1e-3)

    return tf.while_loop(lambda step, _: step < 2, body, (0, images))[1]


def by_moments(values, *axes):
    mean, variance = tf.nn.moments(values, list(axes))
    return (values - mean) * tf.math.rsqrt(variance + 1e-3)


def in_time(function):
    """Apply a function to tensors whose first axis is time."""
    return lambda hidden: tf.transpose(function(tf.transpose(hidden, [1, 0, 2])), [1, 0, 2])


def of_squares(hidden):
    mean = tf.reduce_mean(hidden, axis=[0, 1])
    return (hidden - mean) * tf.math.rsqrt(tf.reduce_mean(hidden**2, axis=[0, 1]) - mean**2 + 1e-3)


FOUND = {
    "time first": in_time(lambda hidden: by_moments(hidden, 0, 1)),
    "flat": lambda hidden: tf.reshape(by_moments(tf.reshape(hidden, [-1, 3]), 0), [-1, 5, 3]),
    "twice": lambda hidden: by_moments(tf.nn.relu(by_moments(hidden, 0, 1)), 0, 1),
    "each example": lambda hidden: tf.sin(in_time(lambda hidden: by_moments(hidden, 0))(hidden)),
    "stacked": lambda hidden: tf.reduce_mean(tf.stack([hidden, tf.sin(hidden)]), axis=0),
    "in the loss": lambda hidden: hidden + 0.0 * tf.reduce_mean(tf.math.reduce_variance(hidden, [0, 1])),
}
JOINED = {
    "centred": lambda hidden: hidden - tf.reduce_mean(hidden, axis=0),
    "of squares": of_squares,
    "largest": in_time(lambda hidden: hidden / (4.0 + tf.reduce_max(hidden, axis=1, keepdims=True))),
}


def step_of(function, how):
    """The loss and its gradient where `function` is applied to hidden values of 5 times and 3 features."""
    random = np.random.RandomState(4)
    data = random.normal(size=(N, 5, 4)) * np.linspace(0.2, 3.0, N)[:, None, None]
    data, labels = tf.constant(data, tf.float32), tf.constant(random.normal(size=(N, 2)), tf.float32)
    kernel, last = (tf.Variable(random.normal(size=shape), dtype=tf.float32) for shape in ((4, 3), (3, 2)))

    def loss(data, labels):
        hidden = tf.reduce_mean(tf.nn.relu(function(tf.matmul(data, kernel))), axis=1)
        return tf.reduce_mean((tf.matmul(hidden, last) - labels) ** 2)

    if how is None:
        with tf.GradientTape() as tape:
            value = loss(data, labels)
        return [value] + tape.gradient(value, [kernel, last])
    value, gradients = accum.value_and_gradients(loss, (data, labels), [kernel, last], 4, **how)
    return [value] + gradients


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", FOUND)
def test_statistics_are_found_wherever_the_examples_are(name):
    """And what is computed of each example alone is neither changed nor named."""
    ours = step_of(FOUND[name], {"whole_batch": "batch_norm"})
    assert apart(ours, step_of(FOUND[name], None)) < 2e-5
    if name in ("time first", "flat", "twice"):
        assert apart(step_of(FOUND[name], {"whole_batch": ()}), step_of(FOUND[name], None)) > 1e-2


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", JOINED)
def test_what_meets_single_examples_again_is_computed_with_the_whole_batch(name):
    plain = step_of(JOINED[name], None)
    assert apart(step_of(JOINED[name], {"whole_batch": "batch_norm"}), plain) < 2e-5
    assert apart(step_of(JOINED[name], {"whole_batch": ()}), plain) > 1e-3


def pairs(kernel, x):
    """A loss in which all examples meet, of a function that stays the same from call to call."""
    hidden = tf.nn.softmax(tf.matmul(x, kernel), axis=0)
    mean, variance = tf.nn.moments(hidden, [0])
    return tf.reduce_sum(((hidden - mean) * tf.math.rsqrt(variance + 1e-3)) ** 4) / tf.cast(tf.shape(x)[0], tf.float32)


@pytest.mark.law("L21")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="default"),
        pytest.param({"whole_batch": "batch_norm"}, id="barriers", marks=pytest.mark.slow),
    ],
)
def test_what_meets_is_found_in_every_call_of_the_same_function(how):
    """Eagerly, in the trace for a batch of another size, and on each replica."""
    kernel = tf.Variable(KERNEL)
    loss = functools.partial(pairs, kernel)

    def off(part, step):
        with tf.GradientTape() as tape:
            value = loss(X[part])
        return apart(step(tf.constant(X[part])), [value, tape.gradient(value, kernel)])

    def step(x):
        value, (gradient,) = accum.value_and_gradients(loss, x, [kernel], 4, **how)
        return value, gradient

    traced = tf.function(step)
    assert max(off(slice(N), step) for _ in range(2)) < 2e-5
    assert max(off(slice(8), traced), off(slice(7), traced)) < 2e-5
    strategy = mirrored()
    of_replicas = tf.function(lambda: getattr(strategy, RUN)(lambda: step(tf.constant(X))))()
    for number in range(2):
        assert (
            off(slice(N), lambda _, n=number: [strategy.experimental_local_results(one)[n] for one in of_replicas])
            < 2e-5
        )
    assert off(slice(N), lambda x: accum.value_and_gradients(loss, x, [kernel], 4, whole_batch=())) > 1e-3


@pytest.mark.law("L21")
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_mean_over_the_examples_takes_one_pass():
    """Eagerly, it is traced once for its proof, which holds until other variables are passed."""
    model, sizes = Model(), []

    def loss(data, labels):
        sizes.append(labels.shape.as_list()[0])
        return model.loss(data, labels)

    for _ in range(2):
        accum.value_and_gradients(loss, batch(), model.variables_, 4)
    assert sizes == [None] + 2 * [3, 4, 4]
    accum.value_and_gradients(loss, batch(), [model.kernel], 4)
    assert sizes[7:] == [None, 3, 4, 4]


@pytest.mark.law("L21")
@pytest.mark.filterwarnings("error::UserWarning")
def test_what_is_proven_for_some_arguments_is_proven_anew_for_others():
    """Eagerly: for other Python values among the data, and for data in other places."""
    kernel = tf.Variable(KERNEL)

    def loss(data, is_centred):
        hidden = tf.matmul(data["one"], kernel) + (tf.matmul(data["two"], kernel) if "two" in data else 0.0)
        centred = hidden - tf.reduce_mean(hidden, 0) if is_centred else hidden
        return tf.reduce_mean(centred**2)

    for data in ({"one": X}, {"one": X, "two": 2 * X}):
        for is_centred in (False, True, False):
            with tf.GradientTape() as tape:
                value = loss(data, is_centred)
            ours = accum.value_and_gradients(loss, (data, is_centred), [kernel], 4)
            assert apart([ours[0], *ours[1]], [value, tape.gradient(value, kernel)]) < 2e-5


@pytest.mark.law("L21")
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("examples_meet", [False, True])
def test_a_function_that_was_traced_before_is_proven_or_not_like_any_other(examples_meet, is_traced):
    """Calls of it run no Python, so its operations are in a function of the graph."""
    kernel = tf.Variable(KERNEL)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def loss(x):
        rows = tf.reduce_sum(tf.matmul(x, kernel) ** 2, axis=1)
        return tf.reduce_logsumexp(rows) if examples_meet else tf.reduce_mean(rows)

    with tf.GradientTape() as tape:
        value = loss(tf.constant(X))
    expected = [value, tape.gradient(value, kernel)]
    call = lambda: accum.value_and_gradients(loss, tf.constant(X), [kernel], 4)
    ours = tf.function(call)() if is_traced else call()
    assert apart([ours[0], *ours[1]], expected) < 2e-5


@pytest.mark.law("L20", "L21")
def test_numbers_that_are_drawn_eagerly_are_named():
    """In a `tf.function`, all micro-batches have the same, as the full batch has."""
    kernel = tf.Variable(KERNEL)

    def loss(x):
        return tf.reduce_mean((tf.matmul(x + tf.random.normal([]), kernel)) ** 2)

    step = lambda x, size: accum.value_and_gradients(loss, x, [kernel], size)[1][0]
    with pytest.warns(accum.InexactWarning, match="draw random numbers that differ"):
        step(tf.constant(X), 4)
    tf.random.set_seed(1)
    whole = tf.function(lambda: step(tf.constant(X), N))()
    tf.random.set_seed(1)
    np.testing.assert_allclose(tf.function(lambda: step(tf.constant(X), 4))(), whole, rtol=0, atol=1e-5)


@pytest.mark.law("L21")
def test_a_function_that_can_t_be_looked_at_is_computed_at_once_and_named():
    kernel = tf.Variable(KERNEL)

    def loss(x):
        return tf.reduce_mean(tf.matmul(x, kernel)) * x[0, 0].numpy() ** 2

    with pytest.warns(UserWarning, match="computed for the whole batch at once, which is exact"):
        value, (gradient,) = accum.value_and_gradients(loss, tf.constant(X), [kernel], 4)
    with tf.GradientTape() as tape:
        whole = loss(tf.constant(X))
    assert apart([value, gradient], [whole, tape.gradient(whole, kernel)]) < 2e-6


@pytest.mark.slow
@pytest.mark.law("L19")
def test_a_mean_that_cancels_over_two_examples_is_not_named(recwarn):
    """As of the cubes of normalised values, which for the two of a trial is what rounding leaves of 0."""
    kernel = tf.Variable(KERNEL)

    def skewness(x):
        hidden = x @ kernel
        mean, variance = tf.nn.moments(hidden, [0])
        return tf.reduce_mean(((hidden - mean) * tf.math.rsqrt(variance + 1e-6)) ** 3)

    step = tf.function(
        lambda x: accum.value_and_gradients(skewness, x, [kernel], micro_batch_size=4, whole_batch="batch_norm")
    )
    value, (gradient,) = step(X)
    with tf.GradientTape() as tape:
        whole = skewness(X)
    np.testing.assert_allclose(value, whole, rtol=2e-5)
    np.testing.assert_allclose(gradient, tape.gradient(whole, kernel), rtol=2e-5, atol=2e-6)
    assert not [warning for warning in recwarn if "look across the examples" in str(warning.message)]


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.parametrize("axis", [0, 1], ids=["times", "examples"])
def test_statistics_over_examples_or_times_of_unknown_number_are_told_apart(axis):
    """Behind a transposition."""
    random = np.random.RandomState(4)
    data = random.normal(size=(N, 5, 4)) * np.linspace(0.2, 3.0, N)[:, None, None]
    kernel = tf.Variable(random.normal(size=(4, 3)), dtype=tf.float32)

    def function(hidden):
        mean, variance = tf.nn.moments(hidden, [axis], keepdims=True)
        return (hidden - mean) * tf.math.rsqrt(variance + 1e-3)

    def loss(data):
        return tf.reduce_mean(tf.reduce_mean(tf.nn.relu(in_time(function)(tf.matmul(data, kernel))), axis=1) ** 2)

    @tf.function(input_signature=[tf.TensorSpec([None, None, 4])])
    def step(data):
        value, gradients = accum.value_and_gradients(loss, data, [kernel], 4, whole_batch="batch_norm")
        return [value] + gradients

    with tf.GradientTape() as tape:
        value = loss(tf.constant(data, tf.float32))
    plain = [value] + tape.gradient(value, [kernel])
    with warned("look across the examples of each micro-batch") as said:
        ours = step(tf.constant(data, tf.float32))
    assert not said
    assert apart(ours, plain) < 2e-5


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.filterwarnings("error::UserWarning")
def test_statistics_of_an_unknown_number_of_features_are_refused_until_it_is_set():
    scale = tf.Variable([1.0, 2.0, 3.0, 4.0])

    def loss(data):
        return tf.reduce_mean(tf.nn.relu(by_moments(data, 0) * scale + 0.3))

    def known(data):
        data.set_shape([None, 4])
        return loss(data)

    def step(function):
        @tf.function(input_signature=[tf.TensorSpec([None, None])])
        def of_batch(data):
            value, gradients = accum.value_and_gradients(function, data, [scale], 4, whole_batch="batch_norm")
            return [value] + gradients

        return of_batch(tf.constant(X))

    with pytest.raises(ValueError, match=r"needs to know the number of features.*statistics of shape \(1, None\)"):
        step(loss)
    ours = step(known)
    with tf.GradientTape() as tape:
        value = loss(tf.constant(X))
    assert apart(ours, [value] + tape.gradient(value, [scale])) < 2e-5


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.filterwarnings("ignore:With `whole_batch`, these operations")
@pytest.mark.parametrize("way", [lambda step: step, tf.function], ids=["eager", "function"])
def test_outputs_of_another_number_than_the_examples_are_refused(way):
    """In a function, their number is known only when it runs."""
    kernel = tf.Variable(KERNEL)

    def step(data):
        return accum.value_and_gradients(
            lambda data: tf.matmul(data, kernel)[::2],
            data,
            [kernel],
            4,
            loss=lambda outputs, data: tf.norm(outputs),
            whole_batch="loss",
        )

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="first axis of each must be the batch"):
        way(step)(tf.constant(X))


@pytest.mark.parametrize("options", [{}, {"traced": True}], ids=["eager", "traced"])
def test_rows_of_positions_are_looked_up_once_as_in_the_full_batch(options):
    """Clipping, and Adam of Keras 3, see how often a row is in a gradient."""
    table, kernel = tf.Variable(tf.reshape(tf.range(20.0), [5, 4])), tf.Variable(tf.ones([4, 1]))
    x = tf.constant(np.random.RandomState(0).normal(size=(7, 3, 4)), tf.float32)

    def function(x):
        places = tf.range(tf.shape(x)[1])[::-1] + 1
        return tf.reduce_mean(tf.matmul(tf.tanh(x + tf.gather(table, places)), kernel[None]) ** 2)

    with tf.GradientTape() as tape:
        loss = function(x)
    expected = tape.gradient(loss, table)
    call = lambda: accum.value_and_gradients(function, (x,), [table, kernel], micro_batch_size=2)[1][0]
    found = tf.function(call)() if options else call()
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-6)


FUNCTIONS = {
    "mean": lambda rows, share: tf.reduce_mean(rows),
    "sum": lambda rows, share: tf.reduce_sum(rows),
    "root of a mean": lambda rows, share: tf.sqrt(tf.reduce_mean(rows)),
    "mean over some": lambda rows, share: tf.reduce_sum(share * rows) / tf.reduce_sum(share),
    "quotient of sums": lambda rows, share: 1.0 - 2.0 * tf.reduce_sum(share * rows) / tf.reduce_sum(share + rows),
    "sum of quotients": lambda rows, share: (
        tf.reduce_sum(share * rows) / tf.reduce_sum(share) + tf.reduce_sum(rows) / tf.reduce_sum(1.0 + share)
    ),
    "greatest": lambda rows, share: tf.reduce_logsumexp(rows),
}


@pytest.mark.law("L21")
@pytest.mark.parametrize("has_norm", [False, True], ids=["", "batch norm"])
@pytest.mark.parametrize("options", [{}, {"whole_batch": "batch_norm"}, {"weight": "share"}], ids=str)
@pytest.mark.parametrize("is_traced", mainly([False, True], True))
@pytest.mark.parametrize("name", mainly(sorted(FUNCTIONS), "sum", "quotient of sums", "root of a mean"))
def test_whatever_a_function_makes_of_its_examples_is_that_of_the_full_batch(name, is_traced, options, has_norm):
    """A mean is proven to be one. The `weight` is what "mean over some" divides by."""
    kernel = tf.Variable(KERNEL)
    shares = tf.constant(0.1 + np.random.RandomState(2).uniform(size=N).astype("float32"))

    def loss(x, share):
        hidden = tf.matmul(x, kernel)
        if has_norm:
            mean, variance = tf.nn.moments(hidden, [0])
            hidden = tf.nn.batch_normalization(hidden, mean, variance, 0.5, None, 1e-3)
        return FUNCTIONS[name](tf.reduce_sum(tf.exp(0.3 * hidden), axis=1), share)

    with tf.GradientTape() as tape:
        value = loss(tf.constant(X), shares)
    expected = [value, tape.gradient(value, kernel)]
    if options.get("weight"):
        options = {"weight": lambda x, share: tf.reduce_sum(share)}
    call = lambda: accum.value_and_gradients(loss, (tf.constant(X), shares), [kernel], 4, **options)
    ours = tf.function(call)() if is_traced else call()
    assert apart([ours[0], *ours[1]], expected) < 2e-5


@tf.function
def normalised(x, kernel):
    hidden = tf.matmul(x, kernel)
    return tf.nn.batch_normalization(hidden, *tf.nn.moments(hidden, [0]), 0.5, None, 1e-3)


def with_branches_in_a_loop(x, y, kernel):
    """TensorFlow traces a function for the loop, and for each branch in it."""
    total, hidden = 0.0, normalised(x, kernel)
    for column in tf.range(2):
        error = hidden[:, column] - y[:, column]
        branches = [functools.partial(tf.reduce_mean, one) for one in (error**2, error)]
        total += tf.cond(tf.reduce_mean(error) > 0.1, *branches)
    return total


def lovasz_hinge(x, y, kernel):
    """The errors in their order, times weights that depend on all classes in that order (Berman et al., 2018)."""
    errors = 1.0 - tf.matmul(x, kernel)[:, 0] * (2.0 * tf.cast(y[:, 0] > 0, tf.float32) - 1.0)
    errors, places = tf.math.top_k(errors, k=tf.shape(errors)[0])
    classes = tf.gather(tf.cast(y[:, 0] > 0, tf.float32), places)
    number = tf.reduce_sum(classes)
    losses = 1.0 - (number - tf.cumsum(classes)) / (number + tf.cumsum(1.0 - classes))
    weights = tf.stop_gradient(tf.concat([losses[:1], losses[1:] - losses[:-1]], 0))
    return tf.tensordot(tf.nn.relu(errors), weights, 1)


@pytest.mark.law("L21")
@pytest.mark.parametrize("function", [with_branches_in_a_loop, lovasz_hinge], ids=lambda one: one.__name__)
def test_a_traced_step_runs_after_python_has_collected_what_it_was_made_of(function):
    """In the hinge, one function of the whole batch takes what another one returns, and no more is known of that."""
    kernel = tf.Variable(KERNEL)
    x, y = tf.constant(X), tf.constant(Y)

    @tf.function
    def whole(x, y):
        with tf.GradientTape() as tape:
            value = tf.function(function)(x, y, kernel)
        return value, tape.gradient(value, kernel)

    @tf.function
    def split(x, y):
        call = tf.function(lambda x, y: function(x, y, kernel))
        return accum.value_and_gradients(call, (x, y), [kernel], 4)

    expected = whole(x, y)
    gc.disable()
    try:
        split.get_concrete_function(x, y)
    finally:
        gc.enable()
    gc.collect()
    ours = split(x, y)
    assert apart([ours[0], *ours[1]], expected) < 2e-6
    parts = [whole(x[i : i + 4], y[i : i + 4])[0] for i in range(0, N, 4)]
    assert abs(np.mean(parts) - expected[0]) > 1e-2


@pytest.mark.law("L18")
def test_data_that_are_none_in_turn_are_told_apart():
    kernel = tf.Variable(KERNEL)

    def loss(x, target, pairs):
        outputs = tf.matmul(x, kernel)
        if target is not None:
            return tf.reduce_mean((outputs - target) ** 2)
        logits = tf.matmul(outputs, pairs, transpose_b=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]), logits))

    for data in ((X, Y, None), (X, None, Y)):
        with tf.GradientTape() as tape:
            expected = loss(*data)
        value, (grad,) = accum.value_and_gradients(loss, data, [kernel], 3)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(grad, tape.gradient(expected, kernel), rtol=1e-5, atol=1e-6)


class Centring(tf.Module):
    """Examples meet in it, or not."""

    def __init__(self, meets):
        super().__init__()
        self.meets, self.kernel = meets, tf.Variable(KERNEL)

    def __call__(self, x):
        return tf.matmul(x - tf.reduce_mean(x, 0) if self.meets else x, self.kernel)


@pytest.mark.slow
@pytest.mark.law("L18")
def test_variables_that_are_made_where_others_have_been_are_no_others():
    """What is proven of variables must not be believed of later ones with the same addresses."""
    model, meets_at = None, {}

    def loss(x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    for trial in range(500):
        model = None
        model = Centring(meets=trial % 3 == 0)
        value, _ = accum.value_and_gradients(loss, (X, Y), [model.kernel], 3)
        np.testing.assert_allclose(value, loss(X, Y), rtol=1e-5)
        if meets_at.setdefault(id(model.kernel), model.meets) != model.meets:
            return
        del value
    pytest.skip("no address has come again")
