"""The digits, split and ordered by a seed."""

import os
from typing import NamedTuple

import numpy as np

TEST_EXAMPLES = 360  # a fifth


class Examples(NamedTuple):
    """Images, float32 [n, 8, 8, 1] from 0 to 1, and their labels, int32 [n]."""

    images: np.ndarray
    labels: np.ndarray


def load(seed):
    """Returns (training, test) `Examples`, whose split and order depend on the seed alone."""
    with np.load(os.path.join(os.path.dirname(__file__), "digits.npz")) as archive:
        images = archive["images"].astype(np.float32)[..., np.newaxis] / 16
        labels = archive["labels"].astype(np.int32)
    order = np.random.RandomState(seed).permutation(len(labels))
    test, train = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
    return Examples(images[train], labels[train]), Examples(images[test], labels[test])


def batches(examples, size):
    """Yield the examples in batches of `size`; the last one may be smaller."""
    for start in range(0, len(examples.labels), size):
        yield Examples(examples.images[start : start + size], examples.labels[start : start + size])
