"""Lookups in tables of several parts keep examples apart, if rows come back to their places (law L21)."""

import pytest
import tensorflow as tf

from accum import _rows

tf1 = tf.compat.v1


def lookup(words, first=0, parts_of_places=None, parts=(0, 1), places=(0, 1), numbered=tf.identity):
    """Look words up as `tf.nn.embedding_lookup` does in a table of two parts."""
    part_of = words % 2
    numbers = numbered(tf.range(first, first + tf.size(words)))
    of_places = part_of if parts_of_places is None else parts_of_places(words)
    there = tf1.dynamic_partition(numbers, of_places, 2)
    rows = tf1.dynamic_partition(words // 2, part_of, 2)
    entries = [tf.gather(tf.ones([6, 6]), rows[part]) for part in parts]
    return tf1.dynamic_stitch([there[place] for place in places], entries)


def kind_of(with_places=True, **options):
    with tf.Graph().as_default() as graph:
        words = tf1.placeholder(tf.int32, [None])
        name = lookup(words, **options).op.name
        return _rows.analyse(graph, [name], {words.name: _rows.Rows(0, 1)}, with_places).verdict(name).kind


@pytest.mark.law("L21")
def test_rows_that_come_back_to_their_places_are_apart():
    assert kind_of() == "rows"
    assert kind_of(parts=(1, 0), places=(1, 0)) != "rows"  # which would be right too, but is nobody's lookup
    assert kind_of(with_places=False) != "rows"


@pytest.mark.law("L21")
@pytest.mark.parametrize(
    "options",
    [
        {"first": 1},
        {"parts_of_places": lambda words: words // 2 % 2},
        {"parts": (1, 0)},
        {"places": (1, 0)},
        {"numbered": tf.zeros_like},
    ],
    ids=["from 1", "by other parts", "parts turned", "places turned", "all to the first place"],
)
def test_rows_that_come_back_to_other_places_have_met(options):
    assert kind_of(**options) in ("meets", "behind")
