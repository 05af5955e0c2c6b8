"""Every bad argument raises at once, in words that say what it must be and what it was (law L17)."""

import numpy as np
import pytest
import tensorflow as tf
from optimizers import legacy_family, new_family

import accum
import accum.compat.v1

pytestmark = pytest.mark.law("L17")

tf1 = tf.compat.v1

OPTIONS = [
    ({"accum_steps": 0}, ValueError, "`accum_steps` must be an int >= 1. Received: accum_steps=0."),
    ({"accum_steps": -3}, ValueError, "Received: accum_steps=-3."),
    ({"accum_steps": 2.0}, TypeError, "Received: accum_steps=2.0."),
    ({"accum_steps": True}, TypeError, "Received: accum_steps=True."),
    ({"accum_steps": None}, TypeError, "Received: accum_steps=None."),
    ({"accum_steps": "4"}, TypeError, "Received: accum_steps='4'."),
    ({"accum_steps": {}}, ValueError, "add the key 0"),
    ({"accum_steps": {1: 4}}, ValueError, "add the key 0"),
    ({"accum_steps": {0: 4, -1: 2}}, ValueError, "must be ints >= 0"),
    ({"accum_steps": {0: 0}}, ValueError, "must be an int >= 1"),
    ({"reduction": "median"}, ValueError, "`reduction` must be one of"),
    ({"reduction": None}, ValueError, "`reduction` must be one of"),
    ({"nonfinite": "ignore"}, ValueError, "`nonfinite` must be one of"),
    ({"sparse": True}, ValueError, "`sparse` must be one of"),
    ({"transform": 3}, TypeError, "`transform` must be a function or None"),
    ({"accumulator_dtype": "float31"}, TypeError, "float31"),
    ({"accumulator_dtype": "int32"}, ValueError, "`accumulator_dtype` must be a floating dtype"),
]
IDS = [repr(options) for options, _, _ in OPTIONS]


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("options,error,words", OPTIONS, ids=IDS)
def test_keras_api_refuses(options, error, words):
    with pytest.raises(error) as caught:
        accum.GradientAccumulateOptimizer("SGD", **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("options,error,words", OPTIONS, ids=IDS)
def test_graph_api_refuses(options, error, words):
    with tf.Graph().as_default(), pytest.raises(error) as caught:
        accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), **options)
    assert words in str(caught.value)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize(
    "options,error,words",
    OPTIONS
    + [
        ({"last_cycle": "keep"}, ValueError, "`last_cycle` must be one of"),
        ({"micro_batch_weight": "tokens"}, ValueError, "`micro_batch_weight` must be one of"),
        ({"use_agc": True, "clip_factor": 0}, ValueError, "`clip_factor` must be a number > 0"),
        ({"use_agc": True, "eps": -1}, ValueError, "`eps` must be a number > 0"),
        ({"use_agc": True, "eps": "1e-3"}, TypeError, "`eps` must be a number > 0"),
        *[({"micro_batch_size": size}, ValueError, "`micro_batch_size` must be an int >= 1") for size in (0, -1)],
        *[({"micro_batch_size": size}, TypeError, "an int >= 1, 'auto' or None") for size in (2.5, "4", True, [8])],
        ({"micro_batch_size": 4, "whole_batch": "everything"}, ValueError, "`whole_batch` must be of"),
        *[({"micro_batch_size": 4, "whole_batch": bad}, TypeError, "must be of") for bad in (3, ["loss", 1])],
        ({"accum_steps": 4, "whole_batch": "all"}, ValueError, "`whole_batch` needs `micro_batch_size`"),
    ],
)
def test_model_api_refuses_before_anything_is_built(options, error, words):
    inputs = tf.keras.Input((3,))
    with pytest.raises(error) as caught:
        accum.GradientAccumulateModel(inputs=inputs, outputs=tf.keras.layers.Dense(2)(inputs), **options)
    assert words in str(caught.value)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("optimizer", [None, 3, tf.Variable, object()], ids=["None", "int", "class", "object"])
def test_keras_api_refuses_what_is_no_optimizer(optimizer):
    with pytest.raises(TypeError, match="must be a Keras optimizer, its name or its config"):
        accum.GradientAccumulateOptimizer(optimizer, 2)


