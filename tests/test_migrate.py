"""`python -m accum migrate` rewrites code of other libraries, keeps the numbers, and leaves what it can't tell."""

import numpy as np
import pytest
import tensorflow as tf
from migrations import LEFT, PAIRS, UNTOUCHED

from accum.__main__ import main

pytestmark = pytest.mark.slow

pytest.importorskip("libcst", reason="`migrate` is an extra, tested where tox.ini installs LibCST")

tf1 = tf.compat.v1
GRADIENTS = np.random.RandomState(0).normal(size=(4, 3)).astype("float32")
PAIR = {pair.name: pair for pair in PAIRS}


@pytest.fixture
def migrate(tmp_path, capsys):
    """A function from a text to (exit status, text after, what was said)."""

    def run(code):
        path = tmp_path / "their.py"
        path.write_bytes(code.encode())
        status = main(["migrate", "--write", str(path)])
        return status, path.read_bytes().decode(), capsys.readouterr()

    return run


@pytest.mark.parametrize("pair", PAIRS, ids=[pair.name for pair in PAIRS])
def test_what_is_understood_is_rewritten_once_and_for_all(migrate, pair):
    status, code, said = migrate(pair.before)
    assert (status, code) == (0, pair.after)
    assert said.out.startswith("--- ") and "left as it is" not in said.err
    status, code, said = migrate(code)
    assert (status, code, said.out, said.err) == (0, pair.after, "", "")


@pytest.mark.parametrize("code", UNTOUCHED)
def test_what_is_another_s_is_none_of_ours(migrate, code):
    status, after, said = migrate(code)
    assert (status, after, said.out, said.err) == (0, code, "", "")


@pytest.mark.parametrize("left", LEFT, ids=[left.name for left in LEFT])
def test_what_is_not_understood_is_left_and_named(migrate, left):
    status, code, said = migrate(left.code)
    assert (status, code, said.out) == (1, left.code, "")
    assert "their.py:{}: left as it is: `".format(left.line) in said.err and left.reason in said.err


def test_one_use_is_rewritten_beside_another_that_is_left(migrate):
    start = "import gradient_accumulator as ga\n"
    status, code, _ = migrate(
        start + 'a = ga.GradientAccumulateOptimizer("sgd", 4)\nb = ga.GradientAccumulateOptimizer("sgd")\n'
    )
    assert status == 1
    assert code == (
        start
        + 'import accum\na = accum.GradientAccumulateOptimizer("sgd", 4)\nb = ga.GradientAccumulateOptimizer("sgd")\n'
    )


def test_a_rewritten_optimizer_s_number_is_named_where_it_is_read_or_set(migrate):
    start = "import keras\n"
    end = "scale = sgd.gradient_accumulation_steps or 1\nsgd.gradient_accumulation_steps = None\n"
    status, code, said = migrate(start + "sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)\n" + end)
    assert status == 1 and said.err.count("left as it is") == 2
    assert "their.py:3: left as it is: `gradient_accumulation_steps`: an optimizer of accum has" in said.err
    assert "their.py:4: left as it is: `gradient_accumulation_steps`: it is set apart" in said.err
    sgd = "sgd = accum.GradientAccumulateOptimizer(keras.optimizers.SGD(0.1), accum_steps=4)\n"
    assert code == start + "import accum\n" + sgd + end


def test_an_import_stays_for_others_that_all_promises_it_to(migrate):
    start = "from gradient_accumulator import GAOptimizerWrapper\n"
    end = '__all__ = ["GAOptimizerWrapper"]\n'
    status, code, said = migrate(start + end + 'make = lambda: GAOptimizerWrapper("sgd", 4)\n')
    assert status == 1 and "their.py:1: left as it is: `GAOptimizerWrapper`: others may import it" in said.err
    assert code == start + "import accum\n" + end + 'make = lambda: accum.GradientAccumulateOptimizer("sgd", 4)\n'


# ----------------------------------------------------------------------------------------------------------------
# The rewritten code runs, and makes the steps that the other library's rule says


