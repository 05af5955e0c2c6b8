"""Small models, data and losses, named as the cases name them."""

import numpy as np
import tensorflow as tf
from exceptions import LINE
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
    "sequence": ["gru", "lstm"] + (["attention"] if LINE >= (2, 4) else []),
}
ONLY_FOR["tokens"] = ONLY_FOR["sequence"]


def layers_for(kind):
    """Return the names of the layers that an input of a kind can have."""
    others = {name for names in ONLY_FOR.values() for name in names} | {"attention"}
    return sorted(set(LAYERS) - others) + ONLY_FOR.get(kind, [])


def squared_hinge_like(y_true, y_pred):
    return tf.reduce_mean(tf.nn.softplus(-y_true * y_pred), axis=-1)


MEANS = {
    "mse": lambda: "mse",
    "huber": lambda: tf.keras.losses.Huber(0.5),
    "binary": lambda: tf.keras.losses.BinaryCrossentropy(from_logits=True),
    "crossentropy": lambda: tf.keras.losses.CategoricalCrossentropy(from_logits=True),
    "function": lambda: squared_hinge_like,
}
"""Losses that are means over examples."""

MEETING = {"dice": lambda: batch_dice, "covariance": lambda: covariance}
"""Losses in which examples meet."""

LOSSES = dict(MEANS, **MEETING)


def model_of(case):
    """Return a functional model, with weights that depend on the seed alone."""
    kind = case["input"]
    shape = INPUTS[kind](np.random.RandomState(0), 1).shape[1:]
    inputs = tf.keras.Input(shape, dtype="int32" if kind == "tokens" else None)
    hidden = layers.Embedding(WORDS, 4, mask_zero="gru" in case["layers"])(inputs) if kind == "tokens" else inputs
    for name in case["layers"]:
        hidden = LAYERS[name](hidden)
    if kind == "image":
        hidden = layers.GlobalAveragePooling2D()(hidden)
    elif kind != "vector":
        hidden = layers.GlobalAveragePooling1D()(hidden)
    dtype = _output_dtype(case)
    outputs = [layers.Dense(2, name=f"out{number}", dtype=dtype)(hidden) for number in range(case["outputs"])]
    model = tf.keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])
    random = np.random.RandomState(case["seed"])
    model.set_weights(
        [
            random.uniform(0.5, 1.5, weight.shape) if weight.ndim == 1 else 0.5 * random.normal(size=weight.shape)
            for weight in model.get_weights()
        ]
    )
    return model


def _output_dtype(case):
    return "float64" if case["precision"] == "float64" else "float32"


def batches_of(case):
    """Return [(x, y, sample_weight or None)] for each batch of each cycle."""
    random = np.random.RandomState(case["seed"] + 1)
    real = "float64" if case["precision"] == "float64" else "float32"
    found = []
    for sizes in case["cycles"]:
        found.append([])
        for count in sizes:
            x = INPUTS[case["input"]](random, count)
            x = x.astype("int32" if case["input"] == "tokens" else real)
            y = [random.randint(0, 2, size=(count, 2)).astype(real) for _ in range(case["outputs"])]
            weights = random.uniform(0.2, 2.0, size=count).astype(real) if case["sample_weight"] else None
            found[-1].append((x, y if len(y) > 1 else y[0], weights))
    return found
