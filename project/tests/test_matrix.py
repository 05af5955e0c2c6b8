"""From what tox leaves behind to pins and MATRIX.md: nothing that did not run is shown as passed."""

import configparser
import itertools
import json
import os
import re
import subprocess
import sys

import freeze
import matrix
import pins
import pytest
import reports
from environments import data, environments

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ENV_NAME = "py311-tf2.15"
COMMIT = "abcdef0123"

PASSED = "<testcase name='one'/><testcase name='two'/>"
SKIPPED = "<testcase name='three'><skipped type='pytest.skip'/></testcase>"
XFAILED = "<testcase name='four'><skipped type='pytest.xfail'/></testcase>"
FAILED = "<testcase name='five'><failure message='no'/></testcase>"
ERROR = "<testcase name='six'><error message='no'/></testcase>"


def junit(cases, **attributes):
    said = "".join(" {}='{}'".format(*pair) for pair in sorted(dict({"time": "61.6"}, **attributes).items()))
    return f"<testsuites><testsuite name='pytest'{said}>{cases}</testsuite></testsuites>"


def package(version, requires=(), pure=True):
    return {"version": version, "requires": list(requires), "pure": pure}


PACKAGES = {
    "tensorflow-cpu": package("2.15.1", ["numpy (<2)", "six>=1.12", "jax ; extra == 'jax'"], pure=False),
    "numpy": package("1.26.4", pure=False),
    "six": package("1.17.0"),
    "tf-slim": package("1.1.0", ["absl_py>=0.2.2"]),
    "absl-py": package("2.1.0"),
    "pytest": package("9.2.0", ["iniconfig"]),
    "iniconfig": package("2.0.0"),
    "jax": package("0.4.1"),
    "tf-accum": package("0.1.0"),
}


@pytest.fixture
def work(tmp_path):
    """A function that leaves what a run of an environment leaves; there is nothing yet."""
    for name in ("freeze", "junit", os.path.join("project", "records")):
        (tmp_path / name).mkdir(parents=True)

    def leave(report, env_name=ENV_NAME, **fields):
        frozen = {"arguments": [], "date": "2026-11-21T08:00Z", "system": "linux", "python": "3.11.7", "commit": COMMIT}
        frozen.update(packages=PACKAGES)
        frozen.update(fields)
        (tmp_path / "freeze" / (env_name + ".json")).write_text(json.dumps(frozen))
        if report is not None:
            (tmp_path / "junit" / (env_name + ".xml")).write_text(report)
        return tmp_path

    leave.folder = tmp_path
    return leave


def written(folder):
    """Run the script; the page that it writes."""
    matrix.main(["--work-dir", str(folder), "--root", str(folder)])
    return (folder / "MATRIX.md").read_text(encoding="utf-8")


