"""What runs with every micro-batch, although a full batch would do it once per step, is named."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from optimizers import mainly
from warned import warned

import accum.compat.v1
from accum import _tf
from accum.testing import record

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
        session.run(tf1.variables_initializer(tf1.trainable_variables()))  # from which averages of ref variables begin
        session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
        for part in X.reshape(STEPS * parts, -1, 2):
            session.run(train_op, {x: part})
        return session.run(fetches)


@contextlib.contextmanager
def said(*texts):
    """Fails unless, in this context, these warnings come, each once."""
    with warned() as found:
        yield
    found = [one for one in found if "tf.layers" not in one]
    assert len(found) == len(texts), found
    for text, one in zip(texts, found):
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


def averages(train_op_of, optimizer, takes_over=False, use_resource=True):
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [None, 2])
        loss = loss_of(normalized(x, use_resource=use_resource))
        if takes_over:
            optimizer.accumulate_update_ops()
        return run(train_op_of(optimizer, loss), x, moving())


@pytest.mark.slow
@KINDS
@FORMS
@pytest.mark.law("L13", "L17")
def test_averages_that_move_with_every_micro_batch_are_named(train_op_of, use_resource):
    with said(MOVES):
        ours = averages(train_op_of, resting(), use_resource=use_resource)
    assert np.abs(ours[0] - statistics()[0]).max() > 0.1
    with said():
        ours = averages(train_op_of, resting(), takes_over=True, use_resource=use_resource)
    np.testing.assert_allclose(ours, statistics(), rtol=0, atol=5e-6)


@pytest.mark.law("L13", "L17")
def test_averages_are_named_that_were_not_there_yet_to_be_taken_over():
    with tf.Graph().as_default(), pytest.warns(UserWarning, match="after the model is built.*net/moving_mean"):
        optimizer = accumulating()
        assert optimizer.accumulate_update_ops() == []
        before_minimizing(optimizer, loss_of(normalized(tf1.placeholder(tf.float32, [None, 2]))))


@pytest.mark.law("L13", "L17")
def test_averages_that_move_in_place_are_named():
    with tf.Graph().as_default(), said(MOVES):
        accumulating().minimize(loss_of(normalized(tf1.placeholder(tf.float32, [None, 2]), in_place=True)))


@pytest.mark.law("L13", "L17")
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


def unchanged(grads_and_vars):
    return grads_and_vars


WHOLE = pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "skip_micro"}, {"transform": unchanged}], ids=["plain", "nonfinite", "transform"]
)
"""Options with which each micro-batch is a full batch, if `accum_steps` is 1."""


@FORMS
@WHOLE
@pytest.mark.law("L14", "L17")
def test_averages_are_not_named_where_each_batch_is_a_full_batch(options, train_op_of):
    with tf.Graph().as_default(), said():
        train_op_of(accumulating(1, **options), loss_of(normalized(tf1.placeholder(tf.float32, [None, 2]))))


@pytest.mark.slow
@pytest.mark.law("L13", "L17")
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


@pytest.mark.slow
@pytest.mark.law("L13", "L17")
def test_averages_that_a_split_batch_moves_once_are_named_where_several_batches_make_a_step():
    def train(optimizer, parts):
        with tf.Graph().as_default():
            x = tf1.placeholder(tf.float32, [None, 2])
            loss = lambda x: loss_of(normalized(x))
            _, pairs = accum.compat.v1.value_and_gradients(loss, (x,), micro_batch_size=SIZE, whole_batch=())
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


# ----------------------------------------------------------------------------------------------------------------
# Averages of the weights

WEIGHTS = "Averages of the weights move with every micro-batch"


class Regression:
    """Weights, a loss whose gradient is the mean of what is fed, and an average of the weights."""

    def __init__(self, use_resource=True):
        self.x = tf1.placeholder(tf.float32, [None, 2])
        self.weights = tf1.get_variable("w", initializer=[1.0, 2.0], use_resource=use_resource)
        self.loss = tf.reduce_mean(tf.reduce_sum(self.weights * self.x, 1))
        self.average = tf1.train.ExponentialMovingAverage(0.5)


def averaged_by_numpy():
    weights = average = np.array([1.0, 2.0])
    for x in X.astype("float64"):
        weights = weights - 0.1 * x.mean(0)
        average = 0.5 * average + 0.5 * weights
    return average


def by_control_dependencies(problem, optimizer):
    """As TensorFlow's documentation shows it."""
    train_op = optimizer.minimize(problem.loss)
    with tf.control_dependencies([train_op]):
        return problem.average.apply([problem.weights])


