"""`StepLogger` logs what NumPy computes for each step, from a linear model whose noise scale is known."""

import csv
import gc
import math

import numpy as np
import pytest
import tensorflow as tf
from loss_scales import loss_scale_optimizer
from replicas import mirrored
from test_callbacks import logged as logged_points

import accum
from accum._keras._logging._noise_scale import Estimate, NoiseScale, SquaredNorms, advice, estimate

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

RANDOM = np.random.RandomState(0)
WIDTH = 3
X = RANDOM.normal(size=(40, WIDTH)).astype("float32")
Y = RANDOM.normal(size=(40, 1)).astype("float32")
FIRST = RANDOM.normal(size=(WIDTH, 1))
NAMES = ["step", "loss", "gradient_norm", "examples", "learning_rate", "noise_scale"]


def plain_model():
    inputs = tf.keras.Input((WIDTH,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
    model.set_weights([FIRST])
    return model


def logged(
    batch_size, rate=0.0, optimizer=None, epochs=1, data=(X, Y), model=None, loss="mse", eagerly=True, **options
):
    """The logger of a model that accumulates with `options`, after `fit`. Eager runs save the time to trace."""
    model = accum.GradientAccumulateModel.from_model(plain_model() if model is None else model, **options)
    model.compile(tf.keras.optimizers.SGD(rate) if optimizer is None else optimizer, loss, run_eagerly=eagerly)
    logger = accum.StepLogger(average_over=3, verbose=0)
    model.fit(*data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[logger])
    return logger


class Oracle:
    """The steps of gradient descent on the linear model, in float64.

    Args:
      rate: learning rate, a number or a function of the steps so far.
    """

    def __init__(self, rate=0.0):
        self.weights, self.rate = FIRST.copy(), rate
        self.variance = self.squared = 0.0
        self.history = {name: [] for name in NAMES}

    def gradient(self, indices):
        return 2 * X[indices].T.astype(float) @ (X[indices] @ self.weights - Y[indices]) / len(indices)

    def step(self, sizes, start):
        """Make a step from the examples after `start`, in micro-batches of `sizes`. Returns where it ended."""
        parts = np.split(np.arange(start, start + sum(sizes)), np.cumsum(sizes)[:-1])
        shares, sizes = np.array(sizes) / sum(sizes), np.array(sizes)
        grads = [self.gradient(part) for part in parts]
        grad = sum(share * grad_of_part for share, grad_of_part in zip(shares, grads))
        # Both expectations, solved as two linear equations.
        system = np.array([[1.0, (shares / sizes).sum()], [1.0, (shares**2 / sizes).sum()]])
        if len(sizes) > 1:
            seen = [sum(share * (grad_of_part**2).sum() for share, grad_of_part in zip(shares, grads)), (grad**2).sum()]
            squared, variance = np.linalg.solve(system, seen)
            self.squared, self.variance = 2 / 3 * self.squared + squared, 2 / 3 * self.variance + variance
        everything = np.concatenate(parts)
        rate = self.rate(len(self.history["step"])) if callable(self.rate) else self.rate
        is_known = len(sizes) > 1 and self.squared > 0 and self.variance > 0
        values = len(self.history["step"]) + 1, ((X[everything] @ self.weights - Y[everything]) ** 2).mean()
        values += np.sqrt((grad**2).sum()), len(everything), rate
        for name, value in zip(NAMES, values + (self.variance / self.squared if is_known else np.nan,)):
            self.history[name].append(value)
        self.weights = self.weights - rate * grad
        return start + sum(sizes)


def expected(steps, rate=0.0, epochs=1):
    """What is logged of `steps`: a list of the sizes of the micro-batches of each."""
    oracle = Oracle(rate)
    for _ in range(epochs):
        start = 0
        for sizes in steps:
            start = oracle.step(sizes, start)
    return oracle.history


def assert_logged(history, wanted, rtol=2e-4):
    assert sorted(history) == sorted(NAMES)
    for name in NAMES:
        np.testing.assert_allclose(history[name], wanted[name], rtol=rtol, err_msg=name)


@pytest.mark.parametrize(
    "options, batch_size, steps",
    [
        pytest.param({"accum_steps": 3}, 6, [[6, 6, 6], [6, 6, 6], [4]], id="accum_steps"),
        pytest.param({"accum_steps": 4}, 6, [[6, 6, 6, 6], [6, 6, 4]], id="flush"),
        pytest.param({"accum_steps": 4, "reduction": "sum", "micro_batch_weight": "equal"}, 5, [[5] * 4] * 2, id="sum"),
        pytest.param({"accum_steps": 4, "reduction": "running_mean"}, 5, [[5] * 4] * 2, id="running_mean"),
        pytest.param({"micro_batch_size": 4}, 15, [[3, 4, 4, 4], [3, 4, 4, 4], [2, 4, 4]], id="micro_batch_size"),
        pytest.param({"micro_batch_size": 4, "accum_steps": 2}, 10, [[2, 4, 4] * 2] * 2, id="both"),
        pytest.param({"accum_steps": 1}, 20, [[20]] * 2, id="no_accumulation"),
    ],
)
def test_each_step_is_logged_as_numpy_computes_it(options, batch_size, steps):
    wanted = expected(steps, rate=0.01, epochs=2)
    if options.get("reduction") == "sum":  # the optimizer gets the sum of the gradients, at a rate for it
        logger = logged(batch_size, rate=0.01 / 4, epochs=2, **options)
        wanted.update(
            gradient_norm=[4 * norm for norm in wanted["gradient_norm"]], learning_rate=[0.01 / 4] * len(wanted["step"])
        )
    else:
        logger = logged(batch_size, rate=0.01, epochs=2, **options)
    assert_logged(logger.history, wanted)


def test_the_noise_scale_is_within_five_percent_of_the_analytic_one():
    random = np.random.RandomState(1)
    x = random.normal(size=(4096, WIDTH)).astype("float32")
    y = (x @ random.normal(size=(WIDTH, 1)) + random.normal(size=(4096, 1))).astype("float32")
    # With x ~ N(0, 1), error e = x.d + noise and gradient 2 e x: G = 2 d, E|2 e x|^2 = 4 ((n + 2) |d|^2 + n s^2).
    solution = np.linalg.lstsq(x.astype(float), y.astype(float), rcond=None)[0]
    square = float(((FIRST - solution) ** 2).sum())
    analytic = ((WIDTH + 2) * square + WIDTH * 1.0 - square) / square
    for options, size in (({"accum_steps": 8}, 8), ({"micro_batch_size": 2}, 32)):
        model = accum.GradientAccumulateModel.from_model(plain_model(), **options)
        model.compile(tf.keras.optimizers.SGD(0.0), "mse")
        logger = accum.StepLogger(average_over=10**6, verbose=0)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0, callbacks=[logger])
        assert logger.history["noise_scale"][-1] == pytest.approx(analytic, rel=0.05)


def test_a_plain_model_with_an_accumulating_optimizer_is_logged():
    model = plain_model()
    model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.01), 4), "mse")
    logger = accum.StepLogger(average_over=3, verbose=0)
    model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0, callbacks=[logger])
    assert_logged(logger.history, expected([[5] * 4] * 2, rate=0.01, epochs=2))


