"""Keras' callbacks see and do in an accumulating fit what they see and do in that of the full batch."""

import os

import numpy as np
import pytest
import tensorflow as tf
import versions
from equality import assert_identical, assert_near
from optimizers import families
from test_mixed_precision import loss_scale_optimizer

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(20, 3)).astype("float32"), RANDOM.normal(size=(20, 1)).astype("float32")
VALIDATION = RANDOM.normal(size=(8, 3)).astype("float32"), RANDOM.normal(size=(8, 1)).astype("float32")
FIRST = [0.5 * RANDOM.normal(size=shape) for shape in ((3, 1), (1,))]
callbacks = tf.keras.callbacks


def plain_model():
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model.set_weights(FIRST)
    return model


def accumulating_model(accum_steps=3, **options):
    return accum.GradientAccumulateModel.from_model(plain_model(), accum_steps, **options)


def both(optimizer):
    """(model, batch size) of the full batch, which need not be traced, and of its micro-batches of 8, 8 and 4."""
    for model, size in ((plain_model(), 20), (accumulating_model(), 8)):
        model.compile(optimizer(), "mse", run_eagerly=size == 20)
        yield model, size


def assert_same_history(ours, theirs, rtol=1e-5):
    assert sorted(ours) == sorted(theirs)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=rtol, err_msg=name)


@pytest.mark.law("L3")
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("family", families())
def test_learning_rate_callbacks_and_early_stopping_do_what_they_do_with_the_full_batch(family, is_scaled):
    def optimizer():
        inner = family.SGD(0.1, momentum=0.9)
        return loss_scale_optimizer(inner, 4.0) if is_scaled else inner

    histories, weights = [], []
    for model, size in both(optimizer):
        callback_list = [
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * (4.0 if epoch == 2 else 0.9)),
            callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9),
            callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        ]
        options = {"validation_data": VALIDATION, "shuffle": False, "verbose": 0, "callbacks": callback_list}
        histories.append(model.fit(X, Y, batch_size=size, epochs=9, **options).history)
        weights.append(model.get_weights())
    assert 3 <= len(histories[0]["loss"]) < 9  # it stopped early
    assert len(set(histories[0]["lr" if "lr" in histories[0] else "learning_rate"])) > 2
    assert_same_history(histories[1], histories[0])
    assert_near(weights[1], weights[0])


def logged(folder):
    """What was logged: {tag: values} of scalars, and the tags of all else."""
    scalars, others = {}, set()
    for name in sorted(os.listdir(str(folder))):
        if "tfevents" not in name:
            continue
        for event in tf.compat.v1.train.summary_iterator(os.path.join(str(folder), name)):
            for value in event.summary.value:
                array = np.array(value.simple_value if value.HasField("simple_value") else "")  # as 2.2 writes scalars
                if value.HasField("tensor"):
                    array = tf.make_ndarray(value.tensor)
                if array.ndim == 0 and array.dtype.kind == "f":
                    scalars.setdefault(value.tag, []).append(float(array))
                else:
                    others.add(value.tag)
    return scalars, others