def by_a_group(problem, optimizer):
    train_op = optimizer.minimize(problem.loss)
    return tf.group(train_op, problem.average.apply([problem.weights]))


class Averages(tf1.train.Optimizer):
    """As `tf.contrib.opt.MovingAverageOptimizer`: an optimizer around."""

    def __init__(self, inner, average):
        super().__init__(False, "Averages")
        self._inner, self._average = inner, average

    def compute_gradients(self, *args, **kwargs):
        return self._inner.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        listed = list(grads_and_vars)
        with tf.control_dependencies([self._inner.apply_gradients(listed, global_step)]):
            return tf.group(self._average.apply([var for _, var in listed]), name=name)


def by_an_optimizer_around(problem, optimizer):
    return Averages(optimizer, problem.average).minimize(problem.loss)


def after_step(problem, optimizer):
    optimizer.after_step(lambda: problem.average.apply([problem.weights]))
    return optimizer.minimize(problem.loss)


def averaged(program, optimizer, use_resource=True, look=lambda optimizer: optimizer.flush(), runs=True):
    with tf.Graph().as_default():
        problem = Regression(use_resource)
        train_op = program(problem, optimizer)
        look(optimizer)
        look(optimizer)
        return run(train_op, problem.x, problem.average.average(problem.weights)) if runs else None


@pytest.mark.slow
@KINDS
@pytest.mark.law("L2", "L17")
@pytest.mark.parametrize(
    "program",
    [by_control_dependencies, by_a_group, by_an_optimizer_around],
    ids=lambda program: program.__name__,
)
def test_an_average_of_the_weights_after_each_run_is_named(program, use_resource):
    with said(WEIGHTS):
        ours = averaged(program, accumulating(), use_resource)
    assert np.abs(ours - averaged_by_numpy()).max() > 5e-3
    with said():
        ours = averaged(after_step, accumulating(), use_resource)
    np.testing.assert_allclose(ours, averaged_by_numpy(), rtol=0, atol=2e-6)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "look",
    [
        lambda optimizer: optimizer.reset(),
        lambda optimizer: accum.compat.v1.Saver(optimizer),
        lambda optimizer: accum.compat.v1.FlushHook(optimizer).begin(),
        lambda optimizer: optimizer.check_graph(),
    ],
    ids=["reset", "Saver", "FlushHook", "check_graph"],
)
def test_all_that_comes_after_the_train_op_looks_for_averages(look):
    with said(WEIGHTS):
        averaged(by_control_dependencies, accumulating(), look=look, runs=False)


def target(problem, change):
    """Weights of another network, which follow those that are trained."""
    other = tf1.get_variable("target", initializer=[0.0, 0.0], trainable=False)
    return other.assign(change(other.read_value(), problem.weights.read_value()))


def moved_target(problem, optimizer):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return target(problem, lambda old, new: 0.9 * old + 0.1 * new)


@pytest.mark.law("L17")
def test_a_target_network_that_moves_after_each_run_is_named():
    with said(WEIGHTS):
        averaged(lambda *of: tf.group(after_step(*of), moved_target(*of)), accumulating(), runs=False)


def before_the_gradients_are_applied(problem, optimizer):
    """As updates of batch normalisation, which wait in UPDATE_OPS."""
    pairs = optimizer.compute_gradients(problem.loss)
    with tf.control_dependencies([problem.average.apply([problem.weights])]):
        return optimizer.apply_gradients(pairs)


@pytest.mark.law("L17")
def test_an_average_that_only_the_train_op_waits_for_is_named():
    with said(WEIGHTS):
        averaged(before_the_gradients_are_applied, accumulating(), runs=False)


def average_in_local_variable(problem, optimizer):
    options = {"trainable": False, "collections": [tf1.GraphKeys.LOCAL_VARIABLES]}
    average = tf1.get_variable("local", initializer=[0.0, 0.0], **options)
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return average.assign(0.5 * average + 0.5 * problem.weights)


