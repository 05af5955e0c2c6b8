"""From what tox leaves behind to pins, MATRIX.md and its picture: nothing that did not run is shown as passed."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "scripts", folder) for folder in ("dev", "release")]


import evidence  # noqa: E402
import freeze  # noqa: E402
import how_tested  # noqa: E402
import pins  # noqa: E402
import reports  # noqa: E402
import strategies  # noqa: E402
from matrix import data as matrix  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.weekly]

ENV_NAME = "py311-tf2.15"
SOURCES = freeze.source_digest()

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
    for name in ("freeze", "junit", "docs", "records"):
        (tmp_path / name).mkdir()

    def leave(report, env_name=ENV_NAME, **fields):
        frozen = {"cell": env_name, "arguments": [], "date": "2026-11-21T08:00Z", "system": "linux", "python": "3.11.7"}
        frozen.update(commit="abcdef0123", sources=SOURCES, packages=PACKAGES)
        frozen.update(fields)
        (tmp_path / "freeze" / (env_name + ".json")).write_text(json.dumps(frozen))
        if report is not None:
            (tmp_path / "junit" / (env_name + ".xml")).write_text(report)
        return tmp_path

    leave.folder = tmp_path
    return leave


def gather(folder, *more):
    """Run the script; the states of Linux' environments that are anything but "not run", and the page."""
    evidence.main(["--work-dir", str(folder), "--root", str(folder)] + list(more))
    records = json.loads((folder / "records" / "evidence.json").read_text(encoding="utf-8"))
    outcomes = {
        (system, name): state
        for system, states in evidence.states(records, SOURCES).items()
        for name, state in states.items()
        if state != "not run"
    }
    return outcomes, (folder / "MATRIX.md").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------
# States


def test_a_suite_that_passed_is_shown_with_its_numbers_and_versions(work):
    outcomes, page = gather(work(junit(PASSED + SKIPPED + XFAILED)))
    assert outcomes == {("linux", ENV_NAME): "passed"}
    row = "| py311-tf2.15 | passed | native |  | 2 | 1 | 1 | 0 | 62 | 3.11.7 |"
    row += " 2.15.1 |  | 1.26.4 |  | 0.1.0 | abcdef0123 |"
    assert "\n" + row in page
    assert "| 2.15 | – | – | – | not run | not run | passed | – | – |" in page
    assert page.count("passed |") == 3  # a heading, the grid, the details


@pytest.mark.parametrize("options, words", sorted(evidence.TESTS.items()))
def test_the_page_says_which_tests_were_selected(options, words, work):
    _, page = gather(work(junit(PASSED), options=options))
    assert f"\n| py311-tf2.15 | passed | native | {words} | 2 | 0 |" in page


def test_every_selection_of_tox_ini_has_a_name():
    with open(os.path.join(ROOT, "tox.ini"), encoding="utf-8") as file:
        addopts = re.findall(r"PYTEST_ADDOPTS = (.*)", file.read())
    with_a_default = re.compile(r"{env:ACCUM_\w+_TESTS:(.*)}")
    by_ci_run = {'-m "not deferred"', '-m "not slow and not deferred"'}
    assert {with_a_default.sub(r"\1", options) for options in addopts} | by_ci_run == set(evidence.TESTS)


def test_what_ran_under_wine_or_emulated_is_never_shown_as_native(work):
    """In the summary, the grid, the details, and by a letter and words in the picture."""
    _, page = gather(work(junit(PASSED), system="windows", under="Wine 10.0"))
    windows = page.split("## Windows")[1].split("## ")[0]
    assert windows.startswith("\n\n1 passed under Wine, 101 not run, of 102 environments.")
    assert "| passed under Wine |" in windows and "| py311-tf2.15 | passed | Wine 10.0 |" in windows
    assert "passed | native" not in page
    drawn = (work.folder / "docs" / "matrix.svg").read_text(encoding="utf-8")
    assert "Windows: 1 of 102 passed, 1 of them under Wine" in drawn and drawn.count(">W</text>") == 1
    assert "py311-tf2.15: passed under Wine 10.0, 2 tests passed" in drawn


def test_a_run_by_hand_with_another_patch_is_no_record_of_the_environment(work):
    folder = work(junit(PASSED))
    evidence.main(["--patches", str(folder), "--root", str(folder)])
    work(junit(FAILED), date="2026-11-20T08:00Z")  # an older run
    evidence.main(["--patches", str(folder), "--root", str(folder)])
    (kept,) = json.loads((folder / "records" / "patches.json").read_text(encoding="utf-8")).values()
    assert (kept["passed"], kept["failed"]) == (2, 0)
    assert os.listdir(str(folder / "records")) == ["patches.json"] and os.listdir(str(folder / "docs")) == []


def test_a_patch_whose_tests_have_not_passed_is_not_pinned(monkeypatch):
    assert "tensorflow 1.15.5" in pins.patches_passed("1.15")
    monkeypatch.setitem(pins.OWN_PATCHES, ("2.2", "tensorflow"), "2.2.99")
    with pytest.raises(pins.Refused, match="no run of tensorflow 2.2.99 on Python 3.6 that passed"):
        pins.patches_passed("2.2")


