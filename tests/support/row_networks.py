"""Networks with a loss and its gradients, on which `accum._rows` is measured.

Each function adds to the current static graph, or to the trace of a `tf.function`, and returns (the batch: a list of
tensors, what is computed: a list of tensors and operations).
"""

import re

import tensorflow as tf

tf1 = tf.compat.v1
VERSION = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:2])
HAS_CELLS = VERSION < (2, 16)
"""Whether there are `tf.layers` and the cells of TF 1."""


def _place(*shape, dtype=tf.float32):
    return tf1.placeholder(dtype, [None, *shape])


def _with_gradients(batch, loss, others=()):
    variables = tf1.trainable_variables()
    grads = [tf.convert_to_tensor(grad) for grad in tf.gradients(loss, variables) if grad is not None]
    return batch, [loss, *grads, *others]


def _dense(x, units, name):
    kernel = tf1.get_variable(f"{name}_kernel", [int(x.shape[-1]), units])
    return tf.nn.bias_add(tf.matmul(x, kernel), tf1.get_variable(f"{name}_bias", [units]))


def _conv(x, filters, name, **options):
    kernel = tf1.get_variable(f"{name}_kernel", [3, 3, int(x.shape[-1]), filters])
    options = {"strides": [1, 1, 1, 1], "padding": "SAME", **options}
    return tf.nn.conv2d(x, kernel, **options)


def perceptron():
    """Dropout by a placeholder without a shape, as many programs have it; L2 decay; a mean of selected examples."""
    x, y, keep = _place(12), _place(1), tf1.placeholder(tf.float32)
    h = tf1.nn.dropout(tf.nn.relu(_dense(x, 8, "a")), keep)
    error = _dense(h, 1, "b") - y
    weight = tf.cast(y > 0, tf.float32)
    loss = tf.reduce_sum(tf.square(error) * weight) / tf.reduce_sum(weight)
    loss += sum(tf.nn.l2_loss(variable) for variable in tf1.trainable_variables())
    return _with_gradients([x, y], loss)


def text_convolution():
    """A convolution over words, as in dennybritz/cnn-text-classification-tf."""
    x, y, keep = _place(20, dtype=tf.int32), _place(2), tf1.placeholder(tf.float32)
    e = tf.expand_dims(tf.nn.embedding_lookup(tf1.get_variable("table", [50, 8]), x), -1)
    pooled = []
    for width in (3, 4):
        kernel = tf1.get_variable(f"kernel_{width}", [width, 8, 1, 4])
        h = tf.nn.conv2d(e, kernel, strides=[1, 1, 1, 1], padding="VALID")
        h = tf.nn.relu(tf.nn.bias_add(h, tf1.get_variable(f"bias_{width}", [4])))
        pooled.append(tf.nn.max_pool2d(h, [1, 21 - width, 1, 1], [1, 1, 1, 1], "VALID"))
    h = tf1.nn.dropout(tf.reshape(tf.concat(pooled, 3), [-1, 8]), keep)
    logits = _dense(h, 2, "out")
    loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=logits))
    right = tf.equal(tf.argmax(logits, 1), tf.argmax(y, 1))
    return _with_gradients([x, y], loss, [tf.reduce_mean(tf.cast(right, tf.float32))])


def batch_normalised():
    """Fused batch normalisation, and moments by hand, with averages that are updated beside the loss."""
    x, y = _place(16, 16, 3), _place(dtype=tf.int64)
    h = _conv(x, 6, "a")
    ones, zeros = tf1.get_variable("scale", [6]), tf1.get_variable("offset", [6])
    h, mean, _ = tf1.nn.fused_batch_norm(h, ones, zeros, is_training=True)
    average = tf1.get_variable("average", [6], trainable=False)
    update = tf1.assign_sub(average, 0.1 * (average - mean))
    h = _conv(tf.nn.max_pool2d(tf.nn.relu(h), 2, 2, "SAME"), 6, "b")
    mean, variance = tf.nn.moments(h, [0, 1, 2])
    h = tf.nn.relu(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3))
    logits = _dense(tf.reduce_mean(h, [1, 2]), 5, "out")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    return _with_gradients([x, y], loss, [update.op])


