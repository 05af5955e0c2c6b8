"""Compare `fit` of Keras in graph mode with the full batch; test_keras_graph_mode.py runs this in its own process."""

import functools
import sys

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
if sys.argv[1] == "disable_v2_behavior":
    tf1.disable_v2_behavior()
else:
    tf1.disable_eager_execution()

import accum  # noqa: E402
import accum.compat.v1  # noqa: E402

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(24, 4)).astype("float32"), RANDOM.normal(size=(24, 1)).astype("float32")
WEIGHTS = [RANDOM.normal(size=shape) for shape in [(4, 3), (3,), (3, 1), (1,)]]
LEGACY = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)  # the new ones need eager execution


def momentum():
    return tf1.train.MomentumOptimizer(0.05, 0.9)


def adam():
    return LEGACY.Adam(0.05)


@functools.lru_cache(maxsize=None)  # a full batch serves two comparisons
def trained(make_optimizer, batch_size):
    tf1.keras.backend.clear_session()
    hidden = tf.keras.layers.Dense(3, activation="tanh", input_shape=(4,))
    model = tf.keras.Sequential([hidden, tf.keras.layers.Dense(1)])
    model.set_weights(WEIGHTS)
    model.compile(make_optimizer(), "mse")
    model.fit(X, Y, batch_size=batch_size, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def compare(name, plain, wrapped):
    off = max(np.abs(one - other).max() for one, other in zip(trained(plain, 12), trained(wrapped, 4)))
    print(name, f"is {off:.1e} from the full batch")
    assert off <= 2e-6


compare("AccumOptimizer(v1)", momentum, lambda: accum.compat.v1.AccumOptimizer(momentum(), 3))
compare("AccumOptimizer(Keras)", adam, lambda: accum.compat.v1.AccumOptimizer(adam(), 3))
if hasattr(accum, "GradientAccumulateOptimizer"):
    compare("GradientAccumulateOptimizer", adam, lambda: accum.GradientAccumulateOptimizer(adam(), 3))

    def accumulating(last_cycle):
        """Weights and steps after two epochs of 24 examples in micro-batches of 4, of which 5 make a cycle."""
        tf1.keras.backend.clear_session()
        hidden = tf.keras.layers.Dense(3, activation="tanh", input_shape=(4,))
        model = tf.keras.Sequential([hidden, tf.keras.layers.Dense(1)])
        model.set_weights(WEIGHTS)
        model.compile(accum.GradientAccumulateOptimizer(adam(), 5), "mse")
        callbacks = [accum.FlushCallback(last_cycle)]
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights(), tf1.keras.backend.get_value(model.optimizer.iterations)

    def by_hand(parts):
        """The same of plain Keras, whose batches are what each step is made of."""
        tf1.keras.backend.clear_session()
        hidden = tf.keras.layers.Dense(3, activation="tanh", input_shape=(4,))
        model = tf.keras.Sequential([hidden, tf.keras.layers.Dense(1)])
        model.set_weights(WEIGHTS)
        model.compile(adam(), "mse")
        for part in parts:
            model.train_on_batch(X[part], Y[part])
        return model.get_weights()

    carried = np.r_[20:24, 0:16]
    for last_cycle, parts in [
        ("flush", [slice(0, 20), slice(20, 24)] * 2),
        ("drop", [slice(0, 20)] * 2),
        ("carry", [slice(0, 20), carried]),
    ]:
        (ours, steps), plain = accumulating(last_cycle), by_hand(parts)
        assert steps == len(parts), (last_cycle, steps)
        off = max(np.abs(one - other).max() for one, other in zip(ours, plain))
        print(f"FlushCallback({last_cycle!r}) is {off:.1e} from the full batch")
        assert off <= 2e-6
    for arguments in [{"accum_steps": 3}, {"micro_batch_size": 2, "micro_batch_weight": "equal"}]:
        try:
            inputs = tf.keras.Input((4,))
            accum.GradientAccumulateModel(inputs=inputs, outputs=tf.keras.layers.Dense(1)(inputs), **arguments)
        except ValueError as error:
            assert "graph mode" in str(error)
        else:
            raise AssertionError(f"the model can't do this in graph mode, but raised no error: {arguments}")
