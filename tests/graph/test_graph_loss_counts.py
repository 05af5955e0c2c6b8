"""Losses that add up examples, or that divide by a count of their own, are named (laws L4 and L5)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import mainly
from warned import silent, warned

import accum.compat.v1

tf1 = tf.compat.v1

K, SIZE, WIDTH = 2, 3, 2
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(3, K * SIZE, WIDTH)).astype("float32")
Y = RANDOM.normal(size=(3, K * SIZE)).astype("float32")
MASK = np.tile([[1, 1, 1, 0, 1, 0]], (3, 1)).astype("float32")
SPARSE = "Converting sparse IndexedSlices"  # TensorFlow's own
SUMS, MEANS = "adds up examples", "divides by a sum over the micro-batch"


class Problem:
    """A linear regression with a mask, in a graph."""

    def __init__(self, batch=None):
        self.x, self.y = tf1.placeholder(tf.float32, [batch, WIDTH]), tf1.placeholder(tf.float32, [batch])
        self.mask = tf1.placeholder(tf.float32, [batch])
        self.flags = self.mask > 0.5
        self.size = tf.shape(self.x)[0]
        self.weights = tf1.get_variable("w", initializer=np.ones(WIDTH, "float32"))
        self.output = tf.linalg.matvec(self.x, self.weights)
        self.each = (self.output - self.y) ** 2


def trained(loss, optimizer, parts, weight=None, batch=None):
    """The weights after all full batches. `weight` is None or a function of the `Problem`."""
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem(batch)
        options = {} if weight is None else {"weight": weight(problem)}
        train_op = optimizer.minimize(loss(problem), **options)
        session.run(tf1.global_variables_initializer())
        for x, y, mask in zip(*[fed.reshape((3 * parts, -1) + fed.shape[2:]) for fed in (X, Y, MASK)]):
            session.run(train_op, {problem.x: x, problem.y: y, problem.mask: mask})
        return session.run(problem.weights)


def sgd():
    return tf1.train.GradientDescentOptimizer(0.05)


def ours(accum_steps=K, **options):
    return accum.compat.v1.AccumOptimizer(sgd(), accum_steps, **options)


def with_warnings(text, *args, **options):
    """What `trained` returns, where one warning was given, with `text`, or none."""
    with warned() as said:
        weights = trained(*args, **options)
    assert_said(said, text)
    return weights


def assert_said(said, text):
    said = [one for one in said if SPARSE not in one]
    assert len(said) == (text is not None), said
    assert text is None or text in said[0]


def assert_named(text, loss, weight=None, batch=None):
    """A train op of the loss gives one warning, with `text`, or none."""
    with tf.Graph().as_default(), warned() as said:
        problem = Problem(batch)
        ours().minimize(loss(problem), weight=weight(problem) if callable(weight) else weight)
    assert_said(said, text)


def by_cross_entropy(p):
    """As the first tutorials have it."""
    log_of = tf1.log_sigmoid(p.output)
    return -tf.reduce_sum(tf.stack([p.mask, 1.0 - p.mask], 1) * tf.stack([log_of, log_of - p.output], 1))


SUM_LOSSES = {
    "sum": lambda p: tf.reduce_sum(p.each),
    "l2_loss": lambda p: tf.nn.l2_loss(p.output - p.y),
    "cross entropy": by_cross_entropy,
    "losses with SUM": lambda p: tf1.losses.mean_squared_error(p.y, p.output, reduction=tf1.losses.Reduction.SUM),
    "sum of sums": lambda p: tf.reduce_sum(tf.reduce_sum((p.x * p.weights - 1.0) ** 2, 1)),
    "sum of means": lambda p: tf.reduce_sum(tf.reduce_mean((p.x * p.weights - 1.0) ** 2, [-1])),
    "sum beside a mean": lambda p: tf.reduce_sum(p.each) + 2.0 * tf.reduce_sum(p.each * p.mask),
    "scaled": lambda p: tf.cast(tf.reduce_sum(p.each) * 128.0, tf.float32),
    "sum of some": lambda p: tf.reduce_sum(tf.boolean_mask(p.each, p.flags)),
    "sum if any": lambda p: tf1.where(tf.reduce_any(p.flags), tf.reduce_sum(p.each * p.mask), 0.0),
    "pairs of features": lambda p: tf1.losses.mean_pairwise_squared_error(p.y[:, None] * p.x, p.x * p.weights),
}


WEIGHTS = [pytest.param(None, id="unweighted"), pytest.param(lambda p: p.size, id="by examples")]


@pytest.mark.law("L4", "L17")
@pytest.mark.parametrize("weight", mainly(WEIGHTS, "unweighted"))
@pytest.mark.parametrize("name", SUM_LOSSES)
def test_a_loss_that_adds_up_examples_is_named(name, weight):
    assert_named(SUMS, SUM_LOSSES[name], weight)


@pytest.mark.law("L4", "L17")
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", mainly(SUM_LOSSES, "sum"))
def test_a_loss_that_adds_up_examples_takes_another_step_unless_sums_are_asked_for(name, weight):
    loss = SUM_LOSSES[name]
    rate = 1e-4 if name == "scaled" else 0.05
    expected = trained(loss, tf1.train.GradientDescentOptimizer(rate), 1)
    make = lambda **options: accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(rate), K, **options)
    assert np.abs(with_warnings(SUMS, loss, make(), K, weight) - expected).max() > 1e-2
    exact = with_warnings(None, loss, make(reduction="sum"), K)
    np.testing.assert_allclose(exact, expected, rtol=0, atol=5e-6)


GCN_MASK = lambda p: p.mask / tf.reduce_mean(p.mask)
COUNT = lambda p: tf.reduce_sum(p.mask)
SELECTED = lambda p: tf.shape(tf.where(p.flags))[0]
MASKED_MEANS = {
    "quotient": (lambda p: tf.reduce_sum(p.each * p.mask) / tf.reduce_sum(p.mask), COUNT),
    "with epsilon": (lambda p: tf.reduce_sum(p.each * p.mask) / (tf.reduce_sum(p.mask) + 1e-9), COUNT),
    "at least 1": (lambda p: tf.reduce_sum(p.each * p.mask) / tf.maximum(1.0, tf.reduce_sum(p.mask)), COUNT),
    "of means": (lambda p: tf.reduce_mean(p.each * p.mask) / tf.reduce_mean(p.mask), COUNT),
    "if any": (
        lambda p: tf1.where(tf.reduce_any(p.flags), tf.reduce_sum(p.each * p.mask) / tf.reduce_sum(p.mask), 0.0),
        COUNT,
    ),
    "in the mask": (lambda p: tf.reduce_mean(p.each * GCN_MASK(p)), COUNT),
    "in the sum": (lambda p: tf.reduce_sum(p.each * (p.mask / tf.reduce_sum(p.mask))), COUNT),
    "losses": (lambda p: tf1.losses.mean_squared_error(p.y, p.output, tf.cast(p.flags, tf.float32)), COUNT),
    "counted": (
        lambda p: tf.reduce_sum(p.each * p.mask) / tf.cast(tf1.count_nonzero(p.flags), tf.float32),
        lambda p: tf1.count_nonzero(p.mask),
    ),
    "of a boolean_mask": (lambda p: tf.reduce_mean(tf.boolean_mask(p.each, p.flags)), SELECTED),
    "of a boolean_mask's inputs": (
        lambda p: tf.reduce_mean((tf.boolean_mask(p.output, p.flags) - tf.boolean_mask(p.y, p.flags)) ** 2),
        SELECTED,
    ),
    "of gathered rows": (lambda p: tf.reduce_mean(tf.gather(p.each, tf.where(p.flags)[:, 0])), COUNT),
    "of gather_nd": (lambda p: tf.reduce_mean(tf.gather_nd(p.each, tf.where(p.flags))), SELECTED),
    "of a partition": (
        lambda p: tf.reduce_mean(tf.dynamic_partition(p.each, tf.cast(p.flags, tf.int32), 2)[1]),
        COUNT,
    ),
    "of a network of selected rows": (
        lambda p: tf.reduce_mean(tf.matmul(tf.boolean_mask(p.x, p.flags), p.weights[:, None]) ** 2),
        SELECTED,
    ),
    "by the size of what is selected": (
        lambda p: tf.reduce_sum(tf.boolean_mask(p.each, p.flags)) / tf.cast(tf.size(tf.where(p.flags)), tf.float32),
        SELECTED,
    ),
    "losses of selected rows": (
        lambda p: tf1.losses.mean_squared_error(tf.boolean_mask(p.y, p.flags), tf.boolean_mask(p.output, p.flags)),
        SELECTED,
    ),
    "beside the weights": (
        lambda p: 3.0 * (tf.reduce_sum(p.each * p.mask) / tf.reduce_sum(p.mask)) + 0.1 * tf.nn.l2_loss(p.weights),
        COUNT,
    ),
}


@pytest.mark.law("L5", "L17")
@pytest.mark.parametrize("weight", mainly(WEIGHTS + [pytest.param("count", id="by what counts")], "by examples"))
@pytest.mark.parametrize("name", MASKED_MEANS)
def test_a_mean_over_a_mask_that_nothing_weighs_by_is_named(name, weight):
    loss, count = MASKED_MEANS[name]
    is_right = weight == "count"
    assert_named(None if is_right else MEANS, loss, count if is_right else weight)


@pytest.mark.law("L5", "L17")
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", mainly(MASKED_MEANS, "quotient"))
def test_a_mean_over_a_mask_takes_another_step_unless_its_count_is_the_weight(name, weight):
    loss, count = MASKED_MEANS[name]
    expected = trained(loss, sgd(), 1)
    assert np.abs(with_warnings(MEANS, loss, ours(), K, weight) - expected).max() > 1e-3
    np.testing.assert_allclose(with_warnings(None, loss, ours(), K, count), expected, rtol=0, atol=5e-6)


def of_towers(p):
    """The mean of what two towers find."""
    half = p.size // 2
    return tf.reduce_mean(tf.stack([tf.reduce_mean(p.each[:half]), tf.reduce_mean(p.each[half:])]))


def of_summed_towers(p):
    half = p.size // 2
    return tf.reduce_sum([tf.reduce_mean(p.each[:half]), tf.reduce_mean(p.each[half:])])


def with_a_penalty(p):
    """As WGAN-GP has."""
    slope = tf.gradients(p.output, p.x)[0]
    return tf.reduce_mean(p.output) + 10.0 * tf.reduce_mean((tf.norm(slope, axis=1) - 1.0) ** 2)


def in_a_collection(p):
    tf1.losses.mean_squared_error(p.y, p.output)
    tf1.add_to_collection(tf1.GraphKeys.REGULARIZATION_LOSSES, tf.nn.l2_loss(p.weights))
    return tf1.losses.get_total_loss()


def smoothed(p):
    return tf1.losses.sigmoid_cross_entropy(p.mask[:, None], p.output[:, None], label_smoothing=0.1)


def by_class(p):
    """Weights of classes are not zero, so TensorFlow counts all examples."""
    weights = tf.gather([1.0, 3.0], tf.cast(p.mask, tf.int32))
    return tf1.losses.mean_squared_error(p.y, p.output, weights)


def standardized(p):
    """As PPO's advantages, which are another kind of count: their deviation."""
    mean, variance = tf.nn.moments(p.y, [0])
    return tf.reduce_mean(p.output * (p.y - mean) / (tf.sqrt(variance) + 1e-8))


