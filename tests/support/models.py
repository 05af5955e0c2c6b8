"""Models and train steps that several files of tests share."""

import tensorflow as tf

import accum


def from_model(*args, **kwargs):
    return accum.GradientAccumulateModel.from_model(*args, **kwargs)


def step_by_mean_square(model, optimizer, x, y):
    """A train step by hand."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return {"loss": loss}
