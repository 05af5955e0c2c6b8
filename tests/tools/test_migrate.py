"""`python -m accum migrate` rewrites code of other libraries, keeps the numbers, and leaves what it can't tell."""

import os

import numpy as np
import pytest
import tensorflow as tf
from by_hand import LOOPS, NO_LOOPS
from migrations import LEFT, PAIRS, UNTOUCHED

import accum.compat.v1
from accum.__main__ import main

pytestmark = pytest.mark.slow

pytest.importorskip("libcst", reason="`migrate` is an extra, tested where tox.ini installs LibCST")

tf1 = tf.compat.v1
AS_THE_MEAN = ("optimizer", "runai", "keras-3", "cyberzhg", "bojone")
GRADIENTS = np.random.RandomState(0).normal(size=(4, 3)).astype("float32")
with open(os.path.join(os.path.dirname(__file__), "..", "..", "docs", "migrating.md"), encoding="utf-8") as file:
    RECIPES = file.read()
NOTHING = "1 file looked at, 0 accumulate.\n"
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
    assert (status, code, said.out, said.err) == (0, pair.after, "", NOTHING)


@pytest.mark.parametrize("code", UNTOUCHED)
def test_what_is_another_s_is_none_of_ours(migrate, code):
    status, after, said = migrate(code)
    assert (status, after, said.out, said.err) == (0, code, "", NOTHING)


@pytest.mark.parametrize("left", LEFT, ids=[left.name for left in LEFT])
def test_what_is_not_understood_is_left_and_named(migrate, left):
    status, code, said = migrate(left.code)
    assert (status, code, said.out) == (1, left.code, "")
    assert f"their.py:{left.line}: left as it is: `" in said.err and left.reason in said.err


@pytest.mark.parametrize("loop", LOOPS, ids=[loop.name for loop in LOOPS])
def test_gradients_that_are_added_up_by_hand_are_named_with_a_recipe_of_the_guide(migrate, loop):
    status, code, said = migrate(loop.code)
    assert (status, code, said.out) == (1, loop.code, "")
    assert said.err.count("left as it is") == 1
    assert f"their.py:{loop.line}: left as it is: `{loop.label}`: " in said.err
    assert loop.recipe in said.err and "## " + loop.recipe + "\n" in RECIPES


@pytest.mark.parametrize("name", sorted(NO_LOOPS))
def test_what_only_looks_like_a_loop_that_accumulates_is_not_named(migrate, name):
    status, _, said = migrate(NO_LOOPS[name])
    assert (status, said.out, said.err) == (0, "", NOTHING)


HVD = "import horovod.tensorflow.keras as hvd\n"
BESIDE = "their.py:{}: left as it is: `{}`: it reduces every micro-batch over the workers"


def test_horovod_around_a_rewritten_optimizer_is_named(migrate):
    start, end = HVD + "import runai.ga\n", "o = hvd.DistributedOptimizer(o)\n"
    status, code, said = migrate(start + "o = runai.ga.keras.optimizers.Optimizer(o, 4)\n" + end)
    assert (status, code) == (1, HVD + "import accum\no = accum.GradientAccumulateOptimizer(o, 4)\n" + end)
    assert BESIDE.format(4, "hvd.DistributedOptimizer") in said.err


def test_horovod_that_is_handed_to_a_loop_by_hand_is_named(migrate):
    loop = "def train(hvd, opt):\n  opt = hvd.DistributedOptimizer(opt)\n" + LOOPS[0].code
    assert BESIDE.format(2, "hvd.DistributedOptimizer") in migrate(loop)[2].err


def test_horovod_beside_its_own_accumulation_is_not_named_twice(migrate):
    ours = HVD + "hvd.DistributedOptimizer(o, backward_passes_per_step=4)\nhvd.DistributedOptimizer(o)\n"
    assert migrate(ours)[2].err.count("left as it is") == 1


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
    assert "their.py:4: left as it is: `gradient_accumulation_steps`: it is set outside" in said.err
    sgd = "sgd = accum.GradientAccumulateOptimizer(keras.optimizers.SGD(0.1), accum_steps=4)\n"
    assert code == start + "import accum\n" + sgd + end


