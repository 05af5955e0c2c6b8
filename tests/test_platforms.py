"""The matrix on all platforms: the workflow, tox.ini and what the package index was asked say the same."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from accum._cli.doctor import matrix

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORKFLOWS = os.path.join(ROOT, ".github", "workflows")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.isdir(WORKFLOWS), reason="a source distribution has no workflows"),
]


sys.path[:0] = [os.path.join(ROOT, "scripts", folder) for folder in ("dev", "release")]

import environments as ENVIRONMENTS  # noqa: E402
import turn  # noqa: E402
import wheels  # noqa: E402

PLATFORMS = sorted(ENVIRONMENTS.PLATFORMS)


def read(*parts):
    with open(os.path.join(ROOT, *parts), encoding="utf-8") as file:
        return file.read()


def job(platform):
    """The text of a job of the workflow."""
    return re.search(r"(?s)\n  {}:\n(.*?)(?=\n  [\w-]+:\n|$)".format(platform), read(ENVIRONMENTS.WORKFLOW)).group(1)


def test_versions_are_one_environment_of_each_version_and_every_python():
    labels = ENVIRONMENTS.labels()
    assert len(labels[""]) == 50
    assert set(labels["versions"]) < set(labels[""])
    for index in (0, 1):  # every Python, and every version exactly once
        parts = [[name.split("-")[index] for name in labels[label]] for label in ("versions", "")]
        assert set(parts[0]) == set(parts[1])
    assert len(parts[0]) == len(set(parts[0])) == 14


ALL_TESTS = ['-m ""', '-m "{env:ACCUM_DEEP_TESTS:}"', '-m "{env:ACCUM_NEWEST_TESTS:}"']


def larger_tiers():
    """The environments, as tox.ini lists them, that run more than what every environment does."""
    listed = re.findall(r"(?m)^    (py[\w.,-]+): PYTEST_ADDOPTS = (.*)$", read("tox.ini"))
    assert {options for _, options in listed} == set(ALL_TESTS) | {'-m "{env:ACCUM_PER_VERSION_TESTS:not slow}"'}
    return [env_name for names, _ in listed for env_name in names.split(",")]


def test_what_differs_between_versions_runs_on_one_python_of_each():
    labels = ENVIRONMENTS.labels()
    versions = {name.split("-")[1] for label in ("", "v1", "beyond") for name in labels[label]}
    assert sorted(env_name.split("-")[1] for env_name in larger_tiers()) == sorted(versions)


def test_every_landing_runs_most_tests_on_four_versions_and_the_main_ones_on_others():
    """With Keras 2 the oldest and the newest TensorFlow, with Keras 3 the newest, and TF 1."""
    listed = dict(re.findall(r"(?m)^    (py[\w.,-]+): PYTEST_ADDOPTS = (.*)$", read("tox.ini")))
    of_all_tests = [
        env_name for names, options in listed.items() if options in ALL_TESTS for env_name in names.split(",")
    ]
    deep = ENVIRONMENTS.labels()["deep"]
    assert sorted(of_all_tests) == sorted(deep)
    assert [listed[env_name] for env_name in ("py36-tf2.2", "py311-tf2.15")] == ALL_TESTS[1:]
    assert listed["py311-tf2.21"] == listed["py36-tf2.2"]
    assert [env_name.split("-")[1] for env_name in deep] == ["tf1.15", "tf2.2", "tf2.15", "tf2.21"]
    assert deep == turn.always()
    run = read(".ci", "run")
    assert 'export ACCUM_DEEP_TESTS="not slow and not deferred" ACCUM_NEWEST_TESTS="not deferred"' in run
    assert 'export ACCUM_PER_VERSION_TESTS="not slow and not per_version"' in run and "scripts/dev/turn.py" in run


def test_every_landing_runs_environments_of_the_larger_tiers():
    each = turn.always() + turn.one_of_each_version()
    assert {env_name.replace("-keras2", "") for env_name in each} < set(larger_tiers())
    assert set(ENVIRONMENTS.labels()["versions"]) < set(each) and len(each) == len(set(each))


def test_a_few_changes_run_each_version():
    thirds = [set(turn.third(f"digest {number}")) for number in range(30)]
    assert set().union(*thirds) == set(turn.one_of_each_version())
    assert {len(third) for third in thirds} == {-(-len(turn.one_of_each_version()) // 3)}
    assert turn.third("digest 1") == turn.third("digest 1") != turn.third("digest 2")


# ----------------------------------------------------------------------------------------------------------------
# Turns

PASS = {"passed": 1, "failed": 0, "seconds": 1, "date": "2026-11-21T08:00Z"}


def test_every_environment_has_run_after_as_many_landings_as_it_says():
    records = {env_name: dict(PASS) for env_name in turn.others()}
    for merge in range(turn.MERGES):
        records.update({env_name: dict(PASS, date=f"2026-11-22T0{merge}:00Z") for env_name in turn.turn(records)})
    assert {record["date"] for record in records.values()}.isdisjoint([PASS["date"]])


def test_what_failed_and_what_never_ran_come_first():
    records = {env_name: dict(PASS, date=f"2026-11-21T{at:02}:00Z") for at, env_name in enumerate(turn.others()[1:])}
    failed = turn.others()[-1]
    records[failed]["failed"] = 1
    assert set(turn.turn(records)[:2]) == {turn.others()[0], failed}


def test_environments_that_run_side_by_side_begin_with_the_longest():
    seconds = {"py36-tf2.3": 3, "py36-tf2.4": 5, "py36-tf2.2": 4}
    records = {env_name: dict(PASS, seconds=passed) for env_name, passed in seconds.items()}
    new = "py39-tf2.9"
    assert turn.longest_first([new] + list(seconds), records) == ["py36-tf2.2", "py36-tf2.4", "py36-tf2.3", new]


def test_a_landing_prints_the_environments_that_it_runs_as_tox_takes_them(capsys):
    assert turn.main() == 0
    printed = capsys.readouterr().out.strip().split(",")
    assert len(printed) == len(set(printed)) and set(turn.always()) < set(printed) <= set(
        ENVIRONMENTS.env_names("linux")
    )


# ----------------------------------------------------------------------------------------------------------------
# Platforms


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_workflow_has_one_job_for_each_environment_of_a_platform(platform):
    listed = re.findall(r"py3[\w.-]+", re.search(r"(?s)        environment: \[(.*?)\]", job(platform)).group(1))
    assert listed == ENVIRONMENTS.env_names(platform)
    assert len(set(listed)) == len(listed) <= 256  # what a matrix may hold


def test_the_rules_here_and_the_data_that_the_package_brings_say_the_same():
    spec = importlib.util.spec_from_file_location("matrix", os.path.join(ROOT, "accum", "_cli", "doctor", "matrix.py"))
    matrix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matrix)
    systems = {platform: platform for platform in ENVIRONMENTS.PLATFORMS if platform != "metal"}
    systems.update({"macos-intel": "macos-x86_64", "macos-arm": "macos-arm64"})
    for platform, system in systems.items():
        assert set(ENVIRONMENTS.env_names(platform)) == {name for name, _, _, _ in matrix.environments(system)}


# (platform, TensorFlow version, Pythons), as published
EXIST = [
    ("linux", (2, 2), [6, 7, 8]),
    ("linux", (2, 11), [7, 8, 9, 10]),
    ("linux", (2, 15), [9, 10, 11]),
    ("linux", (2, 21), [10, 11, 12, 13]),
    ("linux-arm64", (2, 9), []),
    ("linux-arm64", (2, 11), [7, 8, 9, 10]),
    ("linux-arm64", (2, 21), [10, 11, 12, 13]),
    ("windows", (1, 15), [6, 7]),
    ("windows", (2, 13), [8, 9, 10, 11]),
    ("macos-intel", (2, 16), [9, 10, 11, 12]),
    ("macos-intel", (2, 17), []),
    ("macos-arm", (2, 4), []),
    ("macos-arm", (2, 8), [8, 9]),
    ("macos-arm", (2, 11), [8, 9, 10]),
    ("macos-arm", (2, 13), [8, 9, 10, 11]),
    ("metal", (2, 12), [8, 9, 10, 11]),
    ("metal", (2, 18), [9, 10, 11]),
    ("metal", (2, 19), []),
]


@pytest.mark.parametrize("platform,version,pythons", EXIST)
def test_the_environments_of_a_version_are_those_that_are_published(platform, version, pythons):
    parts = [ENVIRONMENTS.parts(env_name) for env_name in ENVIRONMENTS.env_names(platform)]
    assert [python for tf, python, flavour in parts if tf == version and flavour != "keras2"] == pythons


def test_the_index_was_asked_with_the_present_pins():
    asked = json.loads(read("records", "wheels.json"))["constraints"]
    assert asked == wheels.constraints_digest(), "run python scripts/release/wheels.py, and commit records/wheels.json"


@pytest.mark.parametrize(
    "said, package",
    [
        ("Because jax==0.4.13 has no usable wheels and tensorflow-intel depends on jax", "jax"),
        ("error: Wheels are required for `h5py` because building from source is disabled for `h5py`", "h5py"),
        ("Because tensorflow==2.11.1 has no usable wheels", None),
        ("No solution found when resolving dependencies", None),
    ],
)
def test_what_has_no_wheel_is_built_unless_it_is_tensorflow(said, package):
    assert wheels.without_wheel(said) == package


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_package_index_has_wheels_for_the_environments_of_a_platform_and_no_others(platform):
    record = json.loads(read("records", "wheels.json"))["cells"][platform]
    assert sorted(env_name for env_name, pins in record.items() if pins) == sorted(ENVIRONMENTS.env_names(platform))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_index_gives_each_environment_its_own_line(platform):
    record = json.loads(read("records", "wheels.json"))["cells"][platform]
    for env_name in ENVIRONMENTS.env_names(platform):
        major, minor = ENVIRONMENTS.parts(env_name)[0]
        versions = [
            value for name, value in record[env_name].items() if re.match(r"tensorflow(-cpu|-intel|-macos)?$", name)
        ]
        assert versions and all(value.startswith(f"{major}.{minor}.") for value in versions), env_name


def test_each_version_has_known_good_pins_and_tox_uses_them():
    tox = read("tox.ini")
    for version in {ENVIRONMENTS.parts(env_name)[0] for env_name in ENVIRONMENTS.env_names("linux")}:
        name = "tf{}.{}".format(*version)
        assert "tensorflow==" in read("constraints", name + ".txt")
        assert f"{name}: -c {{env:ACCUM_CONSTRAINTS:constraints}}/{name}.txt" in tox


@pytest.mark.parametrize("name", sorted(os.listdir(WORKFLOWS)) if os.path.isdir(WORKFLOWS) else [])
def test_workflows_install_nothing_but_by_tox(name):
    runs = re.findall(r"(?m)^\s*(?:- )?run: (.*)$", read(".github", "workflows", name))
    assert runs
    for command in runs:
        assert command.startswith(
            ("uvx --python 3.11 --with tox-uv tox run -e", "bash .accum/scripts/", "brew ", "|")
        ), command


def test_what_tensorflow_built_last_night_may_fail_and_meets_the_tests_of_keras_repository():
    jobs = re.split(r"(?m)^  (?=[\w-]+:$)", read(".github", "workflows", "platforms.yml").split("\njobs:\n")[1])
    lenient = [job.split(":")[0] for job in jobs if "continue-on-error: true" in job]
    assert lenient == ["nightly"]
    nightly = read("tox.ini").split("[testenv:nightly]")[1].split("\n[")[0]
    for line in ("ignore_errors = true", "    tf-nightly", "    keras-nightly"):
        assert line + "\n" in nightly
    assert re.search(r"pip install --no-deps --force-reinstall .*git\+https://\S+/keras-team/keras", nightly)
    assert 'pytest tests/test_upstream_suites.py -m ""' in nightly  # all `slow`: the other command leaves them out


def test_all_of_the_engine_has_to_be_reached_by_the_environments_whose_coverage_is_put_together():
    tox = read("tox.ini")
    label = re.search(r"(?m)^    cov = (.*)$", tox).group(1).split(", ")
    section = tox.split("[testenv:engine-coverage]")[1].split("\n[")[0]
    assert label[-1] == "engine-coverage" and "--fail-under 100\n" in section
    assert set(re.findall(r"\{work_dir\}/coverage/([\w.-]+-cov)", section)) == set(label[:-1])
    assert re.search(r"(?m)^depends = (.*)$", section).group(1).split(", ") == label[:-1]
    assert f'"{",".join(label)}"' in read(".github", "workflows", "platforms.yml")


def test_the_workflow_for_other_projects_names_environments_that_exist_and_runs_the_script():
    text = read(".github", "workflows", "across-tensorflow.yml")
    page = read("docs", "test-across-tensorflow.md")
    names = re.findall(r'"(py3\d+-tf[\w.-]+)"', text + page) + re.findall(r"ENVIRONMENT=(\S+)", page)
    known = {name for name, _, _, _ in matrix.environments()}
    assert len(names) > 6 and "workflow_call:" in text
    assert [name for name in names if re.sub("-cpu$", "", name) not in known] == []
    assert re.findall(r"(?m)^ *- run: bash \.accum/(\S+)$", text) == ["scripts/user/across_tensorflow.sh"]
    inputs = re.findall(r"(?m)^      (\w+):\n        description", text)
    passed = re.findall(r"(?m)^      (\w+): ", page)
    assert set(passed) <= set(inputs) and set(passed) >= {"accum", "environments"}


OLD_PYTHONS = ("py36-", "py37-")
"""The Pythons that neither a runner has nor uv fetches."""


@pytest.mark.parametrize("workflow", ["across-tensorflow.yml", "platforms.yml"])
def test_a_job_with_a_python_that_no_runner_has_runs_in_an_image_with_it(workflow):
    """Each job that runs on Linux, and on which `matrix.environment` names such a Python."""
    text = read(".github", "workflows", workflow)
    jobs = re.split(r"(?m)^  (?=[\w-]+:$)", text.split("\njobs:\n")[1])
    images = 0
    for linux_job in [job for job in jobs if "runs-on: ubuntu" in job]:
        names = re.findall(r"py3\d+-tf[\w.-]+", text if "inputs.environments" in linux_job else linux_job)
        needed = {name[:5] for name in names if name.startswith(OLD_PYTHONS)}
        container = re.findall(r"(?m)^    container: \$\{\{ (.*) \}\}$", linux_job)
        python_of_image = re.findall(
            r"startsWith\(matrix\.environment, '(py3\d-)'\) && 'python:3\.(\d)-\w+'", "".join(container)
        )
        assert needed <= {python for python, _ in python_of_image if python in OLD_PYTHONS}
        assert all(python == f"py3{minor}-" for python, minor in python_of_image)
        images += len(needed)
    assert images and re.search(r"(?m)^env:\n  UV_PYTHON_PREFERENCE: system\b", text)


UV = """\
#!/usr/bin/env bash
# Notes how it is called, and what the override files say, and installs nothing.
echo "uv $*" >> "$CALLS"
while [ $# -gt 0 ]; do
    [ "$1" != --overrides ] || cat "$2" >> "$CALLS"
    shift
done
mkdir -p ".across/$ENVIRONMENT/bin"
ln -sf "$PYTHON" ".across/$ENVIRONMENT/bin/python"
"""
SMALL_LIBRARY = os.path.join(ROOT, "tests", "support", "small_library")


@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_another_project_is_installed_with_its_dependencies_beside_the_tensorflow_of_its_name(tmp_path):
    """uv is a stand-in here; docs/test-across-tensorflow.md says what was run with uv itself."""
    project, calls = tmp_path / "project", tmp_path / "calls.txt"
    shutil.copytree(SMALL_LIBRARY, str(project))
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    environment = dict(os.environ, ENVIRONMENT="py37-tf1.15-cpu", COMMAND='echo "tests ran" >> "$CALLS"')
    environment.update(CALLS=str(calls), PYTHON=sys.executable)
    environment["PATH"] = str(tmp_path) + os.pathsep + os.environ["PATH"]
    script = os.path.join(ROOT, "scripts", "user", "across_tensorflow.sh")
    subprocess.run(["bash", script], cwd=str(project), env=environment, check=True)
    *before, ran = calls.read_text().splitlines()
    made, tensorflow, installed, *overrides = before
    assert "--python 3.7 " in made and tensorflow.endswith(f" -c {ROOT}/constraints/tf1.15.txt tensorflow-cpu")
    assert f"-c {ROOT}/constraints/tf1.15.txt " in installed and installed.endswith(" . pytest")
    assert "--no-deps" not in installed
    assert [line for line in overrides if not line.endswith(" ; python_version < '3'")] == []
    assert {"tensorflow", "tensorflow-cpu"} <= {line.split()[0] for line in overrides}
    assert ran == "tests ran"


def test_the_made_up_library_depends_on_tensorflow_and_on_what_no_constraint_has():
    text = read("tests", "support", "small_library", "setup.cfg")
    needed = re.findall(r"(?m)^    ([\w-]+)", text.split("install_requires =")[1])
    pinned = re.findall(r"(?m)^([\w-]+)==", "".join(read("constraints", f"tf{of}.txt") for of in matrix.VERSIONS))
    assert "tensorflow" in needed and any(name not in pinned for name in needed[1:])
    assert "tests/support/small_library" in read("docs", "test-across-tensorflow.md")