def dice(p):
    """What divides by outputs of the network is no mean over a count."""
    return 1.0 - 2.0 * tf.reduce_sum(p.output * p.mask) / (tf.reduce_sum(p.output) + tf.reduce_sum(p.mask) + 1.0)


def with_a_placeholder(p):
    return tf.reduce_sum(p.each) / tf1.placeholder_with_default(float(SIZE), [])


def by_a_factor_that_is_fed(p):
    return tf.reduce_sum(p.each) * tf1.placeholder_with_default(1.0 / SIZE, [])


def scaled(p):
    scale = tf1.get_variable("scale", initializer=128.0, trainable=False)
    return tf.reduce_mean(p.each) * scale


def time_major(p):
    """Means over the batch, added up over time, whose length is not known."""
    x = tf1.placeholder(tf.float32, [None, None, WIDTH])
    return tf.reduce_sum(tf.reduce_mean(tf.reduce_sum(x * p.weights, 2) ** 2, 1))


def of_steps(p):
    """Means over the batch of each step of a loop."""
    write = lambda i, array: (i + 1, array.write(i, tf.reduce_mean(p.each) * tf.cast(i, tf.float32)))
    array = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    _, array = tf.while_loop(lambda i, _: i < p.size, write, [0, array])
    return tf.reduce_sum(array.stack())


