"""Keras in graph mode, as TF 1 pipelines use it: `compile` takes each of our optimizers (law L1)."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "keras_graph_mode.py")


@pytest.mark.tf(keras=2, because="Keras 3 has no optimizer for static graphs")
@pytest.mark.law("L1")
@pytest.mark.parametrize("mode", ["disable_v2_behavior", "disable_eager_execution"])
def test_fit_in_graph_mode_equals_the_full_batch(mode, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        cwd=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout
