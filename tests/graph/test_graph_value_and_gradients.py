"""`accum.compat.v1.value_and_gradients`: a whole batch in micro-batches, in a static graph (law L18).

With `whole_batch=()` the function is called for each micro-batch, otherwise once.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_slim as slim
from equality import assert_near
from optimizers import mainly
from replicas import RUN, mirrored
from warned import silent, warned

import accum.compat.v1

tf1 = tf.compat.v1
KEYS = tf1.GraphKeys
value_and_gradients = accum.compat.v1.value_and_gradients

N, ROWS = 11, 6
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(N, 4)).astype("float32")
Y = RANDOM.normal(size=(N, 2)).astype("float32")
WORDS = RANDOM.randint(0, ROWS, (N, 3))
FIRST = {
    "table": RANDOM.normal(size=(ROWS, 4)).astype("float32"),
    "kernel": RANDOM.normal(size=(4, 2)).astype("float32"),
    "bias": RANDOM.normal(size=2).astype("float32"),
}
SIZES = [1, 3, 8, N, 20]


def variable(name, partitioner=None, **options):
    first = FIRST[name]
    initializer = tf1.random_normal_initializer(seed=3) if partitioner else tf1.constant_initializer(first)
    return tf1.get_variable(name, first.shape, initializer=initializer, partitioner=partitioner, **options)


def l2(var):
    return 0.1 * tf.reduce_sum(var**2)


def squares(data, labels, partitioner=None):
    """A mean over examples of an embedding and a linear layer, with a regularization loss."""
    features = data["x"] + tf.reduce_mean(
        tf.nn.embedding_lookup(variable("table", partitioner=partitioner), data["words"]), axis=1
    )
    outputs = tf.matmul(features, variable("kernel", regularizer=l2)) + variable("bias")
    return tf.reduce_mean((outputs - labels) ** 2) + tf.add_n(tf1.losses.get_regularization_losses())


class Fed:
    """Placeholders for the batch, of static or unknown size, and what to feed."""

    def __init__(self, count=None):
        self.x = tf1.placeholder(tf.float32, [count, 4])
        self.words = tf1.placeholder(tf.int32, [count, 3])
        self.y = tf1.placeholder(tf.float32, [count, 2])
        self.data = {"x": self.x, "words": self.words}, self.y

    def with_values(self, count=N):
        return {self.x: X[:count], self.words: WORDS[:count], self.y: Y[:count]}


def run_in_graph(build, use_resource=True, count=None, fed_count=N):
    """Build `(value, grads_and_vars)` from the placeholders and run it: `(value, {name: dense gradient}, kinds)`."""
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = Fed(count)
        with tf1.variable_scope("net", use_resource=use_resource):
            value, pairs = build(*fed.data)
        session.run(tf1.global_variables_initializer())
        dense = {var.op.name: tf.convert_to_tensor(grad) for grad, var in pairs if grad is not None}
        kinds = {var.op.name: type(grad) for grad, var in pairs}
        return session.run([value, dense], fed.with_values(fed_count)) + [kinds]


def in_one(function):
    def build(data, labels):
        loss = function(data, labels)
        return loss, tf1.train.GradientDescentOptimizer(1.0).compute_gradients(loss)

    return build


def in_micro_batches(function, size, variables=None, **options):
    return lambda data, labels: value_and_gradients(function, (data, labels), variables, size, **options)


APART = {"whole_batch": ()}
BOTH = pytest.mark.parametrize("options", [{}, APART], ids=["once", "apart"])


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], rtol=2e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, expected in theirs[1].items():
        np.testing.assert_allclose(ours[1][name], expected, rtol=0, atol=2e-6 * np.abs(expected).max(), err_msg=name)


# ----------------------------------------------------------------------------------------------------------------
# It equals the full batch


@pytest.mark.law("L18")
@pytest.mark.parametrize("use_resource", mainly([False, True], False), ids=["ref", "resource"])
@pytest.mark.parametrize("count", mainly([None, N], None), ids=["unknown", "static"])
@pytest.mark.parametrize("size", mainly(SIZES, 3))
@BOTH
def test_value_and_gradients_equal_the_full_batch(options, size, count, use_resource):
    theirs = run_in_graph(in_one(squares), use_resource, count)
    ours = run_in_graph(in_micro_batches(squares, size, **options), use_resource, count)
    assert_close(ours, theirs)
    assert ours[2] == theirs[2]
    assert ours[2]["net/table"] is tf.IndexedSlices


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("count", [9, N])
@BOTH
def test_constants_of_the_graph_as_data_are_no_positions(options, count):
    """Each micro-batch looks up other rows, although all of them are computed from constants."""

    def build(loss_of):
        return lambda data, labels: loss_of(
            {"x": tf.constant(X[:count]), "words": tf.constant(WORDS[:count])}, Y[:count]
        )

    assert_close(run_in_graph(build(in_micro_batches(squares, 3, **options))), run_in_graph(build(in_one(squares))))


@pytest.mark.slow
@pytest.mark.law("L18")
def test_without_weights_the_mean_would_be_another():
    """The same comparison finds a difference where micro-batches count equally, whatever they hold."""
    theirs, ours = run_in_graph(in_one(squares)), run_in_graph(in_micro_batches(squares, 3, weight="equal"))
    parts = [run_in_graph(in_one(squares_of(part)))[0] for part in (slice(2), slice(2, 5), slice(5, 8), slice(8, 11))]
    np.testing.assert_allclose(ours[0], np.mean(parts), rtol=2e-6)
    assert abs(ours[0] - theirs[0]) > 1e-2
    assert np.abs(ours[1]["net/kernel"] - theirs[1]["net/kernel"]).max() > 1e-2


def squares_of(part):
    return lambda data, labels: squares({name: tensor[part] for name, tensor in data.items()}, labels[part])


@pytest.mark.slow
@pytest.mark.law("L18")
def test_a_weight_of_the_user_s_own_makes_a_masked_mean_exact():
    def masked(data, labels):
        mask = tf.cast(data["words"][:, 0] > 2, tf.float32)
        errors = tf.reduce_sum((tf.matmul(data["x"], variable("kernel")) - labels) ** 2, axis=1)
        return tf.reduce_sum(mask * errors) / tf.reduce_sum(mask)

    def count(data, labels):
        return tf.reduce_sum(tf.cast(data["words"][:, 0] > 2, tf.float32))

    theirs = run_in_graph(in_one(masked))
    for how in ({}, APART):
        assert_close(run_in_graph(in_micro_batches(masked, 3, weight=count, **how)), theirs)
        assert_close(run_in_graph(in_micro_batches(masked, 1, weight=count, **how)), theirs)  # some would be NaN
    assert_close(run_in_graph(in_micro_batches(masked, 8)), theirs)  # which sees all examples
    assert abs(run_in_graph(in_micro_batches(masked, 8, **APART))[0] - theirs[0]) > 1e-3


@pytest.mark.law("L18", "L21")
def test_with_a_weight_too_examples_meet_in_the_whole_batch():
    def normalized(data, labels):
        hidden = tf.matmul(data["x"], variable("kernel"))
        mean, variance = tf.nn.moments(hidden, [0])
        return tf.reduce_mean((tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3) - labels) ** 2)

    count = lambda data, labels: tf.shape(labels)[0]
    theirs = run_in_graph(in_one(normalized))
    assert_close(run_in_graph(in_micro_batches(normalized, 3, weight=count)), theirs)
    assert abs(run_in_graph(in_micro_batches(normalized, 3, weight=count, **APART))[0] - theirs[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
@BOTH
def test_partitioned_variables(options, use_resource):
    def split(data, labels):
        return squares(data, labels, partitioner=tf1.fixed_size_partitioner(2))

    ours = run_in_graph(in_micro_batches(split, 4, **options), use_resource)
    assert_close(ours, run_in_graph(in_one(split), use_resource))
    assert "net/table/part_1" in ours[1]


@pytest.mark.slow
@pytest.mark.law("L18")
def test_a_partitioned_variable_in_the_list_stands_for_its_parts():
    def build(data, labels):
        table = variable("table", partitioner=tf1.fixed_size_partitioner(2))
        loss = lambda data, labels: tf.reduce_mean(
            (tf.nn.embedding_lookup(table, data["words"])[:, 0, :2] - labels) ** 2
        )
        return value_and_gradients(loss, (data, labels), [table], 4)

    assert sorted(run_in_graph(build)[1]) == ["net/table/part_0", "net/table/part_1"]


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("name", ["MomentumOptimizer", "AdamOptimizer", "AccumOptimizer"])
def test_any_optimizer_of_static_graphs_takes_the_gradients(name):
    make = {
        "MomentumOptimizer": lambda: tf1.train.MomentumOptimizer(0.05, 0.9),
        "AdamOptimizer": lambda: tf1.train.AdamOptimizer(0.05),
        "AccumOptimizer": lambda: accum.compat.v1.AccumOptimizer(tf1.train.AdamOptimizer(0.05), accum_steps=2),
    }[name]

    def trained(build):
        with tf.Graph().as_default(), tf1.Session() as session:
            fed, step = Fed(), tf1.train.get_or_create_global_step()
            _, pairs = build(*fed.data)
            train_op = make().apply_gradients(pairs, step)
            session.run(tf1.global_variables_initializer())
            for _ in range(6):
                session.run(train_op, fed.with_values())
            return session.run([tf1.trainable_variables(), step])

    (theirs, steps), (ours, our_steps) = trained(in_one(squares)), trained(in_micro_batches(squares, 3))
    assert our_steps == steps
    assert_near(ours, theirs)


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("size", SIZES)
def test_no_call_sees_more_than_a_micro_batch(size):
    sizes = []

    def recorded(data, labels):
        with tf.control_dependencies(
            [tf1.py_func(lambda x, y: sizes.append((len(x), len(y))), [data["x"], labels], [])]
        ):
            return squares(data, labels)

    run_in_graph(in_micro_batches(recorded, size, **APART))
    first = (N - 1) % size + 1
    assert sizes == [(first, first)] + [(size, size)] * ((N - first) // size)


@pytest.mark.slow
@pytest.mark.law("L18")
def test_a_batch_without_examples_counts_for_nothing():
    value, grads, _ = run_in_graph(in_micro_batches(squares, 3, **APART), fed_count=0)
    assert value == 0.0 and all(not grad.any() for grad in grads.values())


@pytest.mark.slow
@pytest.mark.law("L18")
def test_by_default_a_batch_without_examples_is_as_the_full_batch():
    theirs, ours = [run_in_graph(build, fed_count=0) for build in (in_one(of_kernel), in_micro_batches(of_kernel, 3))]
    np.testing.assert_array_equal(ours[0], theirs[0])  # NaN
    np.testing.assert_array_equal(ours[1]["net/kernel"], theirs[1]["net/kernel"])


@pytest.mark.slow
@pytest.mark.law("L18")
def test_ragged_and_sparse_tensors_and_what_is_no_tensor():
    words = [[1, 2], [], [3], [0, 1, 2], [5]]
    sparse = np.where(RANDOM.uniform(size=(5, 4)) < 0.5, RANDOM.normal(size=(5, 4)), 0.0).astype("float32")

    def loss(ragged, matrix, scale, nothing):
        assert nothing is None
        features = tf.reduce_sum(
            tf.RaggedTensor.from_row_splits(
                tf.nn.embedding_lookup(variable("table"), ragged.values), ragged.row_splits
            ),
            axis=1,
        ) + scale * tf.sparse.sparse_dense_matmul(matrix, np.eye(4, dtype="float32"))
        return tf.reduce_mean(tf.matmul(features, variable("kernel")) ** 2)

    def build(make):
        def made(data, labels):
            return make(tf.ragged.constant(words), tf.sparse.from_dense(sparse), tf.constant(2.0), None)

        return made

    def whole(*data):
        return in_one(lambda *_: loss(*data))(None, None)

    for size in (1, 2, 5):
        ours = run_in_graph(build(lambda *data, size=size: value_and_gradients(loss, data, None, size)))
        assert_close(ours, run_in_graph(build(whole)))


@pytest.mark.slow
@pytest.mark.law("L18")
@BOTH
def test_control_flow_within_the_function(options):
    def recurrent(data, labels):
        kernel = variable("kernel")
        scaled = tf.cond(tf.reduce_mean(data["x"]) > 100.0, lambda: data["x"], lambda: 2.0 * data["x"])
        body = lambda step, state: (step + 1, tf.tanh(tf.matmul(tf.matmul(state, kernel), kernel, transpose_b=True)))
        _, state = tf.while_loop(lambda step, _: step < 3, body, (0, scaled))
        return tf.reduce_mean((tf.matmul(state, kernel) - labels) ** 2)

    assert_close(run_in_graph(in_micro_batches(recurrent, 4, **options)), run_in_graph(in_one(recurrent)))


@pytest.mark.slow
@pytest.mark.law("L18")
@BOTH
def test_two_replicas_with_different_numbers_of_examples(options):
    """Each computes the mean over its own part, as with plain TensorFlow."""

    def gradients_by_replica(build):
        strategy = mirrored()
        with tf.Graph().as_default(), tf1.Session() as session, strategy.scope():

            def of_replica():
                is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
                start, end = tf.where(is_first, 0, 7), tf.where(is_first, 7, N)
                data = {"x": tf.constant(X)[start:end], "words": tf.constant(WORDS)[start:end]}
                _, pairs = build(data, tf.constant(Y)[start:end])
                return [tf.convert_to_tensor(grad) for grad, _ in pairs]

            of_replicas = [strategy.experimental_local_results(grads) for grads in getattr(strategy, RUN)(of_replica)]
            session.run(tf1.global_variables_initializer())
            return session.run(of_replicas)

    theirs = gradients_by_replica(in_one(squares))
    ours = gradients_by_replica(in_micro_batches(squares, 3, **options))
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs):
        assert len(one) == 2 and not np.allclose(one[0], one[1], atol=1e-3)
        for mine, expected in zip(one, other):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# ----------------------------------------------------------------------------------------------------------------
# Variables, names and collections are those of one call


def scoped(data, labels):
    """Layers whose names TensorFlow chooses."""
    hidden = data["x"]
    for _ in range(2):
        with tf1.variable_scope(None, default_name="layer"):
            hidden = tf.tanh(tf.matmul(hidden, tf1.get_variable("w", [4, 4], initializer=tf1.ones_initializer())))
    return tf.reduce_mean(hidden) + 0.0 * tf.reduce_mean(labels)


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("size", [3, 20])
@BOTH
def test_default_names_are_those_of_one_call_before_and_after(options, size):
    def names(build):
        with tf.Graph().as_default():
            fed = Fed()
            with tf1.variable_scope("net"):
                scoped(*fed.data)
                build(*fed.data)
                scoped(*fed.data)
            return [var.name for var in tf1.global_variables()]

    assert names(in_micro_batches(scoped, size, **options)) == names(in_one(scoped))


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize(
    "make", [lambda: tf.Variable(tf.ones([4, 2])), lambda: tf1.get_variable("w%d" % next(COUNTER), [4, 2])]
)
def test_a_function_that_creates_variables_anew_is_refused(make):
    def fresh(data, labels):
        return tf.reduce_mean((tf.matmul(data["x"], make()) - labels) ** 2)

    with pytest.raises(ValueError, match="in its second call too.*create variables and Keras layers outside"):
        run_in_graph(in_micro_batches(fresh, 3, **APART))
    run_in_graph(in_micro_batches(fresh, 3))  # which calls it once


COUNTER = iter(range(1000))


def counts(*keys):
    return [len(tf1.get_collection(key)) for key in keys]


def from_collections(data, labels):
    outputs = tf.matmul(data["x"], variable("kernel", regularizer=l2))
    tf1.losses.mean_squared_error(labels, outputs)
    tf1.losses.absolute_difference(labels, outputs)
    tf1.add_to_collection(KEYS.REGULARIZATION_LOSSES, tf.reduce_mean(outputs**2))  # as of an activity
    tf1.summary.scalar("loss", tf.reduce_mean(outputs))
    return tf1.losses.get_total_loss()


@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("size", mainly(SIZES, 3))
@BOTH
def test_losses_in_collections_count_as_in_one_call(options, size):
    def with_one_before(build):
        def built(data, labels):
            tf1.losses.add_loss(tf.constant(5.0))
            made = build(data, labels)
            seen.append(counts(KEYS.LOSSES, KEYS.REGULARIZATION_LOSSES, KEYS.SUMMARIES))
            return made

        return built

    seen = []
    ours = run_in_graph(with_one_before(in_micro_batches(from_collections, size, **options)))
    assert_close(ours, run_in_graph(with_one_before(in_one(from_collections))))
    assert seen == [[1, 1, 0] if options else [3, 2, 1], [3, 2, 1]]


@pytest.mark.slow
@pytest.mark.law("L18")
def test_losses_of_variables_that_each_call_would_add_are_refused():
    def explicit(data, labels):
        kernel = variable("kernel")
        tf1.add_to_collection(KEYS.REGULARIZATION_LOSSES, l2(kernel))
        return tf.reduce_mean((tf.matmul(data["x"], kernel) - labels) ** 2) + tf1.losses.get_regularization_loss()

    with pytest.raises(ValueError, match="would count them twice.*`regularizer=` where the variable"):
        run_in_graph(in_micro_batches(explicit, 3, **APART))
    assert_close(run_in_graph(in_micro_batches(explicit, N, **APART), count=N), run_in_graph(in_one(explicit)))
    assert_close(run_in_graph(in_micro_batches(explicit, 3)), run_in_graph(in_one(explicit)))


@pytest.mark.slow
@pytest.mark.law("L18")
def test_a_graph_with_a_loop_is_imported_again(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = Fed()
        value, pairs = in_micro_batches(squares, 3, **APART)(*fed.data)
        train_op = tf1.train.AdamOptimizer(0.05).apply_gradients(pairs)
        session.run(tf1.global_variables_initializer())
        path = tf1.train.Saver().save(session, str(tmp_path / "at"))
        for _ in range(2):
            expected, _ = session.run([value, train_op], fed.with_values())
        feeds = [(tensor.name, fed_value) for tensor, fed_value in fed.with_values().items()]
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        tf1.train.import_meta_graph(path + ".meta").restore(session, path)
        for _ in range(2):
            value_in_loop, _ = session.run([value.name, train_op.name], dict(feeds))
        assert value_in_loop == expected and len(graph.get_collection(KEYS.WHILE_CONTEXT)) == 1


# ----------------------------------------------------------------------------------------------------------------
# Batch normalisation


def slim_layer(x, **options):
    options = {"is_training" if name == "training" else name: value for name, value in options.items()}
    return slim.batch_norm(x, decay=0.75, **dict({"is_training": True}, **options))


def tf_layer(x, **options):
    return tf1.layers.batch_normalization(x, momentum=0.75, **dict({"training": True}, **options))


def averages_after(layer, batches, size=None, use_resource=True, fed=None, waits=False, **options):
    """The moving averages after steps with `batches` through `layer`, and what stands in UPDATE_OPS."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, (None,) + batches[0].shape[1:])
        made = {name: make() for name, make in options.items() if callable(make)}
        options.update(made)

        def loss(x):
            value = tf.reduce_mean((layer(x, **options) - 1.0) ** 2)
            with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS) if waits else []):
                return tf.identity(value)

        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        with tf1.variable_scope("net", use_resource=use_resource):
            if size is None:
                pairs = optimizer.compute_gradients(loss(x))
            else:
                _, pairs = value_and_gradients(loss, x, micro_batch_size=size, **APART)
        with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS)):
            train_op = optimizer.apply_gradients(pairs)
        session.run(tf1.global_variables_initializer())
        for batch in batches:
            session.run(train_op, dict({x: batch}, **(fed or {})))
        averages = [v for v in tf1.global_variables() if v.op.name.endswith(("moving_mean", "moving_variance"))]
        return session.run(averages), counts(KEYS.UPDATE_OPS)