def divided(p):
    return p.each / tf.cast(p.size, tf.float32)


def of_distinct_ids(p):
    """As an embedding looks rows up: each id once, and then one for each example."""
    ids, places = tf.unique(tf.cast(p.mask, tf.int32))
    rows = tf.gather(tf.stack([p.weights, 2.0 * p.weights]), ids)
    return tf.reduce_mean((tf.gather(rows, places) - p.x) ** 2)


def of_rows_that_the_program_chooses(p):
    return tf.reduce_mean(tf.gather(p.each, tf.where([True, False, True])[:, 0]))


def of_a_fixed_number_of_selected_rows(p):
    return tf.reduce_mean(tf.gather(p.each, tf.math.top_k(p.y, 2)[1]))


MEAN_LOSSES = [
    of_distinct_ids,
    of_rows_that_the_program_chooses,
    of_a_fixed_number_of_selected_rows,
    time_major,
    of_steps,
    of_towers,
    of_summed_towers,
    with_a_penalty,
    in_a_collection,
    smoothed,
    by_class,
    standardized,
    dice,
    with_a_placeholder,
    by_a_factor_that_is_fed,
    scaled,
]
FEW_WORDS = {
    "mean": lambda p: tf.reduce_mean(p.each),
    "over examples": lambda p: tf.reduce_sum(p.each) / tf.cast(p.size, tf.float32),
    "over elements": lambda p: tf.reduce_sum((p.x * p.weights) ** 2) / tf.cast(tf.size(p.x), tf.float32),
    "by a number": lambda p: tf.reduce_sum(p.each) / SIZE,
    "by a factor": lambda p: tf.reduce_sum(p.each) * (1.0 / SIZE),
    "by a reciprocal": lambda p: tf.reduce_sum(p.each) * (1.0 / tf.cast(p.size, tf.float32)),
    "divided in the sum": lambda p: tf.reduce_sum(p.each / tf.cast(p.size, tf.float32)),
    "by half": lambda p: tf.reduce_sum(p.each) * (1.0 / 2),
    "by half in the sum": lambda p: tf.reduce_sum(p.each * 0.5),
    "divided before a choice": lambda p: tf.reduce_sum(tf1.where(p.flags, divided(p), 2.0 * divided(p))),
    "divided before a concatenation": lambda p: tf.reduce_sum(tf.concat([divided(p), 2.0 * divided(p)], 0)),
    "divided before a mask": lambda p: tf.reduce_sum(tf.boolean_mask(divided(p), p.flags)),
    "multiplied in the sum": lambda p: tf.reduce_sum(p.each * (1.0 / SIZE)),
    "sum of features' means": lambda p: tf.reduce_sum(tf.reduce_mean((p.x * p.weights) ** 2, 0)),
    "mean of sums": lambda p: tf.reduce_mean(tf.reduce_sum((p.x * p.weights) ** 2, 1)),
    "mean of masked examples": lambda p: tf.reduce_mean(p.each * p.mask),
    "mean if it is finite": lambda p: tf1.where(p.each[0] < 1e9, tf.reduce_mean(p.each), 0.0),
    "losses": lambda p: tf1.losses.mean_squared_error(p.y, p.output),
    "losses, weighted by a number": lambda p: tf1.losses.mean_squared_error(p.y, p.output, 0.5),
    "losses over the batch": lambda p: tf1.losses.mean_squared_error(
        p.y, p.output, p.mask, reduction=tf1.losses.Reduction.SUM_OVER_BATCH_SIZE
    ),
    "example weights": lambda p: tf1.losses.mean_squared_error(p.y, p.output, tf.exp(p.mask)),
    "weighted as fed": lambda p: tf.reduce_sum(p.each * p.mask / tf.cast(p.size, tf.float32)),
    "by attention": lambda p: tf.reduce_sum(p.each * tf.nn.softmax(p.mask)),
    "a small term": lambda p: tf.reduce_mean(p.each) + 1e-4 * tf.reduce_sum(tf.abs(p.output)),
    "weights alone": lambda p: tf.reduce_mean(p.each) + tf.reduce_sum(p.weights**2),
    "data alone": lambda p: tf.reduce_mean(p.each) + tf.reduce_sum(p.y),
    "statistics": lambda p: tf.reduce_sum(tf.abs(tf.matmul(p.x * p.weights, p.x, transpose_a=True))),
    "normalized examples": lambda p: tf.reduce_mean(p.each / (tf.reduce_sum(p.x**2, 1) + 1.0)),
}