def executed(migrate, name):
    """The names that the rewritten code of a pair defines."""
    status, code, _ = migrate(PAIR[name].before)
    assert status == 0
    names = {"tf": tf}
    exec(compile(code, name, "exec"), names)
    return names


@pytest.mark.law("L4")
@pytest.mark.keras_face
@pytest.mark.parametrize("name,factor", [("optimizer", 1), ("optimizer-of-0.3.0", 4), ("runai", 1), ("keras-3", 1)])
def test_a_rewritten_keras_optimizer_sums_or_takes_the_mean_as_before(migrate, name, factor):
    optimizer = executed(migrate, name)["optimizer"]
    variable = tf.Variable(np.zeros(3, "float32"))
    for grad in GRADIENTS:
        optimizer.apply_gradients([(tf.constant(grad), variable)])
    steps = len(GRADIENTS) // optimizer.accum_steps
    moved = -0.1 * steps * factor * GRADIENTS.astype("float64").mean(0)
    np.testing.assert_allclose(variable.numpy(), moved, rtol=0, atol=2e-6)


@pytest.mark.law("L4")
@pytest.mark.parametrize("name,factor,clock", [("h2g-net", 1, 2), ("tensorpack", 2, 4)])
def test_a_rewritten_graph_optimizer_sums_or_takes_the_mean_as_before(migrate, name, factor, clock):
    with tf.Graph().as_default(), tf1.Session() as session:
        optimizer = executed(migrate, name)["optimizer"]
        variable = tf1.get_variable("variable", [3], initializer=tf1.zeros_initializer())
        global_step, fed = tf1.train.get_or_create_global_step(), tf1.placeholder(tf.float32, [3])
        train_op = optimizer.apply_gradients([(fed, variable)], global_step)
        session.run(tf1.global_variables_initializer())
        for grad in GRADIENTS:
            session.run(train_op, {fed: grad})
        moved, steps = session.run([variable, global_step])
    np.testing.assert_allclose(moved, -0.1 * 2 * factor * GRADIENTS.astype("float64").mean(0), rtol=0, atol=2e-6)
    assert steps == clock


@pytest.mark.law("L1")
@pytest.mark.keras_face
def test_rewritten_adam_accumulated_makes_the_updates_of_h2g_net(migrate):
    optimizer = executed(migrate, "h2g-net-adam")["optimizer"]
    variable = tf.Variable(np.ones(3, "float32"))
    for grad in GRADIENTS:
        optimizer.apply_gradients([(tf.constant(grad), variable)])
    weights, m, v, steps = np.ones(3), 0.0, 0.0, 2
    for t, grads in enumerate(GRADIENTS.astype("float64").reshape(2, steps, 3), 1):
        grad = (grads / steps).mean(0)  # H2G-Net divides twice
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        weights = weights - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 0.05)
    np.testing.assert_allclose(variable.numpy(), weights, rtol=0, atol=2e-6)


@pytest.mark.law("L6")
@pytest.mark.keras_face
def test_a_rewritten_model_makes_the_steps_of_gradient_accumulator(migrate):
    """Its rule: each micro-batch counts alike, and an unfinished cycle goes on in the next epoch."""
    model = executed(migrate, "model")["model"]
    x, y = GRADIENTS[:3].repeat(2, 0)[:5], np.arange(5, dtype="float32")[:, None]
    model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.set_weights([np.ones((3, 1))])
    model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    weights = np.ones((3, 1))
    batches = [slice(0, 2), slice(2, 4), slice(4, 5)] * 2
    for cycle in zip(batches[::2], batches[1::2]):
        grads = [2 * x[part].T.astype("float64") @ (x[part] @ weights - y[part]) / len(x[part]) for part in cycle]
        weights = weights - 0.1 * sum(grads) / 2
    np.testing.assert_allclose(model.get_weights()[0], weights, rtol=0, atol=2e-6)


@pytest.mark.keras_face
def test_rewritten_layers_are_made(migrate):
    layer = executed(migrate, "layers")["layer"]
    assert (layer.momentum, layer.epsilon) == (0.9, 1e-4)