SLIM = "tf_slim 1.1.0 takes this from a module that Keras 2.13 dropped"
LAYERS = [
    pytest.param(slim_layer, id="slim.batch_norm", marks=pytest.mark.tf(max="2.12", because=SLIM)),
    pytest.param(tf_layer, id="tf.layers"),
]
SHAPES = [
    pytest.param((5,), False, id="rank2-ref"),
    pytest.param((3, 2, 5), False, id="rank4-ref"),
    pytest.param((3, 2, 5), True, id="rank4-resource"),
]


@pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
@pytest.mark.slow
@pytest.mark.law("L13", "L18")
@pytest.mark.parametrize("is_fused", [None, False], ids=["fused", "plain"])
@pytest.mark.parametrize("shape,use_resource", SHAPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_averages_of_batch_norm_move_once_by_the_whole_batch(layer, shape, use_resource, is_fused):
    batches = [RANDOM.normal(3.0, 2.0, (count,) + shape).astype("float32") for count in (11, 4)]
    options = {"use_resource": use_resource, "fused": is_fused}
    theirs, count = averages_after(layer, batches, **options)
    for size in (2, 3, 20):
        ours, our_count = averages_after(layer, batches, size, **options)
        assert our_count == count == [2]
        assert_near(ours, theirs)


@pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("is_training", [False, True])
def test_averages_of_batch_norm_whose_training_is_a_tensor(is_training):
    batches = [RANDOM.normal(3.0, 2.0, (7, 3, 2, 5)).astype("float32")]
    options = {"training": lambda: tf1.placeholder_with_default(is_training, []), "fused": False}
    ours, _ = averages_after(tf_layer, batches, 2, **options)
    theirs, _ = averages_after(tf_layer, batches, training=is_training, fused=False)
    assert_near(ours, theirs)


@pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_averages_of_batch_norm_whose_updates_the_function_itself_runs(use_resource):
    batches = [RANDOM.normal(3.0, 2.0, (count, 5)).astype("float32") for count in (11, 4)]
    options = {"use_resource": use_resource, "fused": False, "waits": True}
    ours, _ = averages_after(tf_layer, batches, 3, **options)
    assert_near(ours, averages_after(tf_layer, batches, **options)[0])


@pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "options, is_sparse, is_named",
    [
        ({}, False, False),
        ({}, True, True),
        ({"weight": "equal"}, False, True),
        (APART, True, False),
    ],
    ids=str,
)
def test_batch_norm_that_sees_a_micro_batch_is_named_unless_that_is_accepted(options, is_sparse, is_named):
    def loss(x, words):
        dense = tf.sparse.to_dense(words) if is_sparse else words
        return tf.reduce_mean(tf_layer(x) ** 2) + tf.reduce_mean(dense)

    with tf.Graph().as_default(), warned(containing="uses the mean and variance of a micro-batch") as texts:
        x, words = tf1.placeholder(tf.float32, [None, 3]), tf1.placeholder(tf.float32, [None, 2])
        words = tf.sparse.from_dense(words) if is_sparse else words
        value_and_gradients(loss, (x, words), micro_batch_size=2, **options)
    assert len(texts) == is_named


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("size", [2, 20])
def test_updates_other_than_those_of_batch_norm_are_refused(size):
    def counting(data, labels):
        seen = tf1.get_variable("seen", [], trainable=False)
        tf1.add_to_collection(KEYS.UPDATE_OPS, tf1.assign_add(seen, tf.reduce_mean(labels)))
        return squares(data, labels)

    with pytest.raises(ValueError, match="can't be taken over: .*outside of `function`, or without UPDATE_OPS"):
        run_in_graph(in_micro_batches(counting, size, **APART))


