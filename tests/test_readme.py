"""Every Python block of the README and of the guides runs, as it stands."""

import os
import re

import exceptions
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

PAGES = ["README.md", "docs/static-graph.md", "docs/distribution.md"]


def blocks(page):
    with open(os.path.join(ROOT, *page.split("/")), encoding="utf-8") as file:
        return re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)


ALL = [pytest.param(page, block, id=page + "-" + str(i)) for page in PAGES for i, block in enumerate(blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page,block", ALL)
def test_block_runs(page, block):
    if "accum.compat.v1" not in block and not exceptions.HAS_KERAS_FACE:
        pytest.skip("TF 1.15 has no Keras face")
    exec(compile(block, page, "exec"), {})


def test_readme_has_a_block_for_each_face():
    for name in ("GradientAccumulateModel(", "GradientAccumulateOptimizer(", "AccumOptimizer("):
        assert any(name in block for block in blocks("README.md"))
