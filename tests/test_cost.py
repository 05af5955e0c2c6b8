"""What accumulating may cost: one accumulator a variable, and no work of the inner optimizer between steps (L16)."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from exceptions import IS_KERAS_3
from optimizers import legacy_family

import accum
import accum.compat.v1

tf1 = tf.compat.v1

SHAPES = [(5, 4), (4,), (7, 3)]


@pytest.mark.law("L16")
@pytest.mark.keras_face
def test_keras_face_makes_one_accumulator_a_variable():
    def made_by(optimizer):
        variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
        made = []

        def record(next_creator, **kwargs):
            variable = next_creator(**kwargs)
            made.append(tuple(variable.shape.as_list()))
            return variable

        with tf.variable_creator_scope(record):
            for _ in range(4):
                optimizer.apply_gradients([(tf.ones(shape), var) for shape, var in zip(SHAPES, variables)])
        return Counter(made)

    bare = made_by(tf.keras.optimizers.Adam())
    added = made_by(accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(), accum_steps=2)) - bare
    assert added.pop(()) == 4  # micro_step, length, weight_sum, and the length asked for
    assert added == Counter(SHAPES)


@pytest.mark.law("L16")
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_graph_face_makes_one_accumulator_a_variable(is_sparse):
    with tf.Graph().as_default():
        variable = tf1.get_variable("w", initializer=np.ones((7, 3), np.float32))
        grad = tf.ones([7, 3])
        if is_sparse:
            grad = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 2]), tf.constant([7, 3]))
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
        optimizer.apply_gradients([(grad, variable)])
        names = {v.op.name: v.shape.as_list() for v in tf1.global_variables()}
    expected = {
        "w": [7, 3],
        "w/AccumOptimizer/accum": [7, 3],
        "AccumOptimizer/micro_step": [],
        "AccumOptimizer/weight_sum": [],
    }
    if is_sparse:
        expected["w/AccumOptimizer/accum_rows"] = [7]
    assert names == expected


def all_ops(graph_def):
    """(function name or None, op type) of every node of a graph and of the functions in it."""
    nodes = [(None, node.op) for node in graph_def.node]
    for function in graph_def.library.function:
        nodes += [(function.signature.name, node.op) for node in function.node_def]
    return nodes


@pytest.mark.law("L16")
@pytest.mark.law("L2")
@pytest.mark.keras_face
def test_inner_kernels_stand_in_one_branch_of_the_trace_only():
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    family = legacy_family() or tf.keras.optimizers
    optimizer = accum.GradientAccumulateOptimizer(family.Adam(), accum_steps=4)

    @tf.function
    def micro_step():
        optimizer.apply_gradients([(tf.ones(shape), var) for shape, var in zip(SHAPES, variables)])

    graph_def = micro_step.get_concrete_function().graph.as_graph_def()
    # In Keras 3 no one kernel makes a step, but nothing else here takes two roots a variable.
    kernel, count = ("Sqrt", 2) if IS_KERAS_3 else ("ResourceApplyAdam", 1)
    where = [name for name, op in all_ops(graph_def) if op == kernel]
    assert len(where) == count * len(SHAPES)
    assert None not in where
    assert len(set(where)) == 1


@pytest.mark.law("L16")
@pytest.mark.keras_face
def test_no_accumulator_is_a_weight():
    inputs = tf.keras.Input((3,))
    outputs = tf.keras.layers.Dense(2)(inputs)
    model = accum.GradientAccumulateModel(2, inputs=inputs, outputs=outputs)
    model.compile("adam", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), batch_size=2, verbose=0)
    assert len(model.weights) == 2
    assert model.count_params() == 8
