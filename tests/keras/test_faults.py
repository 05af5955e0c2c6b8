"""The n-th operation fails, for n = 1, 2, … until none does: nothing has moved, and what is tried again is exact.

Plain Keras, or TensorFlow 1, which make the same steps on full batches without a fault, are the oracle.
"""

import gc
import logging
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_identical, assert_near
from optimizers import built, keras_weights
from replicas import mirrored
from versions import IS_KERAS_3, TF_VERSION

import accum
import accum.compat.v1

if sys.platform == "win32":
    pytest.skip("Windows has no limits of a process", allow_module_level=True)

from faults import FAULTS, FailingOps, MayFail, failing_assignments, full_disk, may_fail

tf1 = tf.compat.v1
layers = tf.keras.layers
PARTS, SIZE = 2, 6
BATCH = PARTS * SIZE
STEPS = 40  # more than there are faults in a step
RANDOM = np.random.RandomState(0)
X, Y = (RANDOM.normal(size=(STEPS, BATCH, width)).astype("float32") for width in (3, 2))
JIT = {"jit_compile": False} if IS_KERAS_3 else {}  # XLA compiles no `py_function`
EAGER_AND_TRACED = [pytest.param(True, id="eager"), pytest.param(False, id="traced")]
OPTIONS = {
    "accum_steps": {"accum_steps": PARTS, "last_cycle": "carry"},
    "micro_batch_size": {"micro_batch_size": SIZE},
    "a single micro-batch": {"micro_batch_size": BATCH},
    "whole_batch": {"micro_batch_size": SIZE, "whole_batch": "all"},
}


@pytest.fixture(autouse=True)
def no_fault():
    yield
    FAULTS.set(None)


