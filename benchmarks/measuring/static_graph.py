"""The static-graph API: everything in Sessions, each implementation with a graph of its own."""

import numpy as np
import tensorflow as tf

from measuring.custom_loop import MOMENTUM, RATE, tensors_of
from measuring.workloads import loss_of

tf1 = tf.compat.v1


def inner_optimizer(name):
    """A bare optimizer of `tf.compat.v1.train`: "momentum" or "adam"."""
    return tf1.train.AdamOptimizer(RATE / 10) if name == "adam" else tf1.train.MomentumOptimizer(RATE, MOMENTUM)


class InSession:
    """What the implementations share; see `custom_loop.Loop`."""

    def __init__(self, workload, initial, accum_steps, optimizer):
        self.accum_steps = accum_steps
        self._graph = tf.Graph()
        self._session = tf1.Session(graph=self._graph)
        with self._graph.as_default(), self._session.as_default():
            self._x = tf1.placeholder(workload.input_dtype, (workload.batch,) + workload.input_shape)
            self._y = tf1.placeholder("int32", [workload.batch])
            self._variables = [tf1.Variable(value, use_resource=True, name="w") for value in initial]
            self._loss = loss_of(workload, self._variables, self._x, self._y)
            self._make_ops(optimizer)
            self._one_weight = tf.reshape(self._variables[-1], [-1])[0]
            self._session.run(tf1.global_variables_initializer())

    def _make_ops(self, optimizer):
        self._train_op = inner_optimizer(optimizer).minimize(self._loss)

    def prepare(self, batches, times=1):
        return batches * times

    def run(self, batches):
        """Run whole cycles. Returns the losses."""
        return [self._run(self._train_op, batch) for batch in batches]

    def settle(self):
        """Wait for the weights, which a GPU may still be computing."""
        self._session.run(self._one_weight)

    def _run(self, op, batch):
        return float(self._session.run([self._loss, op], {self._x: batch[0], self._y: batch[1]})[0])

    def weights(self):
        return self._session.run(self._variables)

    def variable_bytes(self):
        with self._graph.as_default():
            made = tf1.global_variables()
        return sum(int(np.prod(var.shape.as_list())) * var.dtype.base_dtype.size for var in made)


class Plain(InSession):
    """An update on every micro-batch."""


class Ours(InSession):
    def _make_ops(self, optimizer):
        from accum.compat.v1 import AccumOptimizer

        self._train_op = AccumOptimizer(inner_optimizer(optimizer), self.accum_steps).minimize(self._loss)


class OurOps(InSession):
    """The separate ops, for loops that drive the cycle themselves; `apply` also clears."""

    def _make_ops(self, optimizer):
        from accum.compat.v1 import AccumOptimizer

        self._ops = AccumOptimizer(inner_optimizer(optimizer), self.accum_steps).accumulation_ops(self._loss)

    def run(self, batches):
        losses = []
        for index, batch in enumerate(batches):
            losses.append(self._run(self._ops.accumulate, batch))
            if (index + 1) % self.accum_steps == 0:
                self._session.run(self._ops.apply)
        return losses


class HandWritten(InSession):
    """Accumulation by hand: accumulate, apply and zero as three ops."""

    def _make_ops(self, optimizer):
        inner = inner_optimizer(optimizer)
        grads = [grad for grad, _ in inner.compute_gradients(self._loss, self._variables)]
        buffers = [tf1.Variable(tf.zeros(var.shape), trainable=False, use_resource=True) for var in self._variables]
        added = []
        for buffer, grad in zip(buffers, grads):
            add = buffer.scatter_add if isinstance(grad, tf.IndexedSlices) else buffer.assign_add
            added.append(add(grad))
        self._accumulate = tf.group(*added)
        self._apply = inner.apply_gradients([(b / self.accum_steps, var) for b, var in zip(buffers, self._variables)])
        self._zero = tf.group(*[buffer.assign(tf.zeros_like(buffer)) for buffer in buffers])

    def run(self, batches):
        losses = []
        for index, batch in enumerate(batches):
            losses.append(self._run(self._accumulate, batch))
            if (index + 1) % self.accum_steps == 0:
                self._session.run(self._apply)
                self._session.run(self._zero)
        return losses


