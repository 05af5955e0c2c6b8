"""Small networks of TensorFlow 1 and their data, named as the cases name them."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from property_tests.models import LENGTH, STATE, WIDTH, WORDS, Ragged, pad

tf1 = tf.compat.v1
MOST = 8 * LENGTH
"""More examples than a batch has."""


class Network(NamedTuple):
    """What a network computes for some examples.

    Attributes:
      outputs: dict of tensors.
      states: the next states, or None.
      penalties: list of scalars, which are means over the examples.
    """

    outputs: Any
    states: Any
    penalties: Any


class _Layers:
    """Creates the variables of a network one after the other, with values that depend on the seed alone."""

    def __init__(self, case, rows):
        self._case, self._rows, self._count = case, rows, 0
        self.penalties = []

    def _variable(self, shape, scale=0.5):
        random = np.random.RandomState([self._case["seed"], self._count])
        first = tf1.constant_initializer((scale * random.normal(size=shape)).astype("float32"))
        name, self._count = f"v{self._count}", self._count + 1
        return tf1.get_variable(name, shape, initializer=first, use_resource=self._case["resource"])

    def embedding(self, tokens):
        return tf.nn.embedding_lookup(self._variable([WORDS, WIDTH]), tokens)

    def linear(self, values, width):
        low = tf.float16 if self._case["precision"] == "float16" else tf.float32
        kernel, bias = self._variable([int(values.shape[-1]), width]), self._variable([width])
        product = tf.tensordot(tf.cast(values, low), tf.cast(kernel, low), 1)
        return tf.cast(product, tf.float32) + bias

    def recurrent(self, values, state):
        """Return the states after each time step, and the last ones."""
        inputs, kernel = self.linear(values, STATE), self._variable([STATE, STATE])
        states = []
        for step in range(LENGTH):
            state = tf.tanh(inputs[:, step] + tf.matmul(state, kernel))
            states.append(state)
        return tf.stack(states, axis=1), state

    def dense(self, values):
        return tf.tanh(self.linear(values, 4))

    def residual(self, values):
        return values + tf.tanh(self.linear(values, int(values.shape[-1])))

    def batch_norm(self, values):
        mean, variance = tf.nn.moments(values, list(range(len(values.shape) - 1)))
        scale = 1.0 + self._variable([int(values.shape[-1])])
        return tf.nn.batch_normalization(values, mean, variance, None, scale, 0.1)

    def penalty(self, values):
        self.penalties.append(0.1 * tf.reduce_mean(values**2))
        return values

    def dropout(self, values):
        """Drop by a seed alone: for each example by its place in its batch, if places are given."""
        if self._rows is None:
            drawn = tf.random.stateless_uniform(tf.shape(values), seed=[3, 5])
        else:
            shape = [MOST] + [int(length) for length in values.shape[1:]]
            drawn = tf.gather(tf.random.stateless_uniform(shape, seed=[3, 5]), self._rows)
        return values * tf.cast(drawn >= 0.3, values.dtype)


def network_of(case, data, rows=None) -> Network:
    """Return a network.

    Args:
      data: dict of tensors, see `Data`.
      rows: the place of each example in its batch, if the examples are those of several.
    """
    made, states = _Layers(case, rows), None
    hidden = made.embedding(data["x"]) if case["input"] == "tokens" else data["x"]
    if case["is_stateful"]:
        hidden, states = made.recurrent(hidden, data["state"])
    for name in case["layers"]:
        hidden = getattr(made, name)(hidden)
    if not case["is_per_token"] and case["input"] != "vector":
        mask = mask_of(case, data["x"])[:, :, None]
        hidden = tf.reduce_sum(hidden * mask, axis=1) / tf.reduce_sum(mask, axis=1)
    outputs = {f"out{number}": made.linear(hidden, 2) for number in range(case["outputs"])}
    return Network(outputs, states, made.penalties)


def mask_of(case, x):
    """Return 1 for each time step of an example, and 0 for padding."""
    if not case["has_masks"]:
        return tf.ones_like(x[:, :, 0] if case["input"] == "sequence" else x, dtype=tf.float32)
    return tf.cast(tf.not_equal(x, 0) if case["input"] == "tokens" else tf.not_equal(x[:, :, 0], 0), tf.float32)


def weight_of(case, data):
    """Return by how much the loss divides."""
    if case["has_masks"] and case["is_per_token"]:
        return tf.reduce_sum(mask_of(case, data["x"]))
    return tf.cast(tf.shape(data["x"])[0], tf.float32)


def loss_of(case, outputs, data):
    """Return the sum over outputs of the mean over examples, or over the tokens that a mask leaves."""
    total = 0.0
    for name in sorted(outputs):
        target, output = data["y"][name], outputs[name]
        dense, has_value = target, tf.ones_like(output)
        if case["is_ragged"]:
            dense = target.to_tensor()
            dense = tf.pad(
                dense, [[0, 0], [0, int(output.shape[1]) - tf.shape(dense)[1]]] + [[0, 0]] * (len(output.shape) - 2)
            )
            has_value = tf.sequence_mask(target.row_lengths(), int(output.shape[1]), dtype=tf.float32)
            has_value = has_value if len(output.shape) == 2 else has_value[:, :, None]
        squares = tf.reduce_mean(has_value * (dense - output) ** 2, axis=-1)
        if case["is_per_token"]:
            squares = squares * mask_of(case, data["x"])
        if case["has_weights"]:
            squares = squares * (data["w"][:, None] if case["is_per_token"] else data["w"])
        divisor = weight_of(case, data)
        divisor = divisor * LENGTH if case["is_per_token"] and not case["has_masks"] else divisor
        total += tf.reduce_sum(squares) / divisor
    return total


def metric_of(case, outputs, data):
    """Return a number of one's own, a mean over what the loss divides by."""
    sizes = tf.reduce_mean(tf.abs(outputs["out0"]), axis=-1)
    if case["has_masks"] and case["is_per_token"]:
        return tf.reduce_sum(sizes * mask_of(case, data["x"])) / weight_of(case, data)
    return tf.reduce_mean(sizes)


