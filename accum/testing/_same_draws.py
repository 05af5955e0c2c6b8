"""Random numbers of the check: plain Keras 2 draws what the accumulating model does, so that dropout can stay on.

Keras 3 takes its numbers from seeds, and needs none of this.
"""

import contextlib

from accum import _tf
from accum._engine._draws import Draws, number_of_step
from accum._tf import tf

SEED = 20
"""Of a program that has none."""


@contextlib.contextmanager
def seed_of_program():
    """Give the program a seed in this context, if it has none, so that two models take their numbers from the same."""
    if _tf.steps.HAS_SEED_WITHOUT_MODEL or _tf.random_ops.seed_of_program() is not None:
        yield
        return
    tf.random.set_seed(SEED)
    try:
        yield
    finally:
        if _tf.random_ops.seed_of_program() == SEED:  # `build_model` has set no other one
            tf.random.set_seed(None)


def draw_by_example(model):
    """Let a plain model draw the numbers that belong to its examples, when its train step is a graph. Returns it."""
    if _tf.steps.HAS_SEED_WITHOUT_MODEL:
        return model
    train_step = model.train_step

    def seed():
        return tf.stack([tf.constant(_tf.random_ops.seed_of_graph(), tf.int64), number_of_step(model.optimizer)])

    def drawing_train_step(data):
        count = None if tf.executing_eagerly() else _tf.losses.known_count(data)
        if count is None:
            return train_step(data)
        with Draws(seed, count).of(0, count):
            return train_step(data)

    model.train_step = drawing_train_step
    return model