def test_a_train_step_of_ones_own_is_logged():
    class Own(tf.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    inputs = tf.keras.Input((WIDTH,))
    model = Own(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
    model.set_weights([FIRST])
    logger = logged(5, rate=0.01, model=model, loss=None, accum_steps=4)
    assert_logged(logger.history, expected([[5] * 4] * 2, rate=0.01))


@pytest.mark.parametrize(
    "options, batch_size, steps",
    [
        pytest.param({"accum_steps": 2}, 10, [[5] * 4] * 2, id="accum_steps"),
        pytest.param({"micro_batch_size": 5}, 20, [[5] * 4] * 2, id="micro_batch_size"),
        pytest.param({"accum_steps": 1}, 20, [[10] * 2] * 2, id="no_accumulation"),
    ],
)
def test_two_replicas_are_logged_together(options, batch_size, steps):
    with mirrored().scope():
        logger = logged(batch_size, rate=0.01, eagerly=False, **options)
    assert_logged(logger.history, expected(steps, rate=0.01))


def test_the_learning_rate_is_that_of_the_step():
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)
    logger = logged(5, optimizer=tf.keras.optimizers.SGD(schedule), epochs=2, eagerly=False, accum_steps=4)
    assert_logged(logger.history, expected([[5] * 4] * 2, rate=lambda step: 0.01 * 0.5**step, epochs=2))


def test_gradients_are_logged_without_their_loss_scale():
    for options, size in (({"accum_steps": 4}, 5), ({"micro_batch_size": 5}, 20)):
        optimizer = loss_scale_optimizer(tf.keras.optimizers.SGD(0.01), 64.0)
        logger = logged(size, optimizer=optimizer, **options)
        assert_logged(logger.history, expected([[5] * 4] * 2, rate=0.01))


def test_a_row_that_a_micro_batch_uses_twice_counts_with_the_sum_of_its_gradients():
    inputs = tf.keras.Input((2,), dtype="int32")
    outputs = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(4, 1)(inputs))
    model = tf.keras.Model(inputs, outputs)
    table = np.arange(1.0, 5.0).reshape(4, 1)
    model.set_weights([table])
    x, y = np.array([[0, 0], [1, 2], [3, 3], [0, 1]]), np.zeros((4, 2), "float32")
    logger = logged(1, model=model, data=(x, y), accum_steps=4)
    grads = np.zeros((4, 4))
    for grad, rows in zip(grads, x):
        np.add.at(grad, rows, table[rows, 0])  # the mean over two outputs of the derivative 2 w
    mean = (grads.mean(0) ** 2).sum()
    variance = ((grads**2).sum(1).mean() - mean) / (1 - 1 / 4)
    assert logger.history["gradient_norm"][0] == pytest.approx(mean**0.5, rel=1e-5)
    assert logger.history["noise_scale"][0] == pytest.approx(variance / (mean - variance / 4), rel=1e-4)


