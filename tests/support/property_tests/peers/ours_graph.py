"""accum's optimizer for static graphs, and TensorFlow 1's own optimizers."""

import numpy as np
import tensorflow as tf

from property_tests import cycles
from property_tests.peers import base, cases

tf1 = tf.compat.v1
NAMES = {
    "sgd": ("GradientDescentOptimizer", {}),
    "momentum": ("MomentumOptimizer", {"momentum": 0.9}),
    "nesterov": ("MomentumOptimizer", {"momentum": 0.9, "use_nesterov": True}),
    "adam": ("AdamOptimizer", {}),
    "rmsprop": ("RMSPropOptimizer", {}),
    "centered": ("RMSPropOptimizer", {"centered": True, "momentum": 0.5}),
    "adagrad": ("AdagradOptimizer", {}),
    "adadelta": ("AdadeltaOptimizer", {}),
    "ftrl": ("FtrlOptimizer", {}),
}
MOMENTUM = 0.5
"""Of batch normalisation."""


class Graph(base.Peer):
    """A graph with a session, placeholders for gradients, and the plain optimizer."""

    optimizers = tuple(NAMES)
    cannot_occur = ("L8 none",)

    def __init__(self, case, initial):
        self.case = case
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._values = [tf1.placeholder(tf.float32, variable["shape"]) for variable in case["variables"]]
            self.variables = [
                tf1.get_variable("v{}".format(index), initializer=value) for index, value in enumerate(initial)
            ]
            self._set = [tf1.assign(*pair) for pair in zip(self.variables, self._values)]
            self._feeds, self.grads = zip(*[_placeholders(variable) for variable in case["variables"]])
            self.weight = tf1.placeholder_with_default(1.0, [])
            self.step = tf1.train.get_or_create_global_step()
            self.train_op = self._create()
            self._saver = tf1.train.Saver()
            initialize = tf1.global_variables_initializer()
        self.session = tf1.Session(graph=self._graph)
        self.session.run(initialize)

    def _create(self):
        pairs = clipped(self.case, list(zip(self.grads, self.variables)))
        return self.make().apply_gradients(pairs, global_step=self.step)

    def make(self):
        name, arguments = NAMES[self.case["optimizer"]]
        rate, decay = cases.RATE, self.case["arguments"].get("inverse_time")
        if decay is not None:
            rate = tf1.train.inverse_time_decay(rate, self.step, 1, decay)
        self.optimizer = getattr(tf1.train, name)(rate, **arguments)
        return self.optimizer

    @classmethod
    def plain(cls, case, initial):
        return Graph(case, initial)

    def apply(self, grads, weight=None):
        feed = {} if weight is None else {self.weight: weight}
        for placeholders, grad in zip(self._feeds, grads):
            feed.update(zip(placeholders, grad if isinstance(grad, cycles.Rows) else [grad]))
        self.session.run(self.train_op, feed)

    def weights(self):
        return self.session.run(self.variables)

    def set_weights(self, values):
        self.session.run(self._set, dict(zip(self._values, values)))

    def step_count(self):
        return int(self.session.run(self.step))

    def slots(self):
        names = self.optimizer.get_slot_names()
        slots = [self.optimizer.get_slot(var, name) for var in self.variables for name in names]
        return self.session.run([slot for slot in slots if slot is not None])

    def resumed(self, folder):
        path = self._saver.save(self.session, folder + "/run")
        self.close()
        other = type(self)(self.case, cycles.initial(self.case))
        other._saver.restore(other.session, path)
        return other

    def close(self):
        self.session.close()


def _placeholders(variable):
    """Return the placeholders of a gradient, and the gradient."""
    if not variable["is_sparse"]:
        placeholder = tf1.placeholder(tf.float32, variable["shape"])
        return [placeholder], placeholder
    indices, values = tf1.placeholder(tf.int64, [None]), tf1.placeholder(tf.float32, [None] + variable["shape"][1:])
    return [indices, values], tf.IndexedSlices(values, indices, tf.constant(variable["shape"], tf.int64))


def clipped(case, pairs):
    """Clip as a training loop does: TensorFlow 1's optimizers have no clipping of their own."""
    grads, variables = zip(*pairs)
    for name, value in case["arguments"].items():
        if name == "clipnorm":
            grads = [tf.clip_by_norm(grad, value) for grad in grads]
        elif name == "clipvalue":
            grads = [tf.clip_by_value(grad, -value, value) for grad in grads]
        elif name == "global_clipnorm":
            grads, _ = tf.clip_by_global_norm(grads, value)
    return list(zip(grads, variables))


class AccumGraph(Graph):
    title = "accum, static graph"
    packages = ("accum", "tensorflow")

    @classmethod
    def start(cls, case, initial):
        return cls(case, initial)

    def _create(self):
        import accum.compat.v1

        optimizer = accum.compat.v1.AccumOptimizer(
            self.make(),
            self.case["accum_steps"],
            self.case["reduction"],
            nonfinite=self.case["nonfinite"],
            transform=lambda pairs: clipped(self.case, pairs),
        )
        is_weighted = self.case["law"] == "L5"
        pairs = list(zip(self.grads, self.variables))
        train_op = optimizer.apply_gradients(pairs, global_step=self.step, weight=self.weight if is_weighted else None)
        if self.case["law"] == "L6":
            self._ends = {"flush": optimizer.flush(), "reset": optimizer.reset()}
        return train_op

    def take(self, grads, weight):
        self.apply(grads, weight)

    def flush(self):
        self.session.run(self._ends["flush"])

    def reset(self):
        self.session.run(self._ends["reset"])

    @classmethod
    def batch_norm(cls, case, batches, whole):
        return _moved(batches, case["accum_steps"]), _moved([[part] for part in whole], None)


def _moved(batches, accum_steps):
    """Return the moving statistics after each cycle, of a layer in a graph whose train op is run with each part."""
    import accum.compat.v1

    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, (None,) + batches[0][0].shape[1:])
        layer = tf1.layers.BatchNormalization(momentum=MOMENTUM)
        loss = tf.reduce_mean(tf.square(layer(x, training=True)))
        optimizer = tf1.train.GradientDescentOptimizer(0.0)
        updates = layer.updates
        if accum_steps is not None:
            optimizer = accum.compat.v1.AccumOptimizer(optimizer, accum_steps)
            optimizer.accumulate_update_ops(updates)
            updates = []
        train_op = tf.group(optimizer.minimize(loss), *updates)
        session.run(tf1.global_variables_initializer())
        statistics = []
        for parts in batches:
            for part in parts:
                session.run(train_op, {x: np.asarray(part)})
            statistics.append(session.run([layer.moving_mean, layer.moving_variance]))
        return statistics
