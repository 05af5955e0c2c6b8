"""Small models and their data, named as the cases name them."""

import numpy as np
import tensorflow as tf
from versions import IS_KERAS_3, TF_VERSION

layers = tf.keras.layers

WORDS, LENGTH, WIDTH, SIDE, STATE = 7, 4, 3, 6, 3

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

    def call(self, inputs, training=None):
        kept = tf.random.stateless_uniform(tf.shape(inputs), seed=[3, 5]) >= self.rate
        dropped = inputs * tf.cast(kept, inputs.dtype)[:: self.order]
        if training is None or isinstance(training, (bool, int)):
            return dropped if training else inputs
        return tf.where(tf.cast(training, tf.bool), dropped, inputs)  # where TensorFlow 2.2 builds the model


class KerasDropout(layers.Dropout):
    """Keras' own dropout.

    Args:
      order: -1 draws for examples in reverse.
    """

    def __init__(self, order):
        super().__init__(0.3, seed=7)
        self.order = order

    def call(self, inputs, training=False):
        if self.order == 1 or not training:
            return super().call(inputs, training=training)
        return inputs * super().call(tf.ones_like(inputs), training=True)[:: self.order]


class Penalty(layers.Layer):
    """Adds a loss that is a mean over examples."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, inputs):
        of_loss = tf.float64 if inputs.dtype == "float64" else tf.float32
        self.add_loss(0.1 * tf.reduce_mean(tf.square(tf.cast(inputs, of_loss))))
        return inputs


class IsData(layers.Layer):
    """Whether a time step is not padding."""

    def call(self, inputs):
        is_data = tf.not_equal(inputs, tf.zeros([], inputs.dtype))
        return is_data if len(inputs.shape) == 2 else tf.reduce_any(is_data, axis=-1)


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
    "penalty": lambda values: Penalty()(values),
    "dropout_off": lambda values: layers.Dropout(0.0)(values),
    "dropout": lambda values, order: StatelessDropout(order)(values),
    "keras_dropout": lambda values, order: KerasDropout(order)(values),
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

LOW_PRECISION = ["mixed_float16"] + (["mixed_bfloat16"] if TF_VERSION >= (2, 4) else [])
LOW_PRECISION_LAYERS = ["dense", "residual", "shared", "nested", "regularized", "penalty", "dropout", "gru"]
"""Those for which TensorFlow has kernels in 16 bits for processors; in bfloat16, for vectors only."""


DROPOUT = ["dropout"] + (["keras_dropout"] if IS_KERAS_3 else [])
"""Dropout that plain Keras draws as accum does, which is for Keras 2 not its own."""


def layers_for(kind):
    """Return the names of the layers that an input of a kind can have."""
    others = {name for names in ONLY_FOR.values() for name in names} | {"attention"}
    return sorted(set(LAYERS) - others) + ONLY_FOR.get(kind, [])


def model_of(case, order=1, takes_states=False):
    """Return a functional model, with weights that depend on the seed alone.

    Args:
      order: of the examples; -1: reversed.
      takes_states: whether the states of a stateful layer are its last input instead.
    """
    kind = case["input"]
    size = {"batch_size": case["sizes"][0]} if case["is_stateful"] and not takes_states else {}
    inputs = [tf.keras.Input(_shape(kind), dtype="int32" if kind == "tokens" else None, **size)]
    hidden = _beginning(case, inputs[0])
    states = []
    if case["is_stateful"]:
        states = [tf.keras.Input((STATE,), dtype=low(case))] if takes_states else []
        layer = layers.SimpleRNN(STATE, return_sequences=True, stateful=not takes_states, name="state")
        hidden = layer(hidden, initial_state=states[0], **_mask(case, inputs[0])) if states else layer(hidden)
    for name in case["layers"]:
        hidden = LAYERS[name](hidden, order) if name in DROPOUT else LAYERS[name](hidden)
    if not case["is_per_token"] and kind != "vector":
        hidden = (layers.GlobalAveragePooling2D if kind == "image" else layers.GlobalAveragePooling1D)()(hidden)
    outputs = _outputs(case, inputs, hidden, size)
    if case["names"] == "dict":
        outputs = dict(zip(names_of(case), outputs))
    model = tf.keras.Model(one_or_all(inputs + states), one_or_all(outputs))
    random = np.random.RandomState(case["seed"])
    model.set_weights(
        [
            random.uniform(0.5, 1.5, weight.shape) if weight.ndim == 1 else 0.5 * random.normal(size=weight.shape)
            for weight in model.get_weights()
        ]
    )
    return model


def _beginning(case, inputs):
    if case["input"] == "tokens":
        return layers.Embedding(WORDS, 4, mask_zero=case["has_masks"], name="words")(inputs)
    return layers.Masking()(inputs) if case["has_masks"] else inputs


def _mask(case, inputs):
    """Return the mask as an argument: Keras 3 does not find it for a layer that is given states too."""
    return {"mask": IsData()(inputs)} if case["has_masks"] else {}


def _outputs(case, inputs, hidden, size):
    """Return the outputs, after adding a second input if the case has one."""
    ends = [] if case["has_second_input"] else names_of(case)
    outputs = [
        layers.Dense(2, dtype=real(case), **({"name": ends[number]} if ends else {}))(hidden)
        for number in range(case["outputs"])
    ]
    if not case["has_second_input"]:
        return outputs
    inputs.append(tf.keras.Input(_shape("vector"), **size))
    shift = layers.Dense(2, dtype=real(case))(inputs[1])
    shift = layers.RepeatVector(LENGTH, dtype=real(case))(shift) if case["is_per_token"] else shift
    return [layers.Add(dtype=real(case), name=name)([output, shift]) for name, output in zip(names_of(case), outputs)]


def state_model_of(case):
    """Return a model from the first input and the states of the stateful layer to its next states."""
    inputs = tf.keras.Input(_shape(case["input"]), dtype="int32" if case["input"] == "tokens" else None)
    states = tf.keras.Input((STATE,), dtype=low(case))
    layer = layers.SimpleRNN(STATE, return_state=True, name="state")
    outputs = layer(_beginning(case, inputs), initial_state=states, **_mask(case, inputs))
    return tf.keras.Model([inputs, states], outputs[1])


def names_of(case):
    """Return the names of the outputs."""
    return [f"out{number}" for number in range(case["outputs"])]


def _shape(kind):
    return INPUTS[kind](np.random.RandomState(0), 1).shape[1:]


def one_or_all(parts):
    return parts[0] if isinstance(parts, list) and len(parts) == 1 else parts


def real(case):
    return "float64" if case["precision"] == "float64" else "float32"


def low(case):
    """Return the type in which layers compute."""
    return {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}.get(case["precision"], real(case))


class Ragged:
    """Rows of different lengths, one for each example."""

    def __init__(self, rows):
        self.rows = rows

    def tensor(self):
        lengths = np.array([len(row) for row in self.rows], "int64")
        return tf.RaggedTensor.from_row_lengths(np.concatenate(self.rows), lengths)


def batches_of(case):
    """Return (x, y, sample_weight or None) for each batch of an epoch."""
    random = np.random.RandomState(case["seed"] + 1)
    return [_batch_of(case, random, count) for count in case["sizes"]]


def _batch_of(case, random, count):
    kind, names = case["input"], names_of(case)
    x = [INPUTS[kind](random, count).astype("int32" if kind == "tokens" else real(case))]
    if case["has_masks"]:
        pad(x[0], random)
    if case["has_second_input"]:
        x.append(INPUTS["vector"](random, count).astype(real(case)))
    shape = (count, LENGTH, 2) if case["is_per_token"] else (count, 2)
    y = [random.randint(0, 2, size=shape).astype(real(case)) for _ in range(case["outputs"])]
    if case["is_ragged"]:
        y = [Ragged([row[: random.randint(1, shape[1] + 1)] for row in target]) for target in y]
    y = dict(zip(names, y)) if case["names"] else one_or_all(y)
    if case["sample_weight"] is None:
        return one_or_all(x), y, None
    shape = (count, LENGTH) if case["sample_weight"] == "tokens" else count
    weights = [random.uniform(0.2, 2.0, size=shape).astype(real(case)) for _ in names]
    return one_or_all(x), y, dict(zip(names, weights)) if case["names"] else weights[0]


def pad(sequences, random):
    """Make the ends of sequences zeros, which are padding, and their beginnings not."""
    for sequence in sequences:
        sequence[0] = np.maximum(np.abs(sequence[0]), 1)
        sequence[random.randint(1, LENGTH + 1) :] = 0


def joined(batches, order=1):
    """Return one batch with the examples of all.

    Args:
      order: -1 reverses them.
    """

    def join(*parts):
        if parts[0] is None:
            return None
        if isinstance(parts[0], Ragged):
            return Ragged([row for part in parts for row in part.rows][::order])
        return np.concatenate(parts)[::order]

    return tf.nest.map_structure(join, *batches)


def tensors(batch):
    """Return a batch in which what is ragged is a tensor."""
    return tf.nest.map_structure(lambda leaf: leaf.tensor() if isinstance(leaf, Ragged) else leaf, batch)
