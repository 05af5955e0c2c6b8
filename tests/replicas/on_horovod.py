"""The guide to Horovod, run by Horovod itself: `tox run -e py39-tf2.10-horovod` (laws L1, L11)."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support"))

import horovod_worker as worker

pytestmark = pytest.mark.law("L11")

needs_2 = pytest.mark.skipif(not hasattr(tf, "optimizers"), reason="Keras 2 in eager execution needs TensorFlow 2")


def job(name, hosts=("-H", "localhost:2")):
    """Run a job in two processes. Returns the table that it trains, as the first one has it."""
    command = [os.path.join(os.path.dirname(sys.executable), "horovodrun"), "--gloo", "-np", "2", *hosts]
    command += [sys.executable, worker.__file__, name]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3")
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False, timeout=240
    )
    output = run.stdout.decode()
    assert run.returncode == 0, output[-3000:]
    (line,) = [line for line in output.splitlines() if "RESULT" in line]
    return np.array(json.loads(line.split("RESULT ")[1]))


def full_batches(passes_are_summed):
    """Return the table after one plain step of NumPy with all micro-batches of a cycle of both processes."""
    ids, targets, table = worker.problem()
    table, velocity, count = table.astype("float64"), 0.0, worker.K * 2 * worker.SIZE
    for start in range(0, len(ids), count):
        grad = np.zeros_like(table)
        part = slice(start, start + count)
        np.add.at(grad, ids[part], 2.0 * (table[ids[part]] - targets[part]) / (2 * count))
        velocity = 0.9 * velocity - 0.1 * grad * (worker.K if passes_are_summed else 1)
        table = table + velocity
    return table


def assert_equal(table, expected):
    np.testing.assert_allclose(table, expected, rtol=0, atol=2e-6)


@needs_2
@pytest.mark.parametrize("name", ["loop", "dense"])
def test_a_loop_makes_the_steps_of_one_process_with_all_micro_batches(name):
    assert_equal(job(name), full_batches(passes_are_summed=True))
    assert np.max(np.abs(full_batches(True) - full_batches(False))) > 1e-2


@needs_2
def test_fit_makes_the_steps_of_one_process_with_all_micro_batches():
    assert_equal(job("fit"), full_batches(passes_are_summed=False))


@needs_2
@pytest.mark.law("L1")
def test_migrated_code_makes_the_steps_of_horovods_own_accumulation():
    assert_equal(job("dense"), job("theirs"))


@needs_2
@pytest.mark.law("L12")
def test_an_elastic_job_that_loses_a_process_in_mid_cycle_makes_the_same_steps(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("echo localhost:1\necho 127.0.0.1:1\n")  # the host of a process that dies is not used again
    script.chmod(0o755)
    hosts = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    assert_equal(job("elastic", hosts), full_batches(passes_are_summed=False))


def test_a_session_makes_the_steps_of_one_process_with_all_micro_batches():
    assert_equal(job("session"), full_batches(passes_are_summed=True))


@pytest.mark.law("L1")
def test_a_migrated_session_makes_the_steps_of_horovods_own_accumulation():
    assert_equal(job("session"), job("session_theirs"))
