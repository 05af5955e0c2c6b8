"""`whole_batch` and `loss` of `accum.compat.v1.value_and_gradients`: batch normalisation in a static graph (law L19).

The oracle is plain TensorFlow on the whole batch, with `compute_gradients` and UPDATE_OPS.
"""

import re

import numpy as np
import pytest
import tensorflow as tf
import tf_slim as slim
from optimizers import mainly
from warned import silent, warned

import accum.compat.v1

tf1 = tf.compat.v1
KEYS = tf1.GraphKeys
N = 11
RANDOM = np.random.RandomState(1)
IMAGES = (RANDOM.normal(size=(N, 6, 6, 2)) * np.linspace(0.2, 3.0, N)[:, None, None, None]).astype("float32")
CLASSES = RANDOM.randint(0, 3, N)
TF_VERSION = tuple(int(part) for part in tf.__version__.split(".")[:2])


def cross_entropy(logits, images, classes):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits))


def of_layers(images, fused=True, **options):
    hidden, first = images, tf1.glorot_uniform_initializer(seed=3)
    for _ in range(2):
        hidden = tf1.layers.conv2d(hidden, 4, 3, padding="same", use_bias=False, kernel_initializer=first)
        hidden = tf1.layers.batch_normalization(hidden, training=True, momentum=0.75, fused=fused)
        hidden = tf.nn.relu(hidden)
    return tf1.layers.dense(tf.reduce_mean(hidden, axis=[1, 2]), 3, kernel_initializer=first, **options)


def normalized(values, axes, scale=None):
    mean, variance = tf.nn.moments(values, axes)
    return tf.nn.batch_normalization(values, mean, variance, None, scale, 1e-3)


def of_operations(images, fused=True, regularizer=None):
    """By `tf.nn` alone, which is all that there is beside Keras 3."""
    hidden = images
    for number, depth in enumerate([2, 4]):
        with tf1.variable_scope(f"layer_{number}"):
            kernel, scale = (
                tf1.get_variable("kernel", [3, 3, depth, 4], regularizer=regularizer),
                tf1.get_variable("scale", [4]),
            )
            hidden = tf.nn.conv2d(hidden, kernel, [1, 1, 1, 1], "SAME")
            if fused:
                hidden, _, _ = tf1.nn.fused_batch_norm(hidden, scale, tf1.get_variable("offset", [4]))
            else:
                hidden = normalized(hidden, [0, 1, 2], scale)
    return tf.matmul(tf.reduce_mean(tf.nn.relu(hidden), axis=[1, 2]), tf1.get_variable("last", [4, 3]))


def of_slim(images, fused=True):
    """With a shortcut, whose addends cross a barrier, and regularisation."""
    norm = {"is_training": True, "decay": 0.75, "fused": fused, "scale": True}
    regularizer = slim.l2_regularizer(1e-2)
    with slim.arg_scope([slim.conv2d], normalizer_fn=slim.batch_norm, normalizer_params=norm):
        with slim.arg_scope([slim.conv2d], weights_regularizer=regularizer):
            stem = slim.conv2d(images, 4, 3)
            hidden = stem + slim.conv2d(stem, 4, 3)
            hidden = slim.conv2d(hidden, 5, 3, stride=2)
    return slim.fully_connected(tf.reduce_mean(hidden, axis=[1, 2]), 3, activation_fn=None)


def trained(network, how, use_resource=True, steps=2, size=4, loss=cross_entropy, count=None, **options):
    """The losses of some steps and the variables after them. `how`: "plain", or options of `value_and_gradients`."""
    with tf.Graph().as_default(), tf1.Session() as session:
        images = tf1.placeholder(tf.float32, [count, 6, 6, 2])
        classes = tf1.placeholder(tf.int64, [count])
        with tf1.variable_scope("net", use_resource=use_resource):
            if how == "plain":
                value = loss(network(images, **options), images, classes)
                pairs = tf1.train.GradientDescentOptimizer(1.0).compute_gradients(value)
            elif "loss" in how:
                value, pairs = accum.compat.v1.value_and_gradients(
                    lambda images, _: network(images, **options), (images, classes), micro_batch_size=size, **how
                )
            else:
                value, pairs = accum.compat.v1.value_and_gradients(
                    lambda images, classes: loss(network(images, **options), images, classes),
                    (images, classes),
                    micro_batch_size=size,
                    **how,
                )
        with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS)):
            train_op = tf1.train.GradientDescentOptimizer(0.1).apply_gradients(pairs)
        session.run(tf1.global_variables_initializer())
        random = np.random.RandomState(5)
        for var in tf1.global_variables():
            if "moving" not in var.name:
                var.load(random.normal(0.3, 0.3, size=var.shape.as_list()), session)
        fed = {images: IMAGES, classes: CLASSES}
        losses = [session.run([value, train_op], fed)[0] for _ in range(steps)]
        counts = {key: len(tf1.get_collection(key)) for key in (KEYS.UPDATE_OPS, KEYS.LOSSES)}
        return losses, {var.op.name: session.run(var) for var in tf1.global_variables()}, counts


