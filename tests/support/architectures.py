"""Small networks with the variables of public programs, as a static graph and in Keras, for tests of `accum.convert`.

The static graphs name their variables as google-research/bert, nshepperd/gpt-2 and tf-slim's `resnet_v1` do, and create
them in the same order. The Keras models are written as a Keras user would, with names of their own.

    python tests/support/architectures.py write FOLDER    stop every run in mid-cycle, and save it in FOLDER
    python tests/support/architectures.py read FOLDER     continue the runs in FOLDER in Keras, and compare the logits
"""

import os
import sys

import numpy as np
import tensorflow as tf

import accum
import accum.compat.v1
import accum.convert

tf1 = tf.compat.v1

K, STOP, END = 4, 6, 11  # 2 of 4 micro steps of the second cycle are made, and at the end 3 of the third
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, CLASSES = 11, 5, 8, 2, 2, 3
EPSILON = 1e-3  # of Adam, large enough that rounding does not decide


def batch(name, number):
    """Return micro-batch `number`: inputs and labels."""
    random = np.random.RandomState(number)
    if name == "resnet":
        return random.normal(size=(3, 8, 8, 3)).astype("float32"), random.randint(CLASSES, size=3)
    return random.randint(VOCABULARY, size=(3, LENGTH)), random.randint(CLASSES, size=3)


# ----------------------------------------------------------------------------------------------------------------
# Static graphs


def _variable(name, *shape, **options):
    # The name alone decides the value, so that two runs start alike
    random = np.random.RandomState(sum(map(ord, tf1.get_variable_scope().name + name)) % 1000)
    value = random.normal(size=shape).astype("float32") * 0.2
    if name in ("gamma", "g", "moving_variance"):
        value = 1.0 + 0.1 * value
    return tf1.get_variable(name, initializer=value, **options)


def _dense(x, units, names=("kernel", "bias"), scope="dense"):
    with tf1.variable_scope(scope):
        kernel = _variable(names[0], x.shape[-1], units)
        return tf.tensordot(x, kernel, 1) + _variable(names[1], units)


def _normalised(x, offset, scale):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)


def _layer_norm(x, scope="LayerNorm"):
    with tf1.variable_scope(scope):
        beta, gamma = _variable("beta", WIDTH), _variable("gamma", WIDTH)
        return _normalised(x, beta, gamma)