def vector_of_weights(problem, optimizer, in_step=False):
    """As of a spectral normalisation: computed from the weights and itself, and the loss is divided by it."""
    vector = tf1.get_variable("vector", initializer=[0.6, 0.8], trainable=False)
    change = lambda: vector.assign(tf.nn.l2_normalize(vector.read_value() * (1.0 + problem.weights.read_value() ** 2)))
    loss = problem.loss / (4.0 + tf.reduce_sum(vector.read_value() * problem.weights))
    if in_step:
        optimizer.after_step(change)
        return optimizer.minimize(loss)
    return tf.group(optimizer.minimize(loss), change())


def average_from_a_step_on(problem, optimizer):
    step = tf1.train.get_or_create_global_step()
    with tf.control_dependencies([optimizer.minimize(problem.loss, step)]):
        average = lambda: tf.group(problem.average.apply([problem.weights]))
        return tf.cond(step.read_value() >= 1, average, tf.no_op)


def scaled_vector(problem, optimizer):
    """Multiplied by what is no mask, in each run."""
    vector = tf1.get_variable("vector", initializer=[1.0, 1.0], trainable=False)
    loss = problem.loss * tf.reduce_sum(vector.read_value() * problem.weights)
    with tf.control_dependencies([optimizer.minimize(loss)]):
        return vector.assign(vector.read_value() * tf.tanh(problem.weights.read_value()))


@KINDS
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "program",
    [average_in_local_variable, vector_of_weights, scaled_vector, average_from_a_step_on],
    ids=lambda program: program.__name__,
)
def test_whatever_is_computed_from_the_weights_and_itself_in_each_run_is_named(program, use_resource):
    with said(WEIGHTS), tf.Graph().as_default(), _tf.graphs.control_flow_of_tf(1):
        optimizer = accumulating()
        program(Regression(use_resource), optimizer)
        optimizer.check_graph()


@pytest.mark.law("L17")
def test_a_vector_of_the_weights_that_changes_after_each_step_is_not_named():
    with said(), tf.Graph().as_default():
        optimizer = accumulating()
        vector_of_weights(Regression(), optimizer, in_step=True)
        optimizer.check_graph()


# ----------------------------------------------------------------------------------------------------------------
# Changes of the weights by the program itself

CHANGED = "Trained variables change in each run"


def subtracted(weights):
    return weights.assign_sub(0.1 * weights.read_value())


def multiplied(weights):
    return weights.assign(0.9 * weights.read_value())


def decayed_behind(problem, optimizer, decay):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return decay(problem.weights)


def decayed_beside(problem, optimizer, decay):
    return tf.group(optimizer.minimize(problem.loss), decay(problem.weights))


def decayed_before(problem, optimizer, decay):
    pairs = optimizer.compute_gradients(problem.loss)
    with tf.control_dependencies([decay(problem.weights)]):
        return optimizer.apply_gradients(pairs)


def decayed_after_step(problem, optimizer, decay):
    optimizer.after_step(lambda: decay(problem.weights))
    return optimizer.minimize(problem.loss)


def decayed(program, decay, use_resource=True):
    with tf.Graph().as_default():
        problem, optimizer = Regression(use_resource), accumulating()
        train_op = program(problem, optimizer, decay)
        optimizer.check_graph()
        return run(train_op, problem.x, problem.weights)


@KINDS
@pytest.mark.law("L2", "L17")
@pytest.mark.parametrize("decay", [subtracted, multiplied], ids=lambda decay: decay.__name__)
@pytest.mark.parametrize(
    "program", [decayed_behind, decayed_beside, decayed_before], ids=lambda program: program.__name__
)
def test_a_weight_decay_in_each_run_is_named(program, decay, use_resource):
    weights = np.array([1.0, 2.0])
    for x in X.astype("float64"):
        weights = 0.9 * (weights - 0.1 * x.mean(0))
    with said(CHANGED):
        ours = decayed(program, decay, use_resource)
    assert np.abs(ours - weights).max() > 5e-3
    with said():
        ours = decayed(decayed_after_step, decay, use_resource)
    np.testing.assert_allclose(ours, weights, rtol=0, atol=2e-6)


