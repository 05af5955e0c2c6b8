"""The test that constraints/across_tensorflow.sh runs on each TensorFlow. It prints which one that is."""

import tensorflow as tf
from small_library import mean_in_parts


def test_parts_have_the_mean_of_all_values():
    print("TensorFlow", tf.__version__)
    assert mean_in_parts([1.0, 2.0, 6.0, 7.0, 9.0], size=2) == 5.0