def test_a_failure_under_an_emulator_says_so(work):
    _, page = gather(work(junit(PASSED + FAILED), under="QEMU 7.2"))
    assert "\n\n1 failed emulated, " in page and "| **failed** emulated |" in page
    assert "| **failed** | QEMU 7.2 |" in page


@pytest.mark.parametrize("sources, kept", [(SOURCES, "native"), ("0123456789abcdef", "Wine 10.0")])
def test_wine_replaces_a_native_result_of_other_sources_only(sources, kept, work):
    gather(work(junit(PASSED), system="windows", sources=sources))
    _, page = gather(work(junit(PASSED), system="windows", under="Wine 10.0", date="2026-11-22T08:00Z"))
    assert f"| py311-tf2.15 | passed | {kept} |" in page


def test_the_results_that_ci_leaves_of_windows_are_gathered_too(work):
    (work.folder / "wine").mkdir()
    work(junit(PASSED), system="windows", under="Wine 10.0")
    for name in ("freeze", "junit"):
        (work.folder / "wine" / "results").mkdir(exist_ok=True)
        (work.folder / name).rename(work.folder / "wine" / "results" / name)
        (work.folder / name).mkdir()
    outcomes, _ = gather(work(junit(PASSED), env_name="py36-tf2.2"))
    assert outcomes == {("windows", ENV_NAME): "passed", ("linux", "py36-tf2.2"): "passed"}


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
    outcomes, page = gather(work(FAILURES[name]))
    assert outcomes == {("linux", ENV_NAME): "failed"}
    assert "| **failed** |" in page
    assert not pins.freezes(str(work.folder / "freeze"), str(work.folder / "junit"))


NOT_RUN = {
    "broken off": {"report": None},
    "not the whole suite": {"report": junit(PASSED), "arguments": ["tests/test_fit.py"]},
    "unknown environment": {"report": junit(PASSED), "env_name": "py35-tf2.15"},
    "no wheel there": {"report": junit(PASSED), "env_name": "py36-tf2.2", "system": "macos-arm64"},
    "unknown system": {"report": junit(PASSED), "system": "freebsd-x86_64"},
    "no environment": {"report": junit(PASSED), "env_name": "lint"},
}


@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_what_did_not_run_is_not_shown(name, work, capsys):
    outcomes, page = gather(work(**NOT_RUN[name]))
    assert outcomes == {}
    assert "passed |" not in page.replace("| passed | skipped |", "") and "failed**" not in page.split("## Linux")[1]
    assert "Left out: " in capsys.readouterr().out


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


def test_a_report_without_a_freeze_proves_nothing(work):
    work(junit(PASSED))
    os.remove(str(work.folder / "freeze" / (ENV_NAME + ".json")))
    assert gather(work.folder)[0] == {}


def test_with_nothing_every_environment_is_not_run(tmp_path):
    for name in ("docs", "records"):
        (tmp_path / name).mkdir()
    outcomes, page = gather(tmp_path)
    assert outcomes == {}
    for system, name in matrix.SYSTEMS.items():
        count = len(matrix.environments(system))
        assert f"## {name}\n\n{count} not run, of {count} environments." in page


def test_a_result_of_other_sources_is_old(work):
    outcomes, page = gather(work(junit(PASSED), sources="0123456789abcdef"))
    assert outcomes == {("linux", ENV_NAME): "old"} and "passed (old)" in page.split("## Linux")[1]


def test_results_stay_and_those_of_other_machines_come_in(work):
    gather(work(junit(PASSED)))
    for name in ("freeze", "junit"):
        os.remove(str(next((work.folder / name).iterdir())))
    record = evidence.record(dict(json.loads(json.dumps(FROZEN))), dict(COUNTS, failed=1))
    elsewhere = work.folder / "elsewhere.json"
    elsewhere.write_text(
        json.dumps({"windows": {ENV_NAME: record}, "linux": {ENV_NAME: dict(record, date="2026-11-20T08:00Z")}})
    )
    outcomes, _ = gather(work.folder, "--merge", str(elsewhere))
    assert outcomes == {("linux", ENV_NAME): "passed", ("windows", ENV_NAME): "failed"}


FROZEN = {"date": "2026-11-21T08:00Z", "python": "3.11.7", "commit": None, "sources": SOURCES, "packages": PACKAGES}
COUNTS = {"passed": 2, "skipped": 0, "xfailed": 0, "failed": 0, "seconds": 1}


def test_the_picture_shows_the_same(work):
    gather(work(junit(PASSED)))
    root = ElementTree.parse(str(work.folder / "docs" / "matrix.svg")).getroot()
    space = {"svg": "http://www.w3.org/2000/svg"}
    uses = [use.get("href") for use in root.iterfind("svg:use", space)]
    every = sum(len(matrix.environments(system)) for system in matrix.SYSTEMS)
    legend = ["#cell-passed", "#cell-old", "#cell-failed", "#cell-not-run"]
    assert uses[:4] == legend
    assert uses[4:].count("#cell-passed") == 1 and uses[4:].count("#cell-not-run") == every - 1
    assert root.get("role") == "img"
    assert f"Linux x86_64: 1 of {len(matrix.environments())} passed" in root.find("svg:desc", space).text
    titles = [title.text for title in root.iterfind("svg:use/svg:title", space)]
    assert "py311-tf2.15: passed, 2 tests passed, 0 failed, 2026-11-21T08:00Z" in titles


