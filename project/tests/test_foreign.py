"""Environments of other systems on Linux x86_64: they have the files of their system; results name what ran them."""

import json
import os

import emulated
import environments as ENVIRONMENTS
import foreign
import pytest
import wine

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
pytestmark = [
    pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, ".git")), reason="only a clone has a list of its files"),
    pytest.mark.skipif(os.name == "nt", reason="they run on Linux"),
]

WINDOWS, AARCH64 = wine.Windows(), emulated.Aarch64()


@pytest.mark.parametrize("system", [WINDOWS, AARCH64], ids=["windows", "aarch64"])
def test_versions_are_one_environment_of_each_version_that_can_run(system):
    expected = {ENVIRONMENTS.parts(env_name)[0] for env_name in foreign.possible(system)}
    assert [ENVIRONMENTS.parts(env_name)[0] for env_name in foreign.versions(system)] == sorted(expected)
    assert "py311-tf2.15" in foreign.versions(system)


@pytest.mark.parametrize(
    "system, env_name",
    [(WINDOWS, "py36-tf2.2"), (AARCH64, "py310-tf2.10"), (AARCH64, "py39-tf2.9"), (WINDOWS, "py313-tf2.21")],
)
def test_an_environment_that_cannot_run_is_refused(system, env_name):
    with pytest.raises(foreign.Failed, match="ENVIRONMENT must be one of: .*Received: " + env_name):
        foreign.chosen(system, ["py39-tf2.10", env_name])


def test_links_are_copied_as_git_makes_them_on_the_system(tmp_path):
    if not os.path.islink(os.path.join(ROOT, "accum", "compat")):
        pytest.skip("this clone has no links")
    foreign.copy_checkout(WINDOWS, str(tmp_path / "windows"))
    foreign.copy_checkout(AARCH64, str(tmp_path / "linux"))
    assert (tmp_path / "windows" / "accum" / "compat").read_text() == os.path.join(os.pardir, "compat")
    assert os.readlink(str(tmp_path / "linux" / "accum" / "compat")) == os.path.join(os.pardir, "compat")
    for tree in ("windows", "linux"):
        assert (tmp_path / tree / "compat" / "v1" / "__init__.py").is_file()


@pytest.mark.parametrize("system, root", [(WINDOWS, "root"), (AARCH64, "bullseye")], ids=["windows", "aarch64"])
def test_a_result_says_under_what_and_of_which_commit_it_is(tmp_path, monkeypatch, system, root):
    env_name, left = "py39-tf2.10", tmp_path / root / "environment" / "work"
    for kind, name, text in (
        ("freeze", env_name + ".json", "{}"),
        ("junit", env_name + ".xml", "<x/>"),
    ):
        (left / kind).mkdir(parents=True)
        (left / kind / name).write_text(text)
    monkeypatch.setattr(type(system), "under", lambda self, folder, env_name: "a layer 10.0")
    monkeypatch.setattr(foreign.freeze, "commit", lambda: "abcdef0123")
    foreign.keep_results(system, str(tmp_path), env_name)
    frozen = json.loads((tmp_path / "results" / "freeze" / (env_name + ".json")).read_text())
    assert frozen == {"under": "a layer 10.0", "commit": "abcdef0123"}
    assert (tmp_path / "results" / "junit" / (env_name + ".xml")).read_text() == "<x/>"


def test_an_earlier_report_is_not_taken_for_that_of_a_run_that_was_broken_off(tmp_path, monkeypatch):
    env_name = "py38-tf2.4"
    (tmp_path / "results" / "junit").mkdir(parents=True)
    earlier = tmp_path / "results" / "junit" / (env_name + ".xml")
    earlier.write_text("<x/>")
    (tmp_path / "root" / "environment" / "work" / "freeze").mkdir(parents=True)
    (tmp_path / "root" / "environment" / "work" / "freeze" / (env_name + ".json")).write_text("{}")
    monkeypatch.setattr(wine.Windows, "under", lambda self, folder, env_name: "Wine 10.0")
    foreign.keep_results(WINDOWS, str(tmp_path), env_name)
    assert not earlier.exists()


