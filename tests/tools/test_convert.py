"""A static graph's run goes on in Keras, and back, in mid-cycle: state, arithmetic, names, refusals (laws L12, L17)."""

import json
import os
import sys

import convert_environments as environments
import numpy as np
import optimizers
import pytest
import tensorflow as tf
from convert_environments import EPSILON, STEPS, STOP, Keras, distance, oracle, run_graph

import accum
import accum.compat.v1
import accum.convert
from accum.__main__ import main
from accum.convert import ConversionError, Disagreement, from_v1, to_v1

tf1 = tf.compat.v1

pytestmark = pytest.mark.tf("2.2")

END = environments.K * STEPS
FAMILIES = (
    {"legacy": optimizers.legacy_family(), "new": optimizers.new_family()} if hasattr(accum, "GAModelWrapper") else {}
)
FAMILIES = {name: family for name, family in FAMILIES.items() if family is not None}
IS_PREVIEW = not hasattr(tf.keras.optimizers.SGD, "update_step")  # the new family is not the default yet
ELSEWHERE = {"legacy": ["rmsprop", "adagrad"], "new": ["rmsprop", "rmsprop with momentum"] if IS_PREVIEW else []}
CASES = [
    pytest.param(rule, family, id=f"{family}-{rule}")
    for family in FAMILIES
    for rule in environments.RULES
    if rule not in ELSEWHERE[family] and not (family == "new" and IS_PREVIEW and rule == "centered rmsprop")
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that gives the checkpoint of a static graph which stopped in mid-cycle."""
    folder, done = tmp_path_factory.mktemp("graph"), {}

    def save(rule):
        if rule not in done:
            done[rule] = str(folder / rule.replace(" ", "-"))
            run_graph(rule, range(STOP), save=done[rule])
        return done[rule]

    return save


def values(path):
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def default(rule):
    return Keras(rule, tf.keras.optimizers)


# ----------------------------------------------------------------------------------------------------------------
# The run goes on


@pytest.mark.law("L12")
@pytest.mark.parametrize("rule,family", CASES)
def test_keras_ends_the_run_of_a_static_graph(saved, rule, family):
    run = Keras(rule, FAMILIES[family]).forget()
    report = from_v1(saved(rule), run.variables, run.optimizer)
    assert (report.iterations, report.micro_step) == (2, 5)
    assert (int(run.optimizer.iterations.numpy()), int(run.optimizer.micro_step)) == (2, 5)
    run.feed(range(STOP, END))
    assert distance(run.values(), oracle(rule, "graph")) <= environments.TOLERANCE
    assert (int(run.optimizer.iterations.numpy()), int(run.optimizer.micro_step)) == (STEPS, 0)


@pytest.mark.law("L12")
def test_a_cycle_goes_on_where_a_schedule_says_how_long_it_is(saved):
    run = Keras("sgd", tf.keras.optimizers, accum_steps={0: environments.K}).forget()
    from_v1(saved("sgd"), run.variables, run.optimizer)
    run.feed(range(STOP, END))
    assert distance(run.values(), oracle("sgd", "graph")) <= environments.TOLERANCE


@pytest.mark.law("L12")
@pytest.mark.parametrize("rule,family", CASES)
def test_a_static_graph_ends_the_run_of_keras(tmp_path, rule, family):
    path = str(tmp_path / "run")
    run = Keras(rule, FAMILIES[family]).feed(range(STOP))
    to_v1(run.variables, path, run.optimizer)
    assert tf.train.latest_checkpoint(str(tmp_path)) == path
    assert distance(run_graph(rule, range(STOP, END), restore=path), oracle(rule, "keras")) <= environments.TOLERANCE


@pytest.mark.slow
@pytest.mark.law("L12")
def test_a_run_may_go_there_and_back_again(saved, tmp_path):
    run, path = default("adam").forget(), str(tmp_path / "back")
    from_v1(saved("adam"), run.variables, run.optimizer)
    to_v1(run.variables, path, run.optimizer, like=saved("adam"))
    before, after = tf.train.load_checkpoint(saved("adam")), tf.train.load_checkpoint(path)
    assert after.get_variable_to_shape_map() == before.get_variable_to_shape_map()
    for name in before.get_variable_to_shape_map():
        np.testing.assert_allclose(after.get_tensor(name), before.get_tensor(name), rtol=3e-7, err_msg=name)
        assert after.get_tensor(name).dtype == before.get_tensor(name).dtype


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_dry_run_changes_nothing(saved, tmp_path):
    run = default("momentum").forget()
    report = from_v1(saved("momentum"), run.variables, run.optimizer, dry_run=True)
    assert len(report.entries) == 3 * len(environments.NAMES) + 3
    assert {float(var.numpy().flat[0]) for var in run.variables} == {7.0}
    assert (int(run.optimizer.iterations.numpy()), int(run.optimizer.micro_step)) == (0, 0)
    assert len(to_v1(run.variables, str(tmp_path / "run"), run.optimizer, dry_run=True).entries) == len(report.entries)
    assert not os.listdir(str(tmp_path))


@pytest.mark.slow
def test_another_dtype_is_cast_where_nothing_is_lost(tmp_path):
    wide = save_graph(tmp_path / "wide", {"w": [2]}, tf.float64)
    ours, optimizer = variables(("w", [2])), tf.keras.optimizers.SGD(0.1)
    assert "w is float64 in the checkpoint, but float32 in Keras." in refused(wide, ours, optimizer)
    to_v1(ours, str(tmp_path / "ours"), optimizer, like=wide)
    assert tf.train.load_checkpoint(str(tmp_path / "ours")).get_tensor("w").dtype == np.float64
    narrow = save_graph(tmp_path / "narrow", {"w": [2]}, tf.float16)
    assert from_v1(narrow, ours, optimizer).entries[0].arithmetic == "cast from float16"
    with pytest.raises(Disagreement, match="w is float32 here, but float16 in `like`"):
        to_v1(ours, str(tmp_path / "again"), optimizer, like=narrow)


@pytest.mark.slow
@pytest.mark.law("L12")
def test_a_plain_run_goes_on_in_a_plain_optimizer(tmp_path):
    path = str(tmp_path / "plain")
    run_graph("momentum", range(3), save=path, accum_steps=1)
    run = Keras("momentum", tf.keras.optimizers, accum_steps=1).forget()
    from_v1(path, run.variables, run.optimizer.optimizer)
    expected = run_graph("momentum", range(6), accum_steps=1)
    assert distance(run.feed(range(3, 6)).values(), expected) <= environments.TOLERANCE


@pytest.mark.slow
@pytest.mark.law("L12")
def test_what_an_optimizer_had_begun_is_forgotten(saved, tmp_path):
    run = default("momentum").feed(range(3))
    path = str(tmp_path / "between")
    run_graph("momentum", range(2 * environments.K), save=path)  # between two cycles
    from_v1(path, run.variables, run.optimizer)
    assert int(run.optimizer.micro_step) == 0
    expected = oracle("momentum", "graph")
    assert distance(run.feed(range(2 * environments.K, END)).values(), expected) <= environments.TOLERANCE


@pytest.mark.slow
@pytest.mark.law("L5")
def test_micro_batches_count_on_in_another_unit(saved):
    run = default("sgd").forget()
    from_v1(saved("sgd"), run.variables, run.optimizer, micro_batch_weight=environments.SIZE)
    for number in range(STOP, END):
        grads = map(tf.constant, environments.micro_gradients(run.values(), number))
        run.optimizer.apply_gradients(list(zip(grads, run.variables)), weight=float(environments.SIZE))
    assert distance(run.values(), oracle("sgd", "graph")) <= environments.TOLERANCE


@pytest.mark.slow
@pytest.mark.law("L5")
def test_units_that_differ_are_noticed(saved, tmp_path):
    inputs = tf.keras.Input((5,))
    hidden = tf.keras.layers.Dense(4, name="hidden")(inputs)
    outputs = tf.keras.layers.Dense(3, name="outputs")(hidden)
    model = accum.GradientAccumulateModel(environments.K, inputs=inputs, outputs=outputs)
    model.compile(tf.keras.optimizers.SGD(0.5), "mse")
    with pytest.raises(Disagreement, match="have a weight of 1 each"):
        from_v1(saved("sgd"), model)
    report = from_v1(saved("sgd"), model, micro_batch_weight=3)
    assert float(model.optimizer.micro_step) == 5 and not report.problems
    with pytest.raises(Disagreement, match="have a weight of 3 each, not 1"):
        to_v1(model, str(tmp_path / "back"))
    to_v1(model, str(tmp_path / "back"), micro_batch_weight=1 / 3)
    to_v1(model, str(tmp_path / "like"), like=saved("sgd"))  # whose micro-batches weigh 1 each
    for name, value in values(str(tmp_path / "back")).items():
        np.testing.assert_array_equal(values(str(tmp_path / "like"))[name], value)
    restored = run_graph("sgd", range(STOP, END), restore=str(tmp_path / "back"))
    assert distance(restored, oracle("sgd", "graph")) <= environments.TOLERANCE


@pytest.mark.slow
@pytest.mark.law("L8")
def test_rows_of_a_sparse_gradient_go_on(tmp_path):
    table = np.arange(8.0, dtype="float32").reshape(4, 2)
    parts = [([0, 2], 1.0), ([2], 2.0), ([3, 3], 4.0)]  # micro-batches of one cycle: rows, and what each row gets

    def graph(slices, restore=None, save=None):
        with tf.Graph().as_default(), tf1.Session() as session:
            var = tf1.get_variable("table", initializer=table)
            rows, value = tf1.placeholder(tf.int32, [None]), tf1.placeholder(tf.float32, [])
            loss = value * tf.reduce_sum(tf.gather(var, rows))
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), 3, "sum")
            train_op, saver = optimizer.minimize(loss, tf1.train.get_or_create_global_step()), tf1.train.Saver()
            session.run(tf1.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            for fed in slices:
                session.run(train_op, dict(zip((rows, value), fed)))
            if save:
                saver.save(session, save)
            return session.run(var)

    def keras():
        return tf.Variable(table * 0, name="table"), accum.GradientAccumulateOptimizer(
            tf.keras.optimizers.SGD(1.0), 3, "sum"
        )

    def feed(var, optimizer, slices):
        for rows, value in slices:
            grad = tf.IndexedSlices(tf.fill([len(rows), 2], value), tf.constant(rows), tf.constant([4, 2]))
            optimizer.apply_gradients([(grad, var)])
        return var.numpy()

    expected = table - np.array([[1.0], [0.0], [3.0], [8.0]])
    graph(parts[:2], save=str(tmp_path / "graph"))
    var, optimizer = keras()
    from_v1(str(tmp_path / "graph"), [var], optimizer)
    np.testing.assert_array_equal(feed(var, optimizer, parts[2:]), expected)

    var, optimizer = keras()
    var.assign(table)
    feed(var, optimizer, parts[:2])
    to_v1([var], str(tmp_path / "keras"), optimizer)
    np.testing.assert_array_equal(graph(parts[2:], restore=str(tmp_path / "keras")), expected)
    feed(var, optimizer, parts[2:])
    to_v1([var], str(tmp_path / "between"), optimizer)
    np.testing.assert_array_equal(graph([], restore=str(tmp_path / "between")), expected)


SPARSE_RULES = ["momentum", "nesterov", "rmsprop with momentum"]


def run_sparse_graph(rule, rows, restore=None, save=None):
    """Take in micro-batches, lists of rows, in a static graph; returns its table."""
    with tf.Graph().as_default(), tf1.Session() as session:
        var = tf1.get_variable("table", initializer=np.ones((4, 2), "float32"))
        fed = tf1.placeholder(tf.int32, [None])
        optimizer = accum.compat.v1.AccumOptimizer(environments.RULES[rule][0](), 2)
        loss = tf.reduce_sum(tf.gather(var, fed))
        train_op, saver = optimizer.minimize(loss, tf1.train.get_or_create_global_step()), tf1.train.Saver()
        session.run(tf1.global_variables_initializer())
        if restore:
            saver.restore(session, restore)
        for indices in rows:
            session.run(train_op, {fed: indices})
        if save:
            saver.save(session, save)
        return session.run(var)


def sparse_keras(rule, family, **options):
    table = environments.variable(np.ones((4, 2), "float32"), "table")
    return table, accum.GradientAccumulateOptimizer(environments.RULES[rule][1](family), 2, **options)


def feed_rows(var, optimizer, rows):
    for indices in rows:
        grad = tf.IndexedSlices(tf.ones([len(indices), 2]), tf.constant(indices), tf.constant([4, 2]))
        optimizer.apply_gradients([(grad, var)])
    return var.numpy()


ROWS = [[0, 1], [1], [2], [2, 3], [1], [3]]
OF_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.law("L8")
@pytest.mark.parametrize("rule", SPARSE_RULES)
@OF_FAMILY
def test_rules_that_differ_for_sparse_gradients_are_refused_by_name(tmp_path, rule, family):
    path = str(tmp_path / "graph")
    run_sparse_graph(rule, ROWS[:3], save=path)
    expected = run_sparse_graph(rule, ROWS[3:], restore=path)
    var, optimizer = sparse_keras(rule, FAMILIES[family])
    if family == "legacy":  # which has v1's rule
        from_v1(path, [var], optimizer)
        np.testing.assert_allclose(feed_rows(var, optimizer, ROWS[3:]), expected, rtol=0, atol=2e-6)
        return
    said = refused(path, [var], optimizer, Disagreement)
    assert "['table'] have sparse gradients. v1's " in said and "all rows decay and move" in said
    report = from_v1(path, [var], optimizer, strict=False)
    assert any("have sparse gradients" in problem for problem in report.problems)
    assert np.abs(feed_rows(var, optimizer, ROWS[3:]) - expected).max() > 1e-3


@pytest.mark.law("L8")
@OF_FAMILY
def test_sparse_gradients_are_named_on_the_way_back_too(tmp_path, family):
    var, optimizer = sparse_keras("momentum", FAMILIES[family])
    feed_rows(var, optimizer, ROWS[:3])
    if family == "legacy":
        to_v1([var], str(tmp_path / "keras"), optimizer)
        expected = feed_rows(var, optimizer, ROWS[3:])
        ours = run_sparse_graph("momentum", ROWS[3:], restore=str(tmp_path / "keras"))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)
        return
    with pytest.raises(Disagreement, match="have sparse gradients"):
        to_v1([var], str(tmp_path / "keras"), optimizer)


@pytest.mark.slow
@pytest.mark.law("L8")
def test_adam_has_one_rule_for_sparse_gradients(tmp_path):
    path = str(tmp_path / "graph")
    run_sparse_graph("adam", ROWS[:3], save=path)
    expected = run_sparse_graph("adam", ROWS[3:], restore=path)
    var, optimizer = sparse_keras("adam", tf.keras.optimizers)
    from_v1(path, [var], optimizer)
    np.testing.assert_allclose(feed_rows(var, optimizer, ROWS[3:]), expected, rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.law("L8")
def test_dense_gradients_of_a_table_are_no_disagreement_where_both_sides_have_them(tmp_path):
    path = save_graph(tmp_path / "graph", dict.fromkeys(["table", "table/Momentum"], [4, 2]))
    (var,) = variables(("table", [4, 2]))
    report = from_v1(path, [var], default("momentum").optimizer.optimizer)
    assert not report.problems


@pytest.mark.slow
@pytest.mark.law("L8")
def test_an_embedding_is_known_to_be_sparse_without_accumulators(tmp_path):
    path = save_graph(tmp_path / "graph", dict.fromkeys(["table/embeddings", "table/embeddings/Momentum"], [4, 2]))
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Embedding(4, 2, name="table")])
    if "new" in FAMILIES:
        with pytest.raises(Disagreement, match="/?embeddings'\\] have sparse gradients"):
            from_v1(path, model, FAMILIES["new"].SGD(0.1, 0.9))
    if "legacy" in FAMILIES:
        assert not from_v1(path, model, FAMILIES["legacy"].SGD(0.1, 0.9)).problems


@pytest.mark.slow
@pytest.mark.law("L8")
@pytest.mark.skipif("legacy" not in FAMILIES, reason="all optimizers here let every row decay")
def test_rows_that_the_wrapper_makes_dense_are_named(tmp_path):
    path = str(tmp_path / "graph")
    run_sparse_graph("momentum", ROWS[:3], save=path)
    var, optimizer = sparse_keras("momentum", FAMILIES["legacy"], sparse="dense")
    assert 'with `sparse="rows"`' in refused(path, [var], optimizer, Disagreement)


# ----------------------------------------------------------------------------------------------------------------
# Averages of the weights


def graph_with_averages(path):
    """A checkpoint of `w`, 1, whose average is 2."""
    return save_graph(path, {"global_step_of_nobody": [1], "w": [2], "w/ExponentialMovingAverage": [2]})


@pytest.mark.tf("2.9", because="the optimizers that TF 2.11 made the default were added in TF 2.9")
@pytest.mark.slow
def test_averages_of_the_weights_are_named_where_the_optimizer_keeps_none(tmp_path):
    path = graph_with_averages(tmp_path / "graph")
    ours, optimizer = variables(("w", [2])), tf.keras.optimizers.SGD(0.1)
    said = refused(path, ours, optimizer, Disagreement, ignore=["global_*"])
    assert "Moving averages of the weights are left out" in said and "['w/ExponentialMovingAverage']" in said
    assert "pass ignore='*/ExponentialMovingAverage'" in said
    assert not from_v1(path, ours, optimizer, ignore=["global_*", "*/ExponentialMovingAverage"]).problems
    np.testing.assert_array_equal(ours[0].numpy(), [1.0, 1.0])


@pytest.mark.tf("2.9", because="the optimizers that TF 2.11 made the default were added in TF 2.9")
@pytest.mark.slow
@pytest.mark.law("L12")
@pytest.mark.skipif("new" not in FAMILIES, reason="no optimizer here keeps averages")
def test_averages_of_the_weights_are_carried_where_the_optimizer_keeps_them(tmp_path):
    path = graph_with_averages(tmp_path / "graph")
    ours, optimizer = variables(("w", [2])), FAMILIES["new"].SGD(0.0, use_ema=True, ema_momentum=0.5)
    report = from_v1(path, ours, optimizer, ignore=["global_*"])
    assert not report.problems
    optimizer.apply_gradients([(tf.zeros([2]), ours[0])])
    to_v1(ours, str(tmp_path / "ours"), optimizer)
    written = tf.train.load_checkpoint(str(tmp_path / "ours"))
    np.testing.assert_array_equal(written.get_tensor("w"), [1.0, 1.0])
    np.testing.assert_array_equal(written.get_tensor("w/ExponentialMovingAverage"), [1.5, 1.5])


@pytest.mark.slow
def test_what_is_not_the_model_s_is_ignored_by_pattern(tmp_path):
    path = save_graph(tmp_path / "graph", dict.fromkeys(["w", "tower_1/a/v", "tower_2/v", "other"], [1]))
    ours, optimizer = variables(("w", [1])), tf.keras.optimizers.SGD(0.1)
    said = refused(path, ours, optimizer, Disagreement, ignore=["tower_*/v"])
    assert "other has no counterpart." in said and "tower" not in said
    assert not from_v1(path, ours, optimizer, ignore=["tower_?", "oth[e]r"]).problems


NORM = ["norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"]
COUNTERS = [pytest.param(True, id="model", marks=pytest.mark.slow), pytest.param(False, id="layer alone")]


@pytest.mark.tf(keras=2, because="`tf.compat.v1.layers` need Keras 2")
@pytest.mark.slow
@pytest.mark.law("L13")
@pytest.mark.parametrize("follows", COUNTERS)
def test_batch_normalisation_goes_on_in_mid_cycle(tmp_path, follows):
    parts = np.random.RandomState(1).normal(size=(3, 4, 2)).astype("float32") * [[[1.0]], [[2.0]], [[3.0]]] + [1.0, 2.0]

    def graph(batches, restore=None, save=None):
        with tf.Graph().as_default(), tf1.Session() as session:
            x = tf1.placeholder(tf.float32, [None, 2])
            outputs = tf1.layers.batch_normalization(x, momentum=0.75, training=True, name="norm")
            optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 3)
            optimizer.accumulate_update_ops()
            loss = tf.reduce_mean(tf.reduce_sum(outputs, axis=1))
            train_op, saver = optimizer.minimize(loss, tf1.train.get_or_create_global_step()), tf1.train.Saver()
            session.run(tf1.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            for batch in batches:
                session.run(train_op, {x: batch})
            if save:
                saver.save(session, save)
            by_name = {var.op.name: var for var in tf1.global_variables()}
            return session.run([by_name[name] for name in NORM])

    class Ours:
        def __init__(self):
            inputs = tf.keras.Input((2,))
            layer = accum.AccumBatchNormalization(1 if follows else 3, momentum=0.75, name="norm")
            self.model = tf.keras.Model(inputs, layer(inputs))
            self.optimizer = tf.keras.optimizers.SGD(0.1)
            if follows:
                self.model = accum.GradientAccumulateModel.from_model(self.model, accum_steps=3)
                self.model.compile(self.optimizer, lambda _, outputs: tf.reduce_sum(outputs, axis=1))
                self.optimizer = self.model.optimizer
            else:
                self.optimizer = accum.GradientAccumulateOptimizer(self.optimizer, 3)

        def feed(self, batches):
            for batch in batches:
                if follows:
                    self.model.train_on_batch(batch, np.zeros([4]))
                    continue
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.reduce_sum(self.model(batch, training=True), axis=1))
                variables = self.model.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return self.model.get_weights()

    seen, unit = parts.reshape(12, 2), 4.0 if follows else 1.0
    expected = [0.25 * seen.mean(axis=0), 0.75 + 0.25 * seen.var(axis=0)]
    like = str(tmp_path / "graph")
    graph(parts[:2], save=like)
    ours = Ours()
    from_v1(like, ours.model, ours.optimizer, micro_batch_weight=unit)
    weights = ours.feed(parts[2:])
    np.testing.assert_allclose(weights[2:], expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(weights[1], -0.1, rtol=0, atol=2e-6)

    ours = Ours()
    ours.feed(parts[:2])
    if not follows:
        ours.model(parts[2], training=True)  # the layer has ended its cycle, the optimizer has not
        with pytest.raises(ConversionError, match="has counted 0 calls in its cycle, but the optimizer 2 micro steps"):
            to_v1(ours.model, str(tmp_path / "keras"), ours.optimizer, NORM)
        ours = Ours()
        ours.feed(parts[:2])
    to_v1(ours.model, str(tmp_path / "keras"), ours.optimizer, NORM, micro_batch_weight=1 / unit)
    weights = graph(parts[2:], restore=str(tmp_path / "keras"))
    np.testing.assert_allclose(weights[2:], expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(weights[1], -0.1, rtol=0, atol=2e-6)


# ----------------------------------------------------------------------------------------------------------------
# Names


def save_graph(path, names, dtype=tf.float32, global_step=7):
    """Save a checkpoint of variables {name: shape}, each filled with its place in the order given."""
    with tf.Graph().as_default(), tf1.Session() as session:
        for index, (name, shape) in enumerate(names.items()):
            tf1.get_variable(name, initializer=tf.fill(shape, tf.cast(index, dtype)))
        if global_step is not None:
            tf1.get_variable("global_step", initializer=tf.constant(global_step, tf.int64))
        session.run(tf1.global_variables_initializer())
        return tf1.train.Saver().save(session, str(path))


def variables(*named):
    return [environments.variable(np.zeros(shape, "float32"), name) for name, shape in named]


KERAS = [("dense_4/kernel", [2, 2]), ("dense_4/bias", [2]), ("dense_5/kernel", [2, 2]), ("dense_5/bias", [2])]
GRAPHS = {
    "the same names": ["dense_4/kernel", "dense_4/bias", "dense_5/kernel", "dense_5/bias"],
    "other numbers": ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"],
    "numbers that overlap": ["dense_3/kernel", "dense_3/bias", "dense_4/kernel", "dense_4/bias"],
    "more than nine": ["dense_9/kernel", "dense_9/bias", "dense_10/kernel", "dense_10/bias"],
    "tf-slim": ["net/fully_connected/weights", "net/fully_connected/biases"]
    + ["net/fully_connected_1/weights", "net/fully_connected_1/biases"],
}


@pytest.mark.slow
@pytest.mark.parametrize("names", GRAPHS.values(), ids=GRAPHS.keys())
def test_layers_are_found_by_name_or_by_number(tmp_path, names):
    path = save_graph(tmp_path / "graph", dict(zip(names, [shape for _, shape in KERAS])))
    ours = variables(*KERAS)
    from_v1(path, ours, tf.keras.optimizers.SGD(0.1))
    assert [int(var.numpy().flat[0]) for var in ours] == [0, 1, 2, 3]


@pytest.mark.slow
def test_layers_are_not_counted_off_where_one_side_has_more(tmp_path):
    parts = ["block_1/w", "block_2/w", "block_3/w", "dense/w"]
    path = save_graph(tmp_path / "graph", dict.fromkeys(parts, [2]))
    ours = variables(("block_1/w", [2]), ("block_3/w", [2]), ("dense_5/w", [2]))
    with pytest.raises(ConversionError, match="Nothing in the static graph matches \\['dense_5/w'\\]"):
        from_v1(path, ours, tf.keras.optimizers.SGD(0.1), ignore=["block_2"])
    from_v1(path, ours, tf.keras.optimizers.SGD(0.1), {"dense_5/w": "dense/w"}, ignore=["block_2"])
    assert [var.numpy()[0] for var in ours] == [0, 2, 3]


@pytest.mark.slow
def test_what_matches_nothing_is_shown_with_a_proposal_that_can_be_passed_back(tmp_path):
    """Both lists, with positions and shapes: the graph's in the order of creation, if the `.meta` file tells it."""
    theirs = {"bert/layer_10/output/b": [2], "bert/layer_10/w": [2, 2], "bert/layer_2/w": [2, 2], "bert/table": [3]}
    path = save_graph(tmp_path / "graph", theirs)
    named = [("encoder_0/kernel", [2, 2]), ("encoder_1/kernel", [2, 2]), ("words", [3]), ("encoder_1/b", [2])]
    ours = variables(*named)
    error = refusal(path, ours, tf.keras.optimizers.SGD(0.1))
    assert "  [0] encoder_0/kernel [2, 2]\n  [1] encoder_1/kernel [2, 2]\n  [2] words [3]\n" in str(error)
    assert "  [0] bert/layer_10/output/b [2]\n  [1] bert/layer_10/w [2, 2]\n  [2] bert/layer_2/w [2, 2]\n" in str(error)
    assert json.loads(str(error).split("names=")[-1]) == error.proposal
    from_v1(path, ours, tf.keras.optimizers.SGD(0.1), error.proposal)
    assert [int(var.numpy().flat[0]) for var in ours] == [2, 1, 3, 0]
    os.remove(path + ".meta")  # `layer_10` comes after `layer_2`
    error = refusal(path, variables(*named), tf.keras.optimizers.SGD(0.1))
    assert "  [0] bert/layer_2/w [2, 2]\n  [1] bert/layer_10/output/b [2]\n  [2] bert/layer_10/w" in str(error)


@pytest.mark.slow
def test_layers_without_names_are_proposed_by_the_order_of_creation(tmp_path):
    """A functional model lists a shortcut after layers that were made later; its number tells when it was made."""
    theirs = ["net/shortcut/w", "net/reduce/w", "net/shortcut/b", "net/reduce/b"]
    path = save_graph(tmp_path / "graph", {name: [2, 2] if name.endswith("w") else [2] for name in theirs})
    parts = [("dense_9/kernel", [2, 2]), ("dense_9/bias", [2]), ("dense_8/kernel", [2, 2]), ("dense_8/bias", [2])]
    ours, optimizer = variables(*parts), tf.keras.optimizers.SGD(0.1)
    error = refusal(path, ours, optimizer)
    assert "A proposal by the order in which the two sides made their variables" in str(error)
    from_v1(path, ours, optimizer, error.proposal)
    assert [int(var.numpy().flat[0]) for var in ours] == [1, 3, 0, 2]
    os.remove(path + ".meta")
    error = refusal(path, variables(*parts), optimizer)
    assert error.proposal is None and "unknown without the checkpoint's `.meta` file" in str(error)
    assert "  dense_9/kernel [2, 2] could be net/reduce/w, net/shortcut/w.\n" in str(error)


def names_of_bert(layers):
    """Yield (name in google-research/bert, shape, name in a model of Hugging Face, shape there)."""
    ours, theirs = "tf_bert_for_sequence_classification/bert/", "bert/"
    for table, size, leaf in (("word", 11, "weight"), ("token_type", 2, "embeddings"), ("position", 7, "embeddings")):
        name = f"embeddings/{table}_embeddings"
        yield theirs + name, [size, 4], f"{ours}{name}/{leaf}", [size, 4]
    dense, norm = [("kernel", [4, 4]), ("bias", [4])], [("beta", [4]), ("gamma", [4])]
    wider, back = [("kernel", [4, 8]), ("bias", [8])], [("kernel", [8, 4]), ("bias", [4])]
    parts = [("attention/self/" + part, dense) for part in ("query", "key", "value")]
    parts += [("attention/output/dense", dense), ("attention/output/LayerNorm", norm), ("intermediate/dense", wider)]
    parts += [("output/dense", back), ("output/LayerNorm", norm)]
    scopes = [("embeddings/LayerNorm", "embeddings/LayerNorm", norm), ("pooler/dense", "pooler/dense", dense)]
    for number in range(layers):
        scopes += [(f"encoder/layer_{number}/{part}", f"encoder/layer_._{number}/{part}", of) for part, of in parts]
    for scope, scope_there, leaves in scopes:
        for leaf, shape in leaves:
            yield f"{theirs}{scope}/{leaf}", shape, f"{ours}{scope_there}/{leaf}", shape
    yield "output_weights", [3, 4], ours.replace("/bert/", "/classifier/kernel"), [4, 3]
    yield "output_bias", [3], ours.replace("/bert/", "/classifier/bias"), [3]


@pytest.mark.slow
def test_the_names_of_hugging_face_s_bert_are_proposed_in_any_order(tmp_path):
    """Also beside the slots of BERT's own optimizer, which have the shapes of weights."""
    names = list(names_of_bert(12))
    ends = ("", "/adam_m", "/adam_v")
    path = save_graph(tmp_path / "graph", {theirs + end: shape for theirs, shape, _, _ in names for end in ends})
    np.random.RandomState(0).shuffle(names)
    ours = variables(*[(name, shape) for _, _, name, shape in names])
    error = refusal(path, ours, tf.keras.optimizers.SGD(0.1))
    assert error.proposal == {name: theirs for theirs, _, name, _ in names}
    report = from_v1(path, ours, tf.keras.optimizers.SGD(0.1), error.proposal, ignore=["*/adam_m", "*/adam_v"])
    assert len(report.entries) == len(names) + 1  # and `global_step`


NO_PROPOSAL = {
    "a shape that is nowhere": (
        {"one": [2], "two": [3]},
        [("first", [2]), ("second", [4])],
        "Nothing fits second [4].",
    ),
    "another order": (
        {"a/w": [2, 2], "b/w": [3, 3], "c/w": [2, 2], "d/w": [3, 3]},
        [(f"dense{number}/kernel", [size, size]) for number, size in (("", 3), ("_1", 3), ("_2", 2), ("_3", 2))],
        "The order does not tell: dense/kernel [3, 3] would be a/w [2, 2].",
    ),
    "one variable more": (
        {"a/w": [2, 2], "b/w": [2, 2], "c/w": [2, 2]},
        [("dense/kernel", [2, 2]), ("dense_1/kernel", [2, 2])],
        "the model has 2 variables of the role 'matrix', and the static graph 3.",
    ),
    "names against the order": (
        {"net/key/w": [2, 2], "net/query/w": [2, 2], "net/x/w": [2, 2], "net/y/w": [2, 2]},
        [("my_query/kernel", [2, 2]), ("my_key/kernel", [2, 2]), ("dense/kernel", [2, 2]), ("dense_1/kernel", [2, 2])],
        "The order of creation contradicts the names: it pairs my_query/kernel with net/key/w, and the names with "
        "net/query/w.",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("theirs,ours,reason", NO_PROPOSAL.values(), ids=NO_PROPOSAL.keys())
def test_nothing_is_proposed_that_is_ambiguous_and_the_reason_is_said(tmp_path, theirs, ours, reason):
    path = save_graph(tmp_path / "graph", theirs)
    error = refusal(path, variables(*ours), tf.keras.optimizers.SGD(0.1))
    assert error.proposal is None and "Nothing is proposed:\n" in str(error) and reason in str(error)


ARRANGED = {
    "transposed": ([3, 2], np.transpose),
    "without a dimension of 1": ([1, 2, 3], lambda value: value.reshape(2, 3)),
    "two heads": ([2, 6], lambda value: value.reshape(2, 2, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape,arranged", ARRANGED.values(), ids=ARRANGED.keys())
def test_values_in_another_arrangement_are_taken_and_given_back_if_the_user_names_them(tmp_path, shape, arranged):
    path, optimizer = str(tmp_path / "graph"), tf.keras.optimizers.SGD(0.5, 0.9)
    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    with tf.Graph().as_default(), tf1.Session() as session:
        weights = [tf1.get_variable(name, initializer=value) for name in ("there", "there/Momentum")]
        tf1.train.get_or_create_global_step()
        session.run(tf1.global_variables_initializer())
        tf1.train.Saver().save(session, path)
        assert [var.op.name for var in weights] == ["there", "there/Momentum"]
    ours = variables(("here", arranged(value).shape))
    assert refusal(path, ours, optimizer).proposal == {"here": "there"}
    report = from_v1(path, ours, optimizer, {"here": "there"})
    np.testing.assert_array_equal(ours[0].numpy(), arranged(value))
    word = "transposed" if shape == [3, 2] else "reshaped"
    assert [entry.arithmetic for entry in report.entries] == [word, "", "* -0.5 (learning rate), " + word]
    to_v1(ours, str(tmp_path / "back"), optimizer, {"here": "there"}, like=path)
    for name, back in values(str(tmp_path / "back")).items():
        np.testing.assert_array_equal(back, values(path)[name])


@pytest.mark.slow
def test_shapes_that_differ_are_listed_with_a_proposal(tmp_path):
    path = save_graph(tmp_path / "graph", {"head": [3, 2], "other": [2, 4]})
    ours = variables(("head", [2, 3]), ("other", [2, 4]))
    error = refusal(path, ours, tf.keras.optimizers.SGD(0.1))
    assert str(error).startswith("Shapes differ: head has shape [2, 3], but head has [3, 2].")
    assert "  [0] head [2, 3]\nThe static graph's:\n  [0] head [3, 2]\n" in str(error)
    assert error.proposal == {"head": "head", "other": "other"}
    from_v1(path, ours, tf.keras.optimizers.SGD(0.1), error.proposal)


@pytest.mark.slow
def test_the_batch_normalisation_that_slim_nests_is_found(tmp_path):
    parts = ["Conv/weights", "Conv/BatchNorm/beta", "Conv_1/weights", "Conv_1/BatchNorm/beta"]
    path = save_graph(tmp_path / "graph", dict.fromkeys(parts, [2]))
    norms = ["accum_batch_normalization_2/beta", "accum_batch_normalization_3/beta"]
    layers = ["conv2d/kernel", "conv2d_1/kernel"] + norms
    ours = variables(*[(name, [2]) for name in layers])
    from_v1(path, ours, tf.keras.optimizers.SGD(0.1))
    assert [int(var.numpy()[0]) for var in ours] == [0, 2, 1, 3]


@pytest.mark.slow
def test_the_user_says_which_is_which(tmp_path):
    path = save_graph(tmp_path / "graph", {"a": [2], "b": [2], "steps/of/mine": []}, global_step=None)
    said = {"x": "b", "iterations": "steps/of/mine"}
    ours, optimizer = variables(("x", [2]), ("a", [2])), tf.keras.optimizers.SGD(0.1)
    from_v1(path, ours, optimizer, said)
    assert [int(var.numpy()[0]) for var in ours] == [1, 0] and int(optimizer.iterations.numpy()) == 2
    ours = variables(("same", [2]), ("same", [2]))
    from_v1(path, ours, tf.keras.optimizers.SGD(0.1), ["b", "a"], iterations=2, ignore=["steps"])
    assert [int(var.numpy()[0]) for var in ours] == [1, 0]
    report = from_v1(path, variables(("x", [2])), tf.keras.optimizers.SGD(0.1), {"x": None}, False, iterations=1)
    assert "Left unchanged, with their slots and sums: ['x']." in report.problems


@pytest.mark.slow
def test_of_two_networks_alike_the_user_says_which(tmp_path):
    parts = {"a/dense/kernel": [2], "b/dense/kernel": [2], "c/dense/kernel": [3]}
    path = save_graph(tmp_path / "graph", parts)
    with pytest.raises(ConversionError, match="fits several scopes of the static graph: \\['a', 'b'\\]"):
        from_v1(path, variables(("dense_7/kernel", [2])), tf.keras.optimizers.SGD(0.1))
    ours = variables(("dense_7/kernel", [3]))
    from_v1(path, ours, tf.keras.optimizers.SGD(0.1), ignore=["a", "b"])
    assert ours[0].numpy()[0] == 2


@pytest.mark.slow
def test_a_slot_belongs_to_the_longest_name(tmp_path):
    parts = ["w", "net/w", "train/w/Momentum", "train/net/w/Momentum"]
    path = save_graph(tmp_path / "graph", dict.fromkeys(parts, [1]))
    report = from_v1(path, variables(("w", [1]), ("net/w", [1])), tf.keras.optimizers.SGD(0.1, 0.9), dry_run=True)
    by_target = {entry.target: entry.source for entry in report.entries}
    assert by_target["w/momentum"] == "train/w/Momentum" and by_target["net/w/momentum"] == "train/net/w/Momentum"


@pytest.mark.slow
def test_an_optimizer_with_a_name_of_its_own(tmp_path):
    path = save_graph(tmp_path / "graph", dict.fromkeys(["w", "w/Mine"], [1]))
    ours, optimizer = variables(("w", [1])), tf.keras.optimizers.SGD(0.5, 0.9)
    report = from_v1(path, ours, optimizer, optimizer_name="Mine")
    assert report.entries == from_v1(path, ours, optimizer).entries
    assert [entry.source for entry in report.entries] == ["w", "global_step", "w/Mine"]
    assert report.entries[-1].arithmetic == "* -0.5 (learning rate)"


@pytest.mark.slow
def test_a_graph_s_own_names_are_written(saved, tmp_path):
    parts = ["net/fully_connected/weights", "train/net/fully_connected/weights/Momentum"]
    like = save_graph(tmp_path / "like", dict(dict.fromkeys(parts, [2]), other=[3]))
    ours = variables(("dense_8/kernel", [2]))
    with pytest.raises(Disagreement, match="other keeps its value in `like`"):
        to_v1(ours, str(tmp_path / "ours"), tf.keras.optimizers.SGD(0.5, 0.9), like=like)
    to_v1(ours, str(tmp_path / "ours"), tf.keras.optimizers.SGD(0.5, 0.9), like=like, strict=False)
    written = tf.train.load_checkpoint(str(tmp_path / "ours"))
    assert set(written.get_variable_to_shape_map()) == set(parts) | {"other", "global_step"}
    np.testing.assert_array_equal(written.get_tensor("other"), [2, 2, 2])
    assert written.get_tensor("global_step") == 0


# ----------------------------------------------------------------------------------------------------------------
# Refusals: nothing is changed


def refused(path, ours, optimizer, kind=ConversionError, **options):
    """The message of a refusal, which has changed nothing."""
    return str(refusal(path, ours, optimizer, kind, **options))


def refusal(path, ours, optimizer, kind=ConversionError, **options):
    """The error of a refusal, which has changed nothing."""
    before = [var.numpy() for var in ours] + [optimizer.iterations.numpy()]
    with pytest.raises(kind) as caught:
        from_v1(path, ours, optimizer, **options)
    for var, value in zip(ours + [optimizer.iterations], before):
        np.testing.assert_array_equal(var.numpy(), value)
    return caught.value


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize(
    "ours,words",
    [
        ([("w", [3])], "Shapes differ: w has shape [3], but w has [2]. Is this the checkpoint of another model?"),
        ([("w", [2]), ("v", [2])], "Nothing in the static graph matches ['v']. Unmatched there: ['more']."),
        ([("w", [2])], "more has no counterpart."),
    ],
    ids=["shapes", "missing there", "missing here"],
)
def test_another_model_is_refused(tmp_path, ours, words):
    path = save_graph(tmp_path / "graph", {"w": [2], "more": [2]})
    assert words in refused(path, variables(*ours), tf.keras.optimizers.SGD(0.1))


@pytest.mark.slow
@pytest.mark.law("L17")
def test_files_that_hold_no_run_are_refused(saved, tmp_path):
    ours, optimizer = variables(("w", [2])), tf.keras.optimizers.SGD(0.1)
    assert "No checkpoint can be read from" in refused(str(tmp_path / "none"), ours, optimizer)
    (tmp_path / "bad.index").write_bytes(b"no index")
    (tmp_path / "bad.data-00000-of-00001").write_bytes(b"no data")
    assert "No checkpoint can be read from" in refused(str(tmp_path / "bad"), ours, optimizer)
    objects = tf.train.Checkpoint(w=ours[0]).write(str(tmp_path / "objects"))
    assert "was written by `tf.train.Checkpoint`, not by a `Saver`" in refused(objects, ours, optimizer)
    cut = save_graph(tmp_path / "cut", {"w": [2]})
    with open(cut + ".data-00000-of-00001", "r+b") as file:
        file.truncate(3)
    assert "can't be read from" in refused(cut, ours, optimizer)
    nowhere = save_graph(tmp_path / "nowhere", {"w": [2]}, global_step=None)
    assert "Pass the number of steps made as `iterations=`" in refused(nowhere, ours, optimizer)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_another_rule_is_refused(saved):
    run = default("momentum")
    assert "v1's MomentumOptimizer" in refused(saved("adam"), run.variables, run.optimizer)
    run = default("sgd")
    assert "hidden/bias/Momentum has no counterpart." in refused(saved("momentum"), run.variables, run.optimizer)
    run = default("rmsprop with momentum")
    said = refused(saved("centered rmsprop"), run.variables, run.optimizer)
    assert "keeps ['rms', 'momentum'] for each variable" in said and "RMSProp_2" in said
    run.optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Nadam(), 8)
    assert "Nadam can't be converted" in refused(saved("adam"), run.variables, run.optimizer)


@pytest.mark.slow
@pytest.mark.law("L17")
def test_what_only_keras_has_is_named(saved, tmp_path):
    run = default("adam").forget()
    run.optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.02, amsgrad=True), 8)
    assert "amsgrad" in refused(saved("adam"), run.variables, run.optimizer, Disagreement)
    with pytest.raises(Disagreement, match="`vhat` is left out"):
        to_v1(run.variables, str(tmp_path / "run"), run.optimizer)
    assert not os.listdir(str(tmp_path))
    report = from_v1(saved("adam"), run.variables, run.optimizer, strict=False)
    assert report.problems == ["amsgrad: v1's Adam keeps no maximum of v; `vhat` restarts."]
    if not IS_PREVIEW:
        run.optimizer = FAMILIES["new"].Adam(0.02, use_ema=True, weight_decay=0.1)
        said = refused(saved("adam"), run.variables, run.optimizer, Disagreement)
        assert "use_ema" in said and "weight_decay=0.1" in said and "unfinished cycle of 5 micro steps" in said


@pytest.mark.slow
@pytest.mark.law("L17")
@pytest.mark.parametrize("family", FAMILIES)
def test_epsilon_elsewhere_is_said_with_both_formulas_and_by_how_much(saved, tmp_path, family):
    for rule in ELSEWHERE[family]:
        run = Keras(rule, FAMILIES[family]).forget()
        said = refused(saved(rule), run.variables, run.optimizer, Disagreement)
        theirs, ours = ("sqrt(a)", "(sqrt(a) + 0.001)") if rule == "adagrad" else ("sqrt(s + e)", "(sqrt(s) + 0.001)")
        assert f"v1 moves by g / {theirs}, Keras by g / {ours}" in said
        report = from_v1(saved(rule), run.variables, run.optimizer, strict=False)
        off = float(report.problems[0].split("up to ")[1].rstrip("."))
        assert 1e-4 < off < 1e-2
        # What is said of the next step bounds what happens to the weights, whose steps are about 0.1.
        away = distance(run.feed(range(STOP, END)).values(), oracle(rule, "graph"))
        assert environments.TOLERANCE < away < 0.2 * off


@pytest.mark.slow
@pytest.mark.law("L17")
def test_another_epsilon_and_another_beta_are_noticed(saved):
    run = default("adam").forget()
    said = refused(saved("adam"), run.variables, run.optimizer, Disagreement, epsilon=1e-8)
    assert "Epsilon is 1e-08 in v1, but 0.001 in Keras." in said
    report = from_v1(saved("adam"), run.variables, run.optimizer, dry_run=True)
    assert any(
        "assumed to be the same in the static graph, where the default is 1e-08." in note for note in report.notes
    )
    inner = tf.keras.optimizers.Adam(0.02, beta_1=0.8, epsilon=EPSILON)
    said = refused(saved("adam"), run.variables, accum.GradientAccumulateOptimizer(inner, 8), Disagreement)
    assert "beta1_power is 0.729, but 0.8 ** (t + 1) with t = 2 is 0.512" in said
    with pytest.raises(ConversionError, match="AdagradOptimizer has no epsilon"):
        run = default("adagrad")
        from_v1(saved("adagrad"), run.variables, run.optimizer, epsilon=1e-8)


@pytest.mark.slow
@pytest.mark.law("L3")
def test_a_global_step_that_counts_something_else_is_noticed(tmp_path):
    parts = {"w": [1], "w/Adam": [1], "w/Adam_1": [1]}
    with tf.Graph().as_default(), tf1.Session() as session:
        for name, shape in parts.items():
            tf1.get_variable(name, initializer=tf.zeros(shape))
        for name, value in (("beta1_power", 0.9**4), ("beta2_power", 0.999**4)):
            tf1.get_variable(name, initializer=tf.constant(value))
        tf1.get_variable("global_step", initializer=tf.constant(24, tf.int64))
        session.run(tf1.global_variables_initializer())
        path = tf1.train.Saver().save(session, str(tmp_path / "graph"))
    ours, optimizer = variables(("w", [1])), tf.keras.optimizers.Adam(0.1)
    said = refused(path, ours, optimizer, Disagreement)
    assert "pass the number of steps as `iterations=`" in said
    from_v1(path, ours, optimizer, iterations=3)
    assert int(optimizer.iterations.numpy()) == 3


@pytest.mark.slow
@pytest.mark.law("L17")
def test_momentum_needs_a_rate_that_stands_still(saved):
    run = default("momentum").forget()
    run.optimizer.learning_rate = 0.0
    assert "with a learning rate of 0:" in refused(saved("momentum"), run.variables, run.optimizer)
    schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.25])
    inner = tf.keras.optimizers.SGD(schedule, 0.9)
    optimizer = accum.GradientAccumulateOptimizer(inner, environments.K)
    assert "follows a schedule" in refused(saved("momentum"), run.variables, optimizer, Disagreement)
    report = from_v1(saved("momentum"), run.variables, optimizer, strict=False)
    assert {entry.arithmetic for entry in report.entries} == {"", "* -0.25 (learning rate)"}


@pytest.mark.slow
@pytest.mark.law("L17")
def test_several_accumulating_optimizers_have_to_be_told_apart(tmp_path):
    parts = {"w": [1], "v": [1]}
    for name in ("AccumOptimizer", "Other"):
        parts.update({name + "/micro_step": [], name + "/weight_sum": []})
    path = save_graph(tmp_path / "graph", parts)
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1), 8)
    said = refused(path, variables(("w", [1])), optimizer)
    assert "Pass the model's as `accum_name`, one of ['AccumOptimizer', 'Other']" in said
    said = refused(path, variables(("w", [1])), optimizer, accum_name="Mine")
    assert "has no `AccumOptimizer` called 'Mine'" in said
    from_v1(
        path,
        variables(("v", [1])),
        tf.keras.optimizers.SGD(0.1),
        accum_name="Other",
        ignore=["w", "AccumOptimizer"],
        strict=False,
    )


