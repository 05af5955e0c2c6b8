"""Check that plain TensorFlow works, beyond its import: `python -I project/smoke.py`, in any environment.

With a NumPy that is too new, TensorFlow 1.15 to 2.3 can be imported and can train a dense network. But `tf.zeros` with
a dynamic shape fails, and with it every recurrent layer. `test_graph_pins.py` runs the same checks in the suite.
"""

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1


def zeros_of_a_dynamic_shape():
    """The shape of `tf.zeros` made from the number of examples, in a static graph."""
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [None, 3])
        return session.run(tf.zeros([tf.shape(x)[0], 2]), {x: np.ones((4, 3))}).shape


def gradient():
    """The gradient of `sum(w * w)` at [1, 2], in a static graph."""
    with tf.Graph().as_default(), tf1.Session() as session:
        weights = tf1.get_variable("w", initializer=[1.0, 2.0])
        (grad,) = tf.gradients(tf.reduce_sum(weights * weights), [weights])
        session.run(tf1.global_variables_initializer())
        return session.run(grad).tolist()


def fit():
    """Whether the weights of a recurrent network move in `fit`."""
    layers = [tf.keras.layers.LSTM(3, input_shape=(None, 2)), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.compile("sgd", "mse")
    before = model.get_weights()
    model.fit(np.ones((4, 3, 2)), np.ones((4, 1)), verbose=0)
    return any((one != other).any() for one, other in zip(before, model.get_weights()))


if __name__ == "__main__":
    assert zeros_of_a_dynamic_shape() == (4, 2)
    assert gradient() == [2.0, 4.0]
    assert fit()
    print(f"TensorFlow {tf.__version__} with NumPy {np.__version__} works.")
