"""Keras' own optimizers, of TensorFlow 2 with Keras 2 or Keras 3: the oracle, and what the others wrap."""

import numpy as np
import tensorflow as tf

from property_tests import cycles
from property_tests.peers import base, cases

IS_KERAS_3 = str(getattr(tf.keras, "__version__", "2")).startswith("3")
NAMES = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "rmsprop": ("RMSprop", {}),
    "centered": ("RMSprop", {"centered": True, "momentum": 0.5}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("Nadam", {}),
    "ftrl": ("Ftrl", {}),
    "adamw": ("AdamW", {"weight_decay": 0.01}),
    "lion": ("Lion", {}),
    "adafactor": ("Adafactor", {}),
}
MOMENTUM = 0.5
"""Of batch normalisation."""


def make(case, **options):
    """Return the plain optimizer; `options` are further arguments of its class."""
    name, arguments = NAMES[case["optimizer"]]
    arguments = dict(arguments, **options)
    rate = cases.RATE
    for key, value in case["arguments"].items():
        if key == "inverse_time":
            rate = tf.keras.optimizers.schedules.InverseTimeDecay(rate, 1, value)
        else:
            arguments[key] = value
    return getattr(tf.keras.optimizers, name)(rate, **arguments)


def variables_of(values):
    if IS_KERAS_3:
        return [tf.keras.Variable(value, name="weight_{}".format(index)) for index, value in enumerate(values)]
    return [tf.Variable(value) for value in values]


def tensors_of(case, grads):
    """Return gradients as tensors, `tf.IndexedSlices` or None."""
    return [_tensor(*pair) for pair in zip(case["variables"], grads)]


def _tensor(variable, grad):
    if not isinstance(grad, cycles.Rows):
        return None if grad is None else tf.constant(grad)
    indices = tf.constant(np.asarray(grad.indices), tf.int64)
    return tf.IndexedSlices(tf.constant(grad.values), indices, tf.constant(variable["shape"], tf.int64))


class KerasPeer(base.Peer):
    """What those have in common that are given gradients and Keras' variables."""

    optimizers = tuple(name for name, (of, _) in NAMES.items() if hasattr(tf.keras.optimizers, of))
    arguments = base.Peer.arguments + (("use_ema",) if IS_KERAS_3 else ())

    def __init__(self, case, initial, optimizer):
        self.case, self.variables, self.optimizer = case, variables_of(initial), optimizer
        if IS_KERAS_3:
            optimizer.build(self.variables)

    @classmethod
    def plain(cls, case, initial):
        return KerasPeer(case, initial, make(case))

    def apply(self, grads):
        self.optimizer.apply_gradients(list(zip(tensors_of(self.case, grads), self.variables)))

    def take(self, grads, weight):
        self.apply(grads)

    def weights(self):
        return [var.numpy().copy() for var in self.variables]

    def set_weights(self, values):
        for var, value in zip(self.variables, values):
            var.assign(value)

    def step_count(self):
        return int(self.optimizer.iterations)

    def slots(self):
        return slots_of(self.optimizer)

    def restored(self, folder, other):
        """Return `other`, restored from a checkpoint of this run."""
        path = tf.train.Checkpoint(variables=list(self.variables), optimizer=self.optimizer).save(folder + "/run")
        tf.train.Checkpoint(variables=list(other.variables), optimizer=other.optimizer).restore(path)
        return other

    @classmethod
    def batch_norm(cls, case, batches, whole):
        """Call the ordinary layer on each micro-batch."""
        return moved_by(tf.keras.layers.BatchNormalization(momentum=MOMENTUM), batches), moved_by_whole(whole)


def slots_of(optimizer):
    """Return the variables of a plain optimizer, without its step counter, which is the first."""
    variables = optimizer.variables if IS_KERAS_3 else optimizer.weights
    return [np.asarray(var.numpy()) for var in variables[1:]]


def moved_by(layer, batches):
    """Return the moving statistics of `layer` after each cycle; each part of a cycle is one call."""
    statistics = []
    for parts in batches:
        for part in parts:
            layer(tf.constant(part), training=True)
        statistics.append([layer.moving_mean.numpy(), layer.moving_variance.numpy()])
    return statistics


def moved_by_whole(whole):
    return moved_by(tf.keras.layers.BatchNormalization(momentum=MOMENTUM), [[part] for part in whole])