@pytest.mark.law("L17")
@pytest.mark.parametrize("weight", mainly(WEIGHTS, "unweighted"))
@pytest.mark.parametrize(
    "loss",
    MEAN_LOSSES + list(FEW_WORDS.values()),
    ids=[loss.__name__ for loss in MEAN_LOSSES] + list(FEW_WORDS),
)
def test_other_losses_are_not_named(loss, weight):
    assert_named(None, loss, weight)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "name, weight, batch",
    [
        pytest.param("sum", None, SIZE, id="a sum over an axis that may be of features"),
        pytest.param("sum", None, 1, id="what is fed as one example"),
        pytest.param("sum", 1, None, id="each micro-batch is one example"),
        pytest.param("quotient", 1.0, None, id="a number that may be the count"),
        pytest.param("quotient", lambda p: tf1.placeholder(tf.float32, []), None, id="a count that is fed"),
    ],
)
def test_what_may_be_meant_is_not_named(name, weight, batch):
    assert_named(None, SUM_LOSSES["sum"] if name == "sum" else MASKED_MEANS[name][0], weight, batch)


@pytest.mark.slow
@pytest.mark.law("L14", "L17")
@pytest.mark.parametrize("loss", [SUM_LOSSES["sum"], MASKED_MEANS["quotient"][0]], ids=["sum", "masked mean"])
def test_losses_are_not_named_where_nothing_accumulates(loss):
    np.testing.assert_array_equal(with_warnings(None, loss, ours(1), 1), trained(loss, sgd(), 1))
    with_warnings(None, loss, ours(1), 1, lambda p: p.size)
    with_warnings(None, loss, ours(1, nonfinite="skip_micro"), 1)
    with_warnings(None, loss, ours(1, transform=lambda pairs: pairs), 1)