def apart(one, other):
    """The largest difference of a loss or variable, relative to the largest entry of the variable."""
    assert sorted(one[1]) == sorted(other[1]) and one[2] == other[2]
    pairs = [(one[1][name], other[1][name]) for name in other[1]] + [(np.array(one[0]), np.array(other[0]))]
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-2) for a, b in pairs)


NETWORKS = [
    pytest.param(of_operations, id="tf.nn"),
    pytest.param(
        of_layers, id="tf.layers", marks=pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
    ),
    pytest.param(
        of_slim, id="slim", marks=pytest.mark.skipif(TF_VERSION >= (2, 13), reason="slim needs Keras 2 of tf_keras")
    ),
]
BATCH_NORM, ALL = {"whole_batch": "batch_norm"}, {"whole_batch": "all", "loss": cross_entropy}
DEFAULT, APART = {}, {"whole_batch": ()}


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("network", NETWORKS)
def test_batch_normalisation_sees_the_whole_batch(network, fused, use_resource):
    """Weights and moving averages, whose updates stand in UPDATE_OPS as often as in the plain graph."""
    plain = trained(network, "plain", use_resource, fused=fused)
    assert apart(trained(network, ALL if fused else BATCH_NORM, use_resource, fused=fused), plain) < 2e-5
    assert apart(trained(network, APART, use_resource, fused=fused), plain) > 1e-2


@pytest.mark.law("L19")
@pytest.mark.parametrize("network", NETWORKS)
def test_the_default_sees_the_whole_batch(network):
    with warned(containing="[accum: ") as texts:
        ours = trained(network, DEFAULT)
    assert apart(ours, trained(network, "plain")) < 2e-5 and not texts


@pytest.mark.law("L19")
@pytest.mark.parametrize("count,size", mainly([(None, 1), (N, 3), (N, N), (None, 20)], (N, 3)))
def test_micro_batches_of_any_size(count, size):
    assert apart(trained(of_operations, ALL, size=size, count=count), trained(of_operations, "plain")) < 2e-5


@pytest.mark.slow
@pytest.mark.law("L19")
def test_all_cuts_kept():
    assert apart(trained(of_operations, dict(ALL, recompute=False)), trained(of_operations, "plain")) < 2e-5


def batch_dice(logits, images, classes):
    """A ratio of sums over the batch, and regularisation from a collection."""
    chosen = tf.one_hot(tf.cast(classes, tf.int32), 3)
    both = tf.reduce_sum(tf.nn.softmax(logits) * chosen, axis=0)
    dice = 1.0 - tf.reduce_mean(2.0 * both / (1.0 + tf.reduce_sum(tf.nn.softmax(logits) + chosen, axis=0)))
    tf1.losses.add_loss(dice)
    return tf1.losses.get_total_loss()


def regularised(images):
    return of_operations(images, regularizer=lambda kernel: 0.1 * tf.reduce_sum(kernel**2))


@pytest.mark.slow
@pytest.mark.law("L19")
def test_a_loss_of_the_batch_sees_it_all_and_regularisation_once():
    plain = trained(regularised, "plain", loss=batch_dice)
    assert apart(trained(regularised, {"whole_batch": "all", "loss": batch_dice}), plain) < 2e-5
    assert apart(trained(regularised, DEFAULT, loss=batch_dice), plain) < 2e-5
    split = trained(regularised, APART, loss=batch_dice)
    assert apart((*split[:2], plain[2]), plain) > 1e-3


