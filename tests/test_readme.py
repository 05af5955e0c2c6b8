"""Every Python block of the README runs, as it stands."""

import os
import re

import exceptions
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
    BLOCKS = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(block):
    if "accum.compat.v1" not in block and not exceptions.HAS_KERAS_FACE:
        pytest.skip("TF 1.15 has no Keras face")
    exec(compile(block, "README.md", "exec"), {})


def test_readme_has_a_block_for_each_face():
    for name in ("GradientAccumulateModel(", "GradientAccumulateOptimizer(", "AccumOptimizer("):
        assert any(name in block for block in BLOCKS)