def decayed_from_a_step_on(problem, optimizer, decay):
    step = tf1.train.get_or_create_global_step()
    with tf.control_dependencies([optimizer.minimize(problem.loss, step)]):
        return tf.cond(step.read_value() >= 1, lambda: tf.group(decay(problem.weights)), tf.no_op)


@KINDS
@pytest.mark.law("L17")
@pytest.mark.parametrize("decay", [subtracted, multiplied], ids=lambda decay: decay.__name__)
def test_a_weight_decay_that_asks_for_the_number_of_steps_is_named(decay, use_resource):
    with _tf.graphs.control_flow_of_tf(1), said(CHANGED):
        decayed(decayed_from_a_step_on, decay, use_resource)


@pytest.mark.law("L17")
def test_noise_that_is_added_to_weights_in_each_run_is_named():
    with said(CHANGED):
        decayed(decayed_behind, lambda weights: weights.assign_add(tf.random.normal([2])))


# ----------------------------------------------------------------------------------------------------------------
# State that the next run reads


class WithBaseline(Regression):
    def __init__(self):
        super().__init__()
        self.baseline = tf1.get_variable("baseline", [2], initializer=tf1.zeros_initializer(), trainable=False)
        self.loss = tf.reduce_mean(tf.reduce_sum(self.weights * (self.x - self.baseline), 1))

    def move(self):
        return self.baseline.assign(0.9 * self.baseline.read_value() + 0.1 * tf.reduce_mean(self.x, 0))


def baseline_behind(problem, optimizer):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return problem.move()


def baseline_beside(problem, optimizer):
    return tf.group(optimizer.minimize(problem.loss), problem.move())


def baseline_elsewhere(problem, optimizer):
    """In runs of its own."""
    train_op = optimizer.minimize(problem.loss)
    problem.move()
    return train_op


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "program", [baseline_behind, baseline_beside, baseline_elsewhere], ids=lambda one: one.__name__
)
def test_state_that_a_run_leaves_to_the_next_one_is_named(program):
    texts = ["to which the graph assigns what it computes"] if program is not baseline_elsewhere else []
    with tf.Graph().as_default(), said(*texts):
        optimizer = accumulating()
        program(WithBaseline(), optimizer)
        optimizer.check_graph()
        optimizer.check_graph()


# ----------------------------------------------------------------------------------------------------------------
# Summaries of a step


@KINDS
@pytest.mark.law("L17")
def test_a_summary_that_is_made_in_a_step_is_named_and_can_be_made_of_a_variable(use_resource):
    def program(keeps):
        problem = Regression(use_resource)
        norm = tf1.get_variable("norm", initializer=0.0, trainable=False, use_resource=use_resource)

        def clip(grads_and_vars):
            ((grad, var),) = grads_and_vars
            value = tf.norm(grad)
            if not keeps:
                tf1.summary.scalar("norm", value)
                return [(grad, var)]
            with tf.control_dependencies([norm.assign(value)]):
                return [(tf.identity(grad), var)]

        tf1.summary.scalar("loss", problem.loss)
        optimizer = accumulating(transform=clip)
        train_op = optimizer.minimize(problem.loss)
        optimizer.flush()
        if keeps:
            tf1.summary.scalar("norm", norm.read_value())
        merged = tf1.summary.merge_all()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for part in X[0].reshape(K, -1, 2):
                session.run(train_op, {problem.x: part})
            return tf1.Summary.FromString(session.run(merged, {problem.x: X[0]}))

    with tf.Graph().as_default(), said("A summary that `transform`"):
        assert [value.tag for value in program(False).value] == ["loss"]
    with tf.Graph().as_default(), said():
        _, norm = program(True).value
    np.testing.assert_allclose(norm.simple_value, np.linalg.norm(X[0].mean(0)), rtol=1e-5)


def copied_target(problem, optimizer):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return target(problem, lambda old, new: new)


def clipped_weights(problem, optimizer):
    """As WGAN has."""
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return problem.weights.assign(tf.clip_by_value(problem.weights.read_value(), -0.1, 0.1))