@pytest.mark.slow
@pytest.mark.law("L19")
def test_partitioned_and_sparsely_read_variables():
    words = RANDOM.randint(0, 12, (N, 3))

    def step(how):
        with tf.Graph().as_default(), tf1.Session() as session:
            table = tf1.get_variable("table", [12, 4], partitioner=tf1.fixed_size_partitioner(2))

            def function(words):
                hidden = tf.reduce_mean(tf1.nn.embedding_lookup(table, words), axis=1)
                return tf.reduce_mean(tf.matmul(normalized(hidden, [0]), tf1.get_variable("last", [4, 1])) ** 2)

            fed = tf.constant(words)
            if how == "plain":
                pairs = tf1.train.Optimizer(False, "n").compute_gradients(function(fed))
            else:
                _, pairs = accum.compat.v1.value_and_gradients(function, fed, micro_batch_size=4, **how)
            assert sum(isinstance(grad, tf.IndexedSlices) for grad, _ in pairs) == 2
            session.run(tf1.global_variables_initializer())
            random = np.random.RandomState(5)
            for var in tf1.trainable_variables():
                var.load(random.normal(size=var.shape.as_list()), session)
            dense = {var.op.name: tf.convert_to_tensor(grad) for grad, var in pairs}
            return [0.0], session.run(dense), {}

    plain = step("plain")
    assert apart(step(DEFAULT), plain) < 2e-5
    assert apart(step(APART), plain) > 1e-2


@pytest.mark.slow
@pytest.mark.law("L19")
def test_losses_with_several_denominators():
    """A mean over masked words and one over sentences: no weight of micro-batches would be right for both."""
    ids, masked = RANDOM.randint(0, 12, (N, 3)), (RANDOM.uniform(size=(N, 3)) < 0.3).astype("float32")

    def network(ids, masked):
        words = tf.nn.embedding_lookup(tf1.get_variable("words", [12, 4]), ids)
        return tf.reduce_sum(words**2, axis=-1), tf.reduce_mean(words, axis=[1, 2])

    def loss(outputs, ids, masked):
        words = tf.reduce_sum(outputs[0] * masked) / tf.maximum(tf.reduce_sum(masked), 1.0)
        return words + tf.reduce_mean((outputs[1] - 1.0) ** 2)

    def step(how):
        with tf.Graph().as_default(), tf1.Session() as session:
            data = tf.constant(ids), tf.constant(masked)
            if how == "plain":
                value = loss(network(*data), *data)
                pairs = tf1.train.Optimizer(False, "n").compute_gradients(value)
            elif "loss" in how:
                value, pairs = accum.compat.v1.value_and_gradients(network, data, micro_batch_size=4, **how)
            else:
                function = lambda ids, masked: loss(network(ids, masked), ids, masked)  # noqa: E731
                value, pairs = accum.compat.v1.value_and_gradients(function, data, micro_batch_size=4, **how)
            session.run(tf1.global_variables_initializer())
            ((grad, var),) = pairs
            var.load(np.random.RandomState(5).normal(size=(12, 4)), session)
            loss_value, dense = session.run([value, tf.convert_to_tensor(grad)])
            return [loss_value], {var.op.name: dense}, {}

    assert apart(step({"loss": loss}), step("plain")) < 2e-6
    assert apart(step(DEFAULT), step("plain")) < 2e-6
    assert apart(step(APART), step("plain")) > 1e-2


@pytest.mark.slow
@pytest.mark.law("L19")
def test_images_of_a_rank_that_is_not_known_are_named():
    def unknown(images):
        images = tf1.placeholder_with_default(images, None)
        return of_operations(tf1.nn.fused_batch_norm(images, tf.ones([2]), tf.zeros([2]))[0])

    with pytest.raises(ValueError, match="set the shape of its results"):
        trained(unknown, ALL)


