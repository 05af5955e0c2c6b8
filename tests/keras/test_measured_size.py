"""Which size of micro-batches is chosen by what was measured with small ones (law L18, "auto")."""

import pytest

from accum._keras._steps._measured_size import Peaks, chosen_size, evened, next_size

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L18")]

MIB = 2**20
BASE = 500 * MIB


def measured(need, limit, count, base=BASE):
    """What is tried and chosen where `need(size)` bytes are the peak. Returns (sizes that were tried, the choice)."""
    peaks, tried, size = Peaks(base, limit), [], 1
    while size:
        tried.append(size)
        peaks.add(size, need(size))
        size = next_size([peaks], count)
    return tried, chosen_size([peaks], count)


def line(size):
    return BASE + 40 * MIB + 10 * MIB * size


def with_floor(size):
    return max(BASE + 300 * MIB, line(size))


def with_noise(size):
    return line(size) + (-1) ** size.bit_length() * 4 * MIB


def of_pairs(size):
    return BASE + MIB * size**2


NEEDS = pytest.mark.parametrize(
    "need", [line, with_floor, with_noise, of_pairs], ids=["line", "floor", "noise", "pairs"]
)


@NEEDS
@pytest.mark.parametrize("room", [60, 100, 250, 600, 1000, 3000, 10000])
@pytest.mark.parametrize("count", [2, 3, 10, 64, 1000])
def test_nothing_that_exceeds_the_limit_is_tried_or_chosen_and_most_of_it_is_used(need, room, count):
    limit = BASE + room * MIB
    tried, choice = measured(need, limit, count)
    largest = max([size for size in range(1, count + 1) if need(size) <= limit] or [1])
    slack = {with_noise: 8 * MIB, of_pairs: 0.05 * room * MIB}.get(need, 0)
    assert max([0] + [need(size) for size in tried[1:]]) <= limit + slack
    assert choice <= count
    if need(1) <= limit:
        assert need(choice) <= limit + slack
        assert need(choice) >= 0.8 * need(largest)


def test_a_batch_that_fits_by_far_is_told_from_few_examples():
    tried, choice = measured(line, BASE + 100000 * MIB, 256)
    assert choice == 256
    assert sum(tried) <= 256 / 3


def test_a_size_that_no_example_fits_is_one():
    assert measured(line, BASE // 2, 64) == ([1], 1)


def test_all_kinds_of_memory_have_to_suffice():
    wide, narrow = Peaks(BASE, BASE + 10000 * MIB), Peaks(0, 170 * MIB)
    size = 1
    while size:
        wide.add(size, line(size))
        narrow.add(size, 10 * MIB * size)
        size = next_size([wide, narrow], 64)
    assert chosen_size([wide, narrow], 64) == 17


@pytest.mark.parametrize("size, count, even", [(37, 64, 32), (5, 22, 5), (64, 64, 64), (1, 7, 1), (63, 64, 32)])
def test_micro_batches_are_as_few_and_as_even_as_possible(size, count, even):
    assert evened(size, count) == even
    assert -(-count // even) == -(-count // size)