def projected_weights(problem, optimizer):
    """Each gives what it gets if it gets what it has given."""
    weights = problem.weights.read_value()
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        projections = [
            weights * tf.constant([1.0, 0.0]),
            tf.concat([tf.zeros([1]), weights[1:]], 0),
            weights / tf.norm(weights),
            weights * tf.minimum(1.0, 1.0 / tf.norm(weights)),
            tf.clip_by_global_norm([weights], 1.0)[0][0],
            weights - tf.reduce_mean(weights),
        ]
        return tf.group(*[problem.weights.assign(one) for one in projections])


def averaged_loss(problem, optimizer):
    """For display."""
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.train.ExponentialMovingAverage(0.9).apply([tf.identity(problem.loss)])


def metrics(problem, optimizer):
    train_op = optimizer.minimize(problem.loss)
    with tf.control_dependencies([train_op]):
        return tf.group(tf1.metrics.mean(problem.weights)[1], tf1.metrics.mean(problem.loss)[1])


def counted_examples(problem, optimizer):
    count = tf1.get_variable("count", initializer=0, trainable=False)
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return count.assign_add(tf.shape(problem.x)[0])


def averaged_now_and_then(problem, optimizer):
    """In a conditional of the program's own."""
    train_op = optimizer.minimize(problem.loss)
    with tf.control_dependencies([train_op]):
        is_new = tf.equal(optimizer.micro_step, 0) if optimizer.micro_step is not None else tf.constant(True)
    return tf.cond(is_new, lambda: tf.group(problem.average.apply([problem.weights])), tf.no_op)


def averaged_if_told(problem, optimizer):
    """In the last micro-batch, if the program feeds that it is."""
    is_last = tf1.placeholder_with_default(False, [])
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.cond(is_last, lambda: tf.group(problem.average.apply([problem.weights])), tf.no_op)


def pruned(problem, optimizer):
    """A mask, and the largest weights so far, which a loss reads."""
    mask, largest = (tf1.get_variable(name, initializer=[1.0, 1.0], trainable=False) for name in ("mask", "largest"))
    loss = problem.loss * tf.reduce_sum(mask.read_value() * problem.weights / largest.read_value())
    with tf.control_dependencies([optimizer.minimize(loss)]):
        sizes = tf.abs(problem.weights.read_value())
        masked = mask.assign(mask.read_value() * tf.cast(sizes > 0.01, tf.float32))
        return tf.group(masked, largest.assign(tf.maximum(largest.read_value(), sizes)))


def of_another_optimizer(problem, optimizer):
    """One that makes a step in each run, as of a generator, whose weights are averaged."""
    others = tf1.get_variable("other", initializer=[1.0, 2.0])
    train_op = optimizer.minimize(problem.loss, var_list=[problem.weights])
    with tf.control_dependencies([train_op]):
        other_op = sgd().minimize(tf.reduce_mean(others * problem.x), var_list=[others])
    with tf.control_dependencies([other_op]):
        return tf1.train.ExponentialMovingAverage(0.9).apply([others])


def averaged_penalty(problem, optimizer):
    """A loss for display that is no loss of the data."""
    penalty = tf.nn.l2_loss(problem.weights)
    with tf.control_dependencies([optimizer.minimize(problem.loss + 1e-4 * penalty)]):
        return tf1.train.ExponentialMovingAverage(0.9).apply([tf.identity(penalty)])


def averaged_loss_of_noise(problem, optimizer):
    """A loss for display, as of a generator, which needs no data."""
    loss = tf.reduce_mean(tf.random.normal([SIZE, 2]) * problem.weights, 0)
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.train.ExponentialMovingAverage(0.9).apply([loss, tf.reduce_sum(loss)])


def moments_of_another_optimizer(problem, optimizer):
    """One written in operations, as BERT's, of a generator whose loss is that of the trained network for noise."""
    others = tf1.get_variable("other", initializer=[1.0, 2.0])
    moment = tf1.get_variable("moment", initializer=[0.0, 0.0], trainable=False)
    train_op = optimizer.minimize(problem.loss, var_list=[problem.weights])
    with tf.control_dependencies([train_op]):
        grad = tf.gradients(tf.reduce_sum(problem.weights * others * tf.random.normal([2])), others)[0]
        return moment.assign(0.9 * moment + 0.1 * grad)


