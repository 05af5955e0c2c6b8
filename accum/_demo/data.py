"""The digits, as a seed splits and orders them."""

import os
from typing import NamedTuple

import numpy as np

TEST_EXAMPLES = 360  # a fifth

Examples = NamedTuple("Examples", [("images", np.ndarray), ("labels", np.ndarray)])
Examples.__doc__ = """Images, float32 [n, 8, 8, 1] from 0 to 1, and their labels, int32 [n]."""


def load(seed):
    """The training and the test examples, two `Examples`: split and in an order that is the seed's alone."""
    with np.load(os.path.join(os.path.dirname(__file__), "digits.npz")) as archive:
        images = archive["images"].astype(np.float32)[..., np.newaxis] / 16
        labels = archive["labels"].astype(np.int32)
    order = np.random.RandomState(seed).permutation(len(labels))
    test, train = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
    return Examples(images[train], labels[train]), Examples(images[test], labels[test])


def batches(examples, size):
    """Yield the examples in pieces of `size`; the last is what is left."""
    for start in range(0, len(examples.labels), size):
        yield Examples(examples.images[start : start + size], examples.labels[start : start + size])