REPORT = "<testsuite tests='1'><testcase classname='a' name='b'>{}</testcase></testsuite>"


@pytest.mark.parametrize(
    "content, status", [("", 0), ("<failure/>", 1), (None, 1)], ids=["passes", "fails", "ends early"]
)
def test_the_exit_status_says_whether_an_environment_passed(tmp_path, monkeypatch, content, status):
    started = []

    def pytest_of_an_environment(root, command, environment, log, minutes):
        started.append(command)
        if "-c" in command and content is not None:
            foreign.write(
                AARCH64.place(str(tmp_path), "py39-tf2.10", "work", "junit", "py39-tf2.10.xml"),
                REPORT.format(content).encode(),
            )
        return True

    monkeypatch.setattr(foreign, "needed", lambda system: None)
    monkeypatch.setattr(emulated.Aarch64, "make", lambda self, folder, env_name: None)
    monkeypatch.setattr(foreign, "prepare", lambda system, folder, env_name: {"PYTEST_ADDOPTS": ""})
    monkeypatch.setattr(foreign, "logged", pytest_of_an_environment)
    os.makedirs(AARCH64.place(str(tmp_path), "py39-tf2.10"))
    assert foreign.main(AARCH64, "", ["run", str(tmp_path), "py39-tf2.10", "--pytest", "tests/tools"]) == status
    assert len([command for command in started if "-c" in command]) == 1


def test_under_wine_tests_that_end_early_are_started_once_more(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(foreign, "logged", lambda root, command, *others: started.append("-c" in command) or True)
    assert not foreign.test(WINDOWS, str(tmp_path), "py39-tf2.10", {}, ["tests"], "log", 1)
    assert sum(started) == 2
    assert "py39-tf2.10: the tests ended without a report; once more" in capsys.readouterr().out


def test_a_root_is_made_once_and_anew_if_it_was_not_completed(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        wine.Windows, "make_root", lambda self, root, env_name: made.append(os.path.exists(root)) or os.mkdir(root)
    )
    for _ in range(2):
        WINDOWS.make(str(tmp_path), "py39-tf2.10")
    os.remove(str(tmp_path / "root" / "complete"))
    WINDOWS.make(str(tmp_path), "py39-tf2.10")
    assert made == [False, False]


def test_a_root_that_cannot_be_made_has_a_status_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(foreign, "needed", lambda system: None)
    monkeypatch.setattr(emulated, "ENTRY", str(tmp_path / "qemu-aarch64"))
    assert foreign.main(AARCH64, "", ["run", str(tmp_path), "py39-tf2.10"]) == 3
    assert "py39-tf2.10: There is no" in capsys.readouterr().out


def test_without_the_kernel_s_entry_for_aarch64_it_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr(emulated, "ENTRY", str(tmp_path / "qemu-aarch64"))
    with pytest.raises(foreign.Failed, match="There is no .*qemu-aarch64. Register it: install qemu-user-static"):
        AARCH64.make(str(tmp_path), "py39-tf2.10")


SIGNED = "CN=Python Software Foundation\nSignature verification: ok\n"


@pytest.mark.parametrize("change", [("Python Software Foundation", "Somebody"), ("ok", "failed")], ids=["who", "how"])
def test_an_interpreter_that_others_signed_is_refused(tmp_path, monkeypatch, change):
    (tmp_path / "python.exe").write_bytes(b"MZ")
    monkeypatch.setattr(foreign, "run", lambda command: SIGNED)
    wine.check_signatures(str(tmp_path), "3.10")
    monkeypatch.setattr(foreign, "run", lambda command: SIGNED.replace(*change))
    with pytest.raises(foreign.Failed, match="python.exe is not signed by the Python Software Foundation"):
        wine.check_signatures(str(tmp_path), "3.10")
