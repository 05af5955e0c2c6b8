"""Workers in separate processes make the steps of one device, even if some are killed (laws L11, L12)."""

import csv
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from addresses import free_addresses
from versions import TF_VERSION
from worker_problems import (
    CYCLES,
    normalised_network,
    outcome,
    problem,
    trained_with_validation,
)

pytestmark = [pytest.mark.tf("2.2"), pytest.mark.slow, pytest.mark.law("L11")]

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "worker.py")
PATIENCE = 300


def job(folder, what, workers, **of_the_last):
    """Run a job to its end, or to the death of one worker. Returns what the first one printed, and who died."""
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    environment.pop("TF_CONFIG", None)
    addresses = free_addresses(workers)
    processes = []
    for index in range(workers):
        task = {"what": what, "folder": str(folder), "addresses": addresses, "index": index}
        task.update(of_the_last if index == workers - 1 else {})
        with open(str(folder / f"log-{index}"), "w") as log:
            command = [sys.executable, "-W", "ignore", SCRIPT, json.dumps(task)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment))
    end = time.time() + PATIENCE
    try:
        while time.time() < end and any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                break  # the others may wait for it for ever: whoever runs the job ends them too
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
        outputs = [process.communicate()[0].decode() for process in processes]
    if of_the_last:
        assert codes[-1] == -9, (folder / f"log-{workers - 1}").read_text()[-3000:]
        return None
    assert codes == [0] * workers, "\n".join((folder / f"log-{i}").read_text()[-2000:] for i in range(workers))
    return json.loads(outputs[0].splitlines()[-1])


def full_batches(cycles):
    """Weights after one plain Adam step for each of `cycles`, slices of the data."""
    random = np.random.RandomState(0)
    x = random.normal(size=(72, 5)).astype("float32")
    y, first = random.normal(size=(72, 1)).astype("float32"), random.normal(size=(5, 1)).astype("float32")
    weights, optimizer = tf.Variable(first), tf.keras.optimizers.Adam(0.1)
    for rows in cycles:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x[rows] @ weights - y[rows]) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
    return weights.numpy().ravel()


LOOP = [slice(0, 36), slice(36, 72)]
FIT = [list(range(18)), list(range(18, 24)) + list(range(12)), list(range(12, 24)) + list(range(6))]
FIT.append(list(range(6, 24)))  # 12 micro-batches of 6 over 24 examples, three times
EPOCHS = 3 * [slice(0, 18), slice(18, 24)]


def assert_steps(result, cycles):
    weights, steps = result
    assert steps == len(cycles)
    np.testing.assert_allclose(weights, full_batches(cycles), rtol=0, atol=2e-6)


@pytest.mark.law("L5")
def test_workers_with_unequal_shares_equal_one_device(tmp_path):
    assert_steps(job(tmp_path, "loop", 3), LOOP)  # one of them has no example


@pytest.mark.law("L12")
def test_a_job_whose_worker_was_killed_in_mid_cycle_goes_on_from_a_checkpoint(tmp_path):
    job(tmp_path, "loop", 2, dies_at=5)  # the last checkpoint is of 4 micro steps, one into the second cycle
    assert_steps(job(tmp_path, "loop", 2), LOOP)


@pytest.mark.law("L12")
def test_a_worker_killed_before_and_after_each_micro_step(tmp_path):
    for half in range(1, 13):
        folder = tmp_path / str(half)
        folder.mkdir()
        job(folder, "loop_saved_each", 2, dies_at=half / 2)
        assert_steps(job(folder, "loop_saved_each", 2), LOOP)


@pytest.mark.tf("2.4", keras=2, because="TF 2.3's fails with several workers, and Keras 3's saves no unfinished cycle")
@pytest.mark.law("L12")
def test_fit_goes_on_from_a_backup_in_mid_cycle(tmp_path):
    job(tmp_path, "fit", 2, dies_at=6)
    assert_steps(job(tmp_path, "fit", 2), FIT)


@pytest.mark.tf("2.4", because="TF 2.3's BackupAndRestore fails with several workers when it deletes its backup")
@pytest.mark.law("L6")
def test_fit_goes_on_from_the_backup_of_an_epoch(tmp_path):
    job(tmp_path, "epochs", 2, dies_at=6)
    assert_steps(job(tmp_path, "epochs", 2), EPOCHS)