@pytest.mark.slow
@pytest.mark.law("L17")
def test_batch_norm_that_updates_in_place_is_refused():
    """Written out as in slim, which does not run on every TensorFlow."""

    def in_place(data, labels):
        average = tf1.get_variable("average", [4], trainable=False, initializer=tf1.zeros_initializer())
        mean = tf.reduce_mean(data["x"], axis=0)
        with tf.control_dependencies([tf1.assign_sub(average, (average - mean) * tf.constant(0.25))]):
            return squares(data, labels)

    for size in (3, 20):
        with pytest.raises(ValueError, match="in place.*leaving out `updates_collections=None`"):
            run_in_graph(in_micro_batches(in_place, size, **APART))


# ----------------------------------------------------------------------------------------------------------------
# Whole pipelines


def mean_of_squares(features, labels):
    outputs = tf.matmul(features["x"], variable("kernel")) + variable("bias")
    return tf1.losses.mean_squared_error(labels, outputs) + 0.01 * tf.nn.l2_loss(outputs) / tf.cast(
        tf.shape(outputs)[0], tf.float32
    )


def estimator(folder, size, strategy=None):
    def model_fn(features, labels, mode):
        if size is None or mode != tf1.estimator.ModeKeys.TRAIN:
            loss = mean_of_squares(features, labels)
            pairs = None
        else:
            loss, pairs = value_and_gradients(mean_of_squares, (features, labels), micro_batch_size=size)
        if mode != tf1.estimator.ModeKeys.TRAIN:
            return tf1.estimator.EstimatorSpec(mode, loss=loss)
        optimizer = tf1.train.MomentumOptimizer(0.05, 0.9)
        pairs = optimizer.compute_gradients(loss) if pairs is None else pairs
        train_op = optimizer.apply_gradients(pairs, tf1.train.get_global_step())
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = tf1.estimator.RunConfig(str(folder), train_distribute=strategy, tf_random_seed=1)
    return tf1.estimator.Estimator(model_fn, str(folder), config)


