"""All APIs, on every TensorFlow, follow the trajectories that NumPy wrote (law L1)."""

import json
import subprocess
import sys

import make_golden
import numpy as np
import pytest
import tensorflow as tf
from optimizers import EAGER_AND_TRACED, families, mainly
from problems import (
    RAGGED,
    assert_follows,
    cross_entropy,
    flat,
    golden_micro_batches,
    golden_model,
    golden_problem,
    golden_trajectory,
)

import accum
import accum.compat.v1

tf1 = tf.compat.v1

EPSILON = 1e-16
KERAS = {
    "sgd": lambda family: family.SGD(0.5),
    "momentum": lambda family: family.SGD(0.1, momentum=0.9),
    "nesterov": lambda family: family.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda family: family.Adam(0.02, epsilon=EPSILON),
    "rmsprop": lambda family: family.RMSprop(0.01, rho=0.9, epsilon=EPSILON),
    "adagrad": lambda family: family.Adagrad(0.1, initial_accumulator_value=0.1, epsilon=EPSILON),
}
GRAPH = {
    "sgd": lambda: tf1.train.GradientDescentOptimizer(0.5),
    "momentum": lambda: tf1.train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda: tf1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: tf1.train.AdamOptimizer(0.02, epsilon=EPSILON),
    "rmsprop": lambda: tf1.train.RMSPropOptimizer(0.01, decay=0.9, epsilon=EPSILON),
    "adagrad": lambda: tf1.train.AdagradOptimizer(0.1, initial_accumulator_value=0.1),
}


@pytest.fixture(params=mainly(sorted(KERAS), "adam"))
def rule(request):
    return request.param


@pytest.fixture(params=families())
def family(request):
    return request.param


@pytest.fixture
def follows(rule, record_property):
    """A function that a trajectory must pass; its distance and its end are recorded in the report."""

    def follows(trajectory):
        golden = golden_trajectory(rule)
        record_property("golden", json.dumps({"off": float(np.abs(np.array(trajectory) - golden).max())}))
        record_property("weights", json.dumps([float(weight) for weight in trajectory[-1]]))
        assert_follows(trajectory, golden)

    return follows


def test_golden_files_are_what_numpy_writes():
    subprocess.run([sys.executable, make_golden.__file__, "--check"], check=True)


def test_golden_gradients_agree_with_finite_differences():
    x, y, weights = golden_problem()
    weights = [w.astype(np.float64) for w in weights]
    x, y = x[:12].astype(np.float64), y[:12]

    def loss(weights):
        logits = np.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3]
        return np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(12), y])

    for index, grad in enumerate(make_golden.gradients(weights, x, y)):
        for position in np.ndindex(*grad.shape):
            up, down = ([w.copy() for w in weights] for _ in range(2))
            up[index][position] += 1e-5
            down[index][position] -= 1e-5
            assert abs((loss(up) - loss(down)) / 2e-5 - grad[position]) < 1e-8


@pytest.mark.slow
@pytest.mark.law("L1", "L5")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", EAGER_AND_TRACED)
def test_optimizer_api_follows_the_golden_trajectory(rule, family, is_traced, follows):
    variables = [tf.Variable(w) for w in golden_problem()[2]]
    optimizer = accum.GradientAccumulateOptimizer(KERAS[rule](family), accum_steps=len(RAGGED))

    def micro_step(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(x, y, variables)
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables), weight=tf.shape(x)[0])

    if is_traced:
        signature = [tf.TensorSpec([None, 5], tf.float32), tf.TensorSpec([None], tf.int32)]
        micro_step = tf.function(micro_step, input_signature=signature)
    trajectory = []
    for count, (x, y) in enumerate(golden_micro_batches(), start=1):
        micro_step(tf.constant(x), tf.constant(y, tf.int32))
        if count % len(RAGGED) == 0:
            trajectory.append(flat([v.numpy() for v in variables]))
    follows(trajectory)


@pytest.mark.slow
@pytest.mark.law("L1", "L5")
@pytest.mark.tf("2.2")
def test_model_api_follows_the_golden_trajectory_through_fit(rule, family, follows):
    plain = golden_model()
    model = accum.GradientAccumulateModel(len(RAGGED), inputs=plain.inputs, outputs=plain.outputs)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(KERAS[rule](family), loss)
    trajectory = []

    class Record(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (batch + 1) % len(RAGGED) == 0:
                trajectory.append(flat(self.model.get_weights()))

    signature = (tf.float32, tf.int32), (tf.TensorShape([None, 5]), tf.TensorShape([None]))
    data = tf.data.Dataset.from_generator(golden_micro_batches, *signature)
    model.fit(data, epochs=1, callbacks=[Record()], verbose=0)
    follows(trajectory)


@pytest.mark.law("L1", "L5")
@pytest.mark.parametrize(
    "is_resource", [pytest.param(False, id="ref", marks=pytest.mark.slow), pytest.param(True, id="resource")]
)
@pytest.mark.parametrize("is_driven", [False, True], ids=["conditional", "explicit"])
def test_graph_api_follows_the_golden_trajectory_in_a_session(rule, is_resource, is_driven, follows):
    with tf.Graph().as_default(), tf1.Session() as session:
        x, y = tf1.placeholder(tf.float32, [None, 5]), tf1.placeholder(tf.int32, [None])
        first = golden_problem()[2]
        with tf1.variable_scope("net", use_resource=is_resource):
            variables = [tf1.get_variable("w%d" % i, initializer=w) for i, w in enumerate(first)]
        inner = GRAPH[rule]()
        optimizer = accum.compat.v1.AccumOptimizer(inner, accum_steps=len(RAGGED))
        loss, weight = cross_entropy(x, y, variables), tf.shape(x)[0]
        if is_driven:
            ops = optimizer.accumulation_ops(loss, weight=weight)
        else:
            train_op = optimizer.minimize(loss, weight=weight)
        session.run(tf1.global_variables_initializer())
        if rule == "rmsprop":  # tf.compat.v1 starts the mean square from one, everyone else from zero
            session.run([inner.get_slot(v, "rms").assign(tf.zeros_like(v)) for v in variables])
        trajectory = []
        for count, (x_now, y_now) in enumerate(golden_micro_batches(), start=1):
            session.run(ops.accumulate if is_driven else train_op, {x: x_now, y: y_now})
            if count % len(RAGGED) == 0:
                if is_driven:
                    session.run(ops.apply)
                trajectory.append(flat(session.run(variables)))
        follows(trajectory)
