"""`NoiseScaleScheduler` raises `accum_steps` by a noise scale that NumPy computes (laws L5, L12)."""

import numpy as np
import pytest
import tensorflow as tf

import accum

pytestmark = pytest.mark.tf("2.2")

SIZE, BATCHES = 4, 240
RANDOM = np.random.RandomState(0)
X = RANDOM.normal(size=(SIZE * BATCHES, 3)).astype("float32")
Y = (X @ [[1.0], [-1.0], [0.5]] + RANDOM.normal(scale=5.0, size=(len(X), 1))).astype("float32")
RATE, MOST = 1e-4, 10


def linear_model():
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs))
    model = accum.GradientAccumulateModel.from_model(model, accum_steps=2)
    model.compile(tf.keras.optimizers.SGD(RATE), "mse")
    return model


def scheduler(most, *args, **options):
    return accum.NoiseScaleScheduler(most, *args, average_over=10**6, verbose=0, **options)


def trained(epochs, callbacks, model=None, **options):
    """Return a model, trained, and the `accum_steps` of each epoch."""
    model = linear_model() if model is None else model
    options.update(batch_size=SIZE, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model, model.fit(X, Y, **options).history["accum_steps"]


class Oracle:
    """The same in NumPy: plain SGD, and after each epoch the rule, on the means of all steps so far."""

    def __init__(self, accum_steps=2, most=MOST, share=1.0):
        self.weights, self.accum_steps, self.most, self.share = np.zeros([3, 1]), accum_steps, most, share
        self.estimates, self.made = [], []

    def epoch(self):
        self.made.append(self.accum_steps)
        for first in range(0, BATCHES, self.accum_steps):
            grads = []
            for number in range(first, min(first + self.accum_steps, BATCHES)):
                x, y = (data[number * SIZE : (number + 1) * SIZE].astype("float64") for data in (X, Y))
                grads.append(2.0 * x.T @ (x @ self.weights - y) / SIZE)
            mean, count = np.mean(grads, axis=0), len(grads)
            if count > 1:
                small = np.mean([np.sum(grad**2) for grad in grads])
                variance = (small - np.sum(mean**2)) / (1.0 / SIZE - 1.0 / (SIZE * count))
                self.estimates.append([variance, np.sum(mean**2) - variance / (SIZE * count)])
            self.weights -= RATE * mean
        self.accum_steps = max(self.accum_steps, min(self.wanted(), 2 * self.accum_steps, self.most))

    def wanted(self):
        estimates = np.array(self.estimates)
        means, errors = estimates.mean(0), estimates.std(0, ddof=1) / np.sqrt(len(estimates))
        is_certain = len(estimates) >= 10 and np.sqrt(np.sum((errors / means) ** 2)) <= 0.5
        return round(float(means[0] / means[1] * self.share / SIZE)) if is_certain else 0


@pytest.mark.slow
@pytest.mark.law("L5")
@pytest.mark.parametrize("most, share", [(MOST, 1.0), (MOST, 0.1)])
def test_steps_grow_as_the_rule_says_and_stay_those_of_their_batches(most, share):
    oracle = Oracle(most=most, share=share)
    for _ in range(5):
        oracle.epoch()
    model, made = trained(5, [scheduler(most, share)])
    assert made == oracle.made
    np.testing.assert_allclose(model.get_weights()[0], oracle.weights, rtol=0, atol=2e-6)
    assert (made[-1] == MOST) == (share == 1.0)  # noisy data reach the bound, a small share does not
    if share == 1.0:
        constant, made = trained(5, [scheduler(2)])
        assert made == [2] * 5
        assert np.max(np.abs(constant.get_weights()[0] - oracle.weights)) > 1e-3


@pytest.mark.slow
@pytest.mark.law("L12")
def test_a_checkpoint_brings_the_length_of_the_next_cycle(tmp_path):
    first, made = trained(3, [scheduler(MOST)])
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(str(tmp_path / "state"))
    model = linear_model()

    class Restores(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)

    _, resumed = trained(1, [scheduler(MOST), Restores()], model)
    _, expected = trained(4, [scheduler(MOST)])
    assert made + resumed == expected and resumed[0] > made[-1] > 2


@pytest.mark.slow
def test_rows_and_history_tell_the_steps(capsys):
    rows = []
    callback = accum.NoiseScaleScheduler(4, average_over=10**6, on_step=rows.append)
    _, made = trained(3, [callback])
    assert made[0] == 2 and made[-1] == 4
    sizes = sum([[SIZE * steps] * (BATCHES // steps) for steps in made], [])
    assert [row["examples"] for row in rows] == callback.history["examples"] == sizes
    assert "`accum_steps` is 4 from now on." in capsys.readouterr().out


@pytest.mark.slow
def test_few_steps_change_nothing_and_nothing_is_lowered():
    assert trained(1, [scheduler(MOST)], steps_per_epoch=8)[1] == [2]  # 4 steps
    assert trained(3, [scheduler(1)])[1] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_scale_that_cannot_be_measured_is_named():
    model = linear_model()
    model.compile(tf.keras.optimizers.SGD(RATE), tf.keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.warns(UserWarning, match="changes nothing: the loss sums over examples"):
        assert trained(1, [scheduler(MOST)], model)[1] == [2]


@pytest.mark.slow
@pytest.mark.law("L17")
def test_two_loggers_of_one_model_are_refused():
    with pytest.raises(ValueError, match="pass one `StepLogger`, or only a `NoiseScaleScheduler`"):
        trained(1, [accum.StepLogger(verbose=0), scheduler(MOST)])
    model, _ = trained(1, [scheduler(MOST)])  # one after the other is no conflict
    trained(1, [scheduler(MOST)], model)


@pytest.mark.law("L17")
def test_wrong_arguments_and_schedules_are_refused():
    for wrong in (0, 2.5, None):
        with pytest.raises((TypeError, ValueError), match="`max_accum_steps` must be an int >= 1"):
            accum.NoiseScaleScheduler(wrong)
    with pytest.raises((TypeError, ValueError), match="`share` must be"):
        accum.NoiseScaleScheduler(8, share=0.0)
    net = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model = accum.GradientAccumulateModel.from_model(net, accum_steps={0: 2, 9: 4})
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="A schedule of `accum_steps` can't be set"):
        model.fit(X, Y, verbose=0, callbacks=[accum.NoiseScaleScheduler(8)])
