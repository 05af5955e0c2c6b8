"""Deep Q-learning with a target network, as keras.io shows it, makes the steps of the full batch (law L21)."""

import numpy as np
import pytest
import tensorflow as tf
from equality import assert_near
from versions import IS_KERAS_3
from warned import silent

import accum

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.law("L21")]

layers = tf.keras.layers
ACTIONS, BATCH, SIZE = 3, 12, 5
CHANCE = np.random.RandomState(0)
STATES, NEXT = CHANCE.normal(size=(2, 36, 4)).astype("float32")
CHOSEN = CHANCE.randint(ACTIONS, size=36).astype("int32")
REWARDS = 3.0 * CHANCE.normal(size=36).astype("float32")
ENDS = (CHANCE.uniform(size=36) < 0.2).astype("float32")
DATA = (STATES, CHOSEN, REWARDS, NEXT, ENDS)
JIT = {"jit_compile": False} if IS_KERAS_3 else {}
HUBER = tf.keras.losses.Huber() if hasattr(tf, "keras") else None


def network(seed):
    net = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(16, activation="relu"), layers.Dense(ACTIONS)])
    chance = np.random.RandomState(seed)
    net.set_weights([0.5 * chance.normal(size=one.shape) for one in net.get_weights()])
    return net


def by_mask(q, actions):
    return tf.reduce_sum(q * tf.one_hot(actions, ACTIONS), axis=1)


def by_gather(q, actions):
    return tf.gather(q, actions, batch_dims=1)


def mean_of_errors(targets, values):
    return HUBER(targets, values)


def sum_of_errors(targets, values):
    """A sum over the batch, which no micro-batch divides."""
    return tf.reduce_sum(tf.stop_gradient(values - targets) * values)


class Agent(tf.keras.Model):
    def __init__(self, choose, error):
        super().__init__()
        self.online, self.target = network(1), network(2)
        self.choose, self.error = choose, error

    def call(self, inputs):
        return self.online(inputs)

    def train_step(self, data):
        ((states, actions, rewards, following, ends),) = data
        future = tf.reduce_max(self.target(following), axis=1)
        targets = rewards + 0.9 * future * (1.0 - ends) - ends
        with tf.GradientTape() as tape:
            loss = self.error(targets, self.choose(self.online(states, training=True), actions))
        variables = self.online.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


def trained(choose, error, **options):
    agent = Agent(choose, error)
    agent(STATES)
    model = accum.GradientAccumulateModel.from_model(agent, **options) if options else agent
    model.compile(tf.keras.optimizers.Adam(0.01, epsilon=0.01), **JIT)
    copy = lambda batch, logs: agent.target.set_weights(agent.online.get_weights()) if batch % 2 else None
    data = tf.data.Dataset.from_tensor_slices((DATA,)).batch(BATCH)
    model.fit(
        data, epochs=2, shuffle=False, verbose=0, callbacks=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=copy)]
    )
    return agent.get_weights()


@pytest.mark.parametrize("error", [mean_of_errors, sum_of_errors])
@pytest.mark.parametrize("choose", [by_mask, by_gather])
def test_q_learning_with_a_target_network_is_that_of_the_full_batch(choose, error):
    with silent(UserWarning):
        assert_near(trained(choose, error, micro_batch_size=SIZE), trained(choose, error), atol=3e-6)


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("error", [mean_of_errors, sum_of_errors])
@pytest.mark.parametrize("choose", [by_mask, by_gather])
def test_q_learning_in_a_loop_of_its_own_is_that_of_the_full_batch(choose, error, is_traced):
    def run(differentiate):
        online, target = network(1), network(2)
        optimizer, variables = tf.keras.optimizers.Adam(0.01, epsilon=0.01), online.trainable_variables

        def loss(states, actions, rewards, following, ends):
            future = tf.reduce_max(target(following), axis=1)
            targets = tf.stop_gradient(rewards + 0.9 * future * (1.0 - ends) - ends)
            return error(targets, choose(online(states, training=True), actions))

        step = lambda *batch: differentiate(loss, batch, variables)
        step = tf.function(step) if is_traced else step
        for count in range(3):
            batch = [tf.constant(part[BATCH * count : BATCH * (count + 1)]) for part in DATA]
            optimizer.apply_gradients(zip(step(*batch), variables))
            if count == 1:
                target.set_weights(online.get_weights())
        return online.get_weights()

    def whole(loss, batch, variables):
        with tf.GradientTape() as tape:
            value = loss(*batch)
        return tape.gradient(value, variables)

    ours = lambda loss, batch, variables: accum.value_and_gradients(loss, batch, variables, SIZE)[1]
    with silent(UserWarning):
        assert_near(run(ours), run(whole), atol=3e-6)
