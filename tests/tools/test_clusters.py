"""What docs/devices.md shows for schedulers, checked as far as it can be without them."""

import json
import os

import pytest
import tensorflow as tf
from test_readme import ROOT, blocks

PAGE = "docs/devices.md"


def page():
    with open(os.path.join(ROOT, *PAGE.split("/")), encoding="utf-8") as file:
        return file.read()


def names_of(word):
    """The names that the block of the page with `word` in it makes."""
    (block,) = [block for block in blocks(PAGE) if word in block]
    names = {}
    exec(compile(block, PAGE, "exec"), names)
    return names


def test_tf_config_by_hand_is_one():
    (line,) = [line for line in page().splitlines() if line.startswith("export TF_CONFIG=")]
    config = json.loads(line.partition("=")[2].strip("'"))
    assert tf.train.ClusterSpec(config["cluster"]).num_tasks("worker") == 2
    assert config["task"] == {"type": "worker", "index": 0}


def test_hosts_become_tf_config():
    tf_config = names_of("SM_HOSTS")["tf_config"]
    config = json.loads(tf_config({"SM_HOSTS": '["a", "b", "c"]', "SM_CURRENT_HOST": "b"}, port=7))
    assert config == {"cluster": {"worker": ["a:7", "b:7", "c:7"]}, "task": {"type": "worker", "index": 1}}


@pytest.mark.tf("2.5", because="the page says that it needs TensorFlow 2.5")
def test_tensorflow_reads_the_variables_of_slurm(monkeypatch):
    for name in ("PROCID", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE"):
        monkeypatch.setenv(f"SLURM_{name}", "")  # what the block sets is undone
    names = names_of("SlurmClusterResolver")
    assert names["cluster"] == {"worker": ["node1:8888", "node2:8888"]}
    assert (names["resolver"].task_type, names["resolver"].task_id) == ("worker", 1)


def test_the_job_of_kubernetes_has_what_its_operator_needs():
    yaml = pytest.importorskip("yaml", reason="comes with the packages of two environments")
    job = yaml.safe_load(page().partition("```yaml\n")[2].partition("```")[0])
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 2 and worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow" and container["command"] == ["python", "train.py"]
