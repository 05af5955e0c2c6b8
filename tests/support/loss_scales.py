"""Loss scaling in a custom loop: Keras 3 unscales gradients when it applies them; in Keras 2, the loop does it."""

import tensorflow as tf
from versions import IS_KERAS_3


def scaled_loss(optimizer, loss):
    return optimizer.scale_loss(loss) if IS_KERAS_3 else optimizer.get_scaled_loss(loss)


def apply_scaled(optimizer, grads, variables):
    """Apply the gradients of a scaled loss."""
    if not IS_KERAS_3:
        grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(list(zip(grads, variables)))


HAS_PUBLIC_CLASS = hasattr(tf.keras.mixed_precision, "LossScaleOptimizer")


def loss_scale_optimizer(optimizer, scale):
    """Create a loss scale optimizer whose scale starts at `scale` and is halved at an overflow."""
    if HAS_PUBLIC_CLASS:
        return tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=scale)
    dynamic = tf.mixed_precision.experimental.DynamicLossScale(initial_loss_scale=scale)
    return tf.keras.mixed_precision.experimental.LossScaleOptimizer(optimizer, dynamic)
