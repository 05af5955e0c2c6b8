"""A loss scale in a loop of the user's own: Keras 3 unscales where it applies, the lines before when they are asked."""

from exceptions import IS_KERAS_3


def scaled_loss(optimizer, loss):
    return optimizer.scale_loss(loss) if IS_KERAS_3 else optimizer.get_scaled_loss(loss)


def apply_scaled(optimizer, grads, variables):
    """Apply the gradients of a scaled loss."""
    if not IS_KERAS_3:
        grads = optimizer.get_unscaled_gradients(grads)
    optimizer.apply_gradients(list(zip(grads, variables)))