def test_a_cycle_that_made_no_step_is_not_logged_with_the_next_one():
    y = Y.copy()
    y[3] = np.nan
    logger = logged(5, data=(X, y), accum_steps=4, nonfinite="skip_cycle")
    wanted = expected([[5] * 4] * 2)
    for name in ("gradient_norm", "examples"):
        np.testing.assert_allclose(logger.history[name], wanted[name][1:], rtol=1e-5)
    assert logger.history["step"] == [1]
    logger = logged(6, epochs=2, accum_steps=4, last_cycle="drop")
    assert logger.history["examples"] == [24, 24]


@pytest.mark.parametrize(
    "call, steps, start", [("flush", [[5, 5], [5] * 4, [5, 5]], 0), ("reset", [[5] * 4, [5, 5]], 10)]
)
def test_a_cycle_that_the_user_ends_is_logged_apart(call, steps, start):
    class EndsCycle(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                getattr(model.optimizer, call)()

    model = accum.GradientAccumulateModel.from_model(plain_model(), accum_steps=4)
    model.compile(tf.keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    logger = accum.StepLogger(average_over=3, verbose=0)
    model.fit(X, Y, batch_size=5, shuffle=False, verbose=0, callbacks=[EndsCycle(), logger])
    oracle = Oracle()
    for sizes in steps:
        start = oracle.step(sizes, start)
    assert_logged(logger.history, oracle.history)


def test_steps_that_do_not_fit_are_said(monkeypatch, capsys):
    monkeypatch.setattr("accum._keras._logging._step_recorder.ROWS", 2)
    logger = logged(5, accum_steps=2, epochs=2)
    wanted = expected([[5, 5]] * 4, epochs=2)
    assert logger.history["step"] == [1, 2, 5, 6]
    for name in ("loss", "gradient_norm", "examples"):
        np.testing.assert_allclose(logger.history[name], [wanted[name][step] for step in (0, 1, 4, 5)], rtol=1e-5)
    assert capsys.readouterr().out.count("2 cycles were not logged") == 2


@pytest.mark.parametrize("name", ["whole_batch", "auto", "single", "sum"])
def test_no_noise_scale_is_logged_where_it_cannot_be_known(name):
    options, size, loss, words = {
        "whole_batch": ({"micro_batch_size": 5, "whole_batch": "loss"}, 20, "mse", "`whole_batch`"),
        "auto": ({"micro_batch_size": "auto"}, 20, "mse", "no step had two micro-batches"),
        "single": ({"accum_steps": 1}, 20, "mse", "no step had two micro-batches"),
        "sum": ({"micro_batch_size": 5}, 20, tf.keras.losses.MeanSquaredError(reduction="sum"), "sums over examples"),
    }[name]
    logger = logged(size, loss=loss, **options)
    assert np.isnan(logger.history["noise_scale"]).all()
    assert words in logger.summary
    wanted = expected([[20]] * 2)
    factor = 20 if name == "sum" else 1
    np.testing.assert_allclose(logger.history["gradient_norm"], factor * np.array(wanted["gradient_norm"]), rtol=1e-5)
    np.testing.assert_allclose(logger.history["loss"], factor * np.array(wanted["loss"]), rtol=1e-5)
    assert logger.history["examples"] == [20, 20]


def test_steps_are_written_to_csv_tensorboard_and_history(tmp_path, capsys):
    model = accum.GradientAccumulateModel.from_model(plain_model(), accum_steps=4)
    model.compile("sgd", "mse")
    logger = accum.StepLogger(str(tmp_path / "steps.csv"), str(tmp_path / "logs"))
    history = model.fit(X, Y, batch_size=5, epochs=2, verbose=0, callbacks=[logger]).history
    with open(str(tmp_path / "steps.csv"), newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == NAMES
    assert [float(row[2]) for row in rows[1:]] == logger.history["gradient_norm"]
    points = logged_points(tmp_path / "logs")[0]
    np.testing.assert_allclose(points["step/loss"], logger.history["loss"], rtol=1e-6)
    assert history["examples_per_step"] == [20, 20]
    np.testing.assert_allclose(history["gradient_norm"][1], np.mean(logger.history["gradient_norm"][2:]))
    assert logger.summary in capsys.readouterr().out


def test_training_without_the_callback_afterwards_records_nothing(tmp_path):
    def saved():
        path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
        return [name for name, _ in tf.train.list_variables(path)]

    model = accum.GradientAccumulateModel.from_model(plain_model(), accum_steps=4)
    model.compile("sgd", "mse")
    logger = accum.StepLogger(verbose=0)
    model.fit(X, Y, batch_size=5, verbose=0)
    before = saved()
    model.fit(X, Y, batch_size=5, verbose=0, callbacks=[logger])
    steps = {name: list(values) for name, values in logger.history.items()}
    assert saved() == before
    model.fit(X, Y, batch_size=5, verbose=0)
    assert logger.history == steps
    assert len(steps["step"]) == 2


class Interrupts(tf.keras.callbacks.Callback):
    """Raises after six batches of five examples."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            raise KeyboardInterrupt


def interrupted(kind, eagerly, tmp_path):
    """A model whose first `fit` has ended by an exception, after a cycle and a half, and its logger."""
    model, inner = plain_model(), tf.keras.optimizers.SGD(0.0)
    if kind == "optimizer":
        inner = accum.GradientAccumulateOptimizer(inner, accum_steps=4)
    else:
        model = accum.GradientAccumulateModel.from_model(model, accum_steps=4, last_cycle=kind)
    model.compile(inner, "mse", run_eagerly=eagerly)
    logger = accum.StepLogger(str(tmp_path / "steps.csv"), average_over=3, verbose=0)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=5, shuffle=False, verbose=0, callbacks=[logger, Interrupts()])
    return model, logger


EAGER = [pytest.param(False, id="traced"), pytest.param(True, id="eager")]


@pytest.mark.parametrize("eagerly", EAGER)
@pytest.mark.parametrize("is_same", [True, False], ids=["same logger", "new logger"])
@pytest.mark.parametrize("kind", ["flush", "carry", "drop", "optimizer"])
def test_after_an_exception_the_next_rows_are_right(kind, is_same, eagerly, tmp_path):
    model, logger = interrupted(kind, eagerly, tmp_path)
    logger = logger if is_same else accum.StepLogger(str(tmp_path / "steps.csv"), average_over=3, verbose=0)
    model.fit(X[30:], Y[30:], batch_size=5, shuffle=False, verbose=0, callbacks=[logger])
    is_one_cycle, oracle = kind in ("carry", "optimizer"), Oracle()
    if kind != "drop":  # two batches are half a cycle, or the second half of the one before
        oracle.step([5] * 4 if is_one_cycle else [5] * 2, 20 if is_one_cycle else 30)
    oracle.history["step"] = [3 if kind == "flush" else 2] * len(oracle.history["step"])
    assert_logged(logger.history, oracle.history)
    with open(str(tmp_path / "steps.csv"), newline="") as file:
        assert len(list(csv.reader(file))) == 1 + len(oracle.history["step"])


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["flush", "carry"])
def test_an_exception_leaves_all_rows_and_a_closed_file(kind, tmp_path):
    model, logger = interrupted(kind, True, tmp_path)
    oracle = Oracle()
    for sizes, start in (([5] * 4, 0), ([5] * 2, 20))[: 2 if kind == "flush" else 1]:
        oracle.step(sizes, start)
    assert_logged(logger.history, oracle.history)
    with open(str(tmp_path / "steps.csv"), newline="") as file:
        assert len(list(csv.reader(file))) == 1 + len(oracle.history["step"])
    del model, logger
    gc.collect()


def test_of_a_cycle_that_began_elsewhere_only_the_step_is_logged(tmp_path):
    model, logger = interrupted("carry", True, tmp_path)
    model.train_on_batch(X[:5], Y[:5])
    logger = accum.StepLogger(average_over=3, verbose=0)
    model.fit(X[:25], Y[:25], batch_size=5, shuffle=False, verbose=0, callbacks=[logger])
    first = {name: values[0] for name, values in logger.history.items()}
    assert first["step"] == 2 and first["gradient_norm"] > 0.0
    assert all(math.isnan(first[name]) for name in ("loss", "examples", "noise_scale"))
    oracle = Oracle()
    oracle.step([5] * 4, 5)
    assert_logged({name: values[1:] for name, values in logger.history.items()}, dict(oracle.history, step=[3]))


@pytest.mark.law("L12")
def test_of_a_cycle_that_a_checkpoint_brings_only_the_step_is_logged(tmp_path):
    model, _ = interrupted("carry", False, tmp_path)  # the second of four batches
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "state"))
    resumed = accum.GradientAccumulateModel.from_model(plain_model(), accum_steps=4, last_cycle="carry")
    resumed.compile(tf.keras.optimizers.SGD(0.0), "mse")
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path)
    logger = accum.StepLogger(average_over=3, verbose=0)
    resumed.fit(X[30:], Y[30:], batch_size=5, shuffle=False, verbose=0, callbacks=[logger])
    assert logger.history["step"] == [2] and logger.history["gradient_norm"][0] > 0.0
    for name in ("loss", "examples", "noise_scale"):
        assert math.isnan(logger.history[name][0]), name


def test_a_model_that_cannot_be_followed_raises():
    model = plain_model()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must be compiled with a `GradientAccumulateOptimizer`"):
        model.fit(X, Y, verbose=0, callbacks=[accum.StepLogger()])
    with pytest.raises(ValueError, match="`average_over` must be an int >= 1"):
        accum.StepLogger(average_over=0)


def test_the_estimates_are_unbiased_for_micro_batches_of_any_size():
    random, sizes = np.random.RandomState(0), np.array([1, 2, 5])
    shares, estimates = sizes / sizes.sum(), []
    for _ in range(4000):
        grads = 2.0 + random.normal(size=3) * 3.0 / np.sqrt(sizes)
        norms = (sizes * grads**2).sum(), 8.0, 3.0, 8.0, 3.0, (shares @ grads) ** 2
        estimates.append(estimate(SquaredNorms(*norms)))
    np.testing.assert_allclose(np.mean(estimates, axis=0), [9.0, 4.0], rtol=0.05)


def test_estimates_that_do_not_exist_are_left_out_of_the_average():
    scale = NoiseScale(average_over=2)
    assert math.isnan(scale.value)
    scale.add(estimate(SquaredNorms(8.0, 2.0, 1.0, 2.0, 1.0, 4.0)))  # a single micro-batch
    assert not scale.has_any
    for variance, squared in ((4.0, 1.0), (math.inf, 1.0), (2.0, 1.0)):
        scale.add(estimate(SquaredNorms(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))._replace(variance=variance, squared=squared))
    assert scale.value == pytest.approx(4.0 / 1.5)


def test_the_sentence_says_whether_a_larger_batch_helps():
    assert advice(2932.0, 256.0) == (
        "The gradient noise scale is about 2,900 examples; a step has 256. A larger batch would still help: twice the "
        "batch would need about 46% fewer steps."
    )
    assert "A larger batch would help little" in advice(30.0, 256.0)


@pytest.mark.parametrize("steps, spread, says", [(2, 0.0, False), (9, 0.0, False), (12, 0.1, True), (12, 5.0, False)])
def test_there_is_no_advice_before_the_noise_scale_means_something(steps, spread, says):
    scale = NoiseScale(100)
    for step in range(steps):
        scale.add(Estimate(10.0 + spread * 10.0 * (-1) ** step, 1.0))
    assert scale.value > 0.0 or spread
    assert scale.is_meaningful == says


def test_a_short_run_gets_no_advice_and_a_file_can_be_appended_to(tmp_path):
    path = str(tmp_path / "steps.csv")
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])
    model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.01), 2), "mse", run_eagerly=True)
    x, y = np.random.RandomState(0).normal(size=(16, 3)), np.random.RandomState(1).normal(size=(16, 1))
    for append in (False, True):
        logger = accum.StepLogger(path, verbose=0, append=append)
        model.fit(x, y, batch_size=4, callbacks=[logger], verbose=0)
        assert "larger batch" not in logger.summary
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows] == ["step", "1", "2", "3", "4"]


def test_rows_are_appended_under_the_columns_that_a_file_has(tmp_path):
    path = tmp_path / "steps.csv"
    model = plain_model()
    model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.01), 2), "mse", run_eagerly=True)
    path.write_text(",".join(["note"] + NAMES[::-1]) + "\nfirst,,,,,,7\n")
    logger = accum.StepLogger(str(path), verbose=0, append=True)
    model.fit(X[:20], Y[:20], batch_size=5, callbacks=[logger], verbose=0)
    with open(str(path), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["7", "1", "2"] and [row["note"] for row in rows] == ["first", "", ""]
    for name in NAMES:
        np.testing.assert_allclose([float(row[name]) for row in rows[1:]], logger.history[name])


@pytest.mark.law("L17")
def test_a_file_without_a_column_of_each_number_is_left_as_it_is(tmp_path):
    path, text = tmp_path / "steps.csv", "step,loss\n1,0.5\n"
    path.write_text(text)
    model = plain_model()
    model.compile(accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.01), 2), "mse", run_eagerly=True)
    with pytest.raises(ValueError, match=r"than .*steps\.csv. Received: columns step, loss, .*gradient_norm"):
        model.fit(X, Y, callbacks=[accum.StepLogger(str(path), append=True)], verbose=0)
    assert path.read_text() == text
    np.testing.assert_array_equal(model.get_weights()[0], FIRST.astype("float32"))