@pytest.mark.slow
@pytest.mark.law("L20")
def test_dropout_is_the_same_when_a_micro_batch_is_computed_again():
    """Against plain TensorFlow with the masks that were drawn. Each example has its own."""
    with tf.Graph().as_default(), tf1.Session() as session:
        images = tf.constant(IMAGES)
        mask_placeholder = tf1.placeholder(tf.float32, [N, 3, 3, 4])

        def network(images, mask=None):
            with tf1.variable_scope("net", reuse=tf1.AUTO_REUSE):
                hidden = tf.nn.conv2d(images, tf1.get_variable("first", [3, 3, 2, 4]), [1, 2, 2, 1], "SAME")
                mask = tf1.nn.dropout(tf.ones_like(hidden), rate=0.5) if mask is None else mask
                hidden = tf.nn.relu(normalized(hidden * mask, [0, 1, 2]))
                hidden = tf.nn.conv2d(hidden, tf1.get_variable("second", [3, 3, 4, 4]), [1, 1, 1, 1], "SAME")
                return tf.reduce_mean(hidden, axis=[1, 2]), mask

        def loss(outputs, images, *_):
            return tf.reduce_mean(outputs[0] ** 2) + 0.0 * tf.reduce_sum(outputs[1])

        masks = []

        def noted(outputs, images):
            masks.append(tf.identity(outputs[1]))
            return loss(outputs, images)

        with silent(accum.InexactWarning):
            value, pairs = accum.compat.v1.value_and_gradients(
                network, images, micro_batch_size=3, whole_batch="all", loss=noted
            )
        plain = loss(network(images, mask_placeholder), images)
        their_pairs = tf1.train.Optimizer(False, "n").compute_gradients(plain)
        session.run(tf1.global_variables_initializer())
        ours, mask = session.run([[value] + [grad for grad, _ in pairs], masks[0]])
        theirs = session.run([plain] + [grad for grad, _ in their_pairs], {mask_placeholder: mask})
        for one, other in zip(ours, theirs):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * max(np.abs(other).max(), 1e-2))
        assert len({example.tobytes() for example in mask}) == N
        assert session.run(masks[0]).tobytes() != mask.tobytes()


@pytest.mark.slow
@pytest.mark.law("L19")
def test_an_estimator_trains_on_whole_batches():
    if not hasattr(tf, "estimator") or TF_VERSION >= (2, 16):
        pytest.skip("there are no Estimators")

    def model_fn(features, labels, mode, params):
        if params["how"] == "plain":
            value = cross_entropy(of_layers(features), features, labels)
            pairs = tf1.train.GradientDescentOptimizer(1.0).compute_gradients(value)
        else:
            outputs = lambda images, _: of_layers(images)
            mean = lambda images, labels: cross_entropy(of_layers(images), images, labels)
            value, pairs = accum.compat.v1.value_and_gradients(
                outputs if "loss" in params["how"] else mean, (features, labels), micro_batch_size=4, **params["how"]
            )
        with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS)):
            optimizer = tf1.train.MomentumOptimizer(0.1, 0.9)
            train_op = optimizer.apply_gradients(pairs, tf1.train.get_global_step())
        return tf1.estimator.EstimatorSpec(mode, loss=value, train_op=train_op)

    def variables(how):
        config = tf1.estimator.RunConfig(tf_random_seed=3)
        estimator = tf1.estimator.Estimator(model_fn, config=config, params={"how": how})
        for _ in range(2):  # the second time from a checkpoint
            estimator.train(lambda: tf1.data.Dataset.from_tensors((IMAGES, CLASSES)).repeat(), steps=2)
        return [0.0], {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}, {}

    plain = variables("plain")
    assert plain[1]["global_step"] == 4
    assert apart(variables(ALL), plain) < 2e-5
    assert apart(variables(DEFAULT), plain) < 2e-5
    assert apart(variables(APART), plain) > 1e-2


# ----------------------------------------------------------------------------------------------------------------
# What can't be exact is named


def value_of(function, **options):
    with tf.Graph().as_default():
        images = tf1.placeholder(tf.float32, [None, 6, 6, 2])
        return accum.compat.v1.value_and_gradients(
            function, images, micro_batch_size=4, **dict({"whole_batch": "batch_norm"}, **options)
        )


def projected(images):
    return tf.matmul(tf.reduce_mean(images, axis=[1, 2]), tf1.get_variable("projection", [2, 3]))


def weighted(images):
    return tf.reduce_mean(projected(images) ** 2)


