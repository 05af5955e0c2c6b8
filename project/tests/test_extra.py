"""What setup.py's extra asks for, with its markers evaluated for every platform and Python."""

import ast
import os
import sys

import environments as ENVIRONMENTS
import pytest

requirements = pytest.importorskip("packaging.requirements")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PLATFORMS = {
    "linux": ("linux", "x86_64"),
    "linux-arm64": ("linux", "aarch64"),
    "windows": ("win32", "AMD64"),
    "macos-x86_64": ("darwin", "x86_64"),
    "macos-arm64": ("darwin", "arm64"),
}


def needed(lines, platform, python):
    """The requirements of those lines whose markers hold."""
    name, machine = PLATFORMS[platform]
    asked = {"sys_platform": name, "platform_machine": machine, "python_version": f"3.{python}", "extra": ""}
    wanted = [requirements.Requirement(line) for line in lines]
    return [each for each in wanted if each.marker is None or each.marker.evaluate(asked)]


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


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
def test_the_extra_asks_for_one_tensorflow_that_a_platform_has(platform):
    """Every Python for which the platform has a TensorFlow gets one range of versions, with the newest in it."""
    newest = {}
    for env_name in ENVIRONMENTS.env_names(platform):
        version, _, python = ENVIRONMENTS.parts(env_name)
        if version >= (2, 13) or platform != "macos-arm64":
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
