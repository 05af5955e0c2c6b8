"""What `print` and error messages show of an accumulating optimizer or model."""

import pytest
import tensorflow as tf

import accum
import accum.compat.v1

pytestmark = pytest.mark.slow

tf1 = tf.compat.v1


def functional(name):
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(2)(inputs), name=name)


def test_a_graph_optimizer_shows_how_it_accumulates():
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.AdamOptimizer(), accum_steps=4, reduction="SUM")
    assert repr(optimizer) == "AccumOptimizer(AdamOptimizer, accum_steps=4, reduction='sum')"


@pytest.mark.tf("2.2")
def test_a_keras_optimizer_shows_how_it_accumulates():
    optimizer = accum.GradientAccumulateOptimizer("adam", accum_steps={0: 8, 100: 2})
    assert repr(optimizer) == "GradientAccumulateOptimizer(Adam, accum_steps={0: 8, 100: 2}, reduction='mean')"


@pytest.mark.tf("2.2")
def test_a_keras_optimizer_shows_the_number_of_micro_steps_that_was_set_last():
    optimizer = accum.GradientAccumulateOptimizer("sgd", accum_steps=4)
    optimizer.accum_steps = 2
    assert repr(optimizer) == "GradientAccumulateOptimizer(SGD, accum_steps=2, reduction='mean')"


@pytest.mark.tf("2.2")
def test_a_functional_model_shows_how_it_accumulates():
    plain = functional("plain")
    model = accum.GradientAccumulateModel(
        accum_steps=4, reduction="sum", inputs=plain.inputs, outputs=plain.outputs, name="mine"
    )
    assert repr(model) == "<GradientAccumulateModel name=mine, built=True, accum_steps=4, reduction='sum'>"


@pytest.mark.tf("2.2")
def test_a_compiled_model_shows_the_number_of_micro_steps_that_was_set_last():
    model = accum.GradientAccumulateModel.from_model(functional("mine"), accum_steps=4)
    model.compile("sgd", "mse")
    model.optimizer.accum_steps = 2
    assert repr(model) == "<GradientAccumulateModel name=mine, built=True, accum_steps=2, reduction='mean'>"


@pytest.mark.tf("2.2")
@pytest.mark.parametrize(
    "options, said",
    [
        ({"accum_steps": 4}, "accum_steps=4, reduction='mean' (one update for every 4 batches)"),
        (
            {"micro_batch_size": 8, "whole_batch": "loss"},
            "accum_steps=1, reduction='mean', micro_batch_size=8, whole_batch=('loss',) (one update for each batch; "
            "batches are computed in micro-batches of at most 8 examples)",
        ),
        (
            {"micro_batch_size": "auto"},
            "accum_steps=1, reduction='mean', micro_batch_size='auto' (one update for each batch; batches are split if "
            "they do not fit into memory)",
        ),
    ],
    ids=["accum_steps", "micro_batch_size", "auto"],
)
def test_the_summary_of_a_model_ends_with_how_it_accumulates(options, said, capsys):
    model = accum.GradientAccumulateModel.from_model(functional("mine"), **options)
    model.summary()
    assert capsys.readouterr().out.splitlines()[-1] == "Gradient accumulation: " + said
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert lines[-1] == "Gradient accumulation: " + said and not capsys.readouterr().out


@pytest.mark.tf("2.2")
def test_a_model_keeps_what_its_own_class_shows():
    class Own(tf.keras.Model):
        def __repr__(self):
            return "Own model"

    model = accum.GradientAccumulateModel.from_model(Own(), accum_steps=4)
    assert repr(model) == "Own model (accum_steps=4, reduction='mean')"