@pytest.mark.tf("2.2")
def test_keras_api_points_a_graph_optimizer_to_its_api():
    with pytest.raises(TypeError, match="accum.compat.v1.AccumOptimizer"):
        accum.GradientAccumulateOptimizer(tf1.train.AdamOptimizer(), 2)


@pytest.mark.tf("2.2")
def test_accumulating_twice_is_refused():
    once = accum.GradientAccumulateOptimizer("SGD", 2)
    with pytest.raises(ValueError, match="accumulates already"):
        accum.GradientAccumulateOptimizer(once, 2)


@pytest.mark.parametrize("optimizer", [None, "adam", object()], ids=["None", "str", "object"])
def test_graph_api_refuses_what_is_no_optimizer(optimizer):
    with pytest.raises(TypeError, match="must be a `tf.compat.v1.train.Optimizer` or a legacy Keras optimizer"):
        accum.compat.v1.AccumOptimizer(optimizer, 2)


def test_graph_api_refuses_to_accumulate_twice():
    once = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2)
    with pytest.raises(ValueError, match="accumulates already: pass `accum_steps` where it is created"):
        accum.compat.v1.AccumOptimizer(once, 2)


def micro_step(grads_and_vars, accum_steps=2, **kwargs):
    accum.GradientAccumulateOptimizer("SGD", accum_steps).apply_gradients(grads_and_vars, **kwargs)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_bad_gradients_are_refused(accum_steps):
    variable = tf.Variable(tf.zeros([3]), name="w")
    with pytest.raises(ValueError, match="No gradient for any variable in .*w"):
        micro_step([(None, variable)], accum_steps)
    with pytest.raises(ValueError, match="No gradient for any variable"):
        micro_step([], accum_steps)
    with pytest.raises(ValueError, match=r"must have its variable's shape. Received: shape \(4,\) for w"):
        micro_step([(tf.zeros([4]), variable)], accum_steps)
    with pytest.raises(TypeError, match="pairs"):
        micro_step([tf.zeros([3])], accum_steps)
    with pytest.raises(TypeError, match="A gradient must be a tensor"):
        micro_step([("g", variable)], accum_steps)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize(
    "weight,error",
    [
        (-1, ValueError),
        (-0.5, ValueError),
        (float("nan"), ValueError),
        (np.array(-1.0), ValueError),
        (tf.constant(-1.0), ValueError),
        (tf.constant(np.nan), ValueError),
        (tf.constant([1.0, 2.0]), ValueError),
        ("3", TypeError),
        (True, TypeError),
        (tf.constant(True), TypeError),
        ([1.0, 2.0], TypeError),
    ],
    ids=str,
)
def test_bad_weights_are_refused(weight, error):
    variable = tf.Variable(tf.zeros([3]))
    with pytest.raises(error, match="`weight` must be a scalar >= 0"):
        micro_step([(tf.zeros([3]), variable)], weight=weight)


@pytest.mark.tf("2.2")
def test_a_variable_given_twice_is_refused():
    variable = tf.Variable(tf.zeros([3]), name="w")
    with pytest.raises(ValueError, match="must appear only once .* the gradients of .*w"):
        micro_step([(tf.zeros([3]), variable), (tf.ones([3]), variable)])


@pytest.mark.tf("2.2")
def test_a_variable_of_unknown_shape_is_refused():
    variable = tf.Variable(tf.zeros([3]), shape=tf.TensorShape([None]))
    with pytest.raises(ValueError, match="needs a variable of known shape"):
        micro_step([(tf.zeros([3]), variable)])


@pytest.mark.tf("2.2")
def test_two_lists_in_one_traced_step_are_refused():
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer("SGD", 2)

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.constant([1.0]), one)])
        optimizer.apply_gradients([(tf.constant([1.0]), other)])

    with pytest.raises(ValueError, match="use an optimizer for each list"):
        step()


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_build_lets_the_list_change_between_cycles_only():
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    optimizer.build([one, other])

    @tf.function
    def micro_step(has_other):
        variables = [one, other] if has_other else [one]
        optimizer.apply_gradients([(tf.constant([1.0]), var) for var in variables])

    micro_step(True)
    with pytest.raises(ValueError, match="must not change within a cycle"):
        optimizer.build([one])
    micro_step(True)
    optimizer.build([one])  # the other was frozen
    micro_step(False)
    micro_step(False)
    np.testing.assert_array_equal([one.numpy(), other.numpy()], [[-2.0], [-1.0]])


