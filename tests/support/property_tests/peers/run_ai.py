"""Run:AI 0.4's wrapper of an optimizer, for Keras 2.3 on TensorFlow 1.15."""

import keras
import keras.backend as K
import numpy as np
import runai.ga.keras
import tensorflow as tf

from property_tests import cycles
from property_tests.peers import base, cases

NAMES = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("Nadam", {}),
}


def make(case):
    name, arguments = NAMES[case["optimizer"]]
    arguments = dict(arguments)
    for key, value in case["arguments"].items():
        arguments["decay" if key == "inverse_time" else key] = value
    return getattr(keras.optimizers, name)(lr=cases.RATE, **arguments)


def read_first(var):
    """Let `var` change only after it was read.

    Keras 2.3 leaves open which comes first, with and without Run:AI, and two runs may differ.
    """
    ops = [op for op in var.handle.graph.get_operations() if var.handle in list(op.inputs)]
    assigns = [op for op in ops if op.type.startswith("Assign") and op is not var.initializer]
    reads = [op for op in ops if op.type == "ReadVariableOp" and op._get_control_flow_context() is None]
    for assign in assigns:
        assign._add_control_inputs([read for read in reads if assign not in read.control_inputs])


class RunAI(base.Peer):
    """The updates of Keras' train function, with a loss whose gradients are its inputs."""

    title = "Run:AI"
    packages = ("runai", "keras", "tensorflow")
    optimizers = tuple(NAMES)
    arguments = ("clipnorm", "clipvalue", "inverse_time")
    not_offered = {"L4": True, "L5": True, "L6": False, "L9 skip": False, "L13": False}
    cannot_occur = ("L8 none",)

    def __init__(self, case, initial, is_passthrough=False):
        K.clear_session()
        self.case, self.is_passthrough, self.optimizer = case, is_passthrough, make(case)
        wrapped = self.optimizer
        if not is_passthrough:
            wrapped = runai.ga.keras.optimizers.Optimizer(self.optimizer, steps=case["accum_steps"])
        self.variables = [K.variable(value, name="v{}".format(index)) for index, value in enumerate(initial)]
        placeholders, loss = [], 0.0
        for variable, var in zip(case["variables"], self.variables):
            if variable["is_sparse"]:
                placeholders.append(K.placeholder([None], dtype="int32"))
                var = tf.gather(var, placeholders[-1])
            placeholders.append(K.placeholder(var.shape.as_list()))
            loss += K.sum(var * placeholders[-1])
        self._wrapped = wrapped
        updates = wrapped.get_updates(loss, self.variables)
        for name in ("iterations", "m_schedule"):
            if hasattr(self.optimizer, name):
                read_first(getattr(self.optimizer, name))
        initialize = tf.global_variables_initializer()
        self.session = tf.Session(graph=initialize.graph)  # the one that Keras made may hold the ops as they were
        K.set_session(self.session)
        self.session.run(initialize)
        self._train = K.function(placeholders, [loss], updates=updates)

    @classmethod
    def start(cls, case, initial):
        return cls(case, initial)

    @classmethod
    def plain(cls, case, initial):
        return cls(case, initial, is_passthrough=True)

    def apply(self, grads):
        inputs = []
        for grad in grads:
            inputs += list(grad) if isinstance(grad, cycles.Rows) else [grad]
        self._train(inputs)

    def take(self, grads, weight):
        self.apply(grads)

    def weights(self):
        return [np.array(value) for value in K.batch_get_value(self.variables)]

    def set_weights(self, values):
        K.batch_set_value(list(zip(self.variables, values)))

    def step_count(self):
        return int(K.get_value(self._wrapped.iterations))

    def slots(self):
        return [np.array(value) for value in self.optimizer.get_weights()[1:]]

    def resumed(self, folder):
        """By a `Saver` of all variables: `model.save` of Keras keeps the inner optimizer's state alone."""
        path = tf.train.Saver().save(self.session, folder + "/run")
        other = type(self)(self.case, cycles.initial(self.case))
        tf.train.Saver().restore(other.session, path)
        return other