class Data:
    """Placeholders for the examples.

    Attributes:
      tensors: dict with "x", "y" (a dict), and "w" and "state" where the case has them.
    """

    def __init__(self, case):
        tail = {"vector": [WIDTH], "sequence": [LENGTH, WIDTH], "tokens": [LENGTH]}[case["input"]]
        x = tf1.placeholder(tf.int32 if case["input"] == "tokens" else tf.float32, [None] + tail)
        self.tensors = {"x": x, "y": {}}
        shape = [LENGTH, 2] if case["is_per_token"] else [2]
        for number in range(case["outputs"]):
            if case["is_ragged"]:
                target = tf1.ragged.placeholder(tf.float32, 1, shape[1:])
            else:
                target = tf1.placeholder(tf.float32, [None] + shape)
            self.tensors["y"][f"out{number}"] = target
        if case["has_weights"]:
            self.tensors["w"] = tf1.placeholder(tf.float32, [None])
        if case["is_stateful"]:
            self.tensors["state"] = tf1.placeholder(tf.float32, [None, STATE])

    def fed(self, batch, state=None):
        """Return a feed dict."""
        feeds = {self.tensors["x"]: batch["x"]}
        for name, target in batch["y"].items():
            feeds[self.tensors["y"][name]] = _value(target)
        feeds.update({self.tensors["w"]: batch["w"]} if "w" in batch else {})
        feeds.update({self.tensors["state"]: state} if state is not None else {})
        return feeds


def _value(target):
    if not isinstance(target, Ragged):
        return target
    splits = np.cumsum([0] + [len(row) for row in target.rows])
    return tf1.ragged.RaggedTensorValue(np.concatenate(target.rows), splits.astype("int64"))


def batches_of(case):
    """Return the batches, as dicts."""
    random = np.random.RandomState(case["seed"] + 1)
    return [_batch_of(case, random, count) for count in case["sizes"]]


def _batch_of(case, random, count):
    if case["input"] == "tokens":
        x = random.randint(0, WORDS, size=(count, LENGTH)).astype("int32")
    else:
        shape = (count, WIDTH) if case["input"] == "vector" else (count, LENGTH, WIDTH)
        x = random.normal(size=shape).astype("float32")
    if case["has_masks"]:
        pad(x, random)
    batch = {"x": x, "y": {}}
    shape = (count, LENGTH, 2) if case["is_per_token"] else (count, 2)
    for number in range(case["outputs"]):
        target = random.randint(0, 2, size=shape).astype("float32")
        if case["is_ragged"]:
            target = Ragged([row[: random.randint(1, shape[1] + 1)] for row in target])
        batch["y"][f"out{number}"] = target
    if case["has_weights"]:
        batch["w"] = random.uniform(0.2, 2.0, size=count).astype("float32")
    return batch
