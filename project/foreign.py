"""Run environments of the matrix that belong to another system, on Linux x86_64 in a root of their own.

This is what wine.py and emulated.py share. An environment is what tox makes of it on its own system: the same
dependencies, constraints, markers and tests, and the wheel of this checkout. Its results say under what it ran.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from typing import List

import environments
import freeze
import reports

TAGS = {"linux-arm64": "aarch64-manylinux_2_31", "windows": "x86_64-pc-windows-msvc"}
"""What uv calls each system."""

# What takes a compiler to build: of these a wheel has to be there. A few small ones come as sources only.
WHEELS = ["tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-io-gcs-filesystem", "tensorflow-addons"]
WHEELS += ["tensorboard", "numpy", "scipy", "h5py", "grpcio", "protobuf", "jax", "jaxlib", "ml-dtypes", "libclang"]
WHEELS += ["matplotlib", "optree", "tokenizers", "safetensors"]

ENV_FOLDER = "/environment"
"""Where an environment is, as its root sees it."""

ENVIRONMENT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONUNBUFFERED": "1",
}


class Failed(Exception):
    """A step failed; the message says what to do."""


class NoRoot(Failed):
    """There is no place in which to run anything, such as when no Debian mirror answers."""


class System:
    """A system whose environments can run here; subclasses say how."""

    platform = ""
    """Its name in the matrix and in results."""
    tools = ("debootstrap", "unshare", "git", "uv", "tox")
    """The commands that this machine must have."""
    environment = ENVIRONMENT
    """What its processes are given, beside the variables that tox sets."""
    attempts = 1
    """How often the tests are started if they end without a report."""
    packages = ()
    """What pytest needs there beyond tox's dependencies, which are resolved for that system but run here."""

    def can_run(self, env_name):
        """Whether there is an interpreter for an environment of this system."""
        raise NotImplementedError

    def root(self, folder, env_name):
        """The folder of the root in which an environment runs."""
        return os.path.join(folder, "root")

    def make_root(self, root, env_name):
        """Make the root of an environment in a folder that does not exist yet."""
        raise NotImplementedError

    def under(self, folder, env_name):
        """What runs the environments, with its version, such as "Wine 10.0"."""
        raise NotImplementedError

    def unpack_python(self, folder, env_name):
        """Put an interpreter into the environment; return (the folder of its packages, its version)."""
        raise NotImplementedError

    def python(self):
        """The command, inside the root, that starts the environment's interpreter."""
        raise NotImplementedError

    def inside(self, path):
        """How the environment's Python calls a path inside the root."""
        return path

    def write_link(self, path, target):
        """Make a link of the checkout as git does on this system."""
        os.symlink(target, path)

    def make(self, folder, env_name):
        """Make the root of an environment, unless it is complete."""
        root = self.root(folder, env_name)
        complete = os.path.join(root, "complete")
        if not os.path.exists(complete):
            shutil.rmtree(root, ignore_errors=True)
            os.makedirs(folder, exist_ok=True)
            say(f"the root for {env_name}")
            self.make_root(root, env_name)
            write(complete, b"")

    def place(self, folder, env_name, *parts):
        """A path in the environment, as seen from here."""
        return os.path.join(self.root(folder, env_name), ENV_FOLDER.strip("/"), *parts)


