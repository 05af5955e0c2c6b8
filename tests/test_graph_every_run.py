"""What runs with every micro-batch, although a full batch would do it once per step, is named."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import accum.compat.v1

tf1 = tf.compat.v1

K, STEPS, SIZE = 4, 3, 3
X = np.random.RandomState(0).normal(3.0, 2.0, size=(STEPS, K * SIZE, 2)).astype("float32")
KINDS = pytest.mark.parametrize("use_resource", [False, True], ids=["ref", "resource"])
UPDATE_OPS = tf1.GraphKeys.UPDATE_OPS


def sgd(rate=0.1):
    return tf1.train.GradientDescentOptimizer(rate)


def accumulating(accum_steps=K, rate=0.1, **options):
    return accum.compat.v1.AccumOptimizer(sgd(rate), accum_steps, **options)


def resting(accum_steps=K):
    return accumulating(accum_steps, rate=0.0)


def run(train_op, x, fetches, parts=K):
    """Run the train op on each part of each full batch. Returns the values of `fetches`."""
    with tf1.Session() as session:
        session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
        for part in X.reshape(STEPS * parts, -1, 2):
            session.run(train_op, {x: part})
        return session.run(fetches)


class said:
    """Fails unless, in this context, these warnings come, each once."""

    def __init__(self, *texts):
        self._texts = texts

    def __enter__(self):
        self._context = warnings.catch_warnings(record=True)
        self._caught = self._context.__enter__()
        warnings.simplefilter("always", UserWarning)

    def __exit__(self, *error):
        self._context.__exit__(*error)
        if error[0] is None:
            found = [str(one.message) for one in self._caught if issubclass(one.category, UserWarning)]
            found = [one for one in found if "tf.layers" not in one]
            assert len(found) == len(self._texts), found
            for text, one in zip(self._texts, found):
                assert text in one, one


# ----------------------------------------------------------------------------------------------------------------
# Averages of batch normalisation

MOVES = "Moving averages of batch normalisation move with every micro-batch"


def normalized(x, scope="net", use_resource=True, decay=0.1, in_place=False, trains=True):
    """A layer as slim makes it, from public ops. Its averages move in UPDATE_OPS."""
    with tf1.variable_scope(scope, use_resource=use_resource):
        scale = tf1.get_variable("scale", initializer=[1.0, 2.0])
        moments = tf.nn.moments(x * scale, [0])
        variables = [
            tf1.get_variable(name, [2], initializer=tf1.zeros_initializer(), trainable=False)
            for name in ("moving_mean", "moving_variance")
        ]
        if not trains:
            return (x * scale - variables[0]) / tf.sqrt(variables[1] + 1e-3)
        moves = [
            tf1.assign_sub(var, (var.read_value() - value) * tf.constant(decay))
            for var, value in zip(variables, moments)
        ]
        if not in_place:
            for move in moves:
                tf1.add_to_collection(UPDATE_OPS, move)
        with tf.control_dependencies(moves if in_place else []):
            return (x * scale - moments[0]) / tf.sqrt(moments[1] + 1e-3)


def loss_of(outputs):
    return tf.reduce_mean((outputs - 1.0) ** 2)


def moving():
    return [var for var in tf1.global_variables() if "moving_" in var.op.name and "AccumOptimizer" not in var.op.name]


def before_minimizing(optimizer, loss):
    with tf.control_dependencies(tf1.get_collection(UPDATE_OPS)):
        return optimizer.minimize(loss)


def before_applying(optimizer, loss):
    pairs = optimizer.compute_gradients(loss)
    with tf.control_dependencies(tf1.get_collection(UPDATE_OPS)):
        return optimizer.apply_gradients(pairs)


def before_the_loss(optimizer, loss):
    """As tf-slim does, whose train op returns the loss."""
    with tf.control_dependencies(tf1.get_collection(UPDATE_OPS)):
        loss = tf.identity(loss)
    return [optimizer.minimize(loss), loss]


def grouped(optimizer, loss):
    train_op = tf.group(optimizer.minimize(loss), *tf1.get_collection(UPDATE_OPS))
    if isinstance(optimizer, accum.compat.v1.AccumOptimizer):
        optimizer.flush()  # sees the whole graph
        optimizer.reset()
    return train_op


def separate(optimizer, loss):
    with tf.control_dependencies(tf1.get_collection(UPDATE_OPS)):
        return optimizer.accumulation_ops(loss).accumulate


FORMS = pytest.mark.parametrize(
    "train_op_of", [before_minimizing, before_applying, before_the_loss, grouped], ids=lambda form: form.__name__
)


def statistics():
    """The averages after all full batches, whose weights rest."""
    mean, variance = 0.0, 0.0
    for x in X.astype("float64") * [1.0, 2.0]:
        mean, variance = 0.9 * mean + 0.1 * x.mean(0), 0.9 * variance + 0.1 * x.var(0)
    return mean, variance


def averages(train_op_of, make, parts, takes_over=False, use_resource=True):
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 2])
        loss, optimizer = loss_of(normalized(x, use_resource=use_resource)), make()
        if takes_over:
            optimizer.accumulate_update_ops()
        return run(train_op_of(optimizer, loss), x, moving(), parts)


@KINDS
@FORMS
@pytest.mark.law("L13")
@pytest.mark.law("L17")
def test_averages_that_move_with_every_micro_batch_are_named(train_op_of, use_resource):
    with said(MOVES):
        ours = averages(train_op_of, resting, K, use_resource=use_resource)
    assert np.abs(ours[0] - statistics()[0]).max() > 0.1
    with said():
        ours = averages(train_op_of, resting, K, takes_over=True, use_resource=use_resource)
    np.testing.assert_allclose(ours, statistics(), rtol=0, atol=5e-6)


@pytest.mark.law("L13")
@pytest.mark.law("L17")
def test_averages_are_named_that_were_not_there_yet_to_be_taken_over():
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="after the model is built.*net/moving_mean"):
        optimizer = accumulating()
        assert optimizer.accumulate_update_ops() == []
        before_minimizing(optimizer, loss_of(normalized(tf1.placeholder(tf.float32, [None, 2]))))


@pytest.mark.law("L13")
@pytest.mark.law("L17")
def test_averages_that_move_in_place_are_named():
    with tf.Graph().as_default(), said(MOVES):
        accumulating().minimize(loss_of(normalized(tf1.placeholder(tf.float32, [None, 2]), in_place=True)))


@pytest.mark.law("L13")
@pytest.mark.law("L17")
@pytest.mark.parametrize("takes_over", [False, True])
def test_averages_that_move_with_separate_ops_are_named(takes_over):
    with tf.Graph().as_default(), said(*[] if takes_over else [MOVES]):
        loss, optimizer = loss_of(normalized(tf1.placeholder(tf.float32, [None, 2]))), accumulating(1)
        if takes_over:
            optimizer.accumulate_update_ops()
        separate(optimizer, loss)


def frozen(x):
    """A layer in inference, whose averages nothing moves."""
    return normalized(x, trains=False)


def at_rest(x):
    return normalized(x, decay=0.0)


def not_run(x):
    outputs = normalized(x)
    del tf1.get_collection_ref(UPDATE_OPS)[:]
    return outputs


@FORMS
@pytest.mark.law("L17")
@pytest.mark.parametrize("layer", [frozen, at_rest, not_run], ids=lambda layer: layer.__name__)
def test_averages_that_do_not_move_are_not_named(layer, train_op_of):
    with tf.Graph().as_default(), said():
        train_op_of(accumulating(), loss_of(layer(tf1.placeholder(tf.float32, [None, 2]))))


@FORMS
@pytest.mark.law("L14")
@pytest.mark.law("L17")
def test_averages_are_not_named_where_nothing_accumulates(train_op_of):
    with said():
        averages(train_op_of, lambda: accumulating(1), 1)


@pytest.mark.law("L13")
@pytest.mark.law("L17")
@pytest.mark.parametrize("takes_over", [False, True])
def test_the_averages_of_the_other_network_are_not_named_before_its_optimizer_had_its_turn(takes_over):
    """Those of a generator run with the train op of the discriminator until the other optimizer takes them over."""
    with tf.Graph().as_default(), said(*[] if takes_over else [MOVES]):
        x = tf1.placeholder(tf.float32, [None, 2])
        fake = normalized(x, "generator")
        of_generator = list(tf1.get_collection(UPDATE_OPS))
        real = normalized(x, "discriminator")
        of_discriminator = tf1.get_collection(UPDATE_OPS)[2:]
        scale = tf1.trainable_variables()
        first, second = accumulating(name="D"), accumulating(name="G")
        first.accumulate_update_ops(of_discriminator)
        with tf.control_dependencies(tf1.get_collection(UPDATE_OPS)):
            first.minimize(loss_of(real) - loss_of(fake * scale[1]), var_list=scale[1:])
        if takes_over:
            second.accumulate_update_ops(of_generator)
        second.minimize(loss_of(fake), var_list=scale[:1])
        accum.compat.v1.Saver([first, second])


@pytest.mark.law("L13")
@pytest.mark.law("L17")
def test_averages_that_a_split_batch_moves_once_are_named_where_several_batches_make_a_step():
    def train(optimizer, parts):
        with tf.Graph().as_default():
            x = tf1.placeholder(tf.float32, [None, 2])
            loss = lambda x: loss_of(normalized(x))
            _, pairs = accum.compat.v1.value_and_gradients(loss, (x,), micro_batch_size=SIZE)
            with tf.control_dependencies(tf1.get_collection(UPDATE_OPS)):
                train_op = optimizer.apply_gradients(pairs)
            return run(train_op, x, moving(), parts)

    with said("pass it the whole batch of a step"):
        ours = train(resting(2), 2)
    assert np.abs(ours[0] - statistics()[0]).max() > 0.1
    for optimizer in (sgd(0.0), resting(1)):  # the remedy
        with said():
            ours = train(optimizer, 1)
        np.testing.assert_allclose(ours, statistics(), rtol=0, atol=5e-6)
