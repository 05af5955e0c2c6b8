"""Random graphs in which examples are kept apart, reduced or meet: what is said to be rows is rows (law L21)."""

import numpy as np
import pytest
import tensorflow as tf
from random_graphs import OPERATIONS, build, values

from accum._rows import Rows, analyse

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

tf1 = tf.compat.v1
pytestmark = pytest.mark.slow
COUNT, CHANGED = 5, 2

STEPS = st.lists(
    st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 30), st.integers(0, 30), st.integers(0, 5)),
    min_size=5,
    max_size=20,
)


def results(session, tensors, feeds):
    """Return the values of tensors; None for one whose shapes do not fit for this number of examples."""
    found = []
    for tensor in tensors:
        try:
            found.append(session.run(tensor, feeds))
        except (ValueError, tf.errors.OpError):
            found.append(None)
    return found


@pytest.mark.law("L21")
@hypothesis.settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(STEPS)
def test_what_is_said_to_be_rows_of_a_random_graph_is_rows(steps):
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        batch, tensors = build(steps)
        try:
            analysis = analyse(graph, [tensor.op.name for tensor in tensors], {one.name: Rows(0, 1) for one in batch})
        except ValueError:  # the number of examples is a constant of the graph
            return
        said = [tensor for tensor in tensors if analysis.rows(tensor.name) and not analysis.level(tensor.name)]
        before, after = (
            results(session, said, dict(zip(batch, values(COUNT, changed)))) for changed in (None, CHANGED)
        )
    for tensor, one, other in zip(said, before, after):
        if one is not None and other is not None:
            axis, per_example = analysis.rows(tensor.name)
            assert one.shape[axis] == per_example * COUNT
            kept = np.delete(np.arange(one.shape[axis]), np.arange(CHANGED * per_example, (CHANGED + 1) * per_example))
            np.testing.assert_array_equal(one.take(kept, axis), other.take(kept, axis), err_msg=tensor.name)