@pytest.mark.law("L5", "L17")
@pytest.mark.parametrize("is_right", [False, True])
def test_each_of_several_losses_has_a_count_of_its_own(is_right):
    with tf.Graph().as_default(), warned() as said:
        problem = Problem()
        losses = [MASKED_MEANS["quotient"][0](problem), tf.reduce_mean(problem.each)]
        counts = [COUNT(problem), problem.size]
        ours().minimize(losses, weight=counts if is_right else counts[::-1])
    assert len(said) == (not is_right)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_loss_is_named_once_and_in_time():
    """A sum whose operations are used many times is read without following each path."""
    with tf.Graph().as_default(), warned() as said:
        problem, optimizer = Problem(), ours()
        each, total = problem.each, tf.reduce_sum(problem.each)
        for _ in range(100):
            each, total = each + each, total + total
        for _ in range(2):
            optimizer.minimize(total + tf.reduce_sum(each))
    assert len(said) == 1 and SUMS in said[0]


@pytest.mark.law("L5", "L17")
def test_a_mask_from_an_input_pipeline_is_named():
    with tf.Graph().as_default(), pytest.warns(UserWarning, match=MEANS):
        data = tf1.data.Dataset.from_tensor_slices((X[0], MASK[0])).batch(SIZE)
        x, mask = tf1.data.make_one_shot_iterator(data).get_next()
        each = tf.linalg.matvec(x, tf1.get_variable("w", [WIDTH])) ** 2
        ours().minimize(tf.reduce_sum(each * mask) / tf.reduce_sum(mask), weight=tf.shape(x)[0])


