"""What the workers of test_workers.py train, and what is compared."""

import numpy as np
import tensorflow as tf


def problem():
    """Return the data of all workers, 6 micro-batches of 12 examples, and initial weights."""
    random = np.random.RandomState(0)
    x = random.normal(size=(72, 5)).astype("float32")
    return x, random.normal(size=(72, 1)).astype("float32"), random.normal(size=(5, 1)).astype("float32")


def sharded(data):
    """Return a dataset whose batches are divided among the workers."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.with_options(options)


def normalised_network():
    """Return a network with batch normalisation, whose weights are the same in each process."""
    inputs = tf.keras.Input((5,))
    hidden = tf.keras.layers.BatchNormalization(momentum=0.5)(tf.keras.layers.Dense(3)(inputs))
    net = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(tf.keras.layers.Activation("tanh")(hidden)))
    random = np.random.RandomState(1)
    net.set_weights(
        [value + random.normal(scale=0.1, size=value.shape) for value in map(np.zeros_like, net.get_weights())]
    )
    return net


def trained_with_validation(model, batch_size=24):
    """Train a model on 68 examples, so that its last batch is smaller, and return its history."""
    x, y, _ = problem()
    data = sharded(tf.data.Dataset.from_tensor_slices((x[:68], y[:68])).batch(batch_size).repeat())
    steps = -(-68 // batch_size)  # TF 2.2 asks several workers for their number
    options = {"steps_per_epoch": steps, "validation_steps": steps}
    return model.fit(data, epochs=2, validation_data=data, verbose=0, **options).history


def outcome(model, history):
    """Return the weights of a model and its history as one array."""
    values = list(model.get_weights()) + [history[key] for key in sorted(history)]
    return np.concatenate([np.ravel(value) for value in values])


def tall_network():
    """Return a network of four layers, whose weights are the same in each process."""
    net = tf.keras.Sequential([tf.keras.Input((5,))] + [tf.keras.layers.Dense(size) for size in (4, 3, 2, 1)])
    random = np.random.RandomState(1)
    net.set_weights([random.normal(scale=0.5, size=value.shape) for value in net.get_weights()])
    return net


def embedding_network():
    """Return a network whose first gradient is `tf.IndexedSlices`, with the same weights in each process."""
    inputs = tf.keras.Input((5,))
    rows = tf.keras.layers.Lambda(lambda x: tf.cast(tf.math.floormod(3.0 * tf.abs(x), 7.0), tf.int32))(inputs)
    hidden = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(7, 3)(rows))
    net = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))
    random = np.random.RandomState(1)
    net.set_weights([random.normal(scale=0.5, size=value.shape) for value in net.get_weights()])
    return net


CYCLES = {
    "static": (tall_network, 1, True),
    "varying": (tall_network, 1, False),
    "cycles": (tall_network, 2, True),
    "varying cycles": (tall_network, 2, False),
    "rows": (embedding_network, 1, True),
    "varying rows": (embedding_network, 1, False),
}
"""Name -> what makes a network, micro steps in a cycle, and whether the size of batches is known in a trace."""


def trained_tall(model, is_static):
    """Train a model on three batches of 24 examples, in an order that is fixed, and return its weights."""
    x, y, _ = problem()
    data = sharded(tf.data.Dataset.from_tensor_slices((x, y)).batch(24, drop_remainder=is_static).repeat())
    model.fit(data, epochs=2, steps_per_epoch=3, verbose=0)
    return np.concatenate([np.ravel(value) for value in model.get_weights()])


def products_before_sums(function, *args):
    """Return how many matrix products each sum over workers waits for, smallest first, in a traced function."""
    definition = function.get_concrete_function(*args).graph.as_graph_def()
    bodies = [definition.node] + [body.node_def for body in definition.library.function]
    return sorted(count for nodes in bodies for count in _products_before_sums(nodes))


def _products_before_sums(nodes):
    by_name = {node.name: node for node in nodes}
    return [
        sum(by_name[name].op == "MatMul" for name in _ancestors(node, by_name))
        for node in nodes
        if node.op.startswith("CollectiveReduce")
    ]


def _ancestors(node, by_name):
    found, ahead = set(), [node]
    while ahead:
        names = [name.lstrip("^").split(":")[0] for name in ahead.pop().input]
        fresh = {name for name in names if name in by_name} - found
        found |= fresh
        ahead += [by_name[name] for name in fresh]
    return found
