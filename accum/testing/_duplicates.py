"""Find rows of an embedding that occur several times in a batch, and how a plain optimizer treats them.

The gradient of a row is the sum over its occurrences. Accumulation passes each row to the optimizer once, with that
sum. A plain optimizer receives one slice for each occurrence, and in some TensorFlow versions it does not add them up
first. In every version, clipping is applied before they are added up.
"""

import numpy as np

from accum import _tf
from accum._tf import tf

CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
STEPS = 3  # of the trial; one is not enough if slots start at zero
ROUNDING = 1e-3  # relative to the total movement; a real difference is some tenths of it


def variables_with_duplicate_rows(model, inputs):
    """Return the trainable variables whose gradient contains a row several times for these inputs."""
    try:
        inputs = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), inputs)
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=False))
        variables = model.trainable_variables
        grads = tape.gradient([output for output in outputs if output.dtype.is_floating], variables)
    except Exception:  # a user's own model may need more than its inputs to be called
        return []
    return [var for var, grad in zip(variables, grads) if isinstance(grad, tf.IndexedSlices) and _has_duplicates(grad)]


def _has_duplicates(slices):
    rows = np.ravel(slices.indices)
    return len(np.unique(rows)) < len(rows)


def clips(optimizer):
    """Whether an optimizer clips gradients."""
    return any(getattr(optimizer, name, None) is not None for name in CLIPPING)


def adds_duplicates_up(optimizer):
    """Find out by trial whether an optimizer treats two slices of a row like one slice with their sum."""
    try:
        raw, summed = (_trained(_tf.optimizers.copy_of(optimizer), count) for count in (2, 1))
    except Exception:  # a user's own optimizer may not support copies or slices
        return True
    return np.max(np.abs(raw - summed)) <= ROUNDING * np.max(np.abs(summed - 1.0))


def _trained(optimizer, count):
    """Return a row of ones after a few steps in which its gradient consists of `count` equal slices."""
    table = tf.Variable(np.ones((2, 1), np.float32))
    for step in range(1, STEPS + 1):
        values = tf.fill([count, 1], np.float32(step / count))
        slices = tf.IndexedSlices(values, tf.zeros([count], tf.int64), tf.constant([2, 1], tf.int64))
        optimizer.apply_gradients([(slices, table)])
    return table.numpy()[0]
