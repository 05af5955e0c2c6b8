"""Which cuts of a model are kept for the gradient (law L19).

The oracle tries every choice.
"""

import functools
import itertools
import os
import random
import subprocess
import sys

import pytest
import tensorflow as tf

import accum
from accum._engine._kept_cuts import Crossing, chosen_cuts, kept_keys, read_again

pytestmark = pytest.mark.law("L19")


def bytes_of(crossings, cuts, count):
    """Return (bytes of what crosses the cuts, of the largest group with gradients that are there beside a tensor)."""
    kept = {one for one in crossings if any(one.level < cut <= one.last for cut in cuts)}
    groups = []
    for begin, end in zip(cuts, cuts[1:] + [count]):
        inner = [one for one in crossings if begin <= one.level <= end - 2 and one not in kept]
        used = [one for one in crossings if one.first is not None]
        both = [sum(one.size for one in used if one.first < cut <= one.last) for cut in range(begin + 1, end + 1)]
        groups.append(sum(one.size for one in inner) + max(both))
    return sum(one.size for one in kept), max(groups)


def some_crossings(seed, count):
    chance = random.Random(seed)
    crossings = [Crossing(level, level + 1, level + 1, chance.randint(1, 9)) for level in range(count - 1)]
    for number in range(3):  # skips; sizes differ, so that no two are equal
        level = chance.randrange(count - 2)
        last = chance.randrange(level + 2, count)
        crossings.append(Crossing(level, chance.randrange(level + 1, last + 1), last, 10 + number))
    return list(dict.fromkeys(crossings))


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_takes_less_memory(seed):
    count = 8
    crossings = some_crossings(seed, count)
    found = bytes_of(crossings, chosen_cuts(crossings, count, True), count)
    every = [[0] + list(cuts) for size in range(count) for cuts in itertools.combinations(range(1, count), size)]
    assert sum(found) == min(sum(bytes_of(crossings, cuts, count)) for cuts in every)


def test_of_a_chain_about_the_square_root_is_kept():
    chain = [Crossing(level, level + 1, level + 1, 100) for level in range(99)]
    assert sum(bytes_of(chain, chosen_cuts(chain, 100, True), 100)) <= 2000
    assert chosen_cuts(chain, 100, False) == list(range(100))


def test_what_crosses_a_kept_cut_is_kept():
    uses = {"skip": Crossing(0, 3, 3, 1), "early": Crossing(0, 1, 1, 1), "late": Crossing(2, 3, 3, 1)}
    assert kept_keys(uses, [0, 2]) == {"skip"}


def peak_of(crossings, cuts, count, read):
    """The bytes that are there at most, while the gradient goes through the levels, if some tensors are read again."""
    kept = [one for one in crossings if any(one.level < cut <= one.last for cut in cuts) or one.level >= cuts[-1]]
    need = {one: one.level if one in read else one.first for one in crossings}
    tensors, gradients, peak = set(kept), set(), 0
    for begin, end in reversed(list(zip(cuts, cuts[1:] + [count]))):
        tensors |= {one for one in crossings if begin <= one.level < end and one not in kept}
        for level in reversed(range(begin, end)):
            made = {one for one in crossings if one.last == level}
            replaced = {one for one in tensors & made if need[one] >= level}
            held = list(tensors - replaced) + list(gradients | made)
            peak = max(peak, sum(one.size for one in held))
            tensors = {one for one in tensors if need[one] < level}
            gradients = {one for one in gradients | made if one.level < level}
    return peak


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_what_a_level_has_made_is_read_again_where_that_takes_no_more_memory(seed, recompute):
    count = 40
    crossings = [one._replace(size=10 * one.size + number) for number, one in enumerate(some_crossings(seed, count))]
    cuts = chosen_cuts(crossings, count, recompute)
    kept = {one for one in crossings if one.level >= cuts[-1]} | kept_keys(dict(zip(crossings, crossings)), cuts)
    read = read_again(dict(zip(crossings, crossings)), crossings, kept, cuts, count)
    assert peak_of(crossings, cuts, count, read) <= peak_of(crossings, cuts, count, [])
    assert peak_of(crossings, cuts, count, crossings) > peak_of(crossings, cuts, count, [])
    assert len(read) > count / 2


def segments_of(net, side):
    """The segments of a network for images [side, side, 3], which is traced but not computed."""
    from accum._keras._steps._whole_batch import Arguments, traced_call

    model = accum.GradientAccumulateModel.from_model(net, micro_batch_size=2, whole_batch="all")
    arguments = Arguments((tf.zeros([4, side, side, 3]),), {"training": True}, is_nested=False)
    call = functools.partial(tf.keras.Model.__call__, model)
    return traced_call(model, call, arguments, True, True, True, 2, False).segments


# name -> (side of an image, the largest part of the bytes of all cuts that is kept or computed again)
BOUNDS = {"ResNet50": (64, 0.45), "MobileNetV2": (64, 0.45)}


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_of_a_real_network_few_bytes_are_kept(name, monkeypatch):
    side, bound = BOUNDS[name]
    seen = []

    def chosen(crossings, count, recompute):
        cuts = chosen_cuts(crossings, count, recompute)
        seen.append((crossings, cuts, count))
        return cuts

    monkeypatch.setattr("accum._engine._segments.chosen_cuts", chosen)
    net = getattr(tf.keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=2)
    segments = segments_of(net, side)
    crossings, cuts, count = seen[-1]
    assert sum(bytes_of(crossings, cuts, count)) <= bound * sum(one.size for one in crossings)
    operation = segments.graph.trace.graph.get_operation_by_name
    forward, again = [
        [node for phase in phases for node in phase.nodes if operation(node).type == "Conv2D"]
        for phases in (segments.graph.forward, segments.backward)
    ]
    assert len(forward) > 30 and len(again) < len(forward) / 3


MEASURED = """
import numpy as np
import tensorflow as tf
import accum

def peak_kib():  # a child's ru_maxrss begins with that of its parent
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])

layers = tf.keras.layers
inputs = hidden = tf.keras.Input((side, side, 1))
for _ in range(4):
    hidden = layers.BatchNormalization()(layers.Conv2D(8, 1)(hidden))
net = tf.keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(hidden)))
model = accum.GradientAccumulateModel.from_model(net, micro_batch_size=2, whole_batch="all", recompute=False)
model.compile("sgd", loss="mse")
x, y = np.ones([32, side, side, 1], "float32"), np.zeros([32, 1], "float32")
before = peak_kib()
model.train_on_batch(x, y)
print((peak_kib() - before) / 1024)
"""


def peak_mib(side):
    """The peak of the memory of a process during a step in which 4 tensors of [32, side, side, 8] cross cuts."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"side = {side}\n" + MEASURED],
        stdout=subprocess.PIPE,
        check=True,
        env=dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"),  # what is freed is given back at once, in any order
    )
    return float(done.stdout.decode().split()[-1])


@pytest.mark.tf("2.2")
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_gradient_takes_the_place_of_the_tensor_that_it_is_by():
    side = 384
    tensor = 32 * side * side * 8 * 4 / 2**20  # 144 MiB
    more = peak_mib(side) - peak_mib(8)
    assert 3.5 * tensor < more < 4.9 * tensor  # 5.35 where both are there at once
