"""Plain TensorFlow works under the pins, in more than an import; and the pins are such that it does."""

import os
import re
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "project"))

import smoke  # noqa: E402

OLD = ("1.15", "2.2", "2.3")  # NumPy 1.20 came after them
FILES = [f"tf{version}.txt" for version in OLD] + [os.path.join("loose", f"tf{version}.txt") for version in OLD]


def test_zeros_can_have_a_dynamic_shape():
    assert smoke.zeros_of_a_dynamic_shape() == (4, 2)


def test_a_static_graph_has_gradients():
    assert smoke.gradient() == [2.0, 4.0]


@pytest.mark.slow
def test_a_recurrent_network_trains():
    assert smoke.fit()


@pytest.mark.parametrize("name", FILES)
def test_versions_from_before_numpy_1_20_hold_it_below(name):
    with open(os.path.join(ROOT, "constraints", name), encoding="utf-8") as file:
        said = re.findall(r"(?m)^numpy(\S+?)(?:;|$)", file.read())
    limits = [text[1:] for text in said if text.startswith("<")]
    assert limits and all(tuple(map(int, limit.split("."))) <= (1, 20) for limit in limits)
    pinned = [text[2:] for text in said if text.startswith("==")]
    assert bool(pinned) == ("loose" not in name)
    assert all(tuple(map(int, version.split(".")[:2])) < (1, 20) for version in pinned)