def network(may_fail=True, normalises=False):
    inputs = tf.keras.Input((3,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    hidden = MayFail()(hidden) if may_fail else hidden
    hidden = layers.BatchNormalization()(hidden) if normalises else hidden
    hidden = layers.Dense(4, activation="tanh")(hidden)
    hidden = MayFail()(hidden) if may_fail else hidden
    model = tf.keras.Model(inputs, layers.Dense(2)(hidden))
    random = np.random.RandomState(1)
    model.set_weights(
        [0.5 * random.normal(size=np.shape(weight)) + (np.ndim(weight) == 1) for weight in model.get_weights()]
    )
    return model


def values(variables):
    return [var.numpy() for var in variables]


def inner_state(optimizer):
    """The values of all variables of a Keras optimizer."""
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return values(variables)


def momentum():
    return tf.keras.optimizers.SGD(0.05, momentum=0.9)


def trained_plainly(normalises=False):
    """The trainable weights after each step of plain Keras on full batches."""
    model = network(False, normalises)
    model.compile(momentum(), "mse", run_eagerly=True)
    states = []
    for x, y in zip(X, Y):
        model.train_on_batch(x, y)
        states.append(values(model.trainable_variables))
    return states


class Messages(logging.Handler):
    """What TensorFlow logs."""

    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


@pytest.fixture
def messages():
    handler = Messages()
    tf.get_logger().addHandler(handler)
    yield handler.said
    tf.get_logger().removeHandler(handler)


def each_fault(step, state):
    """Make steps until one has no fault: step 1 has the first fault, step 2 the second. Yields the numbers of steps.

    Args:
      step: function of the number of a step that makes what is left of it.
      state: function that returns the values that move with a step alone.
    """
    for number in range(STEPS):
        FAULTS.set(number or None)  # none in the first step, which creates and traces
        before = state()
        try:
            step(number)
        except Exception as error:
            assert "a fault on purpose" in str(error)
            assert_identical(state(), before)
            step(number)
        yield number
        if number and not FAULTS.has_come:
            assert number > 3
            return
    raise AssertionError(f"There are more than {STEPS} faults.")


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No batch is split")
@pytest.mark.parametrize("eagerly", EAGER_AND_TRACED)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_n_th_layer_or_its_gradient_fails_in_fit(options, eagerly, messages):
    normalises = options == "whole_batch"
    tf.keras.backend.clear_session()  # TF 2.2 has one graph for all models, of which each keeps the layers of all
    references = fitted_with_faults(OPTIONS[options], eagerly, normalises)
    tf.keras.backend.clear_session()
    gc.collect()
    if TF_VERSION >= (2, 4) or not (eagerly and normalises):  # TF 2.2 never frees a custom gradient that fails eagerly
        assert [reference() for reference in references if reference() is not None] == []
    assert [said for said in messages if "never used" in said] == []


def fitted_with_faults(options, eagerly, normalises):
    """Fit a model and drop it. Returns weak references to it and its layers."""
    model = accum.GradientAccumulateModel.from_model(network(True, normalises), **options)
    model.compile(momentum(), "mse", run_eagerly=eagerly, **JIT)
    size = SIZE if "accum_steps" in options else BATCH
    plain = trained_plainly(normalises)

    def step(number):
        done = int(model.optimizer.micro_step) * size
        model.fit(X[number][done:], Y[number][done:], batch_size=size, shuffle=False, verbose=0)

    def state():
        return values(model.trainable_variables) + inner_state(model.optimizer.optimizer)

    for number in each_fault(step, state):
        assert_near(values(model.trainable_variables), plain[number])
    return [weakref.ref(part) for part in [model] + model.layers]


class Failing(tf.keras.Model):
    """A model whose train step raises an error as long as its attribute says so."""

    fails = False

    def train_step(self, data):
        if self.fails:
            raise RuntimeError("a fault on purpose")
        return super().train_step(data)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("trains", ["fit", "train_on_batch"])
@pytest.mark.parametrize("name", ["accum_steps", "micro_batch_size", "auto", "whole_batch"])
def test_a_train_step_that_fails_in_its_first_trace_is_traced_again(name, trains):
    options = {**OPTIONS, "auto": {"micro_batch_size": "auto"}}[name]
    plain = network(False)
    model = accum.GradientAccumulateModel.from_model(Failing(plain.inputs, plain.outputs), **options)
    before = plain.get_weights()
    for one in (plain, model):
        one.compile(momentum(), "mse", **JIT)

    def step(one, parts):
        if trains == "fit":
            return one.fit(X[0], Y[0], batch_size=BATCH // parts, shuffle=False, verbose=0)
        return [one.train_on_batch(x, y) for x, y in zip(np.split(X[0], parts), np.split(Y[0], parts))]

    model.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a fault on purpose"):
            step(model, 1)
    assert_identical(model.get_weights(), before)
    model.fails = False
    step(model, PARTS if "accum_steps" in options else 1)
    step(plain, 1)
    assert_near(model.get_weights(), plain.get_weights())


def loop(model, optimizer, strategy=None, eagerly=True):
    """A custom loop. Returns a function that makes what is left of a step."""

    def micro_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        if strategy is not None:
            grads = [grad / strategy.num_replicas_in_sync for grad in grads]
        optimizer.apply_gradients(zip(grads, model.trainable_variables))

    def on_replicas(x, y):
        replicas = strategy.num_replicas_in_sync

        def parts(value):
            own = tf.split(value, replicas)
            return strategy.experimental_distribute_values_from_function(
                lambda context: own[context.replica_id_in_sync_group]
            )

        strategy.run(traced, args=(parts(x), parts(y)))

    traced = micro_step if eagerly else tf.function(micro_step)

    def step(number):
        for part in range(int(optimizer.micro_step), PARTS):
            rows = slice(part * SIZE, (part + 1) * SIZE)
            (traced if strategy is None else on_replicas)(tf.constant(X[number][rows]), tf.constant(Y[number][rows]))

    return step


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("eagerly", [pytest.param(True, id="eager", marks=pytest.mark.slow), EAGER_AND_TRACED[1]])
def test_the_n_th_layer_or_its_gradient_fails_in_a_custom_loop(eagerly):
    model = network()
    optimizer = accum.GradientAccumulateOptimizer(momentum(), accum_steps=PARTS)
    plain = trained_plainly()

    def state():
        return values(model.trainable_variables) + inner_state(optimizer.optimizer)

    for number in each_fault(loop(model, optimizer, eagerly=eagerly), state):
        assert_near(values(model.trainable_variables), plain[number])


@pytest.mark.slow
@pytest.mark.tf("2.2")
@pytest.mark.tf("2.4", because="values of replicas can be made since 2.4")
def test_the_n_th_communication_fails():
    strategy = mirrored(FailingOps())
    with strategy.scope():
        model = network(may_fail=False)
        optimizer = accum.GradientAccumulateOptimizer(momentum(), accum_steps=PARTS)
    plain = trained_plainly()
    step = loop(model, optimizer, strategy)

    def state():
        return values(model.trainable_variables)

    for number in range(3):
        FAULTS.set(number or None)
        before = state()
        if number == 1:
            with pytest.raises(Exception, match="a fault on purpose"):
                step(number)
            assert_identical(state(), before)
            assert int(optimizer.micro_step) == PARTS - 1
        step(number)
        assert_near(state(), plain[number])
    assert not FAULTS.has_come  # a step has one communication


@pytest.mark.tf("2.2")
def test_the_n_th_assignment_fails_while_sums_are_stored_and_reset_begins_the_cycle_again(monkeypatch):
    """Sums that are half stored can't be told from others: `reset` is what a user has to call then."""
    first = [np.ones(2, "float32"), np.full(3, 2.0, "float32")]
    variables = keras_weights(first)
    optimizer = built(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=3), variables)
    expected = [value.copy() for value in first]
    is_torn = []
    for number in range(STEPS):
        grads = RANDOM.normal(size=(3, 5)).astype("float32")

        def feed(part, grads=grads):
            optimizer.apply_gradients(zip([tf.constant(grads[part][:2]), tf.constant(grads[part][2:])], variables))

        feed(0)
        sums = values(optimizer.gradients)
        FAULTS.set(number or None)
        with failing_assignments(monkeypatch):
            try:
                feed(1)
            except Exception as error:
                assert "a fault on purpose" in str(error)
        if FAULTS.has_come:
            assert_identical(values(variables), expected)
            assert int(optimizer.micro_step) in (1, 2)
            is_torn.append(not all(map(np.array_equal, values(optimizer.gradients), sums)))
            optimizer.reset()
            feed(0)
            feed(1)
        feed(2)
        expected = [value - grad for value, grad in zip(expected, np.split(grads.mean(axis=0), [2]))]
        assert_near(values(variables), expected)
        expected = values(variables)
        if number and not FAULTS.has_come:
            break
    assert any(is_torn) and not all(is_torn)


class Program:
    """A program of TensorFlow 1, whose tanh and its gradient may fail."""

    def __init__(self, optimizer, resource, explicit):
        random = np.random.RandomState(1)
        shapes = {"w1": (3, 4), "w2": (4, 2)}
        self.x, self.y = (tf1.placeholder(tf.float32, [None, width]) for width in (3, 2))
        w1, w2 = (
            tf1.get_variable(name, initializer=random.normal(size=shape).astype("float32"), use_resource=resource)
            for name, shape in shapes.items()
        )
        hidden = tf.tanh(tf.matmul(self.x, w1))
        loss = tf.reduce_mean((tf.matmul(may_fail(hidden) if optimizer else hidden, w2) - self.y) ** 2)
        self.global_step = tf1.train.get_or_create_global_step()
        inner = tf1.train.MomentumOptimizer(0.05, 0.9)
        self.wrapped = accum.compat.v1.AccumOptimizer(inner, PARTS) if optimizer else inner
        if explicit:
            self.ops = self.wrapped.accumulation_ops(loss, global_step=self.global_step)
        else:
            self.train_op = self.wrapped.minimize(loss, global_step=self.global_step)
        self.weights = [w1, w2]
        self.moving = [w1, w2, self.global_step] + [inner.get_slot(var, "momentum") for var in self.weights]


@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
@pytest.mark.parametrize("explicit", [False, True], ids=["train op", "explicit"])
def test_the_n_th_layer_or_its_gradient_fails_in_a_session(explicit, resource):
    with tf.Graph().as_default(), tf1.Session() as session:
        program = Program(False, resource, False)
        session.run(tf1.global_variables_initializer())
        plain = []
        for x, y in zip(X, Y):
            session.run(program.train_op, {program.x: x, program.y: y})
            plain.append(session.run(program.weights))
    with tf.Graph().as_default(), tf1.Session() as session:
        program = Program(True, resource, explicit)
        micro_step = program.wrapped.micro_step
        session.run(tf1.global_variables_initializer())

        def step(number):
            for part in range(int(session.run(micro_step)), PARTS):
                rows = slice(part * SIZE, (part + 1) * SIZE)
                op = program.ops.accumulate if explicit else program.train_op
                session.run(op, {program.x: X[number][rows], program.y: Y[number][rows]})
            if explicit:
                session.run(program.ops.apply)

        made = []
        for number in each_fault(step, lambda: session.run(program.moving)):
            assert_near(session.run(program.weights), plain[number])
            made.append(number)
        assert int(session.run(program.global_step)) == len(made)


def fill_up(save):
    """Call `save` while files may have 0 bytes, then ever more, until it succeeds. Returns how often it failed."""
    for failed in range(30):
        try:
            with full_disk(int(1.7**failed) - 1):
                save()
        except Exception:
            continue
        return failed
    raise AssertionError("Nothing was ever saved.")


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_the_disk_is_full_while_a_checkpoint_is_saved_in_mid_cycle(tmp_path):
    model = network(may_fail=False)
    optimizer = accum.GradientAccumulateOptimizer(momentum(), accum_steps=PARTS)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=None)
    step = loop(model, optimizer)
    plain = trained_plainly()
    step(0)
    kept = manager.save()
    optimizer_state = lambda: values(model.weights) + inner_state(optimizer.optimizer) + values(optimizer.gradients)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X[1][:SIZE], training=True) - Y[1][:SIZE]) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    before = optimizer_state()
    seen = []

    def save():
        try:
            manager.save()
        except Exception:
            seen.append(tf.train.latest_checkpoint(str(tmp_path)))
            raise

    assert fill_up(save) > 3
    assert set(seen) == {kept}
    assert_identical(optimizer_state(), before)
    step(1)
    assert_near(values(model.trainable_variables), plain[1])
    ended = values(model.weights)
    checkpoint.restore(manager.latest_checkpoint)  # the one that succeeded, in mid-cycle
    assert_identical(optimizer_state(), before)
    step(1)
    assert_identical(values(model.weights), ended)


