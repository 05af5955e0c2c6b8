"""Files that earlier versions of accum wrote are read, and what they hold goes on (law L12).

tests/support/make_stored.py wrote them, in a folder for each of some TensorFlow versions.
The oracle is NumPy on full batches.
"""

import json
import os
import re
import shutil

import make_stored
import numpy as np
import pytest
import tensorflow as tf
from versions import IS_KERAS_3, TF_VERSION

import accum
import accum.convert
import accum.testing

pytestmark = [pytest.mark.law("L12"), pytest.mark.slow]

STORED = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support", "stored")
FOLDERS = sorted(os.listdir(STORED))
TOLERANCE = 2e-6
OF_KERAS_2 = "Keras 3 does not know the `jit_compile` of an optimizer that Keras 2.11 and later store"
# What Keras itself does not read: (part of folder-name, whether this TensorFlow can't, reason)
UNREAD = [
    (
        "2.10-optimizer-new",
        TF_VERSION >= (2, 11),
        "Keras 2.11 put the number of steps before an optimizer's other variables, so it reads no checkpoint of the "
        "preview in 2.10, not even a plain one",
    ),
    ("2.10-model-new", TF_VERSION >= (2, 11), "the same"),
    ("model.h5", IS_KERAS_3, "Keras 3 does not know the `reduction` of a loss that Keras 2 stores"),
    ("saved-model", IS_KERAS_3, "Keras 3 reads no SavedModel"),
    ("2.15-model.keras", IS_KERAS_3, OF_KERAS_2),
    ("2.15-optimizer-config", IS_KERAS_3, OF_KERAS_2),
]


def run_of(folder):
    with open(os.path.join(STORED, folder, "run.json")) as file:
        return json.load(file)


def version_of(folder):
    return tuple(int(part) for part in re.findall(r"\d+", run_of(folder)["tensorflow"])[:2])


def stored(*names, by_later_versions=False):
    """Return pytest parameters: a folder and one of the names, for each that it holds.

    A file of Keras is read by the TensorFlow that wrote it and by later ones. `by_later_versions` includes the files of
    later ones, too.
    """
    parameters = []
    for folder in FOLDERS:
        files = os.listdir(path_of(folder))
        for name in names:
            if (by_later_versions or version_of(folder) <= TF_VERSION) and {name, name + ".index", name + ".zip"} & set(
                files
            ):
                marks = [
                    pytest.mark.xfail(reason=why, strict=True)
                    for part, unread, why in UNREAD
                    if unread and part in folder + "-" + name
                ]
                parameters.append(pytest.param(folder, name, id=folder + "-" + name, marks=marks))
    return parameters


def path_of(folder, name=""):
    return os.path.join(STORED, folder, name)


def replicas_of(name):
    return 2 if name.endswith("-replicas") else 1


@pytest.fixture
def unpacked(folder, name, tmp_path):
    """The path of a file or folder that is stored as a ZIP file."""
    shutil.unpack_archive(path_of(folder, name + ".zip"), str(tmp_path))
    return str(tmp_path / name)