@pytest.mark.law("L3")
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("family", families())
def test_tensorboard_logs_what_it_logs_of_the_full_batch(family, is_scaled, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard comes with TensorFlow up to 2.20")

    def optimizer():
        inner = family.SGD(tf.keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
        return loss_scale_optimizer(inner, 4.0) if is_scaled else inner

    seen = []
    for model, size in both(optimizer):
        board = callbacks.TensorBoard(str(tmp_path / str(size)), histogram_freq=1, profile_batch=0)
        model.fit(X, Y, batch_size=size, epochs=3, shuffle=False, verbose=0, callbacks=[board])
        seen.append(logged(tmp_path / str(size) / "train"))
    (theirs, their_others), (ours, our_others) = seen
    assert "epoch_loss" in theirs
    assert_same_history(ours, theirs)
    kinds = [{tag.split("/")[-1] for tag in tags} for tags in (our_others, their_others)]
    if versions.IS_KERAS_3:  # draws models of its own classes alone
        kinds[1].discard("keras")
    assert kinds[0] == kinds[1]


@pytest.mark.law("L12")
def test_model_checkpoint_in_every_format_within_a_cycle(tmp_path, recwarn):
    formats = ["whole.h5", "whole", "weights.h5", "weights"] + (
        ["whole.keras"] if versions.TF_VERSION >= (2, 13) else []
    )
    if versions.IS_KERAS_3:  # builds the optimizer of an H5 file for no variables, so that it can't go on
        formats = ["weights.weights.h5", "whole.keras"]
    model, at_save = accumulating_model(2), []

    class Record(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                at_save.append([np.copy(weight) for weight in model.get_weights()])

    saving = [
        callbacks.ModelCheckpoint(str(tmp_path / name), save_freq=3, save_weights_only=name.startswith("weights"))
        for name in formats
    ]
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=saving + [Record()])  # two cycles and a half
    said = [str(warning.message) for warning in recwarn if "unfinished cycle is left out" in str(warning.message)]
    assert len(said) == len([name for name in formats if name in ("whole.h5", "whole.keras")])
    for name in formats:
        if name.startswith("weights"):
            again = accumulating_model(2)
            again.compile(tf.keras.optimizers.Adam(0.1), "mse")
            again.load_weights(str(tmp_path / name))
        else:
            again = tf.keras.models.load_model(str(tmp_path / name))
        assert_identical(again.get_weights(), at_save[0])
        if name in ("whole.h5", "whole.keras"):
            assert (int(again.optimizer.iterations.numpy()), int(again.optimizer.micro_step)) == (1, 0)
        again.fit(X[12:], Y[12:], batch_size=4, shuffle=False, verbose=0)


BackupAndRestore = getattr(callbacks, "BackupAndRestore", None) or getattr(
    getattr(callbacks, "experimental", None), "BackupAndRestore", None
)


class Interrupt(tf.keras.callbacks.Callback):
    """Ends the first fit within its second epoch."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1):
            raise KeyboardInterrupt


@pytest.mark.tf("2.3", keras=2, because="`BackupAndRestore` came with TF 2.3, and Keras 3's saves no unfinished cycle")
@pytest.mark.law("L12")
def test_backup_and_restore_goes_on_with_the_cycle_that_the_epoch_left(tmp_path):
    def fit(*more):
        model = accumulating_model(3, last_cycle="carry")
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        callbacks = [BackupAndRestore(str(tmp_path / "backup"))] + list(more)
        model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    with pytest.raises(KeyboardInterrupt):
        fit(Interrupt())
    model, full = fit(), plain_model()
    full.compile(tf.keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    for start in range(0, 60, 12):  # cycles go on from epoch to epoch
        rows = np.arange(start, start + 12) % 20
        full.train_on_batch(X[rows], Y[rows])
    assert int(model.optimizer.iterations.numpy()) == 5
    assert_near(model.get_weights(), full.get_weights())


def failing(grads_and_vars):
    raise RuntimeError("the transform fails")


@pytest.mark.law("L6")
def test_an_interrupted_fit_raises_what_interrupted_it_though_the_flush_fails():
    model = accumulating_model(2, transform=failing)
    model.compile("sgd", "mse", run_eagerly=True)

    class Break(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="could not be ended.*the transform fails"):
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Break()])
    assert int(model.optimizer.micro_step) == 1


def fitted(given):
    model = accumulating_model(4)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, validation_data=VALIDATION, callbacks=given(model))
    return int(model.optimizer.iterations.numpy())


def test_another_policy_for_the_last_cycle_than_the_model_s_is_refused():
    assert fitted(lambda model: [accum.FlushCallback("flush")]) == 2
    for policy in ("drop", "carry"):
        with pytest.raises(ValueError, match="The model ends its cycles by itself: leave out the `FlushCallback`"):
            fitted(lambda model, policy=policy: [accum.FlushCallback(policy)])


@pytest.mark.skipif(not hasattr(callbacks, "CallbackList"), reason="private up to TensorFlow 2.2")
def test_a_list_of_callbacks_that_is_one_of_keras_ends_cycles_once():
    seen = []
    count = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    assert fitted(lambda model: callbacks.CallbackList([count], model=model)) == 2
    assert seen == [0]
