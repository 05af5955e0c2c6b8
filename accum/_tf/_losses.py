"""What a train step unpacks, and what its loss divides by."""

import functools

from accum._tf._line import IS_KERAS_3, VERSION, tf


def unpack_data(data):
    """(x, y, sample_weight) of what a `train_step` is given."""
    if VERSION >= (2, 3):
        return tf.keras.utils.unpack_x_y_sample_weight(data)
    data = data if isinstance(data, tuple) else (data,)  # dies with 2.2
    return data + (None,) * (3 - len(data))


def count_examples(data):
    """The number of examples in what a `train_step` is given, a float32 scalar."""
    first = tf.nest.flatten(unpack_data(data)[0])[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.float32)
    shape = first.dense_shape if isinstance(first, tf.SparseTensor) else tf.shape(first)
    return tf.cast(shape[0], tf.float32)


def loss_denominator(container, y_true, y_pred):
    """What the losses of a model divided by, a float32 scalar, or None where that was the number of examples.

    From 2.11 on, a built-in reduction divides the loss of a masked output by the number of its unmasked elements, and
    from 2.10 on one with an `ignore_class` by the number of the others. Of several outputs that differ in it, no one
    number is right: None if any has no mask, and otherwise the sum over the outputs, right where their masks are one.
    """
    if VERSION < (2, 10):  # dies with 2.9
        return None
    counts = [_unmasked_elements(*entry) for entry in _losses_of_outputs(container, y_true, y_pred)]
    return tf.add_n(counts) if counts and not any(count is None for count in counts) else None


LOSS_CONTAINER = "_compile_loss" if IS_KERAS_3 else "compiled_loss"
"""The attribute of a compiled model that holds and computes its losses; has no public name in Keras 3."""


def _at(path, structure):
    return functools.reduce(lambda part, key: part[key], path, structure)


def _losses_of_outputs(container, y_true, y_pred):
    """List of (loss, target, output) of what a model was compiled with, where there is a loss and a target."""
    if not IS_KERAS_3:
        places = [tf.nest.flatten(part) for part in (container._conform_to_outputs(y_pred, y_true), y_pred)]
        entries = list(zip(container._losses, *places))
    else:
        try:
            entries = [
                (entry.loss, _at(entry.path, y_true), _at(entry.path, y_pred)) for entry in container._flat_losses
            ]
        except (IndexError, KeyError, TypeError):  # targets of another structure, which Keras matches by itself
            entries = []
    return [entry for entry in entries if entry[0] is not None and entry[1] is not None]


def _unmasked_elements(loss, target, output):
    """How many elements a loss was divided by, if a mask tells it: a float32 scalar or None."""
    if loss.reduction not in ("auto", "sum_over_batch_size", "mean"):
        return None
    mask = getattr(output, "_keras_mask", None) if VERSION >= (2, 11) else None  # has no public name; dies with 2.10
    mask = None if mask is None else tf.cast(mask, tf.float32)
    is_sparse = isinstance(loss, tf.keras.losses.SparseCategoricalCrossentropy)
    ignored = loss.get_config().get("ignore_class") if is_sparse else None
    if ignored is not None:
        taken = tf.cast(tf.not_equal(target, tf.cast(ignored, target.dtype)), tf.float32)
        taken = tf.reshape(taken, tf.shape(output)[:-1])
        mask = taken if mask is None else mask * taken
    return None if mask is None else tf.reduce_sum(mask)
