"""`accum.compat.v1.split_batch` in the loops of TensorFlow 1: Estimators, hooks, towers, queues (laws L19 and L21)."""

import numpy as np
import pytest
import tensorflow as tf

import accum.compat.v1

pytestmark = pytest.mark.law("L21")

tf1 = tf.compat.v1
KEYS = tf1.GraphKeys
RANDOM = np.random.RandomState(0)
N = 20
X = RANDOM.normal(size=(2 * N + 7, 4)).astype("float32")
Y = RANDOM.normal(size=(2 * N + 7, 1)).astype("float32")


@pytest.fixture(autouse=True)
def static_graph():
    with tf.Graph().as_default():
        yield


def variable(name, shape, trainable=True):
    first = np.random.RandomState(len(name)).normal(size=shape, scale=0.4).astype("float32")
    initializer = tf1.constant_initializer(first if trainable else 0.1)
    kept = tf.VariableAggregation.NONE if trainable else tf.VariableAggregation.MEAN
    return tf1.get_variable(name, shape, initializer=initializer, trainable=trainable, aggregation=kept)


def normalized(x, is_training):
    """Batch normalisation with averages that UPDATE_OPS move."""
    averages = variable("norm/mean", [5], False), variable("norm/variance", [5], False)
    if not is_training:
        return tf.nn.batch_normalization(x, averages[0], averages[1], None, None, 1e-3)
    statistics = tf.nn.moments(x, [0])
    for average, statistic in zip(averages, statistics):
        tf1.add_to_collection(KEYS.UPDATE_OPS, tf1.assign(average, 0.9 * average + 0.1 * statistic))
    return tf.nn.batch_normalization(x, statistics[0], statistics[1], None, None, 1e-3)


def network(x, y, is_training=True):
    """Return (outputs, a loss that is no mean over examples)."""
    hidden = tf.tanh(normalized(tf.matmul(x, variable("first", [4, 5])), is_training))
    outputs = tf.matmul(hidden, variable("last", [5, 1]))
    return outputs, tf.sqrt(tf.reduce_mean((outputs - y) ** 2))


def stepped(loss):
    with tf.control_dependencies(tf1.get_collection(KEYS.UPDATE_OPS)):
        step = tf1.train.get_or_create_global_step()
        return tf1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step)


def values_of(folder):
    reader = tf1.train.load_checkpoint(str(folder))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same(values, others):
    assert set(values) == set(others)
    for name in values:
        np.testing.assert_allclose(values[name], others[name], rtol=0, atol=5e-6, err_msg=name)


# --------------------------------------------------------------------------------------------------------------------
# Estimators


def estimator(folder, size, strategy=None):
    def model_fn(features, labels, mode):
        is_training = mode == tf1.estimator.ModeKeys.TRAIN
        outputs, loss = network(features["x"], labels, is_training)
        metrics = {"error": tf1.metrics.mean_absolute_error(labels, outputs)}
        if not is_training:
            return tf1.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
        if size is not None:
            loss = accum.compat.v1.split_batch(loss, (features, labels), size)
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=stepped(loss))

    config = tf1.estimator.RunConfig(str(folder), train_distribute=strategy, tf_random_seed=1)
    return tf1.estimator.Estimator(model_fn, str(folder), config)


def batches():
    return tf.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(N).repeat()  # of 20, 20 and 7 examples


def estimated(folder, size, strategy=None):
    made = estimator(folder, size, strategy)
    train = tf1.estimator.TrainSpec(batches, max_steps=5)
    metrics, _ = tf1.estimator.train_and_evaluate(made, train, tf1.estimator.EvalSpec(batches, steps=2))
    return metrics, {name: made.get_variable_value(name) for name in made.get_variable_names()}


@pytest.mark.slow
@pytest.mark.tf(max="2.15", because="TF 2.16 removed Estimators")
def test_estimator_trains_and_evaluates(tmp_path):
    metrics, values = estimated(tmp_path / "plain", None)
    ours, our_values = estimated(tmp_path / "ours", 6)
    assert_same(our_values, values)
    assert metrics["global_step"] == 5
    assert_same(ours, metrics)


@pytest.mark.slow
@pytest.mark.tf(max="2.12", because="from TF 2.13 on, even a plain Estimator hangs under a MirroredStrategy")
def test_estimator_under_a_mirrored_strategy_splits_the_batch_of_each_replica(tmp_path):
    finals = []
    for name, size in (("plain", None), ("ours", 6)):
        made = estimator(tmp_path / name, size, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
        made.train(batches, steps=4)
        finals.append({name: made.get_variable_value(name) for name in made.get_variable_names()})
    assert_same(*reversed(finals))


# --------------------------------------------------------------------------------------------------------------------
# Sessions


def monitored(folder, size, stops):
    """Train up to each step of `stops`, in a session of its own that begins with the last checkpoint."""
    for last in stops:
        with tf.Graph().as_default():
            x, y = tf1.placeholder(tf.float32, [None, 4]), tf1.placeholder(tf.float32, [None, 1])
            _, loss = network(x, y)
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, (x, y), size)
            tf1.summary.scalar("loss", loss)
            op, seen = stepped(loss), []
            hooks = [
                tf1.train.StopAtStepHook(last_step=last),
                tf1.train.LoggingTensorHook({"loss": loss}, 1, formatter=lambda now, seen=seen: seen.append(now)),
            ]
            with tf1.train.MonitoredTrainingSession(
                checkpoint_dir=str(folder), hooks=hooks, save_checkpoint_steps=2, save_summaries_steps=1
            ) as session:
                while not session.should_stop():
                    session.run(op, {x: X[:N], y: Y[:N]})
    return values_of(folder), [now["loss"] for now in seen]