def between_steps(problem, optimizer):
    """With separate ops, `apply` makes the steps."""
    ops = optimizer.accumulation_ops(problem.loss)
    with tf.control_dependencies([ops.apply]):
        return problem.average.apply([problem.weights])


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "program",
    [
        copied_target,
        clipped_weights,
        projected_weights,
        averaged_loss,
        metrics,
        counted_examples,
        averaged_now_and_then,
        averaged_if_told,
        pruned,
        of_another_optimizer,
        averaged_penalty,
        averaged_loss_of_noise,
        moments_of_another_optimizer,
        between_steps,
    ],
    ids=lambda program: program.__name__,
)
def test_what_may_follow_each_run_is_not_named(program):
    with tf.Graph().as_default(), said():
        optimizer = accumulating()
        program(Regression(), optimizer)
        optimizer.check_graph()


@WHOLE
@pytest.mark.law("L14", "L17")
def test_an_average_after_each_step_is_not_named(options):
    with said():
        averaged(by_control_dependencies, accumulating(1, **options), runs=False)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_large_graphs_are_walked_a_few_times(monkeypatch):
    """Each average has few operations of its own, and what is computed from the data is looked at once."""
    with tf.Graph().as_default() as graph, said(WEIGHTS):
        problem, optimizer = Regression(), accumulating()
        hidden = problem.weights * problem.x
        for _ in range(1000):
            hidden = tf.sin(hidden)
        others = [tf1.get_variable("slot_%d" % place, initializer=[0.0, 0.0], trainable=False) for place in range(200)]
        with tf.control_dependencies([optimizer.minimize(problem.loss)]):
            tf.group(*[tf1.assign_sub(other, tf.reduce_mean(hidden, 0)) for other in others])
            problem.average.apply([problem.weights])
        walks, looked = accum._tf.op_walks, []
        sources_of = walks.sources_of
        monkeypatch.setattr(walks, "sources_of", lambda op, *args: looked.append(op) or sources_of(op, *args))
        optimizer.check_graph()
        assert 0 < len(looked) < 10 * len(graph.get_operations())


# ----------------------------------------------------------------------------------------------------------------
# A step counter of the program's own

COUNTER = "`global_step` is advanced with every micro-batch"


def counter(use_resource=True):
    collections = [tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.GLOBAL_STEP]
    options = {"trainable": False, "collections": collections, "use_resource": use_resource}
    return tf1.get_variable("global_step", [], tf.int64, tf1.zeros_initializer(), **options)


def halved(step):
    return 0.1 * 0.5 ** tf.cast(step.read_value(), tf.float32)


def decayed_by_numpy():
    weights = np.array([1.0, 2.0])
    for step, x in enumerate(X.astype("float64")):
        weights = weights - 0.1 * 0.5**step * x.mean(0)
    return weights


def counting(count, use_resource=True, rate=halved, runs=True):
    """The weights and the counter. `count` returns the op that is run, from the problem, optimizer and counter."""
    with tf.Graph().as_default():
        problem, step = Regression(use_resource), counter(use_resource)
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(rate(step)), K)
        train_op = count(problem, optimizer, step)
        optimizer.flush()
        return run(train_op, problem.x, [problem.weights, step]) if runs else None


def after_each_run(problem, optimizer, step):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.assign_add(step, 1)


def assigned_after_each_run(problem, optimizer, step):
    """As BERT's programs have it."""
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.assign(step, step + 1)


def assigned_beside_each_run(problem, optimizer, step):
    return tf.group(optimizer.minimize(problem.loss), step.assign(1 + step))


def beside_each_run(problem, optimizer, step):
    return tf.group(optimizer.minimize(problem.loss), tf1.assign_add(step, 1))


def as_it_should(problem, optimizer, step):
    return optimizer.minimize(problem.loss, step)


def after_each_step(problem, optimizer, step):
    optimizer.after_step(lambda: tf1.assign_add(step, 1))
    return optimizer.minimize(problem.loss)


@pytest.mark.slow
@KINDS
@pytest.mark.law("L3", "L17")
@pytest.mark.parametrize(
    "count",
    [after_each_run, beside_each_run, assigned_after_each_run, assigned_beside_each_run],
    ids=lambda count: count.__name__,
)
def test_a_counter_that_the_program_advances_in_each_run_is_named(count, use_resource):
    with said(COUNTER):
        weights, steps = counting(count, use_resource=use_resource)
    assert steps == K * STEPS and np.abs(weights - decayed_by_numpy()).max() > 1e-2
    for remedy in (as_it_should, after_each_step):
        with said():
            weights, steps = counting(remedy, use_resource=use_resource)
        np.testing.assert_allclose(weights, decayed_by_numpy(), rtol=0, atol=2e-6)
        assert steps == STEPS