def whole_batches():
    return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(N - 3).repeat()  # 8 and 3 examples in turn


def estimated(folder, size, strategy=None):
    made = estimator(folder, size, strategy)
    made.train(whole_batches, steps=5)
    metrics = made.evaluate(whole_batches, steps=2)
    return [made.get_variable_value(name) for name in ("kernel", "bias")], metrics


@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
@pytest.mark.slow
@pytest.mark.law("L18")
@pytest.mark.parametrize("size", [2, 5])
def test_estimator_whose_input_fn_gives_the_whole_batch(tmp_path, size):
    theirs, metrics = estimated(tmp_path / "plain", None)
    ours, our_metrics = estimated(tmp_path / "ours", size)
    assert_near(ours, theirs)
    assert our_metrics["global_step"] == metrics["global_step"] == 5
    np.testing.assert_allclose(our_metrics["loss"], metrics["loss"], rtol=2e-6)


@pytest.mark.tf(max="2.12", because="from TF 2.13 on, even a plain Estimator hangs under a MirroredStrategy")
@pytest.mark.slow
@pytest.mark.law("L18")
def test_estimator_under_a_mirrored_strategy_whose_input_fn_gives_the_whole_batch(tmp_path):
    theirs, _ = estimated(tmp_path / "plain", None, mirrored())
    ours, _ = estimated(tmp_path / "ours", 3, mirrored())
    assert_near(ours, theirs)