def cells(page, version="2.15"):
    """{system: its cell} in the row of a TensorFlow."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {version} |")]
    return dict(zip(data.SYSTEMS, [text.strip() for text in row.split("|")[2:-1]]))


# ----------------------------------------------------------------------------------------------------------------
# The page


def test_a_suite_that_passed_is_shown_with_its_commit(work):
    page = written(work(junit(PASSED + SKIPPED + XFAILED)))
    assert cells(page)["linux"] == "3.11 a; not run: 3.9, 3.10"
    assert f"| a | `{COMMIT}` |  | 2026-11-21 | 1 |" in page
    (kept,) = json.loads((work.folder / "project" / "records" / "runs.json").read_text())["linux"].values()
    assert [kept[name] for name in ("passed", "skipped", "xfailed", "failed", "seconds")] == [2, 1, 1, 0, 62]
    assert kept["packages"]["tensorflow"] == "2.15.1"


def test_all_tests_are_a_result_too(work):
    assert cells(written(work(junit(PASSED), arguments=["--slow"])))["linux"].startswith("3.11 a")


def test_other_commits_and_what_ran_under_wine_have_letters_of_their_own(work):
    work(junit(PASSED), env_name="py310-tf2.15", date="2026-11-20T08:00Z", commit="0123456789")
    written(work(junit(PASSED)))
    page = written(work(junit(PASSED), system="windows", under="Wine 10.0"))
    assert cells(page)["linux"] == "3.10 a, 3.11 b; not run: 3.9"
    assert cells(page)["windows"] == "3.11 c; not run: 3.9, 3.10"
    assert f"| c | `{COMMIT}` | Wine 10.0 | 2026-11-21 | 1 |" in page


def test_a_newer_run_replaces_an_older_one(work):
    written(work(junit(PASSED)))
    assert "failed" in cells(written(work(junit(FAILED), date="2026-11-22T08:00Z", commit="0123456789")))["linux"]
    assert "failed" in cells(written(work(junit(PASSED))))["linux"]


def test_with_nothing_every_environment_is_not_run(work):
    for version, keras_2 in matrix.rows():
        row = cells(written(work.folder), version + (", Keras 2" if keras_2 else ""))
        assert row == {system: "not run" if data.pythons(version, system) else "–" for system in data.SYSTEMS}


def names_of(text):
    """The names that a generative name of tox stands for: py{36,37}-tf2.2."""
    pieces = [piece.split(",") for piece in re.split(r"[{}]", text)]
    return {"".join(choice) for choice in itertools.product(*pieces)}


def test_tox_has_the_environments_of_the_data():
    config = configparser.ConfigParser(interpolation=None)
    config.read(os.path.join(ROOT, "tox.ini"), encoding="utf-8")
    lines = [line for line in config["tox"]["env_list"].split() if line.startswith("py")]
    assert set().union(*map(names_of, lines)) == {env_name for env_name, _, _, _ in environments()}


def test_what_is_committed_is_what_the_records_say():
    with open(os.path.join(ROOT, "project", "records", "runs.json"), encoding="utf-8") as file:
        records = json.load(file)
    with open(os.path.join(ROOT, "MATRIX.md"), encoding="utf-8") as file:
        assert file.read() == matrix.page(records), "run python project/matrix.py"


FAILURES = {
    "failure": junit(PASSED + FAILED),
    "error": junit(PASSED + ERROR),
    "only counted": junit(PASSED, errors="1"),
    "no tests": junit(""),
    "all skipped": junit(SKIPPED),
    "empty file": "",
    "cut off": junit(PASSED)[:-20],
    "something else": "<html></html>",
}


@pytest.mark.parametrize("name", sorted(FAILURES))
def test_anything_wrong_with_a_report_is_a_failure(name, work):
    assert cells(written(work(FAILURES[name])))["linux"] == "3.11 **failed** a; not run: 3.9, 3.10"
    assert not pins.freezes(str(work.folder / "freeze"), str(work.folder / "junit"))


NOT_RUN = {
    "broken off": {"report": None},
    "not the whole suite": {"report": junit(PASSED), "arguments": ["tests/keras/test_fit.py"]},
    "no commit": {"report": junit(PASSED), "commit": None},
    "unknown environment": {"report": junit(PASSED), "env_name": "py35-tf2.15"},
    "no wheel there": {"report": junit(PASSED), "env_name": "py36-tf2.2", "system": "macos-arm64"},
    "unknown system": {"report": junit(PASSED), "system": "freebsd-x86_64"},
    "no environment": {"report": junit(PASSED), "env_name": "lint"},
}


@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_what_is_no_result_is_not_shown(name, work, capsys):
    nothing = written(work.folder)
    assert written(work(**NOT_RUN[name])) == nothing
    assert "Left out: " in capsys.readouterr().out


def test_a_report_without_a_freeze_proves_nothing(work):
    nothing = written(work.folder)
    work(junit(PASSED))
    os.remove(str(work.folder / "freeze" / (ENV_NAME + ".json")))
    assert written(work.folder) == nothing


def test_what_failed_is_listed_by_environment_and_test(work, capsys):
    said = "def test_five():&#10;>   assert 1 == 2&#10;E   assert 1 == 2"
    failed = "<testcase classname='tests.test_five' name='test_five[1]'><failure message='no'>{}</failure></testcase>"
    work(junit(PASSED + failed.format(said) + ERROR, failures="1", errors="1"))
    work(junit(PASSED + SKIPPED), env_name="py310-tf2.8")
    work("cut o", env_name="py36-tf2.2")
    junit_folder = ["--junit", str(work.folder / "junit")]
    assert reports.main(junit_folder) is True
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ENV_NAME + ": tests.test_five::test_five[1]" and lines[3] == "    E   assert 1 == 2"
    assert lines[4:6] == [ENV_NAME + ": six", "    no"]
    assert lines[6:] == ["py36-tf2.2: the whole suite", "    its report can't be read", "3 reports, 3 tests failed"]
    for env_name in (ENV_NAME, "py36-tf2.2"):
        work(junit(PASSED), env_name=env_name)
    assert reports.main(junit_folder) is False
    assert capsys.readouterr().out == "3 reports, 0 tests failed\n"


# ----------------------------------------------------------------------------------------------------------------
# Pins


WHOLE = junit(PASSED)


def leave_version(work, version="2.15", other=None, without=None, report=WHOLE):
    for name, of, python, keras_2 in environments():
        if of == version and not keras_2 and python != without:
            packages = dict(PACKAGES)
            if python == "3.9":
                packages.update(other or {})
            work(report, env_name=name, python=python + ".1", packages=packages)


def write_pins(work, monkeypatch, *arguments):
    folder = work.folder / "constraints"
    (folder / "loose").mkdir(parents=True)
    (folder / "loose" / "tf2.15.txt").write_text(
        "# TensorFlow 2.15, for all\ntensorflow==2.15.*\n# a reason\nnumpy<2\n"
    )
    monkeypatch.setattr(pins, "FOLDER", str(folder))
    status = pins.main(["--work-dir", str(work.folder)] + list(arguments))
    path = folder / "tf2.15.txt"
    return status, path.read_text() if path.exists() else None


def test_pins_are_what_passed_and_what_it_needs(work, monkeypatch):
    leave_version(work, other={"absl-py": package("1.4.0")})
    status, text = write_pins(work, monkeypatch)
    assert status == 0
    assert text.startswith("# TensorFlow 2.15, for Python 3.9 to 3.11.\n")
    assert "Linux x86_64, 2026-11-21: the tests passed in them." in text
    limits, pins = text.split("# what was installed\n")
    assert limits.endswith("tensorflow==2.15.*\n# a reason\nnumpy<2\n\n")
    assert pins.splitlines() == [
        'absl-py==1.4.0; python_version == "3.9"',
        'absl-py==2.1.0; python_version == "3.10" or python_version == "3.11"',
        'numpy==1.26.4; sys_platform == "linux"',
        "six==1.17.0",
        'tensorflow==2.15.1; sys_platform == "linux" and platform_machine == "x86_64"',
        'tensorflow-cpu==2.15.1; sys_platform == "linux" and platform_machine == "x86_64"',
        "tf-slim==1.1.0",
    ]


@pytest.mark.parametrize("report", [None, junit(PASSED + FAILED), ""], ids=["no report", "failed", "empty"])
def test_no_pins_from_what_did_not_pass(report, work, monkeypatch):
    leave_version(work)
    work(report)
    if report is None:
        os.remove(str(work.folder / "junit" / (ENV_NAME + ".xml")))
    assert write_pins(work, monkeypatch, "2.15") == (1, None)


def test_no_pins_unless_all_pythons_of_a_version_passed(work, monkeypatch, capsys):
    leave_version(work, without="3.10")
    assert write_pins(work, monkeypatch) == (1, None)
    assert "tf2.15: left as it is. py310-tf2.15: no environment that passed" in capsys.readouterr().err


def make_python(work, status):
    """Stand in for the Python of each environment's environment: it ends in `status`, whatever it is to run."""
    for name, of, _, _ in environments():
        if of == "2.15":
            python = work.folder / name / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text(f"#!/bin/sh\nexit {status}\n")
            python.chmod(0o755)