@pytest.mark.slow
def test_the_disk_is_full_while_a_saver_saves_in_mid_cycle(tmp_path):
    with tf.Graph().as_default(), tf1.Session() as session:
        program = Program(True, True, False)
        saver = tf1.train.Saver(max_to_keep=None)
        session.run(tf1.global_variables_initializer())
        feeds = [{program.x: x[:SIZE], program.y: y[:SIZE]} for x, y in zip(X[:4], Y[:4])]
        for feed in feeds[:2]:
            session.run(program.train_op, feed)
        kept = saver.save(session, str(tmp_path / "run"), 0)
        session.run(program.train_op, feeds[2])
        everything = tf1.global_variables()
        before = session.run(everything)
        assert fill_up(lambda: saver.save(session, str(tmp_path / "run"), 1, write_meta_graph=False)) > 3
        assert_identical(session.run(everything), before)
        session.run(program.train_op, feeds[3])
        ended = session.run(everything)
        for path, rest in ((kept, feeds[2:]), (str(tmp_path / "run-1"), feeds[3:])):
            saver.restore(session, path)
            for feed in rest:
                session.run(program.train_op, feed)
            assert_identical(session.run(everything), ended)


@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("fit", marks=pytest.mark.tf("2.2")),
        "MonitoredTrainingSession",
        "Estimator",
    ],
)
def test_a_run_killed_before_and_after_each_micro_step_ends_on_the_same_bits(kind, tmp_path):
    if kind != "fit" and TF_VERSION > (1, 15):
        pytest.skip("the loops of TF 1 are run on TF 1")
    script = os.path.join(
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "killed_everywhere.py"
    )
    done = subprocess.run([sys.executable, script, kind, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert done.stdout.split()[-1] == b"16"