@pytest.mark.slow
@pytest.mark.law("L18")
def test_a_network_and_losses_of_slim(tmp_path):
    images = RANDOM.normal(size=(N, 6, 6, 2)).astype("float32")
    labels = RANDOM.randint(0, 3, N)

    def network(images, labels):
        with slim.arg_scope([slim.conv2d, slim.fully_connected], weights_regularizer=slim.l2_regularizer(0.01)):
            net = slim.repeat(images, 2, slim.conv2d, 4, [3, 3], scope="conv", activation_fn=tf.nn.tanh)
            net = slim.conv2d(net, 3, [3, 3], activation_fn=tf.nn.tanh)
            logits = slim.fully_connected(slim.flatten(net), 3, activation_fn=None)
        tf1.losses.sparse_softmax_cross_entropy(labels, logits)
        return tf1.losses.get_total_loss()

    def trained(folder, size):
        with tf.Graph().as_default():
            tf1.set_random_seed(1)
            step = tf1.train.get_or_create_global_step()
            with tf1.variable_scope("", initializer=tf1.glorot_uniform_initializer(seed=2)):
                data = tf.constant(images), tf.constant(labels, tf.int64)
                optimizer = tf1.train.MomentumOptimizer(0.1, 0.9)
                if size is None:
                    loss = network(*data)
                    pairs = optimizer.compute_gradients(loss)
                else:
                    loss, pairs = value_and_gradients(network, data, micro_batch_size=size)
            train_op = optimizer.apply_gradients(pairs, step)
            names = [var.op.name for var in slim.get_model_variables()]
            first = [
                var.assign(np.random.RandomState(len(var.op.name)).normal(0.0, 0.3, var.shape.as_list()))
                for var in tf1.trainable_variables()
            ]
            losses = []
            with tf1.train.MonitoredTrainingSession(checkpoint_dir=str(folder)) as session:
                session.run(first)
                for _ in range(4):
                    losses.append(session.run([loss, train_op])[0])
            reader = tf1.train.load_checkpoint(str(folder))
            return names, losses, [reader.get_tensor(name) for name in names], reader.get_tensor("global_step")

    theirs, ours = trained(tmp_path / "plain", None), trained(tmp_path / "ours", 3)
    assert ours[0] == theirs[0] and len(set(ours[0])) == 8
    np.testing.assert_allclose(ours[1], theirs[1], rtol=2e-6)
    assert_near(ours[2], theirs[2])
    assert ours[3] == theirs[3] == 4