class RunAi(InSession):
    """Run:AI's wrapper around an optimizer of the package `keras`; its update ops run as that package runs them."""

    def _make_ops(self, optimizer):
        import keras.optimizers
        from runai.ga.keras.optimizers import Optimizer

        adam = lambda: keras.optimizers.Adam(RATE / 10)
        inner = adam() if optimizer == "adam" else keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        updates = Optimizer(inner, self.accum_steps).get_updates(self._loss, self._variables)
        self._train_op = tf.group(*updates)


class Limit(InSession):
    """K forward and backward passes, and one bare `apply_gradients` of a gradient held in variables."""

    def _make_ops(self, optimizer):
        inner = inner_optimizer(optimizer)
        self._grads = [grad for grad, _ in inner.compute_gradients(self._loss, self._variables)]
        # An element of each is fetched: what nobody reads, the session's optimiser makes a no-op of.
        self._train_op = tf.add_n([_one_element(tensor) for tensor in tensors_of(self._grads)])
        # Run in earnest: any gradient is fed. Timed: that of a first cycle stands in variables.
        self._fed = [self._placeholder_like(grad) for grad in self._grads]
        self._apply_fed = inner.apply_gradients(list(zip(self._fed, self._variables)))
        self._inner, self._apply = inner, None

    def _placeholder_like(self, grad):
        if not isinstance(grad, tf.IndexedSlices):
            return tf1.placeholder(grad.dtype, grad.shape)
        values = tf1.placeholder(grad.values.dtype, [None] + list(self._variables[0].shape[1:]))
        return tf.IndexedSlices(
            values, tf1.placeholder("int64", [None]), tf1.constant(self._variables[0].shape.as_list())
        )

    def prepare(self, batches):
        if self._apply is None:
            self._make_fixed(self._mean(batches[: self.accum_steps]))
        return batches

    def _make_fixed(self, means):
        """The op that is timed. The gradient is fed into variables, because constants would be folded."""
        with self._graph.as_default():
            fixed, filled = [], {}
            for grad in means:
                parts = [self._variable(part, filled) for part in (grad if isinstance(grad, tuple) else [grad])]
                shape = tf1.constant(self._variables[0].shape.as_list())
                fixed.append(tf.IndexedSlices(parts[0], parts[1], shape) if len(parts) == 2 else parts[0])
            self._apply = self._inner.apply_gradients(list(zip(fixed, self._variables)))
            for variable, (fed, value) in filled.items():
                self._session.run(variable, {fed: value})

    @staticmethod
    def _variable(value, filled):
        fed = tf1.placeholder(value.dtype, value.shape)
        variable = tf1.Variable(fed, trainable=False, use_resource=True)
        filled[variable.initializer] = fed, value
        return variable.read_value()

    def run(self, batches):
        losses = []
        for index, batch in enumerate(batches):
            losses.append(self._run(self._train_op, batch))
            if (index + 1) % self.accum_steps == 0:
                self._session.run(self._apply)
        return losses

    def run_in_earnest(self, batches):
        """Make the steps that the limit stands for; the others' weights are compared with the result."""
        for first in range(0, len(batches), self.accum_steps):
            means = self._mean(batches[first : first + self.accum_steps])
            fed = [[grad] if isinstance(grad, tuple) else [(grad,)] for grad in means]
            values = [part for (parts,) in fed for part in parts]
            self._session.run(self._apply_fed, dict(zip(tensors_of(self._fed), values)))

    def _mean(self, batches):
        found = [self._session.run(self._grads, {self._x: x, self._y: y}) for x, y in batches]
        return [_mean_of(grads) for grads in zip(*found)]


def _one_element(tensor):
    return tf.cast(tf.reshape(tensor, [-1])[0], tf.float32)


def _mean_of(grads):
    """As `custom_loop.mean_of`, for NumPy arrays; sparse rows are a pair of values and indices."""
    if not hasattr(grads[0], "indices"):
        return sum(grads) / np.float32(len(grads))
    indices = np.concatenate([grad.indices for grad in grads]).astype("int64")
    values = np.concatenate([grad.values for grad in grads])
    rows, places = np.unique(indices, return_inverse=True)
    sums = np.zeros((len(rows),) + values.shape[1:], "float32")
    np.add.at(sums, places, values)
    return sums / np.float32(len(grads)), rows


def implementations():
    """name -> (class, module that it needs)."""
    found = {"accum": (Ours, None), "accum, explicit ops": (OurOps, None)}
    found.update({"an update every micro-batch": (Plain, None), "by hand": (HandWritten, None)})
    found["Run:AI"] = (RunAi, "runai")
    return found