def attention():
    """Self-attention with a mask and layer normalisation by hand, over sequences of any length."""
    x, lengths, y = _place(None, 8), _place(dtype=tf.int32), _place(1)
    mask = tf.sequence_mask(lengths, tf.shape(x)[1])
    q, k, v = (tf.tensordot(x, tf1.get_variable(name, [8, 2, 4]), [[2], [0]]) for name in "qkv")
    scores = tf.einsum("bthd,bshd->bhts", q, k) / 2.0
    scores += (1.0 - tf.cast(mask, tf.float32)[:, tf.newaxis, tf.newaxis, :]) * -1e9
    h = tf.reshape(tf.einsum("bhts,bshd->bthd", tf.nn.softmax(scores), v), tf.shape(x))
    mean, variance = tf.nn.moments(h + x, [-1], keepdims=True)
    h = (h + x - mean) * tf1.rsqrt(variance + 1e-6)
    h.set_shape([None, None, 8])
    h = tf.reduce_sum(h * tf.cast(mask, tf.float32)[:, :, tf.newaxis], 1) / tf.cast(lengths, tf.float32)[:, tf.newaxis]
    return _with_gradients([x, lengths, y], tf.reduce_mean(tf.square(_dense(h, 1, "out") - y)))


def encoder_and_decoder():
    """Transposed convolutions, joined features, resized images and a loss for each pixel."""
    x, y = _place(16, 16, 3), _place(16, 16, dtype=tf.int32)
    a = tf.nn.relu(_conv(x, 4, "a"))
    b = tf.nn.relu(_conv(tf.nn.avg_pool2d(a, 2, 2, "SAME"), 4, "b"))
    kernel = tf1.get_variable("up_kernel", [3, 3, 4, 4])
    shape = tf.stack([tf.shape(x)[0], 16, 16, 4])
    up = tf.nn.conv2d_transpose(b, kernel, shape, strides=[1, 2, 2, 1])
    smooth = tf1.image.resize_bilinear(b, [16, 16])
    h = tf.nn.local_response_normalization(tf.concat([a, up, smooth], 3))
    logits = _conv(h, 4, "out")
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    return _with_gradients([x, y], tf.reduce_mean(tf.reduce_sum(losses, [1, 2])))


def scanned():
    """A recurrent network by `tf.scan`, time first."""
    x, y = _place(7, 4), _place(1)
    kernel = tf1.get_variable("kernel", [9, 5])

    def step(state, now):
        return tf.tanh(tf.matmul(tf.concat([state, now], 1), kernel))

    states = tf.scan(step, tf.transpose(x, [1, 0, 2]), tf.zeros([tf.shape(x)[0], 5]))
    flat = tf.reshape(states, [-1, 5])
    h = tf.reshape(_dense(flat, 3, "each"), [7, -1, 3])
    return _with_gradients([x, y], tf.reduce_mean(tf.square(_dense(h[-1], 1, "out") - y)))


def in_a_conditional():
    """Batch normalisation whose statistics are chosen by a placeholder."""
    x, y, training = _place(6), _place(1), tf1.placeholder(tf.bool)
    h = _dense(x, 4, "a")
    average = tf1.get_variable("average", [4], trainable=False)
    mean = tf1.cond(training, lambda: tf.reduce_mean(h, 0), lambda: tf.identity(average))
    h = tf1.cond(training, lambda: tf1.nn.dropout(h - mean, rate=0.5), lambda: h - mean)
    return _with_gradients([x, y], tf.reduce_mean(tf.square(_dense(h, 1, "out") - y)))