# ----------------------------------------------------------------------------------------------------------------
# Arguments


def of_kernel(data, labels):
    return tf.reduce_mean((tf.matmul(data["x"], variable("kernel")) - labels) ** 2)


@pytest.mark.slow
@pytest.mark.law("L18")
def test_a_list_of_variables_is_answered_in_its_order():
    def build(data, labels):
        bias, table = variable("bias"), variable("table")
        loss = lambda data, labels: tf.reduce_mean(tf.gather(table, data["words"])) + tf.reduce_mean(labels)
        _, pairs = value_and_gradients(loss, (data, labels), [bias, table], 4)
        assert [var is listed for (_, var), listed in zip(pairs, [bias, table])] == [True, True]
        return tf.constant(0.0), pairs

    _, grads, kinds = run_in_graph(build)
    assert kinds == {"net/bias": type(None), "net/table": tf.IndexedSlices} and list(grads) == ["net/table"]


@pytest.mark.slow
@pytest.mark.law("L18")
def test_gradients_have_the_dtype_of_their_variables():
    def loss(data, labels):
        half = tf1.get_variable("half", [4, 2], tf.float16, tf1.ones_initializer())
        return tf.reduce_mean((tf.matmul(tf.cast(data["x"], tf.float16), half) - tf.cast(labels, tf.float16)) ** 2)

    value, grads, _ = run_in_graph(in_micro_batches(loss, 3))
    assert value.dtype == grads["net/half"].dtype == np.float16


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "options,error,words",
    [
        ({"micro_batch_size": 0}, ValueError, "`micro_batch_size` must be an int >= 1. Received: micro_batch_size=0."),
        ({"micro_batch_size": 2.5}, TypeError, "Received: micro_batch_size=2.5."),
        ({"micro_batch_size": True}, TypeError, "Received: micro_batch_size=True."),
        ({"micro_batch_size": None}, TypeError, "None and 'auto' are for `GradientAccumulateModel`"),
        ({"micro_batch_size": "auto"}, ValueError, "None and 'auto' are for `GradientAccumulateModel`"),
        ({"weight": "tokens"}, ValueError, "`weight` must be one of ['examples', 'equal']"),
        ({"weight": lambda data, labels: -1.0, "whole_batch": ()}, ValueError, "`weight` must be a scalar >= 0"),
        ({"function": 3}, TypeError, "`function` must be a function"),
        ({"function": lambda data, labels: labels}, ValueError, "must return a scalar loss"),
        ({"function": lambda data, labels: None}, TypeError, "must return a scalar loss"),
        ({"variables": []}, ValueError, "`variables` must hold at least one variable"),
        ({"variables": ["kernel"]}, TypeError, "`variables` must be a list of variables"),
        ({"data": ({"x": tf1.zeros_like}, 3)}, ValueError, "There is no batch to split"),
        ({"data": ({"x": np.zeros([3, 4])}, np.zeros([2, 2]))}, ValueError, "first axes of lengths [2, 3]"),
    ],
)
def test_bad_arguments_are_refused(options, error, words):
    with tf.Graph().as_default(), pytest.raises(error) as caught:
        fed = Fed()
        options = dict({"function": of_kernel, "data": fed.data, "micro_batch_size": 3}, **options)
        value_and_gradients(**options)
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_loss_that_depends_on_no_variable_is_refused():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="No gradient for any variable in .*kernel"):
        variable("kernel")
        value_and_gradients(lambda data, labels: tf.reduce_mean(labels), Fed().data, micro_batch_size=3)


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("rows", [N - 1, N + 1])
@BOTH
def test_batches_of_different_lengths_are_refused_in_the_session(options, rows):
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = Fed()
        value, _ = value_and_gradients(of_kernel, fed.data, micro_batch_size=3, **options)
        session.run(tf1.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match="accum: batch-axis"):
            session.run(value, {fed.x: X, fed.words: WORDS, fed.y: np.ones([rows, 2])})


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.tf("2.2")
def test_eager_execution_is_refused():
    with pytest.raises(RuntimeError, match="or use `accum.value_and_gradients`"):
        value_and_gradients(of_kernel, ({"x": X}, Y), micro_batch_size=3)


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_variables_that_the_function_changes_for_each_micro_batch_are_named(use_resource):
    def run(gradients_of):
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [None])
            weight, count = [
                tf1.get_variable(name, initializer=1.0, use_resource=use_resource) for name in ("w", "count")
            ]

            def loss(x):
                with tf.control_dependencies([count.assign_add(1.0)]):
                    return weight * tf.reduce_mean(x) * count.read_value()

            pairs = gradients_of(loss, x, [weight])
            train_op = tf1.train.GradientDescentOptimizer(1.0).apply_gradients(pairs)
            session.run(tf1.global_variables_initializer())
            session.run(train_op, {x: np.arange(6.0)})
            return session.run(weight)

    def whole(loss, x, variables):
        return tf1.train.GradientDescentOptimizer(1.0).compute_gradients(loss(x), variables)

    def ours(loss, x, variables):
        with pytest.warns(UserWarning, match="once for each micro-batch.*outside of `function`.*'count'"):
            return accum.compat.v1.value_and_gradients(loss, x, variables, 2, **APART)[1]

    assert abs(run(whole) - (1.0 - 2.0 * 2.5)) < 2e-6
    assert abs(run(ours) - run(whole)) > 1.0