@pytest.mark.law("L12")
def test_a_cycle_goes_on_with_another_number_of_workers(tmp_path):
    job(tmp_path, "loop", 2, dies_at=5)
    assert_steps(job(tmp_path, "loop", 3), LOOP)


@pytest.mark.tf("2.4", because="TF 2.2 and 2.3 give the replicas of each worker the same numbers")
@pytest.mark.law("L19")
@pytest.mark.parametrize("workers", [2, 4])
def test_the_batch_of_all_workers_is_normalised_as_one(tmp_path, workers):
    result, steps = job(tmp_path, "whole_batch", workers)
    tf.keras.backend.clear_session()
    net = normalised_network()
    net.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    expected = outcome(net, trained_with_validation(net))
    assert steps == 6
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6)
    other = normalised_network()
    other.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    alone = outcome(other, trained_with_validation(other, batch_size=12))
    assert np.max(np.abs(alone - expected)) > 1e-3  # and the batch of each worker makes another network


@pytest.mark.law("L17")
@pytest.mark.skipif(TF_VERSION >= (2, 4), reason="each replica has a number of its own since TF 2.4")
def test_a_loss_over_workers_that_have_one_number_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="(.*\n)*.*give the replicas of each worker the same numbers"):
        job(tmp_path, "whole_batch", 2)


@pytest.mark.tf("2.3", because="TF 2.2 cancels the collectives of a worker after an error for ever")
@pytest.mark.law("L18")
def test_workers_agree_on_a_smaller_micro_batch(tmp_path):
    assert_steps(job(tmp_path, "micro_batches", 2), LOOP)


@pytest.mark.law("L18")
def test_workers_with_unequal_parts_that_fit_split_none_and_do_not_wait_for_each_other(tmp_path):
    cycles = [slice(0, 7), slice(7, 16), slice(16, 26), slice(26, 37)]
    assert_steps(job(tmp_path, "unequal_parts", 2), cycles)


@pytest.mark.law("L11")
def test_each_worker_logs_the_steps_of_all_workers(tmp_path):
    result, steps = job(tmp_path, "logged", 2)
    rows = np.reshape(result, [4, -1])
    assert steps == 4
    x, y, weights = problem()
    with open(str(tmp_path / "steps.csv")) as file:
        np.testing.assert_allclose([list(map(float, row)) for row in list(csv.reader(file))[1:]], rows, rtol=1e-6)
    for number, row in enumerate(rows):  # each of 36 examples: three batches of 12, 6 for each worker, two at once
        part = slice(36 * (number % 2), 36 * (number % 2) + 36)
        error = x[part] @ weights - y[part]
        gradients = 2.0 * error * x[part]  # of each example
        norm = np.linalg.norm(gradients.mean(0))
        np.testing.assert_allclose(row[:5], [number + 1, np.mean(error**2), norm, 36, 0.1], rtol=2e-5)
        weights = weights - 0.1 * gradients.mean(0)[:, None]
    assert np.isfinite(rows[0, 5])


@pytest.mark.law("L18")
@pytest.mark.parametrize("workers", [2, 4])
def test_sums_that_overlap_with_the_last_micro_batch_make_the_steps_of_one_device(tmp_path, workers):
    result, _ = job(tmp_path, "overlapped", workers)
    for make_network, accum_steps, _ in CYCLES.values():
        expected = one_device(make_network, 24 * accum_steps)
        weights, result = result[: len(expected)], result[len(expected) :]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=2e-6)
        assert np.max(np.abs(weights - one_device(make_network, 24 if accum_steps == 2 else 12))) > 1e-3
    assert not result


def one_device(make_network, batch_size):
    """Weights of plain Keras after the steps of two epochs of 72 examples, the last of each with what is left."""
    tf.keras.backend.clear_session()
    x, y, _ = problem()
    net = make_network()
    net.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    net.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(value) for value in net.get_weights()])


@pytest.mark.law("L11")
@pytest.mark.tf("2.5", because="TF 2.4 and earlier can't sum gradients over workers in packs")
def test_a_gradient_is_summed_over_workers_before_the_others_are_computed(tmp_path):
    result, _ = job(tmp_path, "sums_of_packs", 2)
    packs, single = (set(counts[counts > 0]) for counts in np.reshape(result, [2, -1]))
    assert len(packs) >= 5  # one for the examples of each worker, and one for each layer
    assert max(packs) - sorted(packs)[1] >= 6  # products: two for each of three layers
    assert len(single) == 2  # in one pack, every gradient waits for all