def run(command, **options):
    """Run a command and raise an error with its last lines if it fails."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, universal_newlines=True, **streams, **options)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise Failed(f"`{' '.join(command)}` ended with {done.returncode}:\n{last}")
    return done.stdout


ENTER = """\
set -e
root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
exec chroot "$root" "$@"
"""
"""In namespaces of its own, so that no mount and no process is left behind."""


def entered(root, command, environment):
    """The command line that runs `command` in the root, with nothing of the environment but what is given."""
    settings = [f"{name}={value}" for name, value in sorted(environment.items())]
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh", root]
    return isolated + ["env", "-i"] + settings + command


def python_of(env_name):
    return f"3.{environments.parts(env_name)[2]}"


# ----------------------------------------------------------------------------------------------------------------
# The environment


def settings(env_name):
    """(dependencies, environment) of an environment, as tox says."""
    command = ["tox", "config", "-q", "-e", env_name, "-k", "deps", "set_env", "--format", "json"]
    said = json.loads(subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, check=True).stdout)["env"][
        env_name
    ]
    return said["deps"], {name: value for name, value in said["set_env"].items() if not name.startswith("TOX_")}


def copy_checkout(system, target):
    """Copy the checkout as git makes it on that system."""
    names = run(["git", "-C", environments.ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).split(
        "\0"
    )
    for name in names:
        path, copy = os.path.join(environments.ROOT, name), os.path.join(target, name)
        if os.path.islink(path):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            system.write_link(copy, os.readlink(path))
        elif os.path.isfile(path):
            with open(path, "rb") as file:
                write(copy, file.read())


def write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def build_wheel(tree, target):
    run(["uv", "build", "--quiet", "--wheel", "--out-dir", target, tree])
    (name,) = [name for name in os.listdir(target) if name.endswith(".whl")]
    return os.path.join(target, name)


def without_wheel(reason):
    """The package that uv had to leave out because it has no wheel; None if that is TensorFlow, or not the reason."""
    match = re.search(r"Wheels are required for `([^`]+)`|([\w-]+)==\S+ has no usable wheels", reason)
    name = match and (match.group(1) or match.group(2))
    return None if not name or name.startswith("tensorflow") else name


def install(system, env_name, version, deps, wheel, site):
    """Install what tox would on that system; packages without a wheel there are built here, as pip would there."""
    pip = ["uv", "pip", "install", "--quiet", "--no-cache", "--target", site]
    pip += ["--python-platform", TAGS[system.platform], "--python-version", version]
    pip += ["--python", python_of(env_name)]
    command = list(pip)
    for dep in deps:
        command += ["--constraints", dep.split()[1]] if dep.startswith("-c ") else [dep]
    # wrapt 1.12 has no wheels; what a machine without a compiler builds of it runs everywhere
    plain = dict(os.environ, WRAPT_EXTENSIONS="false", WRAPT_INSTALL_EXTENSIONS="false")
    built: List[str] = []
    while True:
        binary = [option for name in WHEELS if name not in built for option in ("--only-binary", name)]
        try:
            run(command + list(system.packages) + binary, cwd=environments.ROOT, env=plain)
            break
        except Failed as failed:
            name = without_wheel(str(failed))
            if name is None or name in built:
                raise
            built.append(name)
    run(pip + ["--no-deps", wheel])


def prepare(system, folder, env_name):
    """Make the environment's folder in its root; return the environment of its tests."""
    shutil.rmtree(system.place(folder, env_name), ignore_errors=True)
    os.makedirs(system.place(folder, env_name))
    deps, environment = settings(env_name)
    site, version = system.unpack_python(folder, env_name)
    tree = system.place(folder, env_name, "tree")
    copy_checkout(system, tree)
    with tempfile.TemporaryDirectory() as built:
        source = os.path.join(built, "tree")
        shutil.copytree(tree, source, symlinks=True)
        wheel = build_wheel(source, os.path.join(built, "wheel"))
        install(system, env_name, version, deps, wheel, site)
    return environment


PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""As the command `pytest` does: without the current folder on the path, whose `accum` is not the installed one."""


def test(system, folder, env_name, environment, arguments, log, minutes):
    """Freeze and test an environment, and leave the results in its folder `work`; whether no test failed."""
    work, tree = (system.inside(f"{ENV_FOLDER}/{name}") for name in ("work", "tree"))
    frozen = system.place(folder, env_name, "work", "freeze", env_name + ".json")
    environment = dict(system.environment, **environment)
    root = system.root(folder, env_name)
    freezing = system.python() + [f"{tree}/project/freeze.py", work, env_name] + arguments
    for _ in range(system.attempts):
        if not os.path.exists(frozen) or not os.path.getsize(frozen):
            logged(root, freezing, environment, log, minutes)
    report = system.place(folder, env_name, "work", "junit", env_name + ".xml")
    testing = system.python() + ["-c", PYTEST] + (arguments or ["tests"]) + [f"--junitxml={work}/junit/{env_name}.xml"]
    for attempt in range(system.attempts):
        if os.path.exists(report):
            break
        if attempt:
            say(f"{env_name}: the tests ended without a report; once more")
        if not logged(root, testing, environment, log, minutes):
            say(f"{env_name}: not done after {minutes} minutes")
            return False
    return os.path.exists(report) and reports.is_pass(reports.counts(report))


def logged(root, command, environment, log, minutes):
    """Run a command in the environment's copy of the checkout; whether it ended in time."""
    inside = entered(root, ["sh", "-c", f'cd {ENV_FOLDER}/tree && exec "$@"', "sh"] + command, environment)
    with open(log, "ab") as file:
        try:
            subprocess.run(inside, stdout=file, stderr=file, stdin=subprocess.DEVNULL, timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            return False
    return True


def keep_results(system, folder, env_name):
    """Move an environment's freeze and report to FOLDER/results, and say there under what it ran."""
    results = os.path.join(folder, "results")
    for kind, suffix in (("freeze", ".json"), ("junit", ".xml")):
        kept = os.path.join(results, kind, env_name + suffix)
        left = system.place(folder, env_name, "work", kind, env_name + suffix)
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        if os.path.exists(kept):
            os.remove(kept)
        if os.path.exists(left):
            shutil.move(left, kept)
    path = os.path.join(results, "freeze", env_name + ".json")
    if not os.path.exists(path):
        raise Failed(f"{env_name}: Python did not start; see {os.path.join(folder, 'logs', env_name + '.log')}")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if not text:
        raise Failed(f"{env_name}: freeze.py did not finish; see {os.path.join(folder, 'logs', env_name + '.log')}")
    frozen = json.loads(text)
    frozen.update(under=system.under(folder, env_name), commit=freeze.commit())
    with open(path, "w", encoding="utf-8") as file:
        json.dump(frozen, file, indent=1, sort_keys=True)


def run_environment(system, folder, env_name, arguments, minutes, keep):
    """Install, test, record and remove an environment; whether it passed.

    `arguments` select a part of its tests, which is not recorded.
    """
    log = os.path.join(folder, "logs", env_name + ".log")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    with open(log, "w", encoding="utf-8"):
        pass
    try:
        system.make(folder, env_name)
    except Failed as failed:
        raise NoRoot(str(failed)) from failed
    say(f"{env_name}: install")
    environment = prepare(system, folder, env_name)
    say(f"{env_name}: test, log in {log}")
    passed = test(system, folder, env_name, environment, arguments, log, minutes)
    if not arguments:  # a part of the tests is no result of the environment
        keep_results(system, folder, env_name)
    if not keep:
        shutil.rmtree(system.place(folder, env_name))
    with open(log, encoding="utf-8", errors="replace") as file:
        said = file.read().strip().splitlines()
    say(f"{env_name}: {said[-1] if said else 'no output'}")
    return passed


# ----------------------------------------------------------------------------------------------------------------
# The command


def possible(system):
    """The environments of that system for whose Python there is an interpreter."""
    return [env_name for env_name in environments.env_names(system.platform) if system.can_run(env_name)]


def versions(system):
    """One environment of each version, without Keras 2 beside Keras 3: that of the newest Python that can run."""
    names = [env_name for env_name in possible(system) if not environments.parts(env_name)[1]]
    return list({environments.parts(env_name)[0]: env_name for env_name in names}.values())


def chosen(system, names):
    env_names_chosen = [env_name for name in names for env_name in (versions(system) if name == "versions" else [name])]
    unknown = [env_name for env_name in env_names_chosen if env_name not in possible(system)]
    if unknown:
        raise Failed(f"ENVIRONMENT must be one of: {' '.join(possible(system))}. Received: {' '.join(unknown)}")
    return env_names_chosen


def say(text):
    print(text, flush=True)


def needed(system):
    """Raise an error that names what the machine lacks."""
    absent = [name for name in system.tools if shutil.which(name) is None]
    if absent:
        raise Failed(f"These commands must be installed: {' '.join(absent)}.")
    if os.geteuid() != 0:
        raise Failed("This must be run as root, which alone may make a root and enter it.")


def main(system, description, argv=None):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run"])
    parser.add_argument("folder", metavar="FOLDER", help="where the roots, logs and results are")
    parser.add_argument("env_names", nargs="*", metavar="ENVIRONMENT", help="names as in tox.ini, or `versions`")
    parser.add_argument(
        "--minutes", type=int, default=120, help="how long the tests of an environment may take (default: 120)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the last environment in its root, under /environment"
    )
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="for part of the suite; nothing is recorded")
    arguments = parser.parse_args(argv)
    folder = os.path.abspath(arguments.folder)
    try:
        needed(system)
        wanted = chosen(system, arguments.env_names)
    except Failed as failed:
        parser.error(str(failed))
    status = 0
    for env_name in wanted:
        try:
            if not run_environment(
                system, folder, env_name, arguments.pytest.split(), arguments.minutes, arguments.keep
            ):
                status = 1
        except NoRoot as failed:
            say(f"{env_name}: {failed}")
            return 3
        except Failed as failed:
            say(f"{env_name}: {failed}")
            status = 1
    return status
