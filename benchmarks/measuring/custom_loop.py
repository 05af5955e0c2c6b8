"""The optimizer API: custom loops around a `tf.function`, and the limit of a cycle."""

import tensorflow as tf

from measuring.workloads import loss_of

RATE, MOMENTUM = 0.01, 0.9
IS_KERAS_3 = str(getattr(tf.keras, "__version__", "2")).startswith("3")
# The default family is another one from 2.11 on; what was written for the old one finds it here.
LEGACY = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)


def inner_optimizer(name, family=tf.keras.optimizers, **options):
    """A bare Keras optimizer: "momentum" or "adam"."""
    if name == "adam":
        return family.Adam(RATE / 10, **options)
    return family.SGD(RATE, momentum=MOMENTUM, **options)


def tensors_of(grads):
    """The tensors of all gradients, in one list."""
    pairs = [[grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad] for grad in grads]
    return [tensor for pair in pairs for tensor in pair]


def consumed(loss, grads):
    """`loss`, after `grads` have been computed and let go.

    A gradient that nobody reads is optimised away, and one that is returned holds its memory until all are there. An
    assertion takes them as what it would print, and reads nothing. On a GPU it would fetch them, so they are returned.
    """
    if tf.config.experimental.list_physical_devices("GPU"):
        return loss, tensors_of(grads)
    tf.raw_ops.Assert(condition=tf.math.is_finite(loss), data=tensors_of(grads), summarize=1)
    return loss, []


def mean_of(grads):
    """The mean gradient of one variable over a cycle; for `tf.IndexedSlices`, each row once."""
    if not isinstance(grads[0], tf.IndexedSlices):
        return tf.add_n(grads) / len(grads)
    indices, values = tf.concat([grad.indices for grad in grads], 0), tf.concat([grad.values for grad in grads], 0)
    rows, places = tf.unique(indices)
    sums = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return tf.IndexedSlices(sums / len(grads), rows, grads[0].dense_shape)


class Loop:
    """What the implementations share.

    Args:
      workload, initial: the network and its first weights.
      accum_steps: micro steps a cycle.
      optimizer: "momentum" or "adam".
    """

    def __init__(self, workload, initial, accum_steps, optimizer):
        self.accum_steps = accum_steps
        self._workload = workload
        self._variables = [tf.Variable(value) for value in initial]
        self._optimizer = self._make_optimizer(optimizer)
        self._traced = tf.function(self._micro_step)

    def _make_optimizer(self, name):
        return inner_optimizer(name)

    def _loss_and_grads(self, x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(self._workload, self._variables, x, y)
        return loss, tape.gradient(loss, self._variables)

    def _micro_step(self, x, y):
        loss, grads = self._loss_and_grads(x, y)
        self._optimizer.apply_gradients(list(zip(grads, self._variables)))
        return loss

    def prepare(self, batches, times=1):
        """The input of `run`: `batches`, NumPy arrays, repeated `times` times."""
        return [(tf.constant(x), tf.constant(y)) for x, y in batches] * times

    def run(self, batches):
        """Run whole cycles. Returns the losses."""
        losses = [self._traced(x, y) for x, y in batches]
        return [float(loss) for loss in losses]

    def settle(self):
        """Wait for the weights, which a GPU may still be computing."""
        float(tf.reshape(self._variables[-1], [-1])[0])

    def weights(self):
        return [variable.numpy() for variable in self._variables]


class Plain(Loop):
    """An update on every micro-batch."""


class Ours(Loop):
    def _make_optimizer(self, name):
        import accum

        return accum.GradientAccumulateOptimizer(inner_optimizer(name), self.accum_steps)


class HandWritten(Loop):
    """Accumulation by hand: accumulate, apply and zero as three functions."""

    def __init__(self, *args):
        super().__init__(*args)
        self._accumulators = [tf.Variable(tf.zeros_like(var), trainable=False) for var in self._variables]
        self._apply, self._zero = tf.function(self._make_step), tf.function(self._clear)

    def _micro_step(self, x, y):
        loss, grads = self._loss_and_grads(x, y)
        for accumulator, grad in zip(self._accumulators, grads):
            add = accumulator.scatter_add if isinstance(grad, tf.IndexedSlices) else accumulator.assign_add
            add(grad)
        return loss

    def _make_step(self):
        means = [accumulator / self.accum_steps for accumulator in self._accumulators]
        self._optimizer.apply_gradients(list(zip(means, self._variables)))

    def _clear(self):
        for accumulator in self._accumulators:
            accumulator.assign(tf.zeros_like(accumulator))

    def run(self, batches):
        losses = []
        for index, (x, y) in enumerate(batches):
            losses.append(self._traced(x, y))
            if (index + 1) % self.accum_steps == 0:
                self._apply()
                self._zero()
        return [float(loss) for loss in losses]


class GradientAccumulator(Loop):
    """gradient-accumulator 0.5.2, which accepts only legacy optimizers."""

    def _make_optimizer(self, name):
        import gradient_accumulator

        inner = inner_optimizer(name, LEGACY)
        return gradient_accumulator.GradientAccumulateOptimizer(optimizer=inner, accum_steps=self.accum_steps)


class Keras3(Loop):
    def _make_optimizer(self, name):
        steps = self.accum_steps if self.accum_steps > 1 else None  # it refuses 1
        return inner_optimizer(name, gradient_accumulation_steps=steps)


class Limit(Loop):
    """K forward and backward passes, and one bare `apply_gradients` of an existing gradient."""

    def __init__(self, *args):
        super().__init__(*args)
        self._gradients = tf.function(self._loss_and_grads)
        self._apply = tf.function(self._make_step)
        self._fixed = None

    def prepare(self, batches):
        made = super().prepare(batches)
        if self._fixed is None:
            self._fixed = self._mean(made[: self.accum_steps])
        return made

    def run(self, batches):
        losses = []
        for index, (x, y) in enumerate(batches):
            losses.append(self._traced(x, y)[0])
            if (index + 1) % self.accum_steps == 0:
                self._apply()
        return [float(loss) for loss in losses]

    def apply(self, times):
        """The bare `apply_gradients` alone."""
        for _ in range(times):
            self._apply()
        self.settle()

    def run_in_earnest(self, batches):
        """Make the steps that the limit stands for; the others' weights are compared with the result."""
        for first in range(0, len(batches), self.accum_steps):
            means = self._mean(batches[first : first + self.accum_steps])
            self._optimizer.apply_gradients(list(zip(means, self._variables)))

    def _micro_step(self, x, y):
        return consumed(*self._loss_and_grads(x, y))

    def _mean(self, batches):
        return [mean_of(grads) for grads in zip(*[self._gradients(x, y)[1] for x, y in batches])]

    def _make_step(self):
        self._optimizer.apply_gradients(list(zip(self._fixed, self._variables)))


def implementations():
    """name -> (class, module that it needs)."""
    found = {"accum": (Ours, None), "an update every micro-batch": (Plain, None), "by hand": (HandWritten, None)}
    found["gradient-accumulator, optimizer"] = (GradientAccumulator, "gradient_accumulator")
    found["Keras 3"] = (Keras3, "keras 3")
    return found