def test_what_apple_s_builds_require_otherwise_is_not_pinned_for_them():
    merged = {"jax": {"3.8": "0.4.13", "3.9": "0.4.30"}, "six": {"3.8": "1.17.0", "3.9": "1.17.0"}}
    merged["h5py"] = {"3.8": "3.10.0", "3.9": "3.10.0"}
    assert pins.pins(merged, {"jax", "six"}, ["3.8", "3.9"], ("jax", "six", "h5py")) == [
        'h5py==3.10.0; sys_platform == "linux" and (sys_platform != "darwin" or platform_machine != "arm64")',
        'jax==0.4.13; (sys_platform != "darwin" or platform_machine != "arm64") and python_version == "3.8"',
        'jax==0.4.30; (sys_platform != "darwin" or platform_machine != "arm64") and python_version == "3.9"',
        'six==1.17.0; sys_platform != "darwin" or platform_machine != "arm64"',
    ]


@pytest.mark.parametrize("version", sorted(pins.LEFT_TO_ARM_MACS))
def test_the_committed_pins_leave_it_to_them_too(version):
    with open(os.path.join(ROOT, "constraints", f"tf{version}.txt"), encoding="utf-8") as file:
        pinned = [
            text for text in file if text.startswith(tuple(name + "==" for name in pins.LEFT_TO_ARM_MACS[version]))
        ]
    assert pinned and all(pins.NO_ARM_MAC in text for text in pinned)