def split(loss, options):
    """The loss of one batch that `value_and_gradients` splits, as a plain program has it, and what it has."""
    with tf.Graph().as_default(), tf1.Session() as session:
        problem = Problem()
        parts = (problem.x, problem.y, problem.mask)

        def function(x, y, mask):
            each = (tf.linalg.matvec(x, problem.weights) - y) ** 2
            return loss(each, mask)

        plain = function(*parts)
        value, _ = accum.compat.v1.value_and_gradients(function, parts, micro_batch_size=SIZE, **options)
        session.run(tf1.global_variables_initializer())
        return session.run([plain, value], dict(zip(parts, (X[0], Y[0], MASK[0]))))


@pytest.mark.slow
@pytest.mark.law("L5", "L17")
def test_without_the_whole_batch_micro_batches_count_by_examples_unless_it_is_told():
    def total(each, _):
        return tf.reduce_sum(each)

    def masked_mean(each, mask):
        return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)

    for loss, text in [(total, SUMS), (masked_mean, MEANS)]:
        with pytest.warns(UserWarning, match=text):
            plain, value = split(loss, {"whole_batch": ()})
        assert abs(plain - value) > 1e-3
        with silent():
            plain, value = split(loss, {})
        np.testing.assert_allclose(value, plain, rtol=2e-6)
    with silent():
        plain, value = split(masked_mean, {"weight": lambda x, y, mask: tf.reduce_sum(mask)})
        np.testing.assert_allclose(value, plain, rtol=2e-6)
        plain, value = split(lambda each, _: tf.reduce_mean(each), {"whole_batch": ()})
        np.testing.assert_allclose(value, plain, rtol=2e-6)


VECTORS = {
    "an example each": lambda p: p.each,
    "an element each": lambda p: (p.x * p.weights) ** 2,
    "one of a list": lambda p: [p.each, tf.reduce_mean(p.each)],
}


@pytest.mark.law("L4", "L17")
@pytest.mark.parametrize("options", [{}, {"reduction": "running_mean"}, {"nonfinite": "skip_micro"}], ids=str)
@pytest.mark.parametrize("name", ["an example each", "an element each"])
def test_a_loss_that_is_no_scalar_is_refused_with_the_remedy(name, options):
    expected = "`loss` must be a scalar.*`tf.reduce_mean.loss.`.*`reduction=.sum.`.*divide penalties on weights"
    with pytest.raises(ValueError, match=expected):
        trained(VECTORS[name], ours(**options), K)
    with tf.Graph().as_default(), pytest.raises(ValueError, match=expected):
        ours(1, **options).accumulation_ops(VECTORS[name](Problem()))


class ByHand:
    """Passes on what `tf.gradients` returns, changed by `change`; then a problem trains as with `minimize`."""

    def __init__(self, optimizer, change=lambda loss, grads: grads, **options):
        self.optimizer, self.change, self.options = optimizer, change, options

    def minimize(self, loss):
        weights = tf1.trainable_variables()
        grads = self.change(loss, tf.gradients(loss, weights, **self.options))
        return self.optimizer.apply_gradients(list(zip(grads, weights)))


@pytest.mark.law("L4", "L17")
@pytest.mark.parametrize("batch", [None, SIZE])
@pytest.mark.parametrize("options", [{}, {"name": "backward"}], ids=["default name", "name"])
@pytest.mark.parametrize("name", ["an example each", "an element each"])
def test_gradients_of_a_loss_that_is_no_scalar_are_refused_with_the_remedy(name, options, batch):
    with pytest.raises(ValueError, match="`loss` must be a scalar.*`tf.reduce_mean.loss.`"):
        trained(VECTORS[name], ByHand(ours(), **options), K, batch=batch)


@pytest.mark.law("L4", "L17")
@pytest.mark.parametrize("name", ["sum", "l2_loss", "sum beside a mean"])
def test_gradients_of_a_loss_that_adds_up_examples_are_named(name):
    got = with_warnings(SUMS, SUM_LOSSES[name], ByHand(ours()), K)
    np.testing.assert_allclose(got, trained(SUM_LOSSES[name], ours(), K), rtol=0, atol=5e-6)