# ----------------------------------------------------------------------------------------------------------------
# Pins


WHOLE = junit(PASSED)


def leave_version(work, version="2.15", other=None, without=None, report=WHOLE):
    for name, of, python, keras_2 in matrix.environments():
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
    for name, of, _, _ in matrix.environments():
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
    command = [
        sys.executable,
        os.path.join(ROOT, "scripts", "dev", "freeze.py"),
        str(tmp_path),
        ENV_NAME,
        "-k",
        "one",
    ]
    subprocess.check_call(command, env=dict(os.environ, PYTEST_ADDOPTS='-m "not slow"'))
    assert not report.exists()
    frozen = json.loads((tmp_path / "freeze" / (ENV_NAME + ".json")).read_text(encoding="utf-8"))
    assert frozen["arguments"] == ["-k", "one"] and frozen["options"] == '-m "not slow"'
    assert frozen["sources"] == SOURCES
    assert frozen["python"] == "{}.{}.{}".format(*sys.version_info)
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ$", frozen["date"])
    assert frozen["packages"]["pytest"]["version"] == pytest.__version__
    assert frozen["packages"]["tf-slim"]["pure"] and not frozen["packages"]["numpy"]["pure"]


def test_the_digest_is_of_what_is_tested(tmp_path):
    for name in ("accum", "tests", os.path.join("accum", "__pycache__")):
        os.makedirs(str(tmp_path / name))
    (tmp_path / "accum" / "one.py").write_bytes(b"a\n")
    digest = freeze.source_digest(str(tmp_path))
    (tmp_path / "README.md").write_bytes(b"new")
    (tmp_path / "accum" / "__pycache__" / "one.pyc").write_bytes(b"new")
    assert freeze.source_digest(str(tmp_path)) == digest
    (tmp_path / "accum" / "one.py").write_bytes(b"a\r\n")  # as Windows checks it out
    assert freeze.source_digest(str(tmp_path)) == digest
    (tmp_path / "tests" / "test_one.py").write_bytes(b"")
    assert freeze.source_digest(str(tmp_path)) != digest


def test_what_is_committed_is_what_the_records_say():
    with open(os.path.join(ROOT, "records", "evidence.json"), encoding="utf-8") as file:
        records = json.load(file)
    # Written when the sources were those of some of the records, or of none.
    digests = {kept["sources"] for env_names in records.values() for kept in env_names.values()} | {"none"}
    with open(os.path.join(ROOT, "MATRIX.md"), encoding="utf-8") as file:
        page = file.read()
    with open(os.path.join(ROOT, "docs", "matrix.svg"), encoding="utf-8") as file:
        drawn = file.read()
    written = [(evidence.page(records, digest), evidence.drawing(records, digest)) for digest in sorted(digests)]
    assert (page, drawn) in written, "run python scripts/dev/evidence.py"


def test_the_page_on_testing_has_the_numbers_of_the_records():
    with open(how_tested.PAGE, encoding="utf-8") as file:
        text = file.read()
    shown = text[text.index(how_tested.BEGIN) + len(how_tested.BEGIN) : text.index(how_tested.END)]
    assert shown == how_tested.counts()


CASES = """<testsuite>
<testcase classname="tests.test_replicas" name="a" time="1"/>
<testcase classname="tests.test_strategies" name="b" time="1"><failure/></testcase>
<testcase classname="tests.test_workers" name="c"><skipped type="pytest.skip"/></testcase>
<testcase classname="tests.test_fit" name="d" time="9"/>
</testsuite>"""


def test_the_tests_of_a_strategy_are_counted_and_what_did_not_run_is_said(tmp_path):
    (tmp_path / f"{ENV_NAME}.xml").write_text(CASES)
    (tmp_path / "lint.xml").write_text(CASES)  # no environment of the matrix
    read = strategies.from_reports(str(tmp_path))
    counted = {"passed": 1, "skipped": 0, "xfailed": 0, "failed": 1, "seconds": 2}
    assert read == {ENV_NAME: {"MirroredStrategy": counted}}
    records = {}
    strategies.keep(records, ENV_NAME, "MirroredStrategy", counted)
    strategies.keep(records, ENV_NAME, "MirroredStrategy", dict(counted, passed=0))  # fewer tests of the same sources
    version = ENV_NAME.partition("tf")[2]
    (row,) = [row for row in strategies.table(records) if row.startswith(f"| {version} |")]
    date = records[ENV_NAME]["MirroredStrategy"]["date"]
    assert row == f"| {version} | 1 passed, 1 failed ({date}) | not run | not run |"
    assert "| 2.5 | not run | not run | not run |" in strategies.table(records)