@pytest.mark.slow
@pytest.mark.law("L17")
def test_what_is_no_run_of_keras_is_refused(saved, tmp_path):
    with pytest.raises(ConversionError, match="has no weights yet"):
        from_v1(saved("sgd"), tf.keras.Sequential([tf.keras.layers.Dense(2)]), tf.keras.optimizers.SGD())
    with pytest.raises(ConversionError, match="Compile it, or pass `optimizer`"):
        from_v1(saved("sgd"), default("sgd").variables)
    with pytest.raises(ConversionError, match="eager execution only"), tf.Graph().as_default():
        from_v1(saved("sgd"), [tf1.get_variable("w", [2])], tf.keras.optimizers.SGD())
    run = default("sgd")
    with pytest.raises(ConversionError, match="in an existing folder"):
        to_v1(run.variables, str(tmp_path / "no" / "run"), run.optimizer)
    with pytest.raises(ConversionError, match="exists already"):
        to_v1(run.variables, saved("sgd"), run.optimizer)
    with pytest.raises(ConversionError, match="`names` has \\['x'\\], which the model does not have"):
        to_v1(run.variables, str(tmp_path / "run"), run.optimizer, {"x": "y"})
    with pytest.raises(ValueError, match="`micro_batch_weight` must be a number > 0"):
        to_v1(run.variables, str(tmp_path / "run"), run.optimizer, micro_batch_weight=0)