@pytest.mark.skipif(sys.platform == "win32", reason="pins are written on Linux")
def test_pins_without_tests_say_so(work, monkeypatch):
    leave_version(work, report=None)
    make_python(work, 0)
    status, text = write_pins(work, monkeypatch, "--unproven")
    assert status == 0 and "the tests have yet to run" in text and "passed" not in text


@pytest.mark.skipif(sys.platform == "win32", reason="pins are written on Linux")
def test_no_pins_from_an_environment_in_which_plain_tensorflow_fails(work, monkeypatch, capsys):
    leave_version(work, report=None)
    make_python(work, 1)
    assert write_pins(work, monkeypatch, "2.15", "--unproven") == (1, None)
    assert ENV_NAME + ": plain TensorFlow fails in it." in capsys.readouterr().err


def test_no_pins_without_tests_from_an_environment_that_is_gone(work, monkeypatch, capsys):
    leave_version(work, report=None)
    assert write_pins(work, monkeypatch, "2.15", "--unproven") == (1, None)
    assert ENV_NAME + ": the environment no longer exists" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------
# Freezes


def test_a_freeze_names_this_environment_and_removes_the_last_report(tmp_path):
    (tmp_path / "junit").mkdir()
    report = tmp_path / "junit" / (ENV_NAME + ".xml")
    report.write_text(junit(PASSED))
    script = os.path.join(ROOT, "project", "freeze.py")
    subprocess.check_call([sys.executable, script, str(tmp_path), ENV_NAME, "-k", "one"])
    assert not report.exists()
    frozen = json.loads((tmp_path / "freeze" / (ENV_NAME + ".json")).read_text(encoding="utf-8"))
    assert frozen["arguments"] == ["-k", "one"] and frozen["commit"] == freeze.commit()
    assert frozen["python"] == "{}.{}.{}".format(*sys.version_info)
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ$", frozen["date"])
    assert frozen["packages"]["pytest"]["version"] == pytest.__version__
    assert frozen["packages"]["pytest"]["pure"] and not frozen["packages"]["numpy"]["pure"]


def test_the_commit_is_that_of_sources_without_changes(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=us", "-c", "user.email=us@example.com"]
    assert freeze.commit(str(tmp_path)) is None
    subprocess.check_call(git + ["init", "-q"])
    (tmp_path / "one.py").write_text("a")
    subprocess.check_call(git + ["add", "."])
    subprocess.check_call(git + ["commit", "-qm", "one"])
    said = subprocess.check_output(git + ["rev-parse", "HEAD"]).decode().strip()
    (tmp_path / "untracked.py").write_text("b")
    assert said.startswith(freeze.commit(str(tmp_path)))
    (tmp_path / "one.py").write_text("c")
    assert freeze.commit(str(tmp_path)) is None