def alternating():
    """Return two variables, an optimizer, and a traced micro step for each of them."""
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    optimizer.build([one, other])

    def step_of(var):
        @tf.function
        def step():
            optimizer.apply_gradients([(tf.constant([1.0]), var)])

        return step

    steps = [step_of(var) for var in (one, other)]
    return one, other, optimizer, steps


@pytest.mark.tf("2.2")
@pytest.mark.skipif(new_family() is None, reason="older optimizers take any variables at any time")
def test_variables_that_the_inner_optimizer_was_not_built_for_are_refused_before_they_accumulate():
    inner, one, other = new_family().SGD(1.0), tf.Variable([1.0]), tf.Variable([2.0])
    inner.build([one])
    optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps=2)
    with pytest.raises(ValueError, match="built for a list of variables.*create a new optimizer"):
        optimizer.apply_gradients([(tf.constant([1.0]), one), (tf.constant([1.0]), other)])
    with pytest.raises(ValueError, match="built for a list of variables.*create a new optimizer"):
        optimizer.build([one, other])
    optimizer.apply_gradients([(tf.constant([4.0]), one)])
    optimizer.flush()
    np.testing.assert_allclose(one.numpy(), [-3.0])


@pytest.mark.tf("2.2")
def test_build_allows_no_second_list_in_the_same_cycle():
    """Both would count micro steps, and end each other's cycles: one variable would never move."""
    *_, (step_of_one, step_of_other) = alternating()
    step_of_one()
    with pytest.raises(ValueError, match="One optimizer accumulates for one list of variables"):
        step_of_other()


@pytest.mark.tf("2.2")
def test_flush_after_build_has_gone_back_to_an_earlier_list():
    one, other, optimizer, (step_of_one, step_of_other) = alternating()
    step_of_one(), step_of_one()
    optimizer.build([other])
    step_of_other(), step_of_other()
    optimizer.build([one])
    step_of_one()  # traced before
    np.testing.assert_array_equal(optimizer.gradients, [[1.0]])
    optimizer.flush()
    np.testing.assert_array_equal([one.numpy(), other.numpy()], [[-2.0], [-1.0]])


@pytest.mark.tf("2.2")
def test_a_variable_that_comes_back_without_a_gradient():
    """It would bring the sum of an earlier cycle."""
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)
    grad = tf.constant([1.0])
    for _ in range(2):
        optimizer.apply_gradients([(grad, one), (grad, other)])
    optimizer.apply_gradients([(grad, one)])
    with pytest.raises(ValueError, match="must not change within a cycle"):
        optimizer.apply_gradients([(grad, one), (None, other)])
    optimizer.reset()
    for _ in range(2):
        optimizer.apply_gradients([(grad, one), (None, other)])
    np.testing.assert_array_equal([one.numpy(), other.numpy()], [[-2.0], [-1.0]])


@pytest.mark.tf("2.2")
def test_flush_traced_before_the_first_micro_step_is_refused():
    optimizer = accum.GradientAccumulateOptimizer("SGD", 2)
    with pytest.raises(ValueError, match="can't be traced before the first micro step"):
        tf.function(optimizer.flush)()


def test_one_graph_optimizer_in_two_graphs_is_refused():
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
    for graph in (tf.Graph(), tf.Graph()):
        with graph.as_default():
            loss = tf.reduce_sum(tf1.get_variable("w", initializer=[0.0]) ** 2)
            if graph is not None and optimizer.micro_step is None:
                optimizer.minimize(loss)
                continue
            with pytest.raises(ValueError, match="create one for each graph"):
                optimizer.minimize(loss)


@pytest.mark.tf("2.2")
def test_model_without_inputs_and_outputs_is_refused():
    with pytest.raises(ValueError, match="takes the `inputs` and `outputs` of a functional model"):
        accum.GradientAccumulateModel(2)


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "function"])
def test_other_variables_within_a_cycle_are_refused_and_nothing_is_lost(is_traced):
    one, other = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1.0), accum_steps=2)

    def take(*variables):
        optimizer.apply_gradients([(tf.constant([1.0]), var) for var in variables])

    first = tf.function(lambda: take(one)) if is_traced else lambda: take(one)
    second = tf.function(lambda: take(one, other)) if is_traced else lambda: take(one, other)
    first()
    words = "one list of variables" if is_traced else "must not change within a cycle"
    with pytest.raises(ValueError, match=words):
        second()
    first()
    np.testing.assert_array_equal(one.numpy(), [-1.0])


