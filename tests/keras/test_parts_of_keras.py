"""Metrics, losses and layers that come with Keras, as they are: exact, and with no false alarm (law L21).

The oracle is plain Keras on the whole batch.
"""

import numpy as np
import pytest
import tensorflow as tf
from versions import IS_KERAS_3
from warned import silent

import accum

pytestmark = [pytest.mark.tf("2.8", because="Keras has few of these before"), pytest.mark.law("L21"), pytest.mark.slow]

layers, metrics, losses = tf.keras.layers, tf.keras.metrics, tf.keras.losses
RANDOM = np.random.RandomState(4)
COUNT, SIZE = 11, 5  # the last micro-batch has a single example
X = RANDOM.normal(size=(COUNT, 6)).astype("float32")
Y = RANDOM.uniform(0.1, 0.9, size=(COUNT, 3)).astype("float32")
CLASSES = (np.arange(COUNT) % 3).astype("int32")
WORDS = np.array([f"w{number % 7}" for number in range(COUNT * 4)]).reshape(COUNT, 4)
NUMBERS = RANDOM.randint(1, 9, size=(COUNT, 5)).astype("int32")
NUMBERS[::2, 3:] = 0


def dense(last="sigmoid"):
    return tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(4), layers.Dense(3, activation=last)])


def looking_up(lookup, dtype):
    inputs = tf.keras.Input((4,), dtype=dtype)
    hidden = layers.Embedding(20, 4)(lookup(inputs))
    return tf.keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))


def vectorized(norm=False, length=4):
    inputs = tf.keras.Input((1,), dtype="string")
    words = layers.TextVectorization(vocabulary=[f"w{number}" for number in range(7)], output_sequence_length=length)
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(words(inputs)))
    return tf.keras.Model(inputs, layers.Dense(3)(layers.BatchNormalization()(hidden) if norm else hidden))


def masked_beside_batch_norm():
    inputs = tf.keras.Input((5,), dtype="int32")
    hidden = layers.LSTM(4)(layers.Embedding(9, 4, mask_zero=True)(inputs))
    return tf.keras.Model(inputs, layers.Dense(3)(layers.BatchNormalization()(hidden)))


def spectral():
    last = layers.SpectralNormalization(layers.Dense(3))
    return tf.keras.Sequential([tf.keras.Input((6,)), layers.SpectralNormalization(layers.Dense(4)), last])


SENTENCES = np.array([" ".join(words) for words in WORDS])[:, None]
PROGRAMS = {
    "Pearson": lambda: (dense(), X, Y, "mse", metrics.PearsonCorrelation(axis=0)),
    "concordance": lambda: (dense(), X, Y, "mse", metrics.ConcordanceCorrelation(axis=0)),
    "cosine": lambda: (dense(), X, Y, "mse", metrics.CosineSimilarity(axis=0)),
    "Dice": lambda: (dense(), X, Y, losses.Dice()),
    "Tversky": lambda: (dense(), X, Y, losses.Tversky()),
    "circle": lambda: (dense(None), X, CLASSES, losses.Circle()),
    "spectral": lambda: (spectral(), X, Y, "mse"),
    "strings": lambda: (looking_up(layers.StringLookup(vocabulary=sorted(set(WORDS.flat))), "string"), WORDS, Y, "mse"),
    "integers": lambda: (
        looking_up(layers.IntegerLookup(vocabulary=list(range(7))), "int64"),
        NUMBERS[:, :4],
        Y,
        "mse",
    ),
    "text": lambda: (vectorized(), SENTENCES, Y, "mse"),
    "text of any length": lambda: (vectorized(True, None), SENTENCES, Y, "mse"),
    "masked LSTM": lambda: (masked_beside_batch_norm(), NUMBERS, Y, "mse"),
}
OF_KERAS_3 = ("Pearson", "concordance", "Dice", "Tversky", "circle", "spectral")


def trained(program, **options):
    # In Keras 2, initial weights drawn after `set_random_seed` no longer follow the seeds of TensorFlow and Python.
    tf.keras.utils.set_random_seed(2) if IS_KERAS_3 else tf.random.set_seed(2)
    model, x, y, loss, *others = PROGRAMS[program]()
    for number, var in enumerate(model.trainable_variables):
        var.assign(0.6 * np.random.RandomState(number).normal(size=var.shape))
    if options:
        model = accum.GradientAccumulateModel.from_model(model, **options)
    jit = {"jit_compile": False} if IS_KERAS_3 else {}
    model.compile(tf.keras.optimizers.SGD(0.1), loss, metrics=others, **jit)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(COUNT)
    history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
    return [*model.get_weights(), *(history[key] for key in sorted(history))]


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_it_is_that_of_the_full_batch(program):
    if program in OF_KERAS_3 and not IS_KERAS_3:
        pytest.skip("comes with Keras 3")
    expected = trained(program)
    with silent():
        found = trained(program, micro_batch_size=SIZE)
    for value, goal in zip(found, expected):
        np.testing.assert_allclose(value, goal, rtol=2e-5, atol=3e-6)