def assert_ends_as(expected, weights):
    for one, other in zip(weights, expected):
        np.testing.assert_allclose(one, np.array(other), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("folder,name", stored("session", "session-replicas", by_later_versions=True))
def test_a_session_goes_on_from_a_stored_checkpoint_in_mid_cycle(folder, name):
    run = run_of(folder)
    weights = make_stored.session(run, restore=path_of(folder, name), replicas=replicas_of(name))
    assert_ends_as(run["fed"]["steps"][-1], weights)


FAMILIES = make_stored.families()


@pytest.mark.tf("2.2")
@pytest.mark.parametrize(
    "folder,name", stored(*["optimizer-" + family + more for family in FAMILIES for more in ("", "-replicas")])
)
def test_an_optimizer_goes_on_from_a_stored_checkpoint_in_mid_cycle(folder, name):
    run, module = run_of(folder), FAMILIES[name.replace("optimizer-", "").replace("-replicas", "")]
    resumed = make_stored.OptimizerRun(run, module, replicas_of(name), is_new=False).restore(path_of(folder, name))
    assert_ends_as(run["fed"]["steps"][-1], resumed.feed(make_stored.after(run)).values())


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("folder,name", stored(*["model-" + family for family in FAMILIES]))
def test_a_model_goes_on_from_a_stored_checkpoint_in_mid_cycle(folder, name):
    run = run_of(folder)
    model = make_stored.make_model(run, FAMILIES[name[len("model-") :]])
    tf.train.Checkpoint(model=model).restore(path_of(folder, name))
    assert_ends_as(run["model"]["steps"][-1], make_stored.train(run, model, make_stored.after(run)))


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("folder,name", stored("session", "session-replicas", by_later_versions=True))
def test_keras_goes_on_from_a_stored_session(folder, name):
    run = run_of(folder)
    resumed = make_stored.OptimizerRun(run, tf.keras.optimizers, is_new=False)
    accum.convert.from_v1(path_of(folder, name), resumed.variables, resumed.optimizer)
    assert_ends_as(run["fed"]["steps"][-1], resumed.feed(make_stored.after(run)).values())


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("folder,name", stored("model.h5", "model.keras"))
def test_a_stored_file_of_a_model_trains_on(folder, name, unpacked):
    run, model = run_of(folder), tf.keras.models.load_model(unpacked)
    assert_ends_as(run["model"]["steps"][0], model.get_weights())
    numbers = list(make_stored.everything(run))[run["accum_steps"] :]
    assert_ends_as(run["model"]["steps"][-1], make_stored.train(run, model, numbers))


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("folder,name", stored("saved-model"))
def test_a_stored_saved_model_has_its_weights_and_options(folder, name, unpacked):
    run, model = run_of(folder), tf.keras.models.load_model(unpacked)
    assert_ends_as(run["model"]["steps"][0], model.get_weights())
    assert model.optimizer.accum_steps == run["accum_steps"]


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("folder,name", stored("optimizer-config.json"))
def test_an_optimizer_made_from_a_stored_config_has_its_options(folder, name):
    run = run_of(folder)
    with open(path_of(folder, name)) as file:
        optimizer = tf.keras.optimizers.deserialize(json.load(file))
    assert isinstance(optimizer, accum.GradientAccumulateOptimizer)
    config = optimizer.get_config()
    assert [config[key] for key in ("accum_steps", "reduction", "nonfinite", "name")] == [
        run["accum_steps"],
        "mean",
        "skip_micro",
        "mine",
    ]
    assert_ends_as(
        run["fed"]["steps"][-1],
        make_stored.OptimizerRun(run, make=lambda: optimizer).feed(make_stored.everything(run)).values(),
    )


@pytest.mark.tf("2.2")
@pytest.mark.parametrize("folder,name", stored("model-config.json"))
def test_a_model_made_from_a_stored_config_has_its_options(folder, name):
    run = run_of(folder)
    with open(path_of(folder, name)) as file:
        model = accum.GradientAccumulateModel.from_config(json.load(file))
    config = model.get_config()["accumulation"]
    assert {key: config[key] for key in run["options"]} == run["options"] and config["accum_steps"] == run[
        "accum_steps"
    ]
    model.set_weights([np.array(w) for w in run["model"]["start"]])
    weights = make_stored.train(run, make_stored.compiled(run, model), make_stored.everything(run))
    assert_ends_as(run["model"]["steps"][-1], weights)


@pytest.mark.parametrize("folder,name", stored("recording.json", by_later_versions=True))
@pytest.mark.parametrize("error", [0.0, 1e-4])
def test_a_stored_recording_is_compared_with_one_of_today(folder, name, error, tmp_path):
    run = run_of(folder)
    today = [[np.array(dense) + error, table] for dense, table in run["fed"]["steps"]]
    make_stored.record(str(tmp_path / name), today)
    assert (accum.testing.compare(path_of(folder, name), str(tmp_path / name)).first is None) == (error == 0.0)


def test_what_is_stored_is_small_and_has_a_session_of_each_version():
    files = [os.path.join(path, name) for path, _, names in os.walk(STORED) for name in names]
    assert sum(map(os.path.getsize, files)) < 300000
    for folder in FOLDERS:
        names = set(os.listdir(path_of(folder)))
        assert {"run.json", "recording.json", "session.index", "session-replicas.index"} <= names
        assert (version_of(folder) < (2, 2)) or {"optimizer-config.json", "model-config.json"} <= names
