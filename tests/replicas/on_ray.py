"""tests/support/ray_program.py, run by Ray itself: `tox run -e py311-tf2.15-ray` (laws L11, L12)."""

import json
import os
import signal
import time

import numpy as np
import pytest
import ray
from ray import cloudpickle, train

pytestmark = pytest.mark.law("L11")

PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "ray_program.py")
EPOCHS, K = 3, 5  # of 8 batches: cycles go on in the next epoch


class Reports(train.UserCallback):
    """Writes what the workers report to a file: each line has the metrics of all workers."""

    def __init__(self, file):
        self.file = file

    def after_report(self, run_context, metrics, checkpoint):
        with open(self.file, "a") as file:
            file.write(json.dumps(metrics) + "\n")


def program():
    """Return the names that the program defines."""
    names = {"__name__": "ray_program"}  # no module that workers could import: they get the functions themselves
    with open(PROGRAM, encoding="utf-8") as file:
        exec(compile(file.read(), PROGRAM, "exec"), names)
    return names


def text_of(path):
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def trained(folder, accum_steps=K, dies_at=None):
    """Run the program. Return the weights, and what the workers have reported."""
    names = program()
    tf, accum = names["tf"], names["accum"]

    def make_model():
        inputs = tf.keras.Input((5,))
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, use_bias=False)(inputs))
        model = accum.GradientAccumulateModel.from_model(model, accum_steps=accum_steps, last_cycle="carry")
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.set_weights([np.full([5, 1], 0.1)])
        return model

    class Die(tf.keras.callbacks.Callback):
        """Kills the second worker after so many batches, once."""

        def __init__(self, at):
            super().__init__()
            self.left = at

        def on_train_batch_end(self, batch, logs=None):
            self.left -= 1
            mark, reports = os.path.join(folder, "has-died"), os.path.join(folder, "reports")
            if self.left == 0 and train.get_context().get_world_rank() == 1 and not os.path.exists(mark):
                while "epoch" not in text_of(reports):
                    time.sleep(0.1)  # until Ray has the checkpoint of the first epoch
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    class StepLoggerThatMayDie(accum.StepLogger):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if dies_at:
                self.die.on_train_batch_end(batch)

        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)
            self.die = Die(dies_at)

    names["make_model"] = make_model
    if dies_at:
        names["accum"] = type("Accum", (), {"StepLogger": StepLoggerThatMayDie})
    trainer = names["make_trainer"](EPOCHS, str(folder))
    trainer.run_config.callbacks = [Reports(os.path.join(folder, "reports"))]
    result = trainer.fit()
    with result.checkpoint.as_directory() as kept:
        model = make_model()
        tf.train.Checkpoint(model=model).restore(os.path.join(kept, "state")).expect_partial()
    with open(os.path.join(folder, "reports")) as file:
        return model.get_weights()[0].ravel(), [json.loads(line) for line in file]


def full_batches(accum_steps=K):
    """Return the weights and the mean losses of one plain step of NumPy for each `accum_steps` batches."""
    x, y = (np.concatenate(part) for part in zip(*[[t.numpy() for t in pair] for pair in program()["make_dataset"]()]))
    x, y, weights, velocity, losses = np.tile(x, [EPOCHS, 1]), np.tile(y, [EPOCHS, 1]), np.full([5, 1], 0.1), 0.0, []
    for start in range(0, len(x) - 12 * accum_steps + 1, 12 * accum_steps):
        part = slice(start, start + 12 * accum_steps)
        error = x[part] @ weights - y[part]
        losses.append(np.mean(error**2))
        velocity = 0.9 * velocity - 0.1 * 2.0 * x[part].T @ error / (12 * accum_steps)
        weights = weights + velocity
    return weights.ravel(), losses


@pytest.fixture(scope="module", autouse=True)
def cluster():
    cloudpickle.register_pickle_by_value(__import__(__name__))
    ray.init(num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_two_workers_make_the_steps_of_one_device_and_report_each(tmp_path):
    weights, reports = trained(tmp_path)
    expected, losses = full_batches()
    np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)
    assert np.max(np.abs(full_batches(1)[0] - expected)) > 1e-2
    steps = [both for both in reports if "step" in both[0]]
    assert [both[0] for both in steps] == [both[1] for both in steps]
    assert [both[0]["step"] for both in steps] == list(range(1, len(losses) + 1))
    np.testing.assert_allclose([both[0]["loss"] for both in steps], losses, rtol=2e-5)


@pytest.mark.law("L12")
def test_a_job_whose_worker_is_killed_in_mid_cycle_goes_on_from_the_checkpoint_of_ray(tmp_path):
    weights, reports = trained(tmp_path, dies_at=12)  # in the second epoch, whose first two batches end a cycle
    assert os.path.exists(str(tmp_path / "has-died"))
    np.testing.assert_allclose(weights, full_batches()[0], rtol=0, atol=2e-6)
    assert [both[0]["epoch"] for both in reports if "epoch" in both[0]] == [1, 2, 3]
    losses = [both[0]["loss"] for both in reports if "loss" in both[0]]
    assert (
        np.isnan(losses[1]) and np.isfinite(losses[2:]).all()
    )  # the first three batches of a cycle were seen by others
