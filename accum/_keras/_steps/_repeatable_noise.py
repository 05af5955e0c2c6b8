"""Dropout and noise whose random numbers can be drawn again, for Keras 2.

The layers of Keras 2 draw from kernels whose state nobody can read. When memory runs out in the middle of a batch, the
next attempt would draw other numbers. Here each layer draws statelessly, by a seed and a counter: setting the counter
back repeats the numbers. The layers of Keras 3 can do this by themselves.
"""

import contextlib
import math
from typing import Any, Callable, Dict, Iterator, List, Sequence, Union

from accum import _tf
from accum._engine import _replicas
from accum._tf import tf


class RepeatableNoise:
    """The random numbers of one layer.

    Args:
      layer: a layer of Keras 2.
      seed: int.

    Attributes:
      counter: int64 scalar variable per replica, the number of draws so far.
    """

    def __init__(self, layer: tf.keras.layers.Layer, seed: int) -> None:
        self._layer = layer
        self._seed = seed
        self.counter = _tf.variables.new_counter(f"{layer.name}/draws")

    def call(self, inputs: tf.Tensor, training: Union[bool, tf.Tensor, None] = None) -> tf.Tensor:
        """Run the layer, in place of its own `call`."""
        if isinstance(inputs, tf.RaggedTensor) or not 0 < getattr(self._layer, "rate", 0.5) < 1:
            return type(self._layer).call(self._layer, inputs, training=training)
        if training is None:
            training = tf.keras.backend.learning_phase()
        if tf.is_tensor(training):
            return tf.cond(
                tf.cast(training, tf.bool), lambda: self._noisy(inputs), lambda: tf.identity(inputs), name="if_training"
            )
        return self._noisy(inputs) if training else tf.identity(inputs)

    def _noisy(self, inputs: tf.Tensor) -> tf.Tensor:
        inputs = tf.convert_to_tensor(inputs)
        with_noise = next(function for cls, function in _LAYERS.items() if type(self._layer).call is cls.call)
        return with_noise(self._layer, inputs, self._draw)

    def _draw(
        self, function: Callable[..., tf.Tensor], shape: Union[tf.Tensor, Sequence[int]], **options: Any
    ) -> tf.Tensor:
        counter = _replicas.local_variable(self.counter)
        drawn = counter.read_value()
        with tf.control_dependencies([drawn]):
            done = counter.assign_add(1, read_value=False)
        seed = tf.stack([tf.cast(self._seed + _replicas.replica_number(), tf.int64), drawn])
        with tf.control_dependencies([] if done is None else [done]):
            return function(shape, seed=seed, **options)


def _noise_shape(layer: tf.keras.layers.Layer, inputs: tf.Tensor) -> tf.Tensor:
    shape = layer._get_noise_shape(inputs)  # of the subclasses for images too
    return tf.shape(inputs) if shape is None else shape


def _dropout(layer: tf.keras.layers.Layer, inputs: tf.Tensor, draw: Callable[..., tf.Tensor]) -> tf.Tensor:
    kept = draw(tf.random.stateless_uniform, _noise_shape(layer, inputs)) >= layer.rate
    kept = tf.broadcast_to(kept, tf.shape(inputs))
    return tf.where(kept, inputs / tf.cast(1.0 - layer.rate, inputs.dtype), tf.zeros_like(inputs))


def _gaussian_noise(layer: tf.keras.layers.Layer, inputs: tf.Tensor, draw: Callable[..., tf.Tensor]) -> tf.Tensor:
    return inputs + tf.cast(draw(tf.random.stateless_normal, tf.shape(inputs), stddev=layer.stddev), inputs.dtype)


def _gaussian_dropout(layer: tf.keras.layers.Layer, inputs: tf.Tensor, draw: Callable[..., tf.Tensor]) -> tf.Tensor:
    stddev = math.sqrt(layer.rate / (1.0 - layer.rate))
    return inputs * tf.cast(draw(tf.random.stateless_normal, tf.shape(inputs), mean=1.0, stddev=stddev), inputs.dtype)


def _alpha_dropout(layer: tf.keras.layers.Layer, inputs: tf.Tensor, draw: Callable[..., tf.Tensor]) -> tf.Tensor:
    """Keep mean and variance after SELU. Source: Klambauer et al., 2017, arXiv:1706.02515, section 2."""
    lowest = -1.0507009873554804934193349852946 * 1.6732632423543772848170429916717
    kept = tf.cast(draw(tf.random.stateless_uniform, _noise_shape(layer, inputs)) >= layer.rate, inputs.dtype)
    scale = ((1.0 - layer.rate) * (1.0 + layer.rate * lowest**2)) ** -0.5
    return scale * (inputs * kept + lowest * (1.0 - kept)) - scale * lowest * layer.rate


def _layers() -> Dict[Any, Callable[..., tf.Tensor]]:
    if not _tf.version.NOISE_HAS_NO_STATE:
        return {}
    layers = tf.keras.layers
    return {
        layers.Dropout: _dropout,
        layers.GaussianNoise: _gaussian_noise,
        layers.GaussianDropout: _gaussian_dropout,
        layers.AlphaDropout: _alpha_dropout,
    }


_LAYERS = _layers()


class RepeatableNoises:
    """The random numbers of all dropout and noise layers of a model, which is not changed."""

    def __init__(self) -> None:
        self._noise_of_layer: Dict[int, Any] = {}  # id of a layer -> (itself, its `RepeatableNoise`)

    def find(self, model: tf.keras.Model) -> None:
        """Create the variables for the layers of a model, outside any trace."""
        for layer in _tf.models.layers_of(model) if _LAYERS else ():
            if id(layer) not in self._noise_of_layer and any(type(layer).call is cls.call for cls in _LAYERS):
                configured = getattr(layer, "seed", None)
                with tf.init_scope():
                    seed = (
                        int(tf.random.uniform([], maxval=2**30, dtype=tf.int32))
                        if configured is None
                        else int(configured)
                    )
                    self._noise_of_layer[id(layer)] = layer, RepeatableNoise(layer, seed)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the layers draw these numbers in this context."""
        with contextlib.ExitStack() as stack:
            for layer, noise in self._noise_of_layer.values():
                stack.enter_context(_tf.steps.own_methods(layer, call=noise.call))
            yield

    @property
    def counters(self) -> List[tf.Variable]:
        return [noise.counter for _, noise in self._noise_of_layer.values()]