def of_the_generator(problem, optimizer, step):
    """Another optimizer makes a step in each run, and counts them."""
    others = tf1.get_variable("other", initializer=[1.0, 2.0])
    train_op = optimizer.minimize(problem.loss, var_list=[problem.weights])
    with tf.control_dependencies([train_op]):
        return sgd().minimize(tf.reduce_mean(others * problem.x), step, [others])


def of_examples(problem, optimizer, step):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.assign_add(step, tf.shape(problem.x, out_type=tf.int64)[0])


def set_to_examples(problem, optimizer, step):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.assign(step, step + tf.shape(problem.x, out_type=tf.int64)[0])


def set_back(problem, optimizer, step):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        return tf1.assign(step, tf.constant(1, tf.int64) + 1)


def at_the_end_of_a_cycle(problem, optimizer, step):
    with tf.control_dependencies([optimizer.minimize(problem.loss)]):
        is_new = tf.equal(optimizer.micro_step, 0)
    return tf.cond(is_new, lambda: tf.group(tf1.assign_add(step, 1)), tf.no_op)


def by_itself(problem, optimizer, step):
    """It is run by the program, whenever that makes sense."""
    tf1.assign_add(step, 1)
    return optimizer.minimize(problem.loss)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "count",
    [of_the_generator, of_examples, set_to_examples, set_back, at_the_end_of_a_cycle, by_itself],
    ids=lambda count: count.__name__,
)
def test_other_ways_to_count_are_not_named(count):
    with said():
        counting(count, runs=False)


def by_own_counter(step):
    """A rate that reads a counter of the program's own, and not that of the graph."""
    with tf1.name_scope("rate"):
        own = tf1.Variable(0.0, trainable=False, name="global_step")
    return 0.1 * 0.5**own


def own_counter():
    return [var for var in tf1.global_variables() if var.op.name == "rate/global_step"][0]


def own_after_each_run(problem, optimizer, step):
    with tf.control_dependencies([optimizer.minimize(problem.loss, step)]):
        return tf1.assign_add(own_counter(), 1.0)


def own_as_it_should(problem, optimizer, step):
    return optimizer.minimize(problem.loss, own_counter())


def own_after_each_step(problem, optimizer, step):
    optimizer.after_step(lambda: tf1.assign_add(own_counter(), 1.0))
    return optimizer.minimize(problem.loss, step)


@pytest.mark.law("L3", "L17")
def test_a_counter_of_the_program_s_own_that_it_advances_in_each_run_is_named():
    with said("`rate/global_step` is advanced with every micro-batch"):
        weights, _ = counting(own_after_each_run, rate=by_own_counter)
    assert np.abs(weights - decayed_by_numpy()).max() > 1e-2
    for remedy in (own_as_it_should, own_after_each_step):
        with said():
            weights, _ = counting(remedy, rate=by_own_counter)
        np.testing.assert_allclose(weights, decayed_by_numpy(), rtol=0, atol=2e-6)


def warms_up(problem, optimizer, step):
    """A term of the loss grows with a counter, such as a divergence."""
    count = tf1.get_variable("warm_up", initializer=0.0, trainable=False)
    loss = problem.loss + tf.minimum(1.0, 0.3 * count.read_value()) * tf.nn.l2_loss(problem.weights)
    with tf.control_dependencies([optimizer.minimize(loss, step)]):
        return tf1.assign_add(count, 1.0)


@pytest.mark.law("L3", "L17")
def test_a_counter_by_which_a_loss_is_computed_is_named():
    with said("`warm_up` is advanced with every micro-batch"):
        counting(warms_up)


def draws_by_it(problem, optimizer, step):
    """Each micro-batch has to draw other numbers."""
    count = tf1.get_variable("draws", [], tf.int32, tf1.zeros_initializer(), trainable=False)
    noise = tf.random.stateless_uniform([2], tf.stack([count.read_value(), 1]))
    with tf.control_dependencies([optimizer.minimize(problem.loss + tf.reduce_sum(noise * problem.weights), step)]):
        return tf1.assign_add(count, 1)