@pytest.mark.slow
@pytest.mark.law("L19")
@pytest.mark.parametrize("whole_batch, is_same", [(None, True), ("batch_norm", True), ((), False)])
def test_what_examples_meet_in_is_computed_with_the_whole_batch(whole_batch, is_same):
    def scaled(images):
        with tf1.variable_scope("network", reuse=tf1.AUTO_REUSE):
            hidden = projected(images)
        return tf.reduce_mean((hidden / (3.0 + tf.reduce_max(hidden, axis=0))) ** 2)

    data = np.random.RandomState(2).normal(size=(10, 6, 6, 2)).astype("float32")
    with tf.Graph().as_default(), tf1.Session() as session:
        images = tf1.placeholder(tf.float32, [None, 6, 6, 2])
        value, pairs = accum.compat.v1.value_and_gradients(scaled, images, micro_batch_size=4, whole_batch=whole_batch)
        plain = scaled(images)
        (gradient,) = tf1.gradients(plain, [pairs[0][1]])
        session.run(tf1.global_variables_initializer())
        ours, full = session.run([[value, pairs[0][0]], [plain, gradient]], {images: data})
    assert np.allclose(ours[0], full[0], rtol=2e-5) == np.allclose(ours[1], full[1], atol=2e-6) == is_same


@pytest.mark.slow
@pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
@pytest.mark.law("L19")
@pytest.mark.usefixtures("control_flow_of_tf_1")
def test_whether_this_is_training_may_be_a_placeholder():
    def switched(images, training):
        training = tf1.placeholder_with_default(True, []) if training is None else training
        return projected(tf1.layers.batch_normalization(images, training=training, momentum=0.75))

    plain = trained(switched, "plain", training=True)
    assert apart(trained(switched, BATCH_NORM, training=None), plain) < 2e-5


@pytest.mark.slow
@pytest.mark.law("L19")
def test_the_function_runs_once_for_the_batch():
    """What it assigns, and what it adds to collections, is that of one call with all examples."""

    def counting(images):
        seen = tf1.get_variable("seen", [], trainable=False)
        rows = tf1.get_variable("rows", [3, 2], trainable=False, use_resource=False)
        tf1.losses.add_loss(tf.reduce_mean(images))
        with tf.control_dependencies([tf1.assign_add(seen, 1.0), tf1.scatter_update(rows, [0], tf.ones([1, 2]))]):
            return projected(tf.identity(images))

    assert apart(trained(counting, ALL), trained(counting, "plain")) < 2e-5


def by_python(images):
    """The loss that examples meet in at once, with what no `split_batch` takes."""
    spread = tf1.py_func(lambda values: values - values.mean(0), [images], tf.float32)
    spread.set_shape(images.shape)
    return tf.reduce_mean(projected(spread) ** 2) + tf.reduce_mean(tf.nn.tanh(projected(spread)))


@pytest.mark.slow
@pytest.mark.law("L17", "L19")
@pytest.mark.parametrize("is_branch", [False, True])
@pytest.mark.parametrize("is_default", [True, False])
def test_what_can_t_be_split_is_computed_at_once(is_branch, is_default):
    """By default; whoever asks for it gets an error. In a branch, even what could be split elsewhere."""
    data = np.random.RandomState(2).normal(size=(10, 6, 6, 2)).astype("float32")
    with tf.Graph().as_default(), tf1.Session() as session:
        images = tf1.placeholder(tf.float32, [None, 6, 6, 2])
        table = tf1.get_variable("projection", [2, 3])
        function = weighted if is_branch else by_python

        def ours(images):
            with tf1.variable_scope("", reuse=True):
                value, ((gradient, _),) = accum.compat.v1.value_and_gradients(
                    function, images, [table], 4, whole_batch=None if is_default else "batch_norm"
                )
            return value, gradient

        def split(images):
            if not is_branch:
                return ours(images)
            nothing = lambda: (tf.constant(0.0), tf.zeros_like(table))  # noqa: E731
            return tf1.cond(tf.reduce_sum(images) < 1e9, lambda: ours(images), nothing)

        if not is_default:
            with pytest.raises(ValueError, match="split_batch.*"):
                split(images)
            return
        with warned("at once") as said:
            found = split(images)
        (text,) = said
        assert "return these, and pass `loss`" in text and "accum: not-split" in text
        assert not {"outputs", "given"}.intersection(re.findall(r"`(\w+)`", text))  # `split_batch` alone takes them
        assert is_branch or "lacks" not in text
        with tf1.variable_scope("", reuse=True):
            value = function(images)
        session.run(tf1.global_variables_initializer())
        full, (one, other) = session.run([[value, tf1.gradients(value, [table])[0]], found], {images: data})
    np.testing.assert_allclose(one, full[0], rtol=2e-6)
    np.testing.assert_allclose(other, full[1], atol=2e-6 * np.abs(full[1]).max())


