"""Locks, audits and bills of materials: on the shipped locks, and on wheels and advisories that a test makes."""

import argparse
import glob
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

from accum._cli.doctor import (
    audit,
    checks,
    cvss,
    cyclonedx,
    drift,
    fixes,
    licenses,
    locks,
    matrix,
    osv,
    sbom,
    spdx,
    trial,
)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
pytestmark = [pytest.mark.slow, pytest.mark.weekly]


@pytest.fixture(scope="module")
def record():
    return locks.read()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of all locks, as the command of the docs writes it, without any installed package."""
    folder = tmp_path_factory.mktemp("written") / "locks"
    write_locks(folder)
    return folder


def write_locks(folder):
    command = [sys.executable, "-E", "-S", os.path.join(ROOT, "scripts", "user", "write_locks.py"), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)


def script(name):
    folder = os.path.join(ROOT, "scripts", "release")
    sys.path.append(folder)
    try:
        spec = importlib.util.spec_from_file_location("script_" + name, os.path.join(folder, name + ".py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


# ----------------------------------------------------------------------------------------------------------------
# What the locks hold


def test_the_locks_have_the_versions_of_the_constraints(record):
    assert script("ask_locks").problems(record) == []


def test_a_folder_of_locks_has_each_in_both_forms_and_always_the_same_bytes(record, written, tmp_path):
    names = [name for lock in record["locks"] for name in (lock + ".txt", f"pylock.{lock.replace('.', '_')}.toml")]
    assert len(names) > 400 and sorted(os.listdir(str(written))) == sorted(names + ["pip.txt"])
    for name in ("py39-tf2.99.txt", "pylock.py39-tf2_99-cpu.toml", "requirements.txt"):  # old locks, and a user's file
        (tmp_path / name).write_text("old")
    (tmp_path / "py39-tf2.10.txt").write_text("old")
    write_locks(tmp_path)
    assert sorted(os.listdir(str(tmp_path))) == sorted(names + ["pip.txt", "requirements.txt"])
    assert all((tmp_path / name).read_bytes() == (written / name).read_bytes() for name in names)


def test_doctor_prints_the_lock_that_is_written(written):
    assert doctor("--pins", "py39-tf2.10-cpu").stdout == (written / "py39-tf2.10-cpu.txt").read_text()
    printed = doctor("--pins", "py311-tf2.18-keras2", "--form", "pylock").stdout
    assert printed == (written / "pylock.py311-tf2_18-keras2.toml").read_text()


def test_each_environment_has_a_lock_for_each_system_on_which_it_exists(record):
    for system in matrix.SYSTEMS:
        for name, _, _, _ in matrix.environments(system):
            assert system in locks.lock(record, name).packages, (name, system)


@pytest.mark.parametrize("name", sorted(locks.read()["locks"]) + ["pip"])
def test_each_requirement_is_exact_and_hashed(name, written):
    text = (written / (name + ".txt")).read_text()
    lines = [line for line in text.replace("\\\n", "").splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.match(r"[a-z0-9.-]+==[^ ]+( ; .+?)?(\s+--hash=sha256:[0-9a-f]{64})+$", line), line


def test_a_lock_says_what_it_has_no_wheels_for(record):
    for name in record["locks"]:
        lock = locks.lock(record, name)
        text = "\n".join(locks.head(record, lock))
        assert [system for system in lock.absent if locks.SYSTEMS[system][0] not in text] == []
        for system in lock.packages:
            for package in locks.built(record, lock, system):
                assert re.search(f"No wheels on {locks.SYSTEMS[system][0]}, .*{package}", text), (name, system)


@pytest.mark.every_merge
def test_pylocks_are_valid(record, written):
    tomllib = pytest.importorskip("tomllib")
    pylock = pytest.importorskip("packaging.pylock")
    for name in sorted(record["locks"])[::9]:
        file = locks.file_name(name, "pylock")
        assert re.fullmatch(r"pylock\.[^.]+\.toml", file)  # the name that PEP 751 asks for
        with open(str(written / file), "rb") as opened:
            pylock.Pylock.from_dict(tomllib.load(opened)).validate()


MARKERS = {
    ("linux",): "sys_platform == 'linux' and platform_machine == 'x86_64'",
    ("linux", "linux-arm64"): "sys_platform == 'linux'",
    ("windows", "macos-x86_64"): "sys_platform == 'win32' or "
    "(sys_platform == 'darwin' and platform_machine == 'x86_64')",
    tuple(locks.SYSTEMS): None,
}


@pytest.mark.parametrize("systems", sorted(MARKERS), ids="+".join)
def test_a_marker_is_as_short_as_it_can_be(systems):
    assert locks.marker(systems, list(locks.SYSTEMS)) == MARKERS[systems]


ENVIRONMENTS = {
    "linux": ("linux", "x86_64"),
    "linux-arm64": ("linux", "aarch64"),
    "windows": ("win32", "AMD64"),
    "macos-x86_64": ("darwin", "x86_64"),
    "macos-arm64": ("darwin", "arm64"),
}


@pytest.mark.parametrize("name", ["py36-tf2.2", "py39-tf2.5", "py39-tf2.10", "py310-tf2.12-metal", "py312-tf2.18"])
@pytest.mark.every_merge
def test_on_each_system_a_lock_installs_what_was_resolved_there(name, record):
    markers = pytest.importorskip("packaging.markers")
    lock = locks.lock(record, name)
    text = locks.requirements(record, lock).replace("\\\n", "")
    rows = re.findall(r"(?m)^([a-z0-9.-]+)==(\S+)(?: ; (.+?))?\s+--hash", text)
    for system, pins in lock.packages.items():
        sys_platform, machine = ENVIRONMENTS[system]
        where = {"sys_platform": sys_platform, "platform_machine": machine}
        chosen = {
            package: version
            for package, version, marker in rows
            if not marker or markers.Marker(marker).evaluate(where)
        }
        assert chosen == pins


WHEELS = [
    ("numpy-1.26.4-cp39-cp39-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", 9, "linux", True),
    ("numpy-1.26.4-cp39-cp39-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", 9, "linux-arm64", False),
    ("numpy-1.26.4-cp39-cp39-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", 10, "linux", False),
    ("numpy-1.26.4-cp39-cp39-musllinux_1_1_x86_64.whl", 9, "linux", False),
    ("numpy-1.19.5-cp36-cp36m-win_amd64.whl", 6, "windows", True),
    ("numpy-1.19.5-cp36-cp36m-win32.whl", 6, "windows", False),
    ("h5py-3.1.0-cp313-cp313t-win_amd64.whl", 13, "windows", False),
    ("cryptography-1-cp37-abi3-macosx_10_12_universal2.whl", 11, "macos-arm64", True),
    ("cryptography-1-cp311-abi3-macosx_10_12_universal2.whl", 9, "macos-arm64", False),
    ("six-1.17.0-py2.py3-none-any.whl", 6, "windows", True),
    ("enum-1-py2-none-any.whl", 6, "linux", False),
]


@pytest.mark.parametrize("wheel,minor,system,fits", WHEELS)
def test_a_wheel_fits_by_its_name(wheel, minor, system, fits):
    assert locks.fits(wheel, minor, system) == fits


# ----------------------------------------------------------------------------------------------------------------
# An offline install, with the oldest pip that this Python can have


def make_wheel(folder, name, version):
    path = os.path.join(str(folder), f"{name}-{version}-py3-none-any.whl")
    info = f"{name}-{version}.dist-info"
    files = {
        name + ".py": f"__version__ = {version!r}\n",
        info + "/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        info + "/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as file:
        for inner, text in files.items():
            file.writestr(inner, text)
        file.writestr(info + "/RECORD", "".join(f"{inner},,\n" for inner in files) + info + "/RECORD,,\n")
    return path


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


@pytest.fixture()
def wheelhouse(tmp_path):
    """(folder of wheels, their lock as a requirements file)"""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    made = {name: make_wheel(folder, name, version) for name, version in (("tensorflow", "2.6.2"), ("numpy", "1.19.5"))}
    version = {"tensorflow": "2.6.2", "numpy": "1.19.5"}
    small = {
        "date": "2026-11-22",
        "files": {name: {version[name]: {os.path.basename(path): sha256(path)}} for name, path in made.items()},
        "locks": {"py36-tf2.6": {system: dict(version) if system == "linux" else {} for system in locks.SYSTEMS}},
    }
    text = locks.requirements(small, locks.lock(small, "py36-tf2.6"))
    (tmp_path / "lock.txt").write_text(text)
    return folder, tmp_path / "lock.txt"


def pip_install(wheelhouse, lock, target):
    import ensurepip

    bundled = glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl"))
    if not bundled:
        pytest.skip("this Python comes without pip")
    command = [
        sys.executable,
        os.path.join(bundled[0], "pip"),
        "install",
        "--no-index",
        "--find-links",
        str(wheelhouse),
    ]
    command += ["--no-deps", "--require-hashes", "-r", str(lock), "--target", str(target), "--no-cache-dir"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environ.update(PIP_CONFIG_FILE=os.devnull, PIP_DISABLE_PIP_VERSION_CHECK="1")
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, env=environ
    )


@pytest.mark.every_merge
def test_an_offline_install_takes_what_is_locked_and_refuses_a_changed_byte(wheelhouse, tmp_path):
    folder, lock = wheelhouse
    done = pip_install(folder, lock, tmp_path / "site")
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in (tmp_path / "site").glob("*.py")) == ["numpy.py", "tensorflow.py"]

    wheel = folder / "numpy-1.19.5-py3-none-any.whl"
    content = bytearray(wheel.read_bytes())
    content[50] ^= 1
    wheel.write_bytes(bytes(content))
    done = pip_install(folder, lock, tmp_path / "other")
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stdout
    assert not list((tmp_path / "other").glob("*.py"))


# ----------------------------------------------------------------------------------------------------------------
# The command


def doctor(*arguments):
    environ = dict(os.environ, PYTHONPATH=ROOT)
    return subprocess.run(
        [sys.executable, "-m", "accum", "doctor"] + list(arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env=environ,
    )


def test_it_prints_the_lock_of_another_machine():
    done = doctor("--pins", "py39-tf2.10", "--platform", "windows")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"(?m)^tensorflow==2\.10\.\d+ \\$", done.stdout) and " ; " not in done.stdout
    with_urls = doctor("--pins", "py39-tf2.10", "--form", "pylock", "--files", "https://files.example/w/").stdout
    assert 'lock-version = "1.0"' in with_urls and 'url = "https://files.example/w/tensorflow-2.10.1-' in with_urls


WRONG = {
    "no such lock": (["--pins", "py36-tf2.15"], "There is no lock named py36-tf2.15"),
    "no such system": (["--pins", "py39-tf2.10", "--platform", "beos"], "--platform must be one of linux, linux-arm64"),
    "no wheels": (["--pins", "py36-tf2.2", "--platform", "macos-arm"], "py36-tf2.2 is not for macOS on Apple silicon"),
    "a platform alone": (["--platform", "windows"], "are options of --pins"),
    "files of a requirements file": (
        ["--pins", "py39-tf2.10", "--files", "x"],
        "--files is an option of --form pylock and of --sbom",
    ),
    "accepted without an audit": (["--accept", "x"], "--accept is an option of --audit"),
    "no accepted list": (["--audit", "--accept", "none.json"], "none.json can't be read: No such file"),
    "a format alone": (["--sbom-format", "spdx"], "--sbom-format is an option of --sbom"),
    "two things": (["--pins", "py39-tf2.10", "--audit"], "--pins does not go with"),
    "advisories alone": (["--advisories", "x"], "--advisories is an option of --audit and --sbom"),
    "no such advisories": (["--audit", "--advisories", "none.zip"], "none.zip can't be read: No such file"),
    "advisories of no form": (["--audit", "--advisories", __file__], "is neither a directory nor a zip archive"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_arguments_are_usage(name, capsys):
    from accum._cli.doctor import command

    arguments, says = WRONG[name]
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["doctor"] + arguments)
    with pytest.raises(SystemExit) as exit_:
        parsed.perform(parsed)
    assert exit_.value.code == 2 and says in " ".join(capsys.readouterr().err.split())


def case_of(packages, python="3.9.18", system="linux", environ=()):
    installed = {name: [checks.installed.Package(name, version, [], "/s")] for name, version in packages.items()}
    facts = checks.Facts(system, python, 64, "CPython", installed, dict(environ), {})
    return checks.Case(facts, trial.Trial(None, None, None, None, "done", None, ""))


def test_an_environment_as_locked_has_no_drift(record):
    pins = locks.lock(record, "py39-tf2.10-cpu").packages["linux"]
    report = drift.report(case_of(dict(pins, pytest="8.0")), record)
    assert (report["name"], report["differ"], report["missing"], report["fix"]) == ("py39-tf2.10-cpu", {}, [], None)
    assert drift.text(report).endswith(f"all {len(pins)} packages are as locked")


def test_drift_is_named_with_the_command_that_mends_it(record):
    pins = dict(locks.lock(record, "py39-tf2.10").packages["linux"])
    locked = pins["numpy"]
    pins["numpy"] = "1.22.0"
    del pins["wrapt"]
    report = drift.report(case_of(pins), record)
    assert (report["differ"], report["missing"]) == ({"numpy": ["1.22.0", locked]}, ["wrapt"])
    assert drift.text(report).endswith(f"1 differs: numpy 1.22.0 (locked {locked}); 1 is missing: wrapt")
    assert report["fix"].startswith("python -m accum doctor --pins py39-tf2.10 --platform linux > py39-tf2.10.txt && ")


def test_a_newer_package_stays_and_the_command_that_mends_leaves_it_out(record):
    pins = dict(locks.lock(record, "py39-tf2.10").packages["linux"], tensorflow="2.10.9")
    report = drift.report(case_of(pins), record)
    assert (report["newer"], report["fix"]) == (["tensorflow"], None)
    assert drift.text(report).endswith("1 is newer, and stays: tensorflow 2.10.9 (locked 2.10.1)")
    del pins["wrapt"]
    assert "py39-tf2.10 --platform linux --keep-newer > " in drift.report(case_of(pins), record)["fix"]


def test_keep_newer_prints_no_older_version_of_what_is_installed(record, monkeypatch, capsys):
    from accum._cli.doctor import command

    pins = dict(locks.lock(record, "py39-tf2.10").packages["linux"], tensorflow="2.10.9", numpy="1.0")
    monkeypatch.setattr(command, "_untried", lambda: case_of(pins))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["doctor", "--pins", "py39-tf2.10", "--platform", "linux", "--keep-newer"])
    assert parsed.perform(parsed) == 0
    out = capsys.readouterr().out
    assert "\nnumpy==" in out and "\ntensorflow==" not in out


@pytest.mark.parametrize("package", ["tensorflow", "tensorflow-cpu"])
def test_the_newest_patch_of_1_15_is_as_locked(record, package):
    """tensorflow-cpu ends at 1.15.0, and the package tensorflow does not."""
    name = "py37-tf1.15" + ("-cpu" if package == "tensorflow-cpu" else "")
    pins = locks.lock(record, name).packages["linux"]
    assert pins[package] == {"tensorflow": "1.15.5", "tensorflow-cpu": "1.15.0"}[package]
    assert drift.report(case_of(pins, "3.7.16"), record)["fix"] is None
    head = "\n".join(locks.head(record, locks.lock(record, name)))
    assert "The newest patches differ: tensorflow has 1.15.5, tensorflow-cpu has 1.15.0" in head


@pytest.mark.parametrize("patch, says", [("2.10.0", " -c "), ("2.10.9", '"tensorflow>=2.10.9,==2.10.*"')])
def test_the_command_that_installs_does_not_go_back_to_an_older_patch(patch, says):
    assert says in case_of({"tensorflow": patch}).install()


LOCKS = {
    "py36-tf2.6": ({"tensorflow": "2.6.2"}, "3.6.15", "linux"),
    "py39-tf2.10-metal": ({"tensorflow-macos": "2.10.0", "tensorflow-metal": "0.6.0"}, "3.9.1", "macos-arm64"),
    "py311-tf2.18-keras2": ({"tensorflow": "2.18.0", "tf-keras": "2.18.0"}, "3.11.1", "windows"),
    "py39-tf2.10": ({"tensorflow-cpu": "2.10.1"}, "3.9.1", "windows"),  # the lock for tensorflow-cpu is Linux's
    None: ({"tensorflow": "2.6.2"}, "3.12.1", "linux"),
}


@pytest.mark.parametrize("name", sorted(LOCKS, key=str))
def test_an_environment_has_the_lock_of_its_distribution(name, record):
    packages, python, system = LOCKS[name]
    environ = {"TF_USE_LEGACY_KERAS": "1"} if "tf-keras" in packages else {}
    assert drift.name(case_of(packages, python, system, environ), record) == name


# ----------------------------------------------------------------------------------------------------------------
# The audit


def osv_document(id, *affected, **fields):
    """An invented advisory in the OSV format; each of `affected` is (package, events)."""
    rows = [
        {
            "package": {"ecosystem": "PyPI", "name": name},
            "ranges": [{"type": "ECOSYSTEM", "events": [{kind: version} for kind, version in events]}],
        }
        for name, events in affected
    ]
    return dict({"id": id, "modified": "2026-01-02T03:04:05Z", "affected": rows}, **fields)


RANGES = [("introduced", "0"), ("fixed", "2.9.2"), ("introduced", "2.10.0"), ("fixed", "2.10.1")]
DOCUMENTS = [
    osv_document("TEST-2026-0001", ("tensorflow", RANGES), database_specific={"severity": "MODERATE"}),
    osv_document("TEST-2026-0002", ("TensorFlow", [("introduced", "0"), ("fixed", "2.13.0")])),
    osv_document("TEST-2026-0003", ("tensorflow-cpu", [("introduced", "2.6.0"), ("fixed", "2.6.5")])),
    osv_document("TEST-2026-0004", ("tensorflow-gpu", [("introduced", "0"), ("fixed", "1.15.4")])),
    osv_document("TEST-2026-0005", ("tensorflow", [("introduced", "0"), ("last_affected", "2.99.0")])),
    osv_document("TEST-2026-0006", ("tensorflow", [("introduced", "0")]), withdrawn="2026-02-02T00:00:00Z"),
    osv_document("TEST-2026-0007", ("numpy", [("introduced", "0")]), modified="2026-03-04T00:00:00.5Z"),
]


def write_database(folder, documents):
    (folder / "deep").mkdir(parents=True)
    for document in documents:
        (folder / "deep" / (document["id"] + ".json")).write_text(json.dumps(document), encoding="utf-8")
    (folder / "README.md").write_text("no advisory")
    return str(folder)


def zipped(folder):
    path = folder + ".zip"
    with zipfile.ZipFile(path, "w") as archive:
        for parent, _, names in os.walk(folder):
            for name in names:
                archive.write(os.path.join(parent, name), os.path.relpath(os.path.join(parent, name), folder))
    return path


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return write_database(tmp_path_factory.mktemp("advisories") / "invented", DOCUMENTS)


@pytest.fixture(scope="module")
def advisories(database):
    return osv.read(database)


def outlooks(advisories, packages, locked):
    return {
        advisory.id: (advisory.outlook, advisory.says)
        for advisory in audit.find(advisories, packages, locked, "2026-11-21")
    }


def test_a_database_has_the_date_of_its_newest_change_and_no_withdrawn_advisory(advisories):
    assert (advisories["date"], advisories["source"]) == ("2026-03-04", "invented")
    assert [entry["id"] for entry in advisories["packages"]["tensorflow"]] == [
        f"TEST-2026-000{number}" for number in (1, 2, 3, 4, 5)
    ]
    ranges = [["0", "2.9.2", None], ["2.10.0", "2.10.1", None]]
    assert advisories["packages"]["tensorflow"][0] == {
        "id": "TEST-2026-0001",
        "aliases": [],
        "severity": "medium",
        "ranges": ranges,
    }


def test_every_advisory_has_an_id_and_ranges(advisories):
    for entries in advisories["packages"].values():
        assert len({entry["id"] for entry in entries}) == len(entries)
        for entry in entries:
            assert re.match(r"TEST-2026-\d{4}$", entry["id"])
            assert entry["ranges"] and all(len(part) == 3 for part in entry["ranges"])


def test_an_archive_holds_what_its_directory_holds(database, advisories):
    assert osv.read(zipped(database)) == dict(advisories, source="invented.zip")


def test_advisories_of_one_flaw_are_one(tmp_path):
    events = [("introduced", "1.0"), ("fixed", "1.2")]
    made = [
        osv_document("GHSA-test", ("made", events), aliases=["CVE-test"], database_specific={"severity": "LOW"}),
        osv_document("PYSEC-test", ("made", [("introduced", "0")]), aliases=["GHSA-test", "CVE-test"]),
    ]
    entry = {"id": "CVE-test", "aliases": ["GHSA-test"], "severity": "low", "ranges": [["1.0", "1.2", None]]}
    assert osv.read(write_database(tmp_path / "made", made))["packages"] == {"made": [entry]}


def test_versions_count_where_ranges_are_of_commits_and_other_ecosystems_do_not(tmp_path):
    made = osv_document("TEST-1", ("made", [("introduced", "abc")]), ("other", [("introduced", "0")]))
    made["affected"][0]["ranges"][0]["type"] = "GIT"
    made["affected"][0]["versions"] = ["1.1"]
    made["affected"][1]["package"]["ecosystem"] = "npm"
    packages = osv.read(write_database(tmp_path / "made", [made]))["packages"]
    assert {name: [entry["ranges"] for entry in entries] for name, entries in packages.items()} == {
        "made": [[["1.1", None, "1.1"]]]
    }


BAD = {
    "no JSON": "{",
    "a list": "[]",
    "no date": '{"id": "TEST-1"}',
    "a wrong date": '{"id": "TEST-1", "modified": "yesterday"}',
    "no id": '{"modified": "2026-01-02T03:04:05Z"}',
    "a fix before a flaw": json.dumps(osv_document("TEST-1", ("made", [("fixed", "1.0")]))),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_file_that_is_no_advisory_is_named(name, tmp_path):
    (tmp_path / "bad.json").write_text(BAD[name])
    with pytest.raises(osv.Unreadable, match="bad.json is not an advisory in the OSV format"):
        osv.read(str(tmp_path))


def test_a_directory_of_yaml_is_no_database(tmp_path):
    (tmp_path / "TEST-1.yaml").write_text("id: TEST-1")
    with pytest.raises(osv.Unreadable, match="has no .json files. Advisories in YAML must be converted to JSON first"):
        osv.read(str(tmp_path))


def test_the_table_of_tensorflow_s_own_flaws_agrees_with_records_of_them():
    """The records of these CVE numbers are another source than the release notes that the table was made of."""
    fixed = {entry["id"]: [part[1] for part in entry["ranges"]] for entry in fixes.read()["packages"]["tensorflow"]}
    assert fixed["CVE-2021-29513"] == fixed["CVE-2021-29518"] == ["2.2.3", "2.3.3", "2.4.2", "2.5.0"]
    assert fixed["CVE-2021-37662"] == ["2.3.4", "2.4.3", "2.5.1", "2.6.0"]
    assert fixed["CVE-2021-41214"] == ["2.4.4", "2.5.2", "2.6.1", "2.7.0"]
    assert fixed["CVE-2022-21726"] == ["2.5.3", "2.6.3", "2.7.1", "2.8.0"]
    # A second instance of this flaw was fixed in later patches, according to GHSA-xf83-q765-xm6m.
    assert fixed["CVE-2022-35991"] == ["2.7.4", "2.8.4", "2.9.3", "2.10.1", "2.11.0"]


@pytest.mark.parametrize(
    "version, newest, flaw, says",
    [
        ("2.10.0", "2.10.1", "CVE-2022-41883", "fixed in 2.10.1"),
        ("2.10.1", "2.10.1", "CVE-2022-41883", None),
        ("2.11.0", "2.11.0", "CVE-2022-41883", None),
        ("2.12.0", "2.12.1", "CVE-2022-41883", None),
        ("2.10.1", "2.10.1", "CVE-2023-33976", "no fix in 2.10, if it has this flaw; first fixed in 2.13.0"),
        ("1.15.0", "1.15.0", "CVE-2021-29512", "no fix in 1.15, if it has this flaw; first fixed in 2.2.3"),
        ("2.5.3", "2.5.3", "CVE-2022-29191", "no fix in 2.5, if it has this flaw; first fixed in 2.6.4"),
        ("2.6.2", "2.6.2", "CVE-2022-21725", "fixed in 2.6.3, but 2.6.2 was the newest for this TensorFlow and Python"),
        ("2.6.3", "2.6.5", "CVE-2022-27774", "fixed in 2.6.4 (in the curl that is built in)"),
        ("2.15.1", "2.15.1", "CVE-2023-33976", None),
    ],
)
def test_a_flaw_of_tensorflow_says_what_fixes_it_in_this_version(version, newest, flaw, says):
    outlook_of = outlooks(fixes.read(), {"tensorflow": version}, {"tensorflow": newest})
    assert says is None or outlook_of[flaw][1].startswith(says)
    assert (flaw in outlook_of) == (says is not None)


def test_an_audit_without_a_database_is_of_tensorflow_and_says_so():
    done = doctor("--audit", "--json")
    report = json.loads(done.stdout)
    assert list(report["looked_up"]) == ["tensorflow"]
    assert done.returncode == int(bool(report["advisories"]))
    assert audit.NEVER not in {advisory["outlook"] for advisory in report["advisories"]}  # the notes do not say so much
    text = doctor("--audit").stdout
    assert f"as of {fixes.read()['date']}" in text and "no flaw after 2.13.0, although" in text
    assert "--advisories PATH" in text


def test_an_audit_without_tensorflow_has_nothing_to_look_up(monkeypatch, capsys):
    from accum._cli.doctor import command

    monkeypatch.setattr(command, "_untried", lambda: case_of({"numpy": "1.26.4"}))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["doctor", "--audit"])
    with pytest.raises(SystemExit) as exit_:
        parsed.perform(parsed)
    assert exit_.value.code == 2 and "TensorFlow is not installed here" in capsys.readouterr().err


def test_an_audit_of_this_environment_reads_metadata_only(database, advisories):
    done = doctor("--audit", "--json", "--advisories", database)
    report = json.loads(done.stdout)
    assert report["snapshot"] == {"date": "2026-03-04", "source": "invented"}
    assert "TEST-2026-0007" in {advisory["id"] for advisory in report["advisories"]}
    assert done.returncode == 1
    import tensorflow as tf

    assert report["looked_up"]["tensorflow"].split("+")[0] == tf.__version__
    text = doctor("--audit", "--advisories", database).stdout
    assert f"Advisories as of {advisories['date']}, {report['days_old']} days ago." in text
    assert "Source: invented." in text and "\n  No fix is known: 1\n    TEST-2026-0007      unrated\n" in text


def audit_of(monkeypatch, capsys, packages, *arguments, python="3.9.18"):
    """(exit status, what it prints) of an audit of an invented environment."""
    from accum._cli.doctor import command

    monkeypatch.setattr(command, "_untried", lambda: case_of(packages, python))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["doctor", "--audit"] + list(arguments))
    status = parsed.perform(parsed)
    return status, capsys.readouterr().out


def accepted_list(tmp_path, entries):
    path = tmp_path / "accepted.json"
    path.write_text(json.dumps(entries))
    return str(path)


def test_an_audit_groups_by_the_version_that_fixes_and_puts_the_worst_first(monkeypatch, capsys, tmp_path):
    vector = "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H"
    made = [
        osv_document("TEST-1", ("tensorflow", [("introduced", "0"), ("fixed", "2.10.1")]), database_specific={}),
        osv_document("TEST-2", ("tensorflow", [("introduced", "0"), ("fixed", "2.13.0")])),
        osv_document("TEST-10", ("tensorflow", RANGES), database_specific={"severity": "LOW"}),
        osv_document("TEST-11", ("tensorflow", RANGES), severity=[{"type": "CVSS_V3", "score": vector}]),
    ]
    database = write_database(tmp_path / "made", made)
    status, text = audit_of(monkeypatch, capsys, {"tensorflow": "2.10.0"}, "--advisories", database)
    matches = re.findall(r"(?m)^ +(Fixed in|Never fixed|TEST-\d+)(.*)", text)
    assert status == 1 and "3 to be fixed by an upgrade to 2.10.1, 1 never fixed here" in text
    assert [" ".join((name + rest).split()) for name, rest in matches] == [
        "Fixed in 2.10.1: 3",
        "TEST-11 critical",
        "TEST-10 low",
        "TEST-1 unrated",
        "Never fixed in 2.10; first fixed in 2.13.0: 1",
        "TEST-2 unrated",
    ]


@pytest.mark.parametrize("until, status, says", [("2999-01-01", 0, "until 2999-01-01"), ("2020-01-01", 1, "EXPIRED")])
def test_what_is_accepted_does_not_fail_an_audit_until_its_last_day(monkeypatch, capsys, tmp_path, until, status, says):
    ids = [entry["id"] for entry in fixes.read()["packages"]["tensorflow"]]
    path = accepted_list(tmp_path, [{"ids": ids + ["CVE-1-1"], "reason": "our own data", "until": until, "by": "me"}])
    done, text = audit_of(monkeypatch, capsys, {"tensorflow": "2.10.0"}, "--accept", path)
    assert done == status and f"accepted until {until}" in text and says in text
    assert "accepted by me" in text and "our own data" in text and "CVE-1-1" in text.split("Accepted but not found")[1]


def test_what_is_not_accepted_fails_an_audit_and_is_counted(monkeypatch, capsys, tmp_path):
    ids = [entry["id"] for entry in fixes.read()["packages"]["tensorflow"]]
    path = accepted_list(tmp_path, [{"ids": ids[:-1], "reason": "our own data", "until": "2999-01-01"}])
    done, text = audit_of(monkeypatch, capsys, {"tensorflow": "1.15.0"}, "--accept", path, python="3.7.16")
    assert done == 1 and "1 of them not accepted by accepted.json." in text


def test_an_accepted_list_finds_advisories_by_their_other_names(monkeypatch, capsys, tmp_path):
    made = [osv_document("GHSA-test", ("tensorflow", [("introduced", "0")]), aliases=["CVE-2026-1"])]
    path = accepted_list(tmp_path, [{"ids": ["GHSA-test"], "reason": "x", "until": "2999-01-01"}])
    arguments = ["--advisories", write_database(tmp_path / "made", made), "--accept", path]
    assert audit_of(monkeypatch, capsys, {"tensorflow": "2.10.0"}, *arguments)[0] == 0


UNACCEPTABLE = {
    "no list": ({}, "must be a list of entries"),
    "no reason": ([{"ids": ["CVE-1-1"], "reason": " ", "until": "2999-01-01"}], "entry 1: `reason` must say why"),
    "no ids": ([{"ids": [], "reason": "x", "until": "2999-01-01"}], "`ids` must be a list of identifiers"),
    "no date": ([{"ids": ["CVE-1-1"], "reason": "x"}], "`until` must be a date such as 2027-06-30. Received: None."),
    "a typo": ([{"ids": ["CVE-1-1"], "reasons": "x", "until": "2999-01-01"}], "unknown field reasons"),
    "no object": (["CVE-1-1"], "entry 1 must be an object"),
}


@pytest.mark.parametrize("name", sorted(UNACCEPTABLE))
def test_a_malformed_accepted_list_is_usage(name, tmp_path, monkeypatch, capsys):
    entries, says = UNACCEPTABLE[name]
    path = accepted_list(tmp_path, entries)
    with pytest.raises(SystemExit) as exit_:
        audit_of(monkeypatch, capsys, {"tensorflow": "2.10.0"}, "--accept", path)
    assert exit_.value.code == 2 and says in " ".join(capsys.readouterr().err.split())


SCORES = {  # scores of the examples that accompany the specification of CVSS 3.1, and a score of 0
    "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:U/C:N/I:N/A:H": (7.5, "high"),
    "CVSS:3.0/AV:N/AC:H/PR:N/UI:R/S:U/C:L/I:N/A:N": (3.1, "low"),
    "CVSS:3.1/AV:N/AC:L/PR:N/UI:R/S:C/C:L/I:L/A:N": (6.1, "medium"),
    "CVSS:3.1/AV:N/AC:L/PR:L/UI:N/S:C/C:L/I:L/A:N": (6.4, "medium"),
    "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:C/C:H/I:H/A:H": (10.0, "critical"),
    "CVSS:3.1/AV:L/AC:L/PR:L/UI:N/S:U/C:N/I:N/A:H": (5.5, "medium"),
    "CVSS:3.1/AV:L/AC:L/PR:L/UI:N/S:U/C:N/I:N/A:N": (0.0, None),
    "CVSS:3.1/AV:L": (None, None),
    "CVSS:4.0/AV:N/AC:L": (None, None),
}


@pytest.mark.parametrize("vector", sorted(SCORES))
def test_a_vector_is_rated_by_its_base_score(vector):
    assert (cvss.base_score(vector), cvss.rating(vector)) == SCORES[vector]


def test_the_page_on_old_versions_has_the_numbers_of_the_table():
    advisories = audit.find(fixes.read(), {"tensorflow": "1.15.5"}, {"tensorflow": "1.15.5"}, "2026-11-22")
    before = audit.find(fixes.read(), {"tensorflow": "1.15.0"}, {"tensorflow": "1.15.5"}, "2026-11-22")
    own = sum(advisory.part is None for advisory in advisories)
    with open(os.path.join(ROOT, "docs", "old-tensorflow.md"), encoding="utf-8") as file:
        page = " ".join(file.read().split())
    assert f"1.15.5, it lists {len(advisories)}" in page and f"fixes for {len(before) - len(advisories)} more" in page
    assert f"{own} are in TensorFlow itself, and {len(advisories) - own} in libraries" in page


def test_an_audit_that_finds_nothing_exits_with_0(tmp_path):
    made = [osv_document("TEST-1", ("not-installed-anywhere", [("introduced", "0")]))]
    done = doctor("--audit", "--advisories", write_database(tmp_path / "made", made))
    assert done.returncode == 0 and "\n0 advisories; " in done.stdout


def test_a_flaw_says_which_patch_of_the_version_fixes_it_or_that_none_does(advisories):
    newest = outlooks(advisories, {"tensorflow": "2.10.1"}, {"tensorflow": "2.10.1"})
    assert newest["TEST-2026-0002"] == (audit.NEVER, "never fixed in 2.10; first fixed in 2.13.0")
    assert "TEST-2026-0001" not in newest
    older = outlooks(advisories, {"tensorflow": "2.10.0"}, {"tensorflow": "2.10.1"})
    assert older["TEST-2026-0001"] == (audit.HERE, "fixed in 2.10.1")


def test_a_patch_that_a_python_has_no_wheels_of_is_no_fix(advisories):
    outlook_of = outlooks(advisories, {"tensorflow": "2.6.2"}, {"tensorflow": "2.6.2"})
    assert outlook_of["TEST-2026-0003"] == (
        audit.NOT_HERE,
        "fixed in 2.6.5, but 2.6.2 was the newest for this TensorFlow and Python on 2026-11-21",
    )


def test_only_the_package_tensorflow_has_the_patches_of_1_15(advisories, record):
    newest = drift.newest_tensorflow(case_of({"tensorflow-cpu": "1.15.0"}, "3.7.16"), record)
    outlook_of = outlooks(advisories, {"tensorflow": "1.15.0"}, {"tensorflow": newest})
    here = [says for outlook, says in outlook_of.values() if outlook == audit.HERE]
    assert here and all("of the package tensorflow" in says for says in here)
    assert audit.NOT_HERE not in {outlook for outlook, _ in outlook_of.values()}


MADE = {
    "before": ([["2.5.0", "2.5.2", None]], "2.4.4", None),
    "after": ([["0", "2.4.4", None]], "2.4.4", None),
    "in": ([["0", "2.4.4", None]], "2.4.3", audit.HERE),
    "gap of ranges": ([["0", "2.4.4", None], ["2.5.0", "2.5.2", None]], "2.4.4", None),
    "last of a range without a fix": ([["0", None, "2.4.4"]], "2.4.4", audit.UNKNOWN),
    "after it": ([["0", None, "2.4.4"]], "2.5.0", None),
    "never": ([["0", "2.7.0", None]], "2.4.4", audit.NEVER),
    "open": ([["2.4.0", None, None]], "2.4.4", audit.UNKNOWN),
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_ranges_hold_their_first_version_and_not_their_fix(name):
    ranges, version, outlook = MADE[name]
    entry = {"id": "TEST-1", "aliases": [], "severity": None, "ranges": ranges}
    made = {"packages": {"tensorflow": [entry]}}
    advisories = audit.find(made, {"tensorflow": version}, {"tensorflow": "2.4.4"}, "2026-11-21")
    assert [advisory.outlook for advisory in advisories] == ([outlook] if outlook else [])


def bill(name, system, record, **more):
    lock = locks.lock(record, name)
    return sbom.Bill(name, sbom.of_lock(record, lock, system), "2026-01-02T03:04:05Z", "0.1", **more)


BILLS = [("py37-tf1.15-cpu", "linux"), ("py39-tf2.10", "windows"), ("py310-tf2.12-metal", "macos-arm64")]


@pytest.mark.parametrize("name,system", BILLS)
def test_a_bill_of_a_lock_has_its_packages_hashes_licenses_and_origins(name, system, record):
    pins = locks.lock(record, name).packages[system]
    document = json.loads(cyclonedx.text(bill(name, system, record)))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert {part["name"]: part["version"] for part in document["components"]} == pins
    assert "vulnerabilities" not in document
    for part in document["components"]:
        files = {ref["url"]: ref["hashes"] for ref in part["externalReferences"]}
        chosen = locks.files(record, name, system, part["name"], part["version"])
        assert files == {file.name: [{"alg": "SHA-256", "content": file.sha256}] for file in chosen}
        assert part["purl"] == part["bom-ref"] == f"pkg:pypi/{part['name']}@{part['version']}"
        assert part.get("hashes") == (files[chosen[0].name] if len(chosen) == 1 else None)
    licensed = {part["name"]: part["licenses"] for part in document["components"] if "licenses" in part}
    assert licensed["numpy"] == [{"expression": "BSD-3-Clause"}]
    assert set(pins) - set(licensed) <= {"tensorflow-metal"}  # its metadata are not known here
    assert document["dependencies"] == [
        {"ref": "subject", "dependsOn": sorted(p["purl"] for p in document["components"])}
    ]


@pytest.mark.parametrize("name,system", BILLS)
def test_spdx_says_the_same_as_cyclonedx(name, system, record):
    components = bill(name, system, record, url="https://wheels.example/")
    document, other = json.loads(spdx.text(components)), json.loads(cyclonedx.text(components))
    subject, packages = document["packages"][0], document["packages"][1:]
    versions = {part["name"]: part["version"] for part in other["components"]}
    assert {package["name"]: package["versionInfo"] for package in packages} == versions
    ids = [subject["SPDXID"]] + [package["SPDXID"] for package in packages]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", one) for one in ids)
    related = [(one["relationshipType"], one["relatedSpdxElement"]) for one in document["relationships"]]
    assert related == [("DESCRIBES", ids[0])] + [("CONTAINS", one) for one in ids[1:]]
    for package, part in zip(packages, other["components"]):
        assert package["licenseDeclared"] == part.get("licenses", [{}])[0].get("expression", "NOASSERTION")
        hashes = [(one["algorithm"], one["checksumValue"]) for one in package.get("checksums", [])]
        assert hashes == [("SHA256", one["content"]) for one in part.get("hashes", [])]
        if hashes:
            assert package["downloadLocation"] == "https://wheels.example/" + package["packageFileName"]
        purls = [one["referenceLocator"] for one in package["externalRefs"]]
        assert purls[0] == part["purl"] and len(purls) == 1 + len(part["externalReferences"])


@pytest.mark.parametrize("form", ["cyclonedx", "spdx"])
def test_a_bill_lists_advisories_under_the_package_that_has_them(form, advisories, record):
    components = bill("py39-tf2.10", "linux", record)
    pins = locks.lock(record, "py39-tf2.10").packages["linux"]
    audited = audit.find(advisories, pins, pins, record["date"])
    document = json.loads({"cyclonedx": cyclonedx, "spdx": spdx}[form].text(components, audited, "invented"))
    if form == "cyclonedx":
        said = {(flaw["id"], flaw["affects"][0]["ref"]) for flaw in document["vulnerabilities"]}
        assert {flaw["source"]["name"] for flaw in document["vulnerabilities"]} == {"invented"}
    else:
        refs = [(ref, package) for package in document["packages"] for ref in package.get("externalRefs", [])]
        security = [(ref, package) for ref, package in refs if ref["referenceCategory"] == "SECURITY"]
        said = {
            (ref["referenceLocator"].split("/")[-1], package["externalRefs"][0]["referenceLocator"])
            for ref, package in security
        }
    assert said == {(one.id, f"pkg:pypi/{one.package}@{one.version}") for one in audited} and said


def test_a_bill_can_be_made_again_byte_by_byte(record, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert sbom.now() == "1970-01-01T00:00:00Z"
    first, second = bill("py39-tf2.10", "linux", record), bill("py39-tf2.10", "linux", record)
    assert cyclonedx.text(first) == cyclonedx.text(second) and spdx.text(first) == spdx.text(second)
    assert bill("py39-tf2.10", "windows", record).uuid != first.uuid


def test_each_package_of_the_locks_has_a_line_on_its_license(record):
    assert set(licenses.read()) == set(record["files"])


@pytest.mark.parametrize(
    "expression, words, recorded, says",
    [
        ("MIT OR Apache-2.0", ["x"], "MIT", ("MIT OR Apache-2.0", "MIT OR Apache-2.0")),
        (None, ["Apache 2.0", "Apache Software License"], None, ("Apache-2.0", "Apache 2.0")),
        (None, ["UNKNOWN", "MIT License"], None, ("MIT", "MIT License")),
        (None, ["BSD"], "BSD-3-Clause", ("BSD-3-Clause", "BSD-3-Clause")),
        (None, ["BSD"], None, (None, "BSD")),
        (None, ["Copyright by many. " * 9], None, (None, None)),
        (None, [], "Apache-2.0 OR BSD-2-Clause", ("Apache-2.0 OR BSD-2-Clause", "Apache-2.0 OR BSD-2-Clause")),
    ],
)
def test_a_license_is_an_expression_only_where_its_words_are_clear(expression, words, recorded, says):
    assert tuple(licenses.of(expression, words, recorded)) == says


@pytest.mark.every_merge
@pytest.mark.parametrize("name,system", BILLS)
def test_a_bill_fits_the_schema_of_cyclonedx(name, system, record, advisories):
    json_validation = pytest.importorskip("cyclonedx.validation.json")
    pytest.importorskip("jsonschema")
    from cyclonedx.schema import SchemaVersion

    pins = locks.lock(record, name).packages[system]
    audited = [one for one in audit.find(advisories, pins, pins, record["date"]) if one.package in pins]
    text = cyclonedx.text(bill(name, system, record), audited, "invented")
    assert json_validation.JsonStrictValidator(SchemaVersion.V1_5).validate_str(text) is None


@pytest.mark.every_merge
@pytest.mark.parametrize("name,system", BILLS)
def test_a_bill_fits_the_rules_of_spdx(name, system, record, advisories, tmp_path):
    parse = pytest.importorskip("spdx_tools.spdx.parser.parse_anything")
    validate = pytest.importorskip("spdx_tools.spdx.validation.document_validator")
    pins = locks.lock(record, name).packages[system]
    audited = [one for one in audit.find(advisories, pins, pins, record["date"]) if one.package in pins]
    path = tmp_path / "bill.spdx.json"
    path.write_text(spdx.text(bill(name, system, record), audited, "invented"))
    assert validate.validate_full_spdx_document(parse.parse_file(str(path))) == []


def sbom_of(path, *arguments):
    """What the command prints to stderr, and the document that it writes."""
    done = doctor("--sbom", str(path), *arguments)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr, json.loads(path.read_text())


def test_the_bill_of_an_environment_has_what_is_installed_here(tmp_path, database):
    says, document = sbom_of(tmp_path / "sbom.json")
    assert "no advisories, because no --advisories were passed" in says and "vulnerabilities" not in document
    parts = {part["name"]: part for part in document["components"]}
    import tensorflow as tf

    assert {part["version"] for name, part in parts.items() if name.startswith("tensorflow")} >= {tf.__version__}
    assert parts["pytest"]["licenses"] == [{"expression": "MIT"}]
    _, with_advisories = sbom_of(tmp_path / "more.json", "--advisories", database)
    assert with_advisories["components"] == document["components"]
    assert "TEST-2026-0007" in {flaw["id"] for flaw in with_advisories["vulnerabilities"]}


def test_a_bill_of_another_lock_needs_nothing_installed(tmp_path):
    says, document = sbom_of(
        tmp_path / "b.json", "--pins", "py37-tf1.15", "--platform", "linux", "--sbom-format", "spdx"
    )
    assert document["spdxVersion"] == "SPDX-2.3" and document["name"] == "lock py37-tf1.15 on linux"
    assert {package["name"]: package.get("versionInfo") for package in document["packages"]}["tensorflow"] == "1.15.5"
    assert "without hashes" not in says


# ----------------------------------------------------------------------------------------------------------------
# Recipes


@pytest.mark.parametrize("path", sorted(glob.glob(os.path.join(ROOT, "recipes", "*"))), ids=os.path.basename)
def test_a_recipe_copies_files_that_exist_and_installs_locks_that_exist_with_hashes(path, written):
    with open(path, encoding="utf-8") as file:
        text = re.sub(r"(?m)^#.*\n", "", file.read()).replace("\\\n", "")
    steps = [line.split(" ", 1) for line in text.splitlines() if line]
    assert steps[0][0] == "FROM" and {step for step, _ in steps} == {"FROM", "COPY", "RUN"}
    python = re.search(r"python:3\.(\d+)", steps[0][1]).group(1)
    copied = [source for step, rest in steps if step == "COPY" for source in rest.split()[:-1] if source != "."]
    assert copied and all(os.path.isfile(os.path.join(ROOT, source)) for source in copied)
    assert "RUN python /src/scripts/user/write_locks.py /locks\n" in text
    installed = re.findall(r"--require-hashes -r /locks/(\S+)", text)
    assert [name for name in installed if not (written / name).exists()] == []
    assert re.match(f"py3{python}-tf", installed[-1]) and installed[:-1] == (["pip.txt"] if int(python) < 10 else [])
    for source in ("scripts/user/write_locks.py", "accum/_cli/doctor/locks.py", "accum/_cli/doctor/locks.json"):
        assert re.search(f"COPY .*{source}.* /src/{os.path.dirname(source)}/\n", text)


# ----------------------------------------------------------------------------------------------------------------
# Patches that no environment of tox has


def test_the_main_tests_passed_with_each_patch_that_is_locked_although_tox_runs_another(record):
    pins = script("pins")
    with open(os.path.join(ROOT, "records", "patches.json"), encoding="utf-8") as file:
        patches = json.load(file)
    assert pins.OWN_PATCHES
    for (tf_version, package), version in pins.OWN_PATCHES.items():
        for name in [name for name, of, _, _ in matrix.environments() if of == tf_version]:
            locked, kept = locks.lock(record, name).packages["linux"], patches[name]
            assert locked[package] == version and kept["tests"] == "main"
            assert kept["passed"] > 1000 and kept["failed"] == 0
            assert {package: locked[package] for package in kept["packages"]} == kept["packages"]
        with open(os.path.join(ROOT, "constraints", f"tf{tf_version}.txt"), encoding="utf-8") as file:
            assert pins.patches_passed(tf_version) in file.read()


def test_a_patch_whose_tests_have_not_passed_is_not_pinned(monkeypatch):
    pins = script("pins")
    monkeypatch.setitem(pins.OWN_PATCHES, ("2.2", "tensorflow"), "2.2.99")
    with pytest.raises(pins.Refused, match="no run of tensorflow 2.2.99 on Python 3.6 that passed"):
        pins.patches_passed("2.2")