def chooses_the_data(problem, optimizer, step):
    """Each micro-batch has to be another one."""
    place = tf1.get_variable("place", [], tf.int32, tf1.zeros_initializer(), trainable=False)
    part = tf.gather(tf.constant(X.reshape(STEPS * K, -1, 2)), place.read_value())
    loss = tf.reduce_mean(problem.x) * 0.0 + tf.reduce_mean(tf.reduce_sum(part * problem.weights, -1))
    with tf.control_dependencies([optimizer.minimize(loss, step)]):
        return tf1.assign_add(place, 1)


def takes_other_data_in_turn(problem, optimizer, step):
    count = tf1.get_variable("turns", [], tf.int32, tf1.zeros_initializer(), trainable=False)
    other = tf1.placeholder(tf.float32, [None, 2])
    data = tf.cond(tf.equal(count.read_value() % 2, 0), lambda: problem.x, lambda: other)
    with tf.control_dependencies([optimizer.minimize(tf.reduce_mean(data * problem.weights), step)]):
        return tf1.assign_add(count, 1)


@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "count", [chooses_the_data, draws_by_it, takes_other_data_in_turn], ids=lambda count: count.__name__
)
def test_a_counter_that_chooses_the_data_or_numbers_is_not_named(count):
    with said():
        counting(count, runs=False)


@pytest.mark.law("L17")
def test_a_counter_that_no_step_reads_is_not_named():
    with said():
        counting(after_each_run, rate=lambda step: 0.1, runs=False)


def float_step(use_resource=True):
    """A step as `get_variable` creates it by default, which TensorFlow's optimizers take."""
    zeros = tf1.zeros_initializer()
    return tf1.get_variable("global_step", [], initializer=zeros, trainable=False, use_resource=use_resource)


@pytest.mark.law("L3")
@pytest.mark.parametrize("use_resource", mainly([False, True], True), ids=["ref", "resource"])
@pytest.mark.parametrize("options", [{}, {"count_micro_steps": True}], ids=["steps", "micro steps"])
@pytest.mark.parametrize("is_given", [False, True], ids=["of another optimizer", "its own"])
def test_a_step_counter_of_floats_is_taken_as_by_tensorflow(options, is_given, use_resource, tmp_path):
    with tf.Graph().as_default(), said():
        problem, step = Regression(use_resource), float_step(use_resource)
        optimizer = accum.compat.v1.AccumOptimizer(sgd(), K, **options)
        train_op = optimizer.minimize(problem.loss, step if is_given else None)
        hooks = [accum.compat.v1.FlushHook(optimizer), record(str(tmp_path / "run")).session_hook()]
        saver = accum.compat.v1.Saver(optimizer)
        optimizer.check_graph()
        with tf1.train.SingularMonitoredSession(hooks, tf1.train.Scaffold(saver=saver)) as session:
            for part in X.reshape(STEPS * K, -1, 2)[: K + 1]:
                session.run(train_op, {problem.x: part})
            counted = session.run(step)
            saver.save(session.raw_session(), str(tmp_path / "at"))
    assert counted == (0 if not is_given else K + 1 if options else 1)


@pytest.mark.law("L3", "L17")
def test_a_step_counter_of_floats_that_the_program_advances_in_each_run_is_named():
    with tf.Graph().as_default(), said(COUNTER):
        problem, step = Regression(), float_step()
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(halved(step)), K)
        after_each_run(problem, optimizer, step)
        optimizer.flush()


@pytest.mark.slow
@pytest.mark.law("L16")
def test_what_is_noted_of_a_graph_does_not_keep_it():
    with tf.Graph().as_default() as graph:
        problem, optimizer = Regression(), accumulating()
        loss = lambda x: tf.reduce_mean(normalized(x))
        accum.compat.v1.value_and_gradients(loss, (problem.x,), micro_batch_size=SIZE, whole_batch=())
        optimizer.minimize(problem.loss, var_list=[problem.weights])
        optimizer.flush()
    reference = weakref.ref(graph)
    del graph, problem, optimizer, loss
    gc.collect()
    assert reference() is None
