"""What messages advise works as they say it (law L17)."""

import re

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from loss_scales import loss_scale_optimizer
from models import from_model
from warned import silent, warned

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L17")]

layers = tf.keras.layers
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(8, 3)).astype("float32"), RANDOM.normal(size=(8, 2)).astype("float32")
WORDS = RANDOM.randint(1, 5, size=(8, 4))
EAGER = {"run_eagerly": True}
WITH_SUMS = {"reduction": "sum", "micro_batch_weight": "equal"}


def network(rate=None):
    penalty = tf.keras.regularizers.l2(rate) if rate else None
    kernel = tf.keras.initializers.Constant(RANDOM.normal(size=(3, 2)))
    dense = layers.Dense(2, kernel_initializer=kernel, kernel_regularizer=penalty)
    return tf.keras.Sequential([tf.keras.Input((3,)), dense])


def trained(model, loss, batch_size):
    model.compile(tf.keras.optimizers.SGD(0.05), loss, **EAGER)
    model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0)
    return model.get_weights()


def test_penalties_that_a_sum_would_count_for_each_batch_are_named_and_may_be_divided():
    sum_of_squares = tf.keras.losses.MeanSquaredError(reduction="sum")
    start = network(0.3).get_weights()

    def ours(rate):
        model = network(rate)
        model.set_weights(start)
        with pytest.warns(accum.InexactWarning, match="divide these by `accum_steps`"):
            return trained(from_model(model, 2, **WITH_SUMS), sum_of_squares, 4)

    plain = network(0.3)
    plain.set_weights(start)
    expected = trained(plain, sum_of_squares, 8)
    assert_near(ours(0.15), expected)
    with silent(accum.InexactWarning):  # of means, all is as many times larger
        trained(from_model(network(0.3), 2, reduction="sum"), "mse", 4)
    assert np.abs(ours(0.3)[0] - expected[0]).max() > 1e-3


def test_a_reduction_of_cycles_does_not_make_a_sum_of_ones_own_right_in_micro_batches_by_tokens():
    words = layers.Embedding(5, 3, mask_zero=True)
    stack = [tf.keras.Input((None,)), words, layers.GlobalAveragePooling1D(), layers.Dense(2)]
    model = from_model(tf.keras.Sequential(stack), 1, micro_batch_tokens=8, **WITH_SUMS)
    with pytest.warns(accum.InexactWarning, match="right only for compiled losses with the reduction SUM"):
        model.compile("sgd", lambda y, outputs: tf.reduce_sum((outputs - y) ** 2))
    with silent():
        model.compile("sgd", tf.keras.losses.MeanSquaredError(reduction="sum"))
        model.train_on_batch(WORDS, Y)


def test_the_expression_that_ends_a_cycle_is_that_of_the_model(tmp_path):
    model = from_model(network(), 4)
    model.compile(loss_scale_optimizer(tf.keras.optimizers.SGD(0.1), 2.0), "mse", **EAGER)
    model.train_on_batch(X[:2], Y[:2])
    with warned("accum: unfinished-cycle") as said:
        model.save(str(tmp_path / "model.h5"))
    (expression,) = re.findall(r"call `(model\..*)` first", said[0])
    eval(expression, {"model": model})
    with warned("accum: unfinished-cycle") as said:
        model.save(str(tmp_path / "other.h5"))
    assert not said


def test_a_model_that_accumulates_already_is_unwrapped_for_another_one():
    model = from_model(network(), 2)
    with pytest.raises(ValueError, match=re.escape("`accum.unwrap(model)`")):
        from_model(model, 4)
    assert from_model(accum.unwrap(model), 4)


def test_what_is_computed_at_once_is_not_told_to_be_split_inexactly():
    """`whole_batch=()` would normalise by micro-batches, and a warning would send back."""

    class InBranch(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.norm, self.head = layers.BatchNormalization(), layers.Dense(2)

        def call(self, inputs, training=None):
            normalised = tf.cond(tf.reduce_sum(inputs) > 1e9, lambda: inputs, lambda: self.norm(inputs, training=True))
            return self.head(normalised)

    model = from_model(InBranch(), 1, micro_batch_size=3)
    model.compile("sgd", "mse")
    with warned("[accum: not-split]") as said:
        model.train_on_batch(X, Y)
    assert said and not any("whole_batch" in text.replace("With `whole_batch`", "") for text in said)