def recurrent(masked=True, both=False):
    """`dynamic_rnn` with dropout; in TF 1 a loop of the graph itself."""
    x, lengths, y, keep = _place(None, dtype=tf.int32), _place(dtype=tf.int32), _place(1), tf1.placeholder(tf.float32)
    e = tf.nn.embedding_lookup(tf1.get_variable("table", [50, 8]), x)

    def cell():
        return tf1.nn.rnn_cell.DropoutWrapper(tf1.nn.rnn_cell.LSTMCell(6), output_keep_prob=keep)

    options = {"sequence_length": lengths if masked else None, "dtype": tf.float32}
    if both:
        outputs, (state, _) = tf1.nn.bidirectional_dynamic_rnn(cell(), cell(), e, **options)
        outputs = tf.concat(outputs, 2)
    else:
        outputs, state = tf1.nn.dynamic_rnn(cell(), e, **options)
    h = tf.concat([state.h, tf.reduce_mean(outputs, 1)], 1)
    loss = tf.reduce_mean(tf.square(tf1.layers.dense(h, 1) - y))
    return _with_gradients([x, lengths, y] if masked else [x, y], loss)


def of_layers():
    """`tf.layers` with batch normalisation and dropout by a placeholder."""
    x, y, training = _place(16, 16, 3), _place(dtype=tf.int32), tf1.placeholder(tf.bool)
    h = x
    for _ in range(2):
        h = tf1.layers.conv2d(h, 8, 3, padding="same", use_bias=False)
        h = tf.nn.relu(tf1.layers.batch_normalization(h, training=training))
        h = tf1.layers.max_pooling2d(h, 2, 2)
    h = tf1.layers.dropout(tf1.layers.flatten(h), 0.5, training=training)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=tf1.layers.dense(h, 5))
    return _with_gradients([x, y], tf.reduce_mean(losses), tf1.get_collection(tf1.GraphKeys.UPDATE_OPS))


STATIC = [perceptron, text_convolution, batch_normalised, attention, encoder_and_decoder, scanned, in_a_conditional]
WITH_CELLS = [recurrent, of_layers]


def trace(model, *specs, training=True):
    """Return (graph, batch, what is computed) of the loss of a Keras model and its gradients."""

    def loss_and_gradients(*inputs):
        output = model(inputs[0] if len(inputs) == 1 else list(inputs), training=training)
        flat = tf.reshape(output, [tf.shape(output)[0], -1])
        loss = tf.reduce_mean(tf.reduce_sum(tf.square(flat), 1))
        variables = model.trainable_variables
        variables = [variable if isinstance(variable, tf.Variable) else variable.value for variable in variables]
        grads = tf.gradients(loss, variables)
        return [loss] + [tf.convert_to_tensor(grad) for grad in grads if grad is not None]

    traced = tf.function(loss_and_gradients, autograph=False).get_concrete_function(*specs)
    return traced.graph, traced.inputs[: len(specs)], traced.outputs


APPLICATIONS = (
    "ResNet50 MobileNetV2 EfficientNetB0 DenseNet121 ConvNeXtTiny NASNetMobile InceptionV3 MobileNetV3Small Xception"
)


def application(name):
    """Return the trace of a network of `keras.applications`."""
    model = getattr(tf.keras.applications, name)(weights=None, input_shape=(96, 96, 3), classes=10)
    return trace(model, tf.TensorSpec([None, 96, 96, 3]))


def of_keras(name):
    """Return the trace of a network of Keras' layers."""
    layers = tf.keras.layers
    if name == "attention":
        x = layers.Input((12, 8))
        h = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(x, x) + x)
        h = layers.GlobalAveragePooling1D()(layers.Dropout(0.1)(h))
        return trace(tf.keras.Model(x, layers.Dense(2)(h)), tf.TensorSpec([None, 12, 8]))
    x = layers.Input((None,), dtype=tf.int32)
    h = layers.Embedding(20, 8, mask_zero=name == "masked")(x)
    h = layers.GRU(5)(layers.Bidirectional(layers.LSTM(6, return_sequences=True))(h))
    return trace(tf.keras.Model(x, layers.Dense(2)(h)), tf.TensorSpec([None, None], tf.int32))


OF_KERAS = ("attention", "recurrent", "masked")