def test_other_variables_in_a_second_minimize_are_refused():
    with tf.Graph().as_default():
        one, other = (tf1.get_variable(name, initializer=[0.0]) for name in "ab")
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
        optimizer.minimize(tf.reduce_sum(one**2), var_list=[one])
        with pytest.raises(ValueError, match="one list of variables"):
            optimizer.minimize(tf.reduce_sum(other**2), var_list=[other])


@pytest.mark.skipif(legacy_family() is None, reason="no optimizer of Keras 3 works in a static graph")
def test_graph_api_refuses_ref_variables_with_a_keras_optimizer():
    with tf.Graph().as_default():
        variable = tf1.get_variable("ref", initializer=[1.0], use_resource=False)
        optimizer = accum.compat.v1.AccumOptimizer(legacy_family().SGD(0.1), 2)
        with pytest.raises(ValueError, match="only updates resource variables: create them with `use_resource=True`"):
            optimizer.apply_gradients([(tf.ones([1]), variable)])


@pytest.mark.tf("2.2")
def test_graph_api_refuses_eager_execution():
    variable = tf.Variable([0.0])
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
    with pytest.raises(RuntimeError, match="accum.GradientAccumulateOptimizer"):
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])


@pytest.mark.skipif(new_family() is None, reason="every Keras optimizer of this version works in a static graph")
def test_graph_api_refuses_a_keras_optimizer_that_would_move_nothing_but_its_counter():
    with tf.Graph().as_default(), pytest.raises(TypeError, match="only its counter is run: use one of `tf.compat"):
        accum.compat.v1.AccumOptimizer(new_family().SGD(0.1), 2)


@pytest.mark.slow
@pytest.mark.tf("2.2")
def test_graph_api_refuses_a_traced_function_such_as_the_train_step_of_fit():
    optimizer, variable = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.1), 2), tf.Variable([1.0])

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.ones([1]), variable)])

    with pytest.raises(RuntimeError, match="accum.GradientAccumulateOptimizer"):
        step()


def test_graph_api_refuses_a_loss_without_trainable_variables():
    with tf.Graph().as_default():
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), accum_steps=2)
        with pytest.raises(ValueError):
            optimizer.minimize(tf.constant(1.0))
        with pytest.raises(ValueError, match="either `loss` or `grads_and_vars`"):
            optimizer.accumulation_ops()


def test_graph_api_refuses_a_schedule_without_a_step_counter():
    with tf.Graph().as_default():
        variable = tf1.get_variable("w", initializer=[0.0])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), {0: 1, 5: 2})
        with pytest.raises(ValueError, match="pass a `global_step`"):
            optimizer.minimize(tf.reduce_sum(variable**2))


@pytest.mark.tf("2.2")
def test_accum_steps_cannot_leave_one_or_a_schedule():
    variable = tf.Variable([0.0])
    single = accum.GradientAccumulateOptimizer("SGD", 1)
    single.apply_gradients([(tf.constant([1.0]), variable)])
    with pytest.raises(ValueError, match="accum_steps={0: 1, first_step: 4}"):
        single.accum_steps = 4
    scheduled = accum.GradientAccumulateOptimizer("SGD", {0: 2, 9: 4})
    with pytest.raises(ValueError, match="pass it to a new optimizer"):
        scheduled.accum_steps = 3
    fresh = accum.GradientAccumulateOptimizer("SGD", 1)
    fresh.accum_steps = 2
    assert fresh.accum_steps == 2


@pytest.mark.tf("2.2")
def test_scheduler_refuses_a_model_that_does_not_accumulate():
    inputs = tf.keras.Input((1,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must be compiled with a `GradientAccumulateOptimizer`"):
        model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[accum.AccumulationScheduler({0: 2})])
    with pytest.raises(ValueError, match="add the key 0"):
        accum.AccumulationScheduler({1: 2})
