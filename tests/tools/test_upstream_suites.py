"""The optimizer tests that Keras 3 and tf-slim ship, run on accumulating optimizers (laws L1, L3, L14)."""

import fnmatch
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from versions import IS_KERAS_3

pytestmark = pytest.mark.slow

SUPPORT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support")

PRIVATE = "it reads or calls what only Keras itself uses of the class"
KERAS_OWN = "it accumulates through Keras, which is refused inside of ours"
OVERWRITTEN = "a variable that is overwritten with its gradient is refused"

# {pattern of names: reason}. Each test that one matches has to fail, if it passes on Keras' own optimizers.
KERAS = {
    "test_default_fallback": PRIVATE,
    "test_multi_optimizer_blocks_nested_optimizers": "the MultiOptimizer is within ours, and does not see itself",
    "MultiOptimizerTest.test_serialization": PRIVATE,
    "test_adamw_single_step": PRIVATE,
    "test_adamw_weight_decay": PRIVATE,
    "test_muon_single_step": PRIVATE,
    "test_should_use_adamw": PRIVATE,
    "test_build_with_empty_var_list": PRIVATE,
    "test_sparse_gradients_loss_scale_optimizer_sgd": "it replaces methods of the outer optimizer, not of the inner",
    "test_empty_gradients": "the message is another",
    "test_optimizer_auto_naming": "the wrapper has a name of its own",
    "test_gradient_accumulation": KERAS_OWN,
    "test_gradient_accumulation_with_weigth_decay*": KERAS_OWN,
    "test_overwrite_with_gradient_with_gradient_accumulation": KERAS_OWN,
    "ScheduleFreeAdamWTest.test_with_model": "built in a trace, it copies weights that are not there yet",
}
KERAS_TWICE = {
    "test_mixed_with_tf_variables": "Keras' warning of a variable without a gradient waits for a cycle without any",
    "test_overwrite_with_gradient": OVERWRITTEN,
    "test_finite_step_with_overwrite_stateful": OVERWRITTEN,
}

ONE_LIST = "it makes train ops for several lists of variables with one optimizer, which is refused"
SLIM_TWICE = {
    "testTrainAllVarsHasLowerLossThanTrainSubsetOfVars": "it resumes with other variables to train, and a plain "
    "`Saver` does not find their accumulators in the checkpoint; `accum.compat.v1.Saver` makes them anew",
    "testTrainingSubsetsOfVariablesOnlyUpdatesThoseVariables": ONE_LIST,
}


def outcomes(files, steps, folder):
    """Run test files in a process of their own: {class.test: "passed", "failed" or "skipped"}."""
    report = folder / f"report_{steps}.xml"
    path = os.pathsep.join([SUPPORT] + [part for part in [os.environ.get("PYTHONPATH")] if part])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "upstream", "--tb=short"]
    command += ["--rootdir", str(folder), "-m", "", "--junitxml", str(report)] + files
    environment = dict(os.environ, PYTHONPATH=path, ACCUM_UPSTREAM=str(steps), PYTEST_ADDOPTS="")
    done = subprocess.run(
        command,
        cwd=str(folder),  # no settings of ours, and no sources beside the installed ones
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert done.returncode in (0, 1), done.stdout[-3000:]
    outcomes = {}
    for case in ElementTree.parse(str(report)).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        failed, skipped = kinds & {"failure", "error"}, "skipped" in kinds
        name = case.get("classname").split(".")[-1] + "." + case.get("name")
        outcomes[name] = "failed" if failed else "skipped" if skipped else "passed"
    return outcomes


def differences(files, steps, folder, plain, expected):
    """Return {test: what is wrong}: the tests that don't do what they do on the packages' own optimizers."""
    ours = outcomes(files, steps, folder)
    assert set(ours) == set(plain)
    wrong = {}
    for name, outcome in plain.items():
        own = name.split(".")[-1]
        reasons = [why for pattern, why in expected.items() if any(fnmatch.fnmatch(n, pattern) for n in (own, name))]
        if outcome == "passed" and ours[name] != ("failed" if reasons else "passed"):
            wrong[name] = f"{ours[name]}; expected to fail: {reasons}"
    return wrong


def folder_of(package):
    """Return the folder of an installed package, without importing it; None if there is none."""
    spec = importlib.util.find_spec(package)
    return None if spec is None else os.path.dirname(spec.origin)


@pytest.fixture(scope="module")
def keras_suite(tmp_path_factory):
    """(files, outcomes on Keras' own optimizers)."""
    if not IS_KERAS_3:
        pytest.skip("the wheels of Keras 2 hold no tests")
    folder = os.path.join(folder_of("keras"), "src", "optimizers")
    files = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith("_test.py"))
    if not files:
        pytest.skip("this Keras ships no tests of optimizers")
    return files, outcomes(files, 0, tmp_path_factory.mktemp("keras"))


@pytest.mark.law("L14")
def test_keras_tests_pass_on_single_micro_steps(keras_suite, tmp_path):
    files, plain = keras_suite
    assert sum(outcome == "passed" for outcome in plain.values()) > 150
    assert differences(files, 1, tmp_path, plain, KERAS) == {}


@pytest.mark.law("L1", "L3")
def test_keras_tests_pass_on_two_micro_steps_for_each_of_their_calls(keras_suite, tmp_path):
    files, plain = keras_suite
    assert differences(files, 2, tmp_path, plain, dict(KERAS, **KERAS_TWICE)) == {}


@pytest.fixture(scope="module")
def slim_suite(tmp_path_factory):
    """(files, outcomes on tf-slim's own optimizers)."""
    folder = folder_of("tf_slim")
    if folder is None:
        pytest.skip("tf-slim is not installed")
    names = ("training/training_test.py", "layers/optimizers_test.py")
    files = [os.path.join(folder, *name.split("/")) for name in names]
    plain = outcomes(files, 0, tmp_path_factory.mktemp("slim"))
    if sum(outcome == "passed" for outcome in plain.values()) < 5:
        pytest.skip("tf-slim 1.1.0 itself fails on this TensorFlow")
    return files, plain


@pytest.mark.tf(max="2.12", because="most of tf_slim 1.1.0's own tests fail from TF 2.13 on")
@pytest.mark.law("L14")
def test_slim_tests_pass_on_single_micro_steps(slim_suite, tmp_path):
    files, plain = slim_suite
    assert differences(files, 1, tmp_path, plain, {}) == {}


@pytest.mark.tf(max="2.12", because="most of tf_slim 1.1.0's own tests fail from TF 2.13 on")
@pytest.mark.law("L1", "L3")
def test_slim_tests_pass_on_two_micro_steps_for_each_of_their_runs(slim_suite, tmp_path):
    files, plain = slim_suite
    assert differences(files, 2, tmp_path, plain, SLIM_TWICE) == {}