@pytest.mark.slow
def test_a_monitored_session_resumes_with_its_hooks(tmp_path):
    values, losses = monitored(tmp_path / "plain", None, [3, 5])
    ours, our_losses = monitored(tmp_path / "ours", 6, [3, 5])
    assert_same(ours, values)
    assert ours["global_step"] == 5 and len(our_losses) == 2
    np.testing.assert_allclose(our_losses, losses, atol=5e-6)


def run_twice(build, size):
    """Return the values of all variables, and what else `build` fetches, after two runs of its train op."""
    with tf.Graph().as_default(), tf1.Session() as session:
        op, fetches, feeds, before = build(size)
        session.run([tf1.global_variables_initializer(), before])
        logs = [session.run([op, fetches], feeds)[1] for _ in range(2)]
        return session.run({var.name: var for var in tf1.global_variables()}), logs


def towers(size):
    """Two parts of a batch, whose gradients are averaged: a call for each."""
    x, y = tf1.placeholder(tf.float32, [None, 4]), tf1.placeholder(tf.float32, [None, 1])
    optimizer, all_grads, losses = tf1.train.AdamOptimizer(0.1, epsilon=1e-2), [], []
    for index, (part, labels) in enumerate(zip(tf.split(x, 2), tf.split(y, 2))):
        with tf1.variable_scope("", reuse=index > 0), tf1.name_scope(f"tower_{index}"):
            _, loss = network(part, labels)
            if size is not None:
                loss = accum.compat.v1.split_batch(loss, (part, labels), size)
            all_grads.append(optimizer.compute_gradients(loss))
            losses.append(loss)
    averaged = [(tf.reduce_mean(tf.stack([one[0] for one in pairs]), 0), pairs[0][1]) for pairs in zip(*all_grads)]
    op = tf.group(optimizer.apply_gradients(averaged), *tf1.get_collection(KEYS.UPDATE_OPS)[:2])
    return op, losses, {x: X[:N], y: Y[:N]}, []


def queue(size):
    """A queue, from which each run takes one batch."""
    examples = tf1.FIFOQueue(100, [tf.float32, tf.float32], [[4], [1]])
    x, y = examples.dequeue_up_to(N)
    _, loss = network(x, y)
    if size is not None:
        loss = accum.compat.v1.split_batch(loss, (x, y), size)
    op = stepped(loss)
    with tf.control_dependencies([op, loss]):
        left = examples.size()
    return op, [left, loss], {}, examples.enqueue_many([X, Y])


def iterator(size):
    """A dataset whose batches are of 20, 20 and 7 examples."""
    made = tf1.data.make_initializable_iterator(tf1.data.Dataset.from_tensor_slices((X, Y)).batch(N).skip(1))
    x, y = made.get_next()
    _, loss = network(x, y)
    if size is not None:
        loss = accum.compat.v1.split_batch(loss, (x, y), size)
    return stepped(loss), [loss, tf.shape(x)[0]], {}, made.initializer


def table(size):
    """A table numbers the words of texts, whose vectors are looked up."""
    texts, y = tf1.placeholder(tf.string, [None, 3]), tf1.placeholder(tf.float32, [None, 1])
    keys, numbers = tf.constant(["a", "b", "c"]), tf.constant([0, 1, 2], tf.int64)
    words = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, numbers), 3)
    vectors = tf.nn.embedding_lookup(variable("vectors", [4, 5]), words.lookup(texts))
    outputs = tf.matmul(normalized(tf.reshape(vectors[:, 0] - vectors[:, 2], [-1, 5]), True), variable("last", [5, 1]))
    loss = tf.sqrt(tf.reduce_mean((outputs - y) ** 2))
    if size is not None:
        loss = accum.compat.v1.split_batch(loss, (texts, y), size)
    data = np.array(["a", "b", "c", "d"])[np.random.RandomState(2).randint(0, 4, size=(N, 3))]
    return stepped(loss), loss, {texts: data, y: Y[:N]}, tf1.tables_initializer()


def recurrent(size):
    """A loop over time before batch normalisation, which gives the gradient of a weight in a part of its shape."""
    x, y = tf1.placeholder(tf.float32, [None, 2, 2]), tf1.placeholder(tf.float32, [None, 1])
    kernel, first = variable("kernel", [2, 5]), tf.zeros([tf.shape(x)[0], 5])
    states = tf.scan(lambda state, one: tf.tanh(tf.matmul(one, kernel) + state), tf.transpose(x, [1, 0, 2]), first)
    outputs = tf.matmul(normalized(states[-1], True), variable("last", [5, 1]))
    loss = tf.sqrt(tf.reduce_mean((outputs - y) ** 2))
    if size is not None:
        loss = accum.compat.v1.split_batch(loss, (x, y), size)
    return stepped(loss), loss, {x: X[:N].reshape(N, 2, 2), y: Y[:N]}, []


@pytest.mark.parametrize("build", [towers, queue, iterator, table, recurrent], ids=lambda build: build.__name__)
def test_a_run_takes_one_batch(build):
    values, logs = run_twice(build, None)
    ours, our_logs = run_twice(build, 6)
    assert_same(ours, values)
    np.testing.assert_allclose(our_logs, logs, rtol=0, atol=5e-6)