# ----------------------------------------------------------------------------------------------------------------
# The command

MODULE = """
import accum
import tensorflow as tf

def made():
    layers = [tf.keras.layers.Dense(4, input_shape=(5,), name="hidden"), tf.keras.layers.Dense(3, name="outputs")]
    return tf.keras.Sequential(layers), accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.1, 0.9), 8)

def small():
    model = tf.keras.Sequential([tf.keras.layers.Dense(4, input_shape=(5,), name="hidden")])
    return model, tf.keras.optimizers.SGD(0.1, 0.9)

def scheduled():
    decay = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    return made()[0], accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(decay, 0.9), 8)

def nothing():
    return None

def leaves():
    raise SystemExit(0)

def coloured():
    raise ValueError("Exception encountered when calling Bad.call().\\n\\n\\x1b[1mits own words\\x1b[0m\\nmore")

def table():
    return tf.zeros((2, 2)).numpy()

def numbers():
    return 1, 2

class Odd:
    weights = [tf.Variable(0.0)]

    def __init__(self, error):
        self.error = error

    @property
    def trainable_variables(self):
        raise self.error

def odd():
    return Odd(KeyError("hidden")), None

def odd_and_coloured():
    return Odd(ValueError("in user code:\\n\\n\\x1b[1mits own words\\x1b[0m\\nmore")), None
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A function that runs the command in a folder of its own: (exit status, what it said)."""
    folder = tmp_path / "files"
    folder.mkdir()
    (tmp_path / "made_here.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(folder)

    def run(*arguments, model="made_here:made"):
        status = main(["convert"] + [str(argument) for argument in arguments] + ["--model", model])
        said = capsys.readouterr()
        return status, said.out + said.err

    yield run
    sys.modules.pop("made_here", None)


@pytest.mark.slow
@pytest.mark.law("L12")
def test_from_file_to_file_and_back(saved, command):
    status, said = command("from-v1", saved("momentum"), "keras", "--dry-run")
    assert status == 0 and "Nothing was written." in said and not os.listdir(".")
    (line,) = [line for line in said.splitlines() if line.startswith("hidden/kernel/Momentum ")]
    assert line.split()[2].endswith("/kernel/momentum")
    assert " ".join(line.split()[3:]) == "[5, 4] float32 * -0.1 (learning rate)"
    assert command("from-v1", saved("momentum"), "keras")[0] == 0
    status, said = command("to-v1", "keras", "graph", "--like", saved("momentum"))
    assert status == 0 and "2 steps, 5 micro steps of the next cycle." in said
    expected = oracle("momentum", "graph")
    assert distance(run_graph("momentum", range(STOP, END), restore="graph"), expected) <= environments.TOLERANCE


@pytest.mark.slow
@pytest.mark.law("L17")
def test_what_can_t_be_converted_exits_with_2_and_what_does_not_agree_with_1(saved, command):
    graph = saved("momentum")
    for arguments, model, status, words in [
        (("from-v1", "none", "out"), "made_here:made", 2, "No checkpoint can be read from none"),
        (("from-v1", saved("adam"), "out"), "made_here:made", 2, "v1's MomentumOptimizer"),
        (("from-v1", graph, "out"), "made_here:small", 1, "outputs/kernel/Momentum has no counterpart"),
        (("from-v1", graph, "out"), "made_here:scheduled", 1, "follows a schedule"),
        (("from-v1", graph, "out"), "made_here:nothing", 2, "must return (model, optimizer). Received: None"),
        (("from-v1", graph, "out"), "made_here:table", 2, "Received: array([[0., 0.], [0., 0.]], dtype=float32).\n"),
        (("from-v1", graph, "out"), "made_here:none", 2, "made_here:none can't be called: AttributeError"),
        (("from-v1", graph, "out"), "made_here:leaves", 2, "can't be called: SystemExit: 0."),
        (("from-v1", graph, "out"), "made_here:coloured", 2, "can't be called: ValueError: its own words.\n"),
        (("from-v1", graph, "out"), "made_here:numbers", 2, "python -m accum convert: "),
        (("from-v1", graph, "out"), "made_here:odd", 2, "convert: KeyError: 'hidden'.\n"),
        (("from-v1", graph, "out"), "made_here:odd_and_coloured", 2, "convert: ValueError: its own words.\n"),
        (("from-v1", graph, "out"), "no_such_module:made", 2, "ModuleNotFoundError"),
        (("from-v1", graph, "no/out"), "made_here:made", 2, "in an existing folder"),
        (("from-v1", graph, "out", "--names", "none.json"), "made_here:made", 2, "none.json"),
        (("to-v1", graph, "out"), "made_here:made", 2, "it was not written by `tf.train.Checkpoint`"),
    ]:
        got = command(*arguments, model=model)
        assert got[0] == status and words in got[1] and not os.listdir(".")


@pytest.mark.slow
def test_a_pattern_on_the_command_line_leaves_out_averages_of_the_weights(tmp_path, command):
    shapes = {"hidden/kernel": [5, 4], "hidden/bias": [4], "outputs/kernel": [4, 3], "outputs/bias": [3]}
    names = {name + end: shape for name, shape in shapes.items() for end in ("", "/Momentum")}
    graph = save_graph(tmp_path / "graph", dict(names, **{"hidden/bias/ExponentialMovingAverage": [4]}))
    status, said = command("from-v1", graph, "keras")
    assert status == 1 and "Moving averages of the weights are left out" in said and not os.listdir(".")
    assert command("from-v1", graph, "keras", "--ignore", "*/ExponentialMovingAverage")[0] == 0


@pytest.mark.slow
def test_a_proposal_is_written_to_a_file_that_is_passed_back(tmp_path, command):
    shapes = {"net/first/w": [5, 4], "net/first/b": [4], "net/last/w": [4, 3], "net/last/b": [3]}
    both = [(name + end, shape) for name, shape in shapes.items() for end in ("", "/Momentum")]
    graph = save_graph(tmp_path / "graph", dict(both))
    tf.keras.backend.clear_session()  # layers get the same names as in a new process
    status, said = command("from-v1", graph, "keras", "--proposal", "names.json")
    assert status == 2 and "The proposal is in names.json. Check it, and pass --names names.json." in said
    assert [name.rpartition("/")[2] for name in os.listdir(".")] == ["names.json"]
    tf.keras.backend.clear_session()
    assert command("from-v1", graph, "keras", "--names", "names.json")[0] == 0
    status, said = command("from-v1", graph, "keras", "--proposal", "names.json", "--overwrite")
    assert status == 2 and "the proposal was not written: FileExistsError" in said


@pytest.mark.slow
@pytest.mark.law("L17")
def test_a_keras_checkpoint_of_something_else_is_refused(saved, command):
    assert command("from-v1", saved("momentum"), "keras")[0] == 0
    status, said = command("to-v1", "keras", "graph", model="made_here:small")
    assert status == 2 and "but the optimizer of the model accumulates nothing" in said
    with open("names.json", "w") as file:
        json.dump(["w", "b", "w/2", "b/2"], file)
    status, said = command("to-v1", "keras", "graph", "--names", "names.json")
    assert status == 0 and "w/2" in [name for name, _ in tf.train.list_variables("graph")]
    with open("names.json", "w") as file:
        file.write("{")
    status, said = command("to-v1", "keras", "again", "--names", "names.json")
    assert status == 2 and "names.json is not JSON" in said and not os.path.exists("again.index")