@pytest.mark.slow
@pytest.mark.law("L17")
def test_outputs_of_another_number_than_the_examples_are_refused():
    def value_of_every(step):
        value_of(lambda images: projected(images)[::step], loss=lambda outputs, images: tf.reduce_sum(outputs**2))

    with pytest.raises(ValueError, match="it takes some of the examples"):
        value_of_every(2)
    value_of_every(1)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_options_that_contradict_each_other():
    with pytest.raises(ValueError, match="pass `loss=`"):
        value_of(weighted, whole_batch="all")
    with pytest.raises(ValueError, match="leave out `weight`"):
        value_of(weighted, loss=lambda outputs, images: outputs, weight="equal")
    with pytest.raises(TypeError, match="`loss` must be"):
        value_of(weighted, loss=3)
    with pytest.raises(ValueError, match="must be of"):
        value_of(weighted, whole_batch="layers")
    with pytest.raises(ValueError, match="`function` sees the whole batch.*leave out `weight`"):
        value_of(weighted, weight="equal")
    with pytest.raises(ValueError, match="can't be split up to `outputs`"):
        value_of(lambda images: tf.reduce_mean(images), loss=lambda outputs, images: outputs)


RAGGED = [[1], [], [0, 2], [2], [1, 1, 2], [0], [], [2, 2], [1], [0], [2, 1, 0]]


def over_words(logits, _, classes):
    """A mean over the words of ragged targets."""
    of_word = tf.gather(tf.nn.log_softmax(logits), classes.value_rowids())
    return -tf.reduce_mean(tf.reduce_sum(of_word * tf.one_hot(classes.values, 3), axis=1))


def from_words(logits, _, classes):
    counts = tf1.sparse.to_dense(classes)
    return tf.reduce_mean(tf.reduce_sum((logits - tf.cast(counts, tf.float32)) ** 2, axis=1))


@pytest.mark.law("L18")
@pytest.mark.parametrize("how", [{"whole_batch": "all"}, {}], ids=["all", "default"])
@pytest.mark.parametrize("loss", [over_words, from_words], ids=["ragged", "sparse"])
def test_ragged_and_sparse_targets_are_those_of_the_whole_batch(loss, how):
    def gradients(how):
        with tf.Graph().as_default(), tf1.Session() as session:
            words = tf.ragged.constant(RAGGED)
            data = tf1.placeholder(tf.float32, [None, 6, 6, 2]), words if loss is over_words else words.to_sparse()
            with tf1.variable_scope("net", initializer=tf1.glorot_uniform_initializer(seed=3)):
                if how is None:
                    value = loss(of_operations(data[0]), *data)
                    pairs = tf1.train.GradientDescentOptimizer(1.0).compute_gradients(value)
                else:
                    _, pairs = accum.compat.v1.value_and_gradients(
                        lambda images, _: of_operations(images), data, micro_batch_size=4, loss=loss, **how
                    )
            session.run(tf1.global_variables_initializer())
            return session.run([gradient for gradient, _ in pairs], {data[0]: IMAGES})

    expected, ours = gradients(None), gradients(how)
    largest = max(np.abs(one).max() for one in expected)
    assert largest > 1e-3
    for one, other in zip(ours, expected):
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1.0, largest))  # law L19


@pytest.mark.law("L17")
def test_data_without_a_dense_tensor_has_no_whole_batch_to_split():
    def call(**options):
        return accum.compat.v1.value_and_gradients(
            lambda one: one.values, tf.ragged.constant(RAGGED), None, 4, **options
        )

    with tf.Graph().as_default(), pytest.raises(ValueError, match="needs a dense tensor"):
        call(loss=lambda values, one: tf.reduce_mean(values))