@pytest.mark.slow
@pytest.mark.law("L17")
def test_variables_that_are_changed_outside_of_the_function_are_not_named():
    with tf.Graph().as_default(), silent():
        x, count = tf1.placeholder(tf.float32, [None]), tf1.get_variable("count", initializer=1.0)
        weight = tf1.get_variable("w", initializer=1.0)
        with tf.control_dependencies([count.assign_add(1.0)]):
            counted = count.read_value()
        value_and_gradients(lambda x: tf.reduce_mean(x) * weight * counted, x, [weight], 2, **APART)


@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
def test_each_use_of_a_layer_moves_its_averages_in_turn(use_resource):
    data = np.random.RandomState(2).normal(3.0, 2.0, size=(11, 5)).astype("float32")
    others = 0.5 * data - 2.0
    with tf.Graph().as_default(), tf1.Session() as session:
        averages = []
        with tf1.variable_scope("norm", use_resource=use_resource):
            for name in ("moving_mean", "moving_variance"):
                averages.append(tf1.get_variable(name, [5], initializer=tf1.zeros_initializer(), trainable=False))
        weight = tf1.get_variable("w", initializer=1.0, use_resource=use_resource)

        def normalized(x):
            mean, variance = tf.nn.moments(x, [0])
            for average, moment in zip(averages, (mean, variance)):
                move = tf1.assign_sub(average, (average.read_value() - moment) * tf.constant(0.25))
                tf1.add_to_collection(KEYS.UPDATE_OPS, move)
            return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)

        def loss(x, y):
            return tf.reduce_mean((normalized(x) * weight - 1.0) ** 2) + tf.reduce_mean((normalized(y) - weight) ** 2)

        batch = tf1.placeholder(tf.float32, [None, 5]), tf1.placeholder(tf.float32, [None, 5])
        value_and_gradients(loss, batch, [weight], 4, **APART)
        moves = tf1.get_collection(KEYS.UPDATE_OPS)
        session.run(tf1.global_variables_initializer())
        session.run(moves, dict(zip(batch, (data, others))))
        ours = session.run(averages)
    for value, statistic in zip(ours, (np.mean, np.var)):
        moved = np.zeros(5)
        for used in (data, others):
            moved = 0.75 * moved + 0.25 * statistic(used.astype("float64"), axis=0)
        np.testing.assert_allclose(value, moved, rtol=0, atol=2e-6)
