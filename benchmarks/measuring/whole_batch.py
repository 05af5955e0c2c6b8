"""Steps with `whole_batch`, against plain splitting at the same micro-batch size and against plain Keras.

Times are ratios to plain splitting in the same round. Plain Keras on the full batch says what the right weights are.
"""

import numpy as np
import tensorflow as tf

from measuring import machine, one_step, statistics, timing, workloads
from measuring.custom_loop import inner_optimizer

PLAIN, SPLIT, EXACT = "plain, full batch", "accum, micro_batch_size", "accum, micro_batch_size and whole_batch"
TOLERANCE = 2e-5
STEPS_IN_THE_GUARD = 2


class Residual(workloads.Mlp):
    """A residual network on 32 x 32 images, with 7 batch normalisation layers and `whole_batch="all"`."""

    name = "residual"
    whole_batch = "all"

    def __init__(self, is_smoke=False, batch=None):
        self.batch = batch or (4 if is_smoke else 32)
        self.input_shape = (8, 8, 3) if is_smoke else (32, 32, 3)
        self._widths = [4, 8] if is_smoke else [16, 32, 64]

    def network(self):
        layers = tf.keras.layers
        inputs = tf.keras.Input(self.input_shape)
        x = layers.ReLU()(self._normal(inputs, self._widths[0]))
        for number, width in enumerate(self._widths):
            stride = 2 if number else 1
            shortcut = layers.Conv2D(width, 1, strides=stride)(x) if number else x
            y = layers.ReLU()(self._normal(x, width, stride))
            x = layers.ReLU()(layers.Add()([self._normal(y, width), shortcut]))
        return tf.keras.Model(inputs, layers.Dense(self.classes)(layers.GlobalAveragePooling2D()(x)))

    def loss(self):
        return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @staticmethod
    def _normal(x, width, stride=1):
        layers = tf.keras.layers
        x = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)


class Towers(Residual):
    """A convolutional and a dense tower, whose contrastive loss sees the batch: `whole_batch="loss"`."""

    name = "towers"
    whole_batch = "loss"

    def __init__(self, is_smoke=False, batch=None):
        super().__init__(is_smoke, batch)
        self._widths = [4, 8] if is_smoke else [32, 64, 128]
        self._features, self._units = (5, [6]) if is_smoke else (256, [1024, 1024])

    def network(self):
        layers = tf.keras.layers
        images, texts = tf.keras.Input(self.input_shape), tf.keras.Input((self._features,))
        one, other = images, texts
        for number, width in enumerate(self._widths):
            one = layers.Conv2D(width, 3, strides=2 if number else 1, padding="same", activation="relu")(one)
        for units in self._units:
            other = layers.Dense(units, activation="relu")(other)
        embedded = [layers.Dense(64)(layers.GlobalAveragePooling2D()(one)), layers.Dense(64)(other)]
        return tf.keras.Model([images, texts], layers.Concatenate()(embedded))

    def loss(self):
        return contrastive

    def inputs(self, random, count):
        shapes = (count,) + self.input_shape, (count, self._features)
        return tuple(random.normal(size=shape).astype(self.input_dtype) for shape in shapes)


def contrastive(_, pairs):
    """Each example against all others of the batch."""
    one, other = (tf.math.l2_normalize(part, axis=1) for part in tf.split(pairs, 2, axis=1))
    logits = tf.matmul(one, other, transpose_b=True) / 0.1
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.range(tf.shape(logits)[0]), logits=logits)


WORKLOADS = {workload.name: workload for workload in (Residual, Towers)}


def initial_weights(workload, seed=0):
    """Kernels drawn by NumPy; all else as Keras starts."""
    random, weights = np.random.RandomState(seed), workload.network().get_weights()
    drawn = [random.normal(size=w.shape) * np.prod(w.shape[:-1]) ** -0.5 if w.ndim > 1 else w for w in weights]
    return [value.astype("float32") for value in drawn]


class WholeBatch(one_step.Steps):
    """The whole batch at once, without the library."""

    def __init__(self, workload, initial, accum_steps, optimizer):
        self.accum_steps, self.size = accum_steps, workload.batch
        self._network = workload.network()
        self._network.set_weights(initial)
        self._model = self._wrapped(self._network, workload)
        self._model.compile(inner_optimizer(optimizer), loss=workload.loss(), **self.compile_options)

    def _wrapped(self, network, workload):
        return network

    def prepare(self, batches, times=1):
        """An endless iterator over what is in memory already, and how often to call the train function."""
        size = self.size * (self.accum_steps if self.takes_whole_batches else 1)
        count = len(batches) * self.size // size

        def joined(*parts):
            whole = np.concatenate(parts)
            return tf.constant(whole.reshape((count, size) + whole.shape[1:]))

        data = tf.nest.map_structure(joined, *batches)
        return iter(tf.data.Dataset.from_tensor_slices(data).repeat()), times * count


class Plain(WholeBatch):
    """An update on every micro-batch, without the library."""

    takes_whole_batches = False


class Split(WholeBatch):
    """`micro_batch_size=m`, by which batch normalisation and the loss see a micro-batch."""

    def _wrapped(self, network, workload):
        import accum

        return accum.GradientAccumulateModel.from_model(network, micro_batch_size=self.size, whole_batch=())


class Exact(WholeBatch):
    """`micro_batch_size=m` and `whole_batch`."""

    def _wrapped(self, network, workload):
        import accum

        return accum.GradientAccumulateModel.from_model(
            network, micro_batch_size=self.size, whole_batch=workload.whole_batch
        )


Ours = Split
CONTENDERS = {SPLIT: Split, EXACT: Exact, PLAIN: WholeBatch}


def time_one(task):
    """Returns the rows of the table, once `whole_batch` has been seen to end where plain Keras ends."""
    workload, k = WORKLOADS[task["workload"]](task["smoke"]), task["accum_steps"]
    initial = initial_weights(workload)
    made = {name: of(workload, initial, k, task["optimizer"]) for name, of in CONTENDERS.items()}
    guarded = workloads.micro_batches(workload, STEPS_IN_THE_GUARD * k)
    for implementation in made.values():
        implementation.run(implementation.prepare(guarded))
    goal = made[PLAIN].weights()
    apart = {name: _largest(implementation.weights(), goal) for name, implementation in made.items()}
    if not apart[EXACT] <= TOLERANCE < _largest(initial, goal) / 20:
        raise AssertionError(f"{EXACT} ends {apart[EXACT]:.1e} off the weights of plain Keras, or nothing moves.")
    seconds = timing.in_turns(made, guarded[:k], 1, task["rounds"], task["warm_up"])
    rows = [dict(statistics.row(name, seconds, SPLIT), deviation=apart[name], is_base=name == SPLIT) for name in made]
    told = dict(statistics.row(EXACT, seconds, PLAIN), deviation=apart[EXACT])
    rows.append(dict(told, implementation=f"{EXACT}, to the {PLAIN}"))
    keys = {key: task[key] for key in ("workload", "api", "accum_steps")}
    return {"times": [dict(row, **keys) for row in rows], "absent": [], "versions": machine.versions()}


def _largest(weights, others):
    return max(float(np.abs(one - other).max()) for one, other in zip(weights, others))