def _attended(query, key, value, is_causal=False):
    parts = [tf.transpose(tf.reshape(one, [-1, LENGTH, HEADS, WIDTH // HEADS]), [0, 2, 1, 3]) for one in (query, key)]
    scores = tf.matmul(parts[0], parts[1], transpose_b=True) / np.sqrt(WIDTH / HEADS).astype("float32")
    if is_causal:
        scores -= 1e9 * (1.0 - np.tri(LENGTH, dtype="float32"))
    value = tf.transpose(tf.reshape(value, [-1, LENGTH, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])
    mixed = tf.matmul(tf.nn.softmax(scores), value)
    return tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, LENGTH, WIDTH])


def bert(ids):
    """Names and order of google-research/bert: modeling.py and run_classifier.py."""
    with tf1.variable_scope("bert"):
        with tf1.variable_scope("embeddings"):
            words, types = _variable("word_embeddings", VOCABULARY, WIDTH), _variable("token_type_embeddings", 2, WIDTH)
            positions = _variable("position_embeddings", LENGTH + 1, WIDTH)
            x = tf.gather(words, ids) + tf.gather(types, tf.zeros_like(ids)) + positions[:LENGTH]
            x = _layer_norm(x)
        for number in range(LAYERS):
            with tf1.variable_scope(f"encoder/layer_{number}"):
                with tf1.variable_scope("attention"):
                    parts = [_dense(x, WIDTH, scope="self/" + part) for part in ("query", "key", "value")]
                    with tf1.variable_scope("output"):
                        x = _layer_norm(x + _dense(_attended(*parts), WIDTH))
                hidden = tf.tanh(_dense(x, 2 * WIDTH, scope="intermediate/dense"))
                with tf1.variable_scope("output"):
                    x = _layer_norm(x + _dense(hidden, WIDTH))
        pooled = tf.tanh(_dense(x[:, 0], WIDTH, scope="pooler/dense"))
    weights, bias = _variable("output_weights", CLASSES, WIDTH), _variable("output_bias", CLASSES)
    return tf.matmul(pooled, weights, transpose_b=True) + bias


def gpt_2(ids):
    """Names, shapes and order of model.py in openai/gpt-2 and nshepperd/gpt-2; the logits are of the last position."""

    def norm(x, scope):
        with tf1.variable_scope(scope):
            scale, offset = _variable("g", WIDTH), _variable("b", WIDTH)
            return _normalised(x, offset, scale)

    def conv(x, units, scope):
        with tf1.variable_scope(scope):
            kernel = _variable("w", 1, x.shape[-1], units)
            return tf.tensordot(x, kernel[0], 1) + _variable("b", units)

    with tf1.variable_scope("model"):
        positions, words = _variable("wpe", LENGTH, WIDTH), _variable("wte", VOCABULARY, WIDTH)
        x = tf.gather(words, ids) + positions
        for number in range(LAYERS):
            with tf1.variable_scope(f"h{number}"):
                parts = tf.split(conv(norm(x, "ln_1"), 3 * WIDTH, "attn/c_attn"), 3, axis=2)
                x += conv(_attended(*parts, is_causal=True), WIDTH, "attn/c_proj")
                x += conv(tf.tanh(conv(norm(x, "ln_2"), 4 * WIDTH, "mlp/c_fc")), WIDTH, "mlp/c_proj")
        x = norm(x, "ln_f")
        return tf.matmul(x[:, -1], words, transpose_b=True)


def resnet(images):
    """Names, shapes and order of tf-slim's `resnet_v1`, with `tf.compat.v1.layers` for batch normalisation."""

    def conv(x, units, size, scope, stride=1):
        with tf1.variable_scope(scope):
            kernel = _variable("weights", size, size, x.shape[-1], units)
            x = tf.nn.conv2d(x, kernel, strides=[1, stride, stride, 1], padding="SAME")
            return tf1.layers.batch_normalization(x, momentum=0.75, training=True, name="BatchNorm", epsilon=1e-2)

    with tf1.variable_scope("resnet_v1_14"):
        x = tf.tanh(conv(images, 4, 3, "conv1"))
        for block, (depth, stride) in enumerate([(4, 1), (8, 2)], 1):
            for unit in (1, 2):
                with tf1.variable_scope(f"block{block}/unit_{unit}/bottleneck_v1"):
                    step = stride if unit == 1 else 1
                    shortcut = x if unit == 2 else conv(x, 2 * depth, 1, "shortcut", step)
                    y = tf.tanh(conv(x, depth, 1, "conv1"))
                    y = tf.tanh(conv(y, depth, 3, "conv2", step))
                    x = tf.tanh(shortcut + conv(y, 2 * depth, 1, "conv3"))
        x = tf.reduce_mean(x, [1, 2], keepdims=True)
        with tf1.variable_scope("logits"):
            logits = tf.nn.conv2d(x, _variable("weights", 1, 1, 16, CLASSES), strides=[1, 1, 1, 1], padding="VALID")
            return tf.squeeze(logits + _variable("biases", CLASSES), [1, 2])


GRAPHS = {"bert": bert, "gpt_2": gpt_2, "resnet": resnet}


def run_graph(name, numbers, restore=None, save=None):
    """Train on the micro-batches in `numbers`. Returns the logits of the first micro-batch."""
    with tf.Graph().as_default(), tf1.Session() as session:
        first = batch(name, 0)
        x = tf1.placeholder(first[0].dtype, first[0].shape)
        labels = tf1.placeholder(tf.int64, [3])
        logits = GRAPHS[name](x)
        loss = 0.25 * tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        inner = tf1.train.MomentumOptimizer(0.1, 0.9)
        if name != "resnet":
            inner = tf1.train.AdamOptimizer(0.005, epsilon=EPSILON)
        optimizer = accum.compat.v1.AccumOptimizer(inner, K)
        optimizer.accumulate_update_ops()
        train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
        saver = tf1.train.Saver()
        session.run(tf1.global_variables_initializer())
        if restore:
            saver.restore(session, restore)
        for number in numbers:
            session.run(train_op, dict(zip((x, labels), batch(name, number))))
        if save:
            saver.save(session, save)
        return session.run(logits, {x: first[0]})


# ----------------------------------------------------------------------------------------------------------------
# Keras


class _Position(tf.keras.layers.Layer):
    """Adds an embedding of the position; the table may be longer than the input."""

    def __init__(self, length, **options):
        super().__init__(**options)
        self.length = length

    def build(self, shape):
        self.table = self.add_weight(name="embeddings", shape=(self.length, WIDTH))

    def call(self, x):
        return x + self.table[:LENGTH]


class _Tied(tf.keras.layers.Layer):
    """An embedding whose table also gives the logits."""

    def build(self, shape):
        self.table = self.add_weight(name="embeddings", shape=(VOCABULARY, WIDTH))

    def call(self, x, is_last=False):
        return tf.matmul(x[:, -1], self.table, transpose_b=True) if is_last else tf.gather(self.table, x)


class _Attention(tf.keras.layers.Layer):
    """Attention without variables."""

    def __init__(self, is_causal=False, **options):
        super().__init__(**options)
        self.is_causal = is_causal

    def call(self, parts):
        return _attended(*parts, is_causal=self.is_causal)


class _Tanh(tf.keras.layers.Layer):
    def call(self, x):
        return tf.tanh(x)


class _Split(tf.keras.layers.Layer):
    def call(self, x):
        return tuple(tf.split(x, 3, axis=2))


def _namer(is_named):
    return lambda name: {"name": name} if is_named else {}


CASES = [("bert", True), ("gpt_2", True)] + [(name, False) for name in GRAPHS]
"""(network, whether its layers have names)"""


def keras_bert(is_named):
    """A BERT of Keras layers, in Keras' order: the query first, gamma before beta, and a dense layer at the end."""
    layers, name = tf.keras.layers, _namer(is_named)
    ids = tf.keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, **name("token_embedding"))(ids)
    x = layers.Add()([x, layers.Embedding(2, WIDTH, **name("segment_embedding"))(layers.Lambda(tf.zeros_like)(ids))])
    x = _Position(LENGTH + 1, **name("position_embedding"))(x)
    x = layers.LayerNormalization(epsilon=1e-3, **name("embedding_norm"))(x)
    for number in range(1, LAYERS + 1):
        of = lambda part, number=number: name(f"block_{number}_{part}")
        parts = [layers.Dense(WIDTH, **of("attention_" + part))(x) for part in ("query", "key", "value")]
        mixed = layers.Dense(WIDTH, **of("attention_output"))(_Attention()(parts))
        x = layers.LayerNormalization(epsilon=1e-3, **of("attention_norm"))(layers.Add()([x, mixed]))
        hidden = layers.Dense(2 * WIDTH, activation="tanh", **of("intermediate"))(x)
        hidden = layers.Dense(WIDTH, **of("output"))(hidden)
        x = layers.LayerNormalization(epsilon=1e-3, **of("output_norm"))(layers.Add()([x, hidden]))
    pooled = layers.Dense(WIDTH, activation="tanh", **name("pooler"))(layers.Lambda(_first)(x))
    return tf.keras.Model(ids, layers.Dense(CLASSES, **name("classifier"))(pooled))


def _first(x):
    return x[:, 0]


def keras_gpt_2(is_named):
    """A GPT-2 of Keras layers."""
    layers, name = tf.keras.layers, _namer(is_named)
    ids = tf.keras.Input((LENGTH,), dtype="int32")
    words = _Tied(**name("token_embedding"))
    x = _Position(LENGTH, **name("position_embedding"))(words(ids))
    for number in range(LAYERS):
        of = lambda part, number=number: name(f"decoder_{number}_{part}")
        y = layers.LayerNormalization(epsilon=1e-3, **of("norm_1"))(x)
        parts = _Split()(layers.Dense(3 * WIDTH, **of("attention_qkv"))(y))
        mixed = layers.Dense(WIDTH, **of("attention_projection"))(_Attention(is_causal=True)(parts))
        x = layers.Add()([x, mixed])
        y = layers.LayerNormalization(epsilon=1e-3, **of("norm_2"))(x)
        y = layers.Dense(4 * WIDTH, activation="tanh", **of("mlp_in"))(y)
        x = layers.Add()([x, layers.Dense(WIDTH, **of("mlp_out"))(y)])
    x = layers.LayerNormalization(epsilon=1e-3, **name("final_norm"))(x)
    return tf.keras.Model(ids, words(x, is_last=True))


def keras_resnet(is_named):
    """A ResNet of Keras layers; the last layer is dense."""
    layers, name = tf.keras.layers, _namer(is_named)

    def conv(x, units, size, scope, stride=1):
        x = layers.Conv2D(units, size, stride, "same", use_bias=False, **name(scope + "_conv"))(x)
        return accum.AccumBatchNormalization(K, momentum=0.75, epsilon=1e-2, **name(scope + "_bn"))(x)

    images = tf.keras.Input((8, 8, 3))
    x = _Tanh()(conv(images, 4, 3, "stem"))
    for block, (depth, stride) in enumerate([(4, 1), (8, 2)]):
        for unit in (0, 1):
            scope, step = f"stage{block}_unit{unit}_", stride if unit == 0 else 1
            shortcut = x if unit == 1 else conv(x, 2 * depth, 1, scope + "shortcut", step)
            y = _Tanh()(conv(x, depth, 1, scope + "reduce"))
            y = _Tanh()(conv(y, depth, 3, scope + "middle", step))
            x = _Tanh()(layers.Add()([shortcut, conv(y, 2 * depth, 1, scope + "expand")]))
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(images, layers.Dense(CLASSES, **name("logits"))(x))


KERAS = {"bert": keras_bert, "gpt_2": keras_gpt_2, "resnet": keras_resnet}


class KerasSide:
    """One of the networks in Keras with its accumulating optimizer; `is_named` says whether layers have names."""

    def __init__(self, name, is_named):
        self._name = name
        self.model = KERAS[name](is_named)
        inner = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        if name != "resnet":
            inner = tf.keras.optimizers.Adam(0.005, epsilon=EPSILON)
        self.optimizer = accum.GradientAccumulateOptimizer(inner, K)

    def feed(self, numbers):
        for number in numbers:
            x, labels = batch(self._name, number)
            with tf.GradientTape() as tape:
                logits = self.model(x, training=True)
                loss = 0.25 * tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
                )
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return self

    def logits(self):
        """Return the logits of the first micro-batch, in which the ResNet normalises by the batch."""
        return self.model(batch(self._name, 0)[0], training=True).numpy()


# ----------------------------------------------------------------------------------------------------------------
# From environment to environment


def write(folder):
    """Save each graph's run in mid-cycle, and the logits with which it ends."""
    for name in GRAPHS:
        path = _path(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        run_graph(name, range(STOP), save=path)
        np.save(path + ".npy", run_graph(name, range(STOP, END), restore=path))
        print(f"{tf.__version__} wrote {path}")


def read(folder):
    """Continue each run in Keras by the proposal. Returns whether all end with the logits of the graph."""
    is_close = []
    for name, is_named in CASES:
        path, ours = _path(folder, name), KerasSide(name, is_named)
        proposal = proposal_of(path, ours)
        accum.convert.from_v1(path, ours.model, ours.optimizer, proposal)
        logits, expected = ours.feed(range(STOP, END)).logits(), np.load(path + ".npy")
        is_close.append(np.allclose(logits, expected, rtol=1e-6, atol=1e-6))
        layers = "named" if is_named else "numbered"
        print(f"{path} -> {tf.__version__}  {name:8} {layers} layers  off by {np.abs(logits - expected).max():.1e}")
    return all(is_close)


def proposal_of(path, ours):
    """Return the proposal with which the conversion into a `KerasSide` is refused."""
    try:
        accum.convert.from_v1(path, ours.model, ours.optimizer)
    except accum.convert.ConversionError as error:
        return error.proposal
    raise AssertionError("It was not refused.")


def _path(folder, name):
    return os.path.join(folder, "architectures", name)


def main(what, folder):
    if what == "write":
        write(folder)
        return 0
    return 0 if read(folder) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
