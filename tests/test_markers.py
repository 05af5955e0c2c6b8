"""The requirements in tox.ini and setup.py, with their markers evaluated for every platform and Python."""

import ast
import configparser
import os
import re
import sys

import pytest

requirements = pytest.importorskip("packaging.requirements")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts", "dev"))
pytestmark = pytest.mark.slow

import environments as ENVIRONMENTS  # noqa: E402

PLATFORMS = {
    "linux": ("linux", "x86_64"),
    "linux-arm64": ("linux", "aarch64"),
    "windows": ("win32", "AMD64"),
    "macos-intel": ("darwin", "x86_64"),
    "macos-arm": ("darwin", "arm64"),
    "metal": ("darwin", "arm64"),
}


def environment(platform, python):
    """What a marker may ask for, on a platform and Python."""
    name, machine = PLATFORMS[platform]
    return {"sys_platform": name, "platform_machine": machine, "python_version": f"3.{python}", "extra": ""}


def needed(lines, platform, python):
    """The requirements of those lines whose markers hold."""
    wanted = [requirements.Requirement(line) for line in lines]
    return [
        requirement
        for requirement in wanted
        if requirement.marker is None or requirement.marker.evaluate(environment(platform, python))
    ]


def tox_lines(env_name):
    """The requirements that the factors of an environment select in tox.ini, without constraints."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(os.path.join(ROOT, "tox.ini"), encoding="utf-8")
    factors, lines = set(env_name.split("-")), []
    for line in re.sub(r"(?m)^#.*\n", "", config["testenv"]["deps"]).strip().splitlines():
        condition, _, rest = line.partition(": ")
        selects = not rest or any(
            all((part[0] == "!") != (part.lstrip("!") in factors) for part in choice.split("-"))
            for choice in ENVIRONMENTS.expanded(condition)
        )
        if selects and not (rest or line).startswith("-c "):
            lines.append(rest or line)
    return lines


def tensorflow_of(env_name, platform):
    """The name under which a platform has the TensorFlow of an environment."""
    version, _, flavour = ENVIRONMENTS.parts(env_name)
    if platform == "linux" and flavour != "keras2":
        return "tensorflow-cpu"
    return "tensorflow-macos" if platform in ("macos-arm", "metal") and version <= (2, 12) else "tensorflow"


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
def test_tox_installs_the_one_tensorflow_that_a_platform_has(platform):
    for env_name in ENVIRONMENTS.env_names(platform):
        names = [
            requirement.name for requirement in needed(tox_lines(env_name), platform, ENVIRONMENTS.parts(env_name)[1])
        ]
        builds = [name for name in names if re.match(r"tensorflow(-cpu|-intel|-macos)?$", name)]
        assert builds == [tensorflow_of(env_name, platform)], env_name
        assert ("tf-keras" in names) == env_name.endswith("-keras2")
        assert ("tensorflow-metal" in names) == (platform == "metal"), env_name
        assert "tensorflow-addons" not in names or platform == "linux"
        assert {"pytest", "tf-slim"} < set(names)


def extra():
    """The requirements of setup.py's extra for TensorFlow."""
    with open(os.path.join(ROOT, "setup.py"), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    scope = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("ARM_MAC", "NO_ARM_MAC", "TENSORFLOW"):
            exec(
                compile(ast.Module([node], []) if sys.version_info >= (3, 8) else ast.Module([node]), "", "exec"), scope
            )
    return scope["TENSORFLOW"]


@pytest.mark.parametrize("platform", sorted(set(PLATFORMS) - {"metal"}))
def test_the_extra_asks_for_one_tensorflow_that_a_platform_has(platform):
    """Every Python for which the platform has a TensorFlow gets one range of versions, with the newest in it."""
    newest = {}
    for env_name in ENVIRONMENTS.env_names(platform):
        version, python, _ = ENVIRONMENTS.parts(env_name)
        if version >= (2, 13) or platform != "macos-arm":
            newest[python] = max(newest.get(python, (0, 0)), version)
    for python, (major, minor) in newest.items():
        tensorflows = [
            requirement for requirement in needed(extra(), platform, python) if requirement.name == "tensorflow"
        ]
        assert len(tensorflows) == 1, (python, tensorflows)
        assert tensorflows[0].specifier.contains(f"{major}.{minor}.0"), (python, tensorflows)


@pytest.mark.parametrize("python", range(6, 14))
@pytest.mark.parametrize("platform", sorted(PLATFORMS))
def test_the_extra_limits_protobuf_for_pythons_whose_tensorflow_was_built_before_its_version_4(platform, python):
    names = [requirement.name for requirement in needed(extra(), platform, python)]
    assert ("protobuf" in names) == (python < 8)
