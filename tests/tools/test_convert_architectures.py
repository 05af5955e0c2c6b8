"""BERT, GPT-2 and a slim ResNet go on in Keras in mid-cycle, without a list of names written by hand (law L12)."""

import numpy as np
import pytest
import tensorflow as tf
from architectures import CASES, END, STOP, KerasSide, proposal_of, run_graph

from accum.convert import from_v1, to_v1

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow]

OF_LAYERS = pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
MARKS = [OF_LAYERS if name == "resnet" else () for name, _ in CASES]
IDS = [f"{name}-{'named' if is_named else 'numbered'} layers" for name, is_named in CASES]


@pytest.mark.law("L12")
@pytest.mark.parametrize(
    "name,is_named", [pytest.param(*case, id=one, marks=marks) for case, one, marks in zip(CASES, IDS, MARKS)]
)
def test_a_public_architecture_goes_on_in_keras_by_the_proposal(tmp_path, name, is_named):
    stopped, ended, written = (str(tmp_path / part) for part in ("stopped", "ended", "written"))
    run_graph(name, range(STOP), save=stopped)
    expected = run_graph(name, range(STOP, END), restore=stopped, save=ended)
    ours = KerasSide(name, is_named)
    proposal = proposal_of(stopped, ours)
    report = from_v1(stopped, ours.model, ours.optimizer, proposal)
    assert report.micro_step == 2 and not report.problems
    ours.feed(range(STOP, END))
    to_v1(ours.model, written, ours.optimizer, proposal, like=ended)
    reader, theirs = tf.train.load_checkpoint(written), tf.train.load_checkpoint(ended)
    for variable in theirs.get_variable_to_shape_map():  # weights, slots, sums, statistics and counters
        there = theirs.get_tensor(variable)
        np.testing.assert_allclose(reader.get_tensor(variable), there, rtol=0, atol=1e-6, err_msg=variable)
    np.testing.assert_allclose(ours.logits(), expected, rtol=1e-6, atol=1e-6)
