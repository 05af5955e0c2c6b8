"""What two ways to train have in common: as many arrays, and the same numbers in them."""

import numpy as np


def assert_near(ours, theirs, rtol=0, atol=2e-6):
    """Each array is the other's, up to the rounding of another order of additions."""
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def assert_identical(ours, theirs):
    """Each array is the other's, to the last bit."""
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        np.testing.assert_array_equal(one, other)