def divided_by_examples(loss, grads):
    return [grad / tf.cast(tf.shape(loss)[0], tf.float32) for grad in grads]


@pytest.mark.law("L4")
def test_gradients_of_a_vector_that_are_divided_by_the_examples_are_those_of_the_mean():
    exact = with_warnings(None, lambda p: p.each, ByHand(ours(), divided_by_examples), K)
    np.testing.assert_allclose(exact, trained(lambda p: tf.reduce_mean(p.each), sgd(), 1), rtol=0, atol=5e-6)


def with_penalty(problem):
    """The inner gradient is that of a vector, whose sum has each example's own gradient."""
    (inner,) = tf.gradients(problem.output, problem.x)
    return tf.reduce_mean(problem.each) + tf.reduce_mean(tf.reduce_sum(inner**2, 1))


@pytest.mark.law("L4")
def test_a_vector_whose_gradient_a_loss_contains_is_no_loss():
    exact = with_warnings(None, with_penalty, ByHand(ours()), K)
    np.testing.assert_allclose(exact, trained(with_penalty, sgd(), 1), rtol=0, atol=5e-6)


@pytest.mark.law("L4")
def test_gradients_of_a_vector_pass_where_their_sum_is_meant():
    exact = with_warnings(None, VECTORS["an example each"], ByHand(ours(reduction="sum")), K)
    np.testing.assert_allclose(exact, trained(VECTORS["an example each"], sgd(), 1), rtol=0, atol=5e-6)
    with tf.Graph().as_default():
        problem = Problem()
        ByHand(ours(), grad_ys=divided(problem) / problem.each).minimize(problem.each)


@pytest.mark.law("L4", "L17")
def test_a_list_of_losses_of_which_one_is_no_scalar_is_refused():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="`loss` must be a scalar"):
        ours().minimize(VECTORS["one of a list"](Problem()), weight=[1.0, 1.0])


@pytest.mark.law("L4")
@pytest.mark.parametrize("name", ["an example each", "an element each"])
def test_a_loss_that_is_no_scalar_is_added_up_exactly(name):
    loss = VECTORS[name]
    exact = with_warnings(None, loss, ours(reduction="sum"), K)
    np.testing.assert_allclose(exact, trained(loss, sgd(), 1), rtol=0, atol=5e-6)


@pytest.mark.law("L1")
def test_a_vector_of_means_is_no_loss_of_examples():
    """TensorFlow differentiates its sum, whose mean over micro-batches is that of the full batch."""

    def means(problem):
        return tf.stack([tf.reduce_mean(problem.each), 0.5 * tf.reduce_mean(problem.each**2)])

    np.testing.assert_allclose(trained(means, ours(), K), trained(means, sgd(), 1), rtol=0, atol=5e-6)


@pytest.mark.law("L14", "L17")
def test_a_loss_that_is_no_scalar_passes_where_its_sum_is_meant():
    np.testing.assert_array_equal(
        trained(VECTORS["an example each"], ours(1), 1), trained(VECTORS["an example each"], sgd(), 1)
    )
    with tf.Graph().as_default():
        problem = Problem()
        ours().minimize(tf.reshape(tf.reduce_mean(problem.each), [1, 1]))
        ours(name="Other").minimize(problem.each, grad_loss=divided(problem) / problem.each)


@pytest.mark.slow
@pytest.mark.law("L4")
def test_a_penalty_on_the_weights_is_divided_where_losses_are_added_up():
    """As the warning of a sum says."""
    loss = lambda penalty: lambda p: tf.reduce_sum(p.each) + penalty * tf.reduce_sum(p.weights**2)
    expected = trained(loss(0.5), sgd(), 1)
    exact = with_warnings(None, loss(0.5 / K), ours(reduction="sum"), K)
    np.testing.assert_allclose(exact, expected, rtol=0, atol=5e-6)
    assert np.abs(trained(loss(0.5), ours(reduction="sum"), K) - expected).max() > 1e-3
