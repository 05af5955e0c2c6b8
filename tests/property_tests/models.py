"""Small models, data and losses, named as the cases name them."""

import functools

import numpy as np
import tensorflow as tf
from exceptions import TF_VERSION
from whole_batches import batch_dice, covariance

layers = tf.keras.layers

WORDS, LENGTH, WIDTH, SIDE = 7, 4, 3, 6

INPUTS = {
    "vector": lambda random, count: random.normal(size=(count, WIDTH)),
    "image": lambda random, count: random.normal(size=(count, SIDE, SIDE, 2)),
    "sequence": lambda random, count: random.normal(size=(count, LENGTH, WIDTH)),
    "tokens": lambda random, count: random.randint(0, WORDS, size=(count, LENGTH)),
}
"""How the input of a kind is drawn."""


def _residual(values):
    return layers.Add()([values, layers.Dense(values.shape[-1], activation="tanh")(values)])


def _shared(values):
    layer = layers.Dense(values.shape[-1], activation="tanh")
    return layer(layer(values))


def _nested(values):
    inputs = tf.keras.Input(values.shape[1:])
    return tf.keras.Model(inputs, layers.Dense(4, activation="relu")(inputs))(values)


class StatelessDropout(layers.Layer):
    """Dropout that every Keras draws from a seed alone, so that a plain run at the full batch is an oracle.

    Args:
      order: -1 draws for examples in reverse.
    """

    def __init__(self, order):
        super().__init__()
        self.order, self.rate, self.supports_masking = order, 0.3, True

    def call(self, inputs):
        kept = tf.random.stateless_uniform(tf.shape(inputs), seed=[3, 5]) >= self.rate
        return inputs * tf.cast(kept, inputs.dtype)[:: self.order]


def _attention(values):
    return layers.MultiHeadAttention(2, 2)(values, values)


LAYERS = {
    "dense": lambda values: layers.Dense(4, activation="tanh")(values),
    "residual": _residual,
    "shared": _shared,
    "nested": _nested,
    "layer_norm": lambda values: layers.LayerNormalization(epsilon=1e-2)(values),
    "batch_norm": lambda values: layers.BatchNormalization(epsilon=0.1)(values),
    "regularized": lambda values: layers.Dense(3, kernel_regularizer="l2")(values),
    "dropout_off": lambda values: layers.Dropout(0.0)(values),
    "dropout": lambda values, order: StatelessDropout(order)(values),
    "conv": lambda values: layers.Conv2D(3, 3, padding="same", activation="relu")(values),
    "strided": lambda values: layers.Conv2D(3, 3, strides=2, padding="same")(values),
    "pool": lambda values: layers.AveragePooling2D(2, padding="same")(values),
    "depthwise": lambda values: layers.DepthwiseConv2D(3, padding="same")(values),
    "gru": lambda values: layers.GRU(3, return_sequences=True)(values),
    "lstm": lambda values: layers.LSTM(3, return_sequences=True)(values),
    "attention": _attention,
}
ONLY_FOR = {
    "image": ["conv", "strided", "pool", "depthwise"],
    "sequence": ["gru", "lstm"] + (["attention"] if TF_VERSION >= (2, 4) else []),
}
ONLY_FOR["tokens"] = ONLY_FOR["sequence"]


def layers_for(kind):
    """Return the names of the layers that an input of a kind can have."""
    others = {name for names in ONLY_FOR.values() for name in names} | {"attention"}
    return sorted(set(LAYERS) - others) + ONLY_FOR.get(kind, [])


def softplus(y_true, y_pred):
    return tf.reduce_mean(tf.nn.softplus(-y_true * y_pred), axis=-1)


REDUCED = {
    "mse": tf.keras.losses.MeanSquaredError,
    "huber": tf.keras.losses.Huber,
    "binary": functools.partial(tf.keras.losses.BinaryCrossentropy, from_logits=True),
    "crossentropy": functools.partial(tf.keras.losses.CategoricalCrossentropy, from_logits=True),
}
"""Losses that can be a mean or a sum over examples."""

FUNCTIONS = {"function": softplus}
MEANS = sorted(REDUCED) + sorted(FUNCTIONS)
"""Losses that are means over examples."""

MEETING = {"dice": batch_dice, "covariance": covariance}
"""Losses in which examples meet."""

LOW_PRECISION = ["mixed_bfloat16"] if TF_VERSION >= (2, 4) else []
"""Not float16: a loss scale that overflows in a micro-batch, but not in the mean of the batch, skips another step."""


def loss_of(case):
    """Return a new loss."""
    name = case["loss"]
    if name in REDUCED:
        return REDUCED[name](**({"reduction": "sum"} if case["loss_reduction"] == "sum" else {}))
    return dict(FUNCTIONS, **MEETING)[name]


def model_of(case, order=1):
    """Return a functional model, with weights that depend on the seed alone.

    Args:
      order: of the examples; -1: reversed.
    """
    kind = case["input"]
    inputs = [tf.keras.Input(_shape(kind), dtype="int32" if kind == "tokens" else None)]
    hidden = layers.Embedding(WORDS, 4, mask_zero="gru" in case["layers"])(inputs[0]) if kind == "tokens" else inputs[0]
    for name in case["layers"]:
        hidden = LAYERS[name](hidden, order) if name == "dropout" else LAYERS[name](hidden)
    if not case["is_per_token"] and kind != "vector":
        hidden = (layers.GlobalAveragePooling2D if kind == "image" else layers.GlobalAveragePooling1D)()(hidden)
    outputs = [layers.Dense(2, name=f"out{number}", dtype=_real(case))(hidden) for number in range(case["outputs"])]
    if case["has_second_input"]:
        inputs.append(tf.keras.Input(_shape("vector")))
        shift = layers.Dense(2, dtype=_real(case))(inputs[1])
        shift = layers.RepeatVector(LENGTH, dtype=_real(case))(shift) if case["is_per_token"] else shift
        outputs = [layers.Add(dtype=_real(case))([output, shift]) for output in outputs]
    model = tf.keras.Model(_one_or_all(inputs), _one_or_all(outputs))
    random = np.random.RandomState(case["seed"])
    model.set_weights(
        [
            random.uniform(0.5, 1.5, weight.shape) if weight.ndim == 1 else 0.5 * random.normal(size=weight.shape)
            for weight in model.get_weights()
        ]
    )
    return model


def _shape(kind):
    return INPUTS[kind](np.random.RandomState(0), 1).shape[1:]


def _one_or_all(parts):
    return parts if len(parts) > 1 else parts[0]


def _real(case):
    return "float64" if case["precision"] == "float64" else "float32"


def batches_of(case):
    """Return (x, y, sample_weight or None) for each batch of an epoch."""
    random = np.random.RandomState(case["seed"] + 1)
    return [_batch_of(case, random, count) for count in case["sizes"]]


def _batch_of(case, random, count):
    kind, real = case["input"], _real(case)
    x = [INPUTS[kind](random, count).astype("int32" if kind == "tokens" else real)]
    if case["has_second_input"]:
        x.append(INPUTS["vector"](random, count).astype(real))
    shape = (count, LENGTH, 2) if case["is_per_token"] else (count, 2)
    y = [random.randint(0, 2, size=shape).astype(real) for _ in range(case["outputs"])]
    if case["sample_weight"] is None:
        return _one_or_all(x), _one_or_all(y), None
    shape = (count, LENGTH) if case["sample_weight"] == "tokens" else count
    return _one_or_all(x), _one_or_all(y), random.uniform(0.2, 2.0, size=shape).astype(real)
