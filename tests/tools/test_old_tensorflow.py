"""docs/old-tensorflow.md: its commands on made-up packages, without a network, and what it says of the constraints."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE = os.path.join(ROOT, "docs", "old-tensorflow.md")

pytestmark = pytest.mark.slow


def commands():
    """The commands of the page, each on one line."""
    with open(PAGE, encoding="utf-8") as file:
        blocks = re.findall(r"(?ms)^```bash\n(.*?)^```", file.read())
    return "".join(blocks).replace("\\\n", " ").splitlines()


def command(*words):
    (line,) = [line for line in commands() if all(word in line for word in words)]
    return line


def add_wheel(folder, name, version, requires=()):
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {text}\n" for text in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        lines.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join(lines + [f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(str(folder / f"{name}-{version}-py3-none-any.whl"), "w") as file:
        for path, text in files.items():
            file.writestr(path, text)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a lock that the page's command wrote of made-up packages, and their wheels in `wheelhouse`."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("project")
    (folder / "wheelhouse").mkdir()
    for version in ("2.4.3", "2.4.4", "2.4.9"):
        add_wheel(folder / "wheelhouse", "tensorflow", version, ["six"])
    for version in ("1.15.0", "1.16.0"):
        add_wheel(folder / "wheelhouse", "six", version)
    shutil.copytree(os.path.join(ROOT, "constraints"), str(folder / "constraints"))
    (folder / "uv.toml").write_text('[pip]\nno-index = true\nfind-links = ["wheelhouse"]\n')
    perform(command("uv pip compile"), folder, UV_CONFIG_FILE="uv.toml", UV_OFFLINE="1")
    return folder


def perform(line, folder, **environ):
    done = subprocess.run(
        line,
        shell=True,
        cwd=str(folder),
        env=dict(os.environ, **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_lock_has_the_tested_versions_and_the_hashes_of_their_files(project):
    lock = (project / "requirements.txt").read_text()
    assert re.findall(r"(?m)^([\w-]+)==(\S+)", lock) == [("six", "1.15.0"), ("tensorflow", "2.4.4")]
    for name in ("six-1.15.0", "tensorflow-2.4.4"):
        wheel = (project / "wheelhouse" / f"{name}-py3-none-any.whl").read_bytes()
        assert f"--hash=sha256:{hashlib.sha256(wheel).hexdigest()}" in lock


def test_an_offline_install_takes_what_is_locked_and_refuses_another_content(project, tmp_path):
    shutil.copytree(str(project), str(tmp_path / "copy"))
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    python = tmp_path / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
    line = command("--no-index").replace("python -m pip", f'"{python}" -m pip --no-cache-dir')
    assert "Successfully installed six-1.15.0 tensorflow-2.4.4" in perform(
        line, tmp_path / "copy", PIP_CONFIG_FILE=os.devnull
    )
    add_wheel(tmp_path / "copy" / "wheelhouse", "six", "1.15.0", ["something"])
    with pytest.raises(AssertionError, match="DO NOT MATCH THE HASHES"):
        perform(line + " --force-reinstall", tmp_path / "copy", PIP_CONFIG_FILE=os.devnull)


def test_the_bill_of_materials_of_a_lock_has_its_packages_and_hashes(project):
    if shutil.which("cyclonedx-py") is None:
        pytest.skip("cyclonedx-py is not installed")
    perform(command("cyclonedx-py requirements").replace("uvx --from cyclonedx-bom ", ""), project)
    with open(str(project / "sbom.json"), encoding="utf-8") as file:
        components = json.load(file)["components"]
    assert {one["purl"] for one in components} == {"pkg:pypi/six@1.15.0", "pkg:pypi/tensorflow@2.4.4"}
    lock = (project / "requirements.txt").read_text()
    hashes = [of["content"] for one in components for ref in one["externalReferences"] for of in ref["hashes"]]
    assert sorted(hashes) == sorted(re.findall(r"sha256:(\w+)", lock))


def test_the_page_knows_where_a_python_or_a_package_lacks_the_newest_patch():
    with open(PAGE, encoding="utf-8") as file:
        rows = re.findall(r"(?m)^\| ([\d.]+) \| ([`P].+?) \| ([\d.]+) \| ([\d.]+)\b", file.read())
    lacking = []
    for version, where, newest, fixed_in in rows:
        with open(os.path.join(ROOT, "constraints", f"tf{version}.txt"), encoding="utf-8") as file:
            pins = re.findall(r"(?m)^(tensorflow(?:-cpu)?)==([\d.]+\d);(.*)$", file.read())
        python = re.search(r"Python ([\d.]+)", where)
        there = [
            of
            for name, of, on in pins
            if (f'python_version == "{python.group(1)}"' in on if python else f"`{name}`" in where)
        ]
        assert set(there) == {newest} and fixed_in in {of for _, of, _ in pins}
        lacking.append(version)
    assert lacking == ["1.15", "2.5", "2.6", "2.11"]