def test_an_import_stays_for_others_that_all_promises_it_to(migrate):
    start = "from gradient_accumulator import GAOptimizerWrapper\n"
    end = '__all__ = ["GAOptimizerWrapper"]\n'
    status, code, said = migrate(start + end + 'make = lambda: GAOptimizerWrapper("sgd", 4)\n')
    assert status == 1 and "their.py:1: left as it is: `GAOptimizerWrapper`: other files may import it" in said.err
    assert code == start + "import accum\n" + end + 'make = lambda: accum.GradientAccumulateOptimizer("sgd", 4)\n'


def test_the_micro_steps_at_which_tensorpack_steps_are_told(migrate):
    assert "it makes steps on micro-batches 1, K + 1, 2K + 1, …" in migrate(PAIR["tensorpack"].before)[2].err


@pytest.mark.law("L17")
def test_one_optimizer_per_tower_is_refused_without_advice_to_build_it():
    with tf.Graph().as_default():
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2)
        towers = [tf1.get_variable(name, [], initializer=tf1.zeros_initializer()) for name in ("one", "other")]
        optimizer.apply_gradients([(tf.constant(1.0), towers[0])])
        with pytest.raises(ValueError, match="use an optimizer for each list") as caught:
            optimizer.apply_gradients([(tf.constant(1.0), towers[1])])
    assert "build" not in str(caught.value)


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
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("name,factor", [(name, 1) for name in AS_THE_MEAN] + [("optimizer-of-0.3.0", 4)])
def test_a_rewritten_keras_optimizer_sums_or_takes_the_mean_as_before(migrate, name, factor):
    optimizer = executed(migrate, name)["optimizer"]
    variable = tf.Variable(np.zeros(3, "float32"))
    for grad in GRADIENTS:
        optimizer.apply_gradients([(tf.constant(grad), variable)])
    steps = len(GRADIENTS) // optimizer.accum_steps
    moved = -0.1 * steps * factor * GRADIENTS.astype("float64").mean(0)
    np.testing.assert_allclose(variable.numpy(), moved, rtol=0, atol=2e-6)


@pytest.mark.law("L4")
@pytest.mark.parametrize("name,factor,step_count", [("h2g-net", 1, 2), ("tensorpack", 2, 4)])
def test_a_rewritten_graph_optimizer_sums_or_takes_the_mean_as_before(migrate, name, factor, step_count):
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
    assert steps == step_count


@pytest.mark.law("L1")
@pytest.mark.tf("2.2")
@pytest.mark.parametrize("name", ["h2g-net-adam", "cyberzhg-adam"])
def test_rewritten_adam_accumulated_divides_by_k_twice_as_before(migrate, name):
    optimizer = executed(migrate, name)["optimizer"]
    variable = tf.Variable(np.ones(3, "float32"))
    for grad in GRADIENTS:
        optimizer.apply_gradients([(tf.constant(grad), variable)])
    weights, m, v, steps = np.ones(3), 0.0, 0.0, 2
    for t, grads in enumerate(GRADIENTS.astype("float64").reshape(2, steps, 3), 1):
        grad = (grads / steps).mean(0)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        weights = weights - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 0.05)
    np.testing.assert_allclose(variable.numpy(), weights, rtol=0, atol=2e-6)


@pytest.mark.law("L1")
@pytest.mark.tf("2.2")
def test_rewritten_adam_accumulate_makes_the_same_updates(migrate):
    """Its rule: Adam on the mean, whose bias is corrected by the number of steps."""
    optimizer = executed(migrate, "adam-accumulate")["optimizer"]
    variable = tf.Variable(np.ones(3, "float32"))
    for grad in GRADIENTS:
        optimizer.apply_gradients([(tf.constant(grad), variable)])
    weights, m, v = np.ones(3), 0.0, 0.0
    for t, grads in enumerate(GRADIENTS.astype("float64").reshape(2, 2, 3), 1):
        m, v = 0.8 * m + 0.2 * grads.mean(0), 0.999 * v + 0.001 * grads.mean(0) ** 2
        weights = weights - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.8**t) * m / (np.sqrt(v) + 0.05)
    np.testing.assert_allclose(variable.numpy(), weights, rtol=0, atol=2e-6)


@pytest.mark.law("L6")
@pytest.mark.tf("2.2")
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


@pytest.mark.tf("2.2")
def test_rewritten_layers_are_made(migrate):
    layer = executed(migrate, "layers")["layer"]
    assert (layer.momentum, layer.epsilon) == (0.9, 1e-4)
