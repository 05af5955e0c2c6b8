"""Ask the package index for what is locked: for each environment and system, the exact packages and their sha256.

    python scripts/release/ask_locks.py ask                ask for all, and write accum/_cli/doctor/locks.json
    python scripts/release/ask_locks.py ask py36-tf1.15    the same for this environment, or more, and its flavours only
    python scripts/release/ask_locks.py check              whether it fits the constraints; needs no network

write_locks.py makes files for pip of it. On Linux x86_64 a lock has the versions in constraints/, with which the tests
passed. Elsewhere it has the same versions as far as the system has wheels of them, and otherwise the newest ones that
fit. `ask` needs `uv` (`pip install uv`); it only resolves, it downloads no wheels.
"""

import argparse
import concurrent.futures
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import tempfile

import _siblings  # noqa: F401
import wheels
from matrix import data as matrix
from write_locks import PIPS
from write_locks import data as locks

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

TARGETS = {
    "linux": "x86_64-manylinux_2_31",
    "linux-arm64": "aarch64-manylinux_2_31",
    "windows": "x86_64-pc-windows-msvc",
    "macos-x86_64": "x86_64-apple-darwin",
    "macos-arm64": "aarch64-apple-darwin",
}
UV = ["uv", "pip", "compile", "--quiet", "--no-python-downloads"]
PATCHES = {"3.6": "3.6.15", "3.7": "3.7.16", "3.8": "3.8.18", "3.9": "3.9.18", "3.10": "3.10.13", "3.11": "3.11.7"}
"""The patch of each Python that is assumed: some packages exclude the first ones."""


@functools.lru_cache(maxsize=None)
def pinned(tf_version):
    """[(package, version, marker)] of what a TensorFlow's constraints pin, and the lines of their limits."""
    with open(os.path.join(ROOT, "constraints", f"tf{tf_version}.txt"), encoding="utf-8") as file:
        limits, pins = file.read().split("# what was installed")
    matches = [re.match(r"([\w.-]+)==([^;\s]+)(?:; (.*))?$", text) for text in pins.strip().splitlines()]
    plain = [text for text in limits.splitlines() if text and not text.startswith("#")]
    return [match.groups() for match in matches], plain


def of_python(tf_version, python):
    """{package: version} of what was installed on Linux with a Python."""
    pins, _ = pinned(tf_version)
    versions = re.compile(r'python_version == "([\d.]+)"')
    return {name: version for name, version, marker in pins if python in versions.findall(marker or "") + _any(marker)}


def _any(marker):
    return [] if marker and "python_version" in marker else [python for of in matrix.PYTHONS.values() for python in of]


@functools.lru_cache(maxsize=None)
def env_names():
    """{environment: (TensorFlow's version, python, flavour)} of all locks."""
    names = {}
    for name, tf_version, python, is_keras_2 in matrix.environments():
        names[name] = (tf_version, python, "keras2" if is_keras_2 else "")
        if not is_keras_2:
            names[name + "-cpu"] = (tf_version, python, "cpu")
            if tf_version in matrix.METAL and python in matrix.pythons(tf_version, "macos-arm64") and python != "3.12":
                names[name + "-metal"] = (tf_version, python, "metal")
    return names


SYSTEMS_OF = {"cpu": ("linux",), "metal": ("macos-arm64",)}
"""Flavours that exist on some systems only."""


# ----------------------------------------------------------------------------------------------------------------
# Asking


def ask(env_name, system):
    """{package: version} of an environment without flavour, or why there is none. accum itself requires only NumPy."""
    tf_version, python, _ = env_names()[env_name]
    if python not in matrix.pythons(tf_version, system):
        return f"no wheels of TensorFlow {tf_version} for Python {python}"
    _, limits = pinned(tf_version)
    exact = matrix.EXACT.get((system, tf_version, python))
    limits = limits + ([f"tensorflow=={exact}"] if exact else [])
    from_source = []
    while True:
        answer = _resolve(
            [matrix.distribution(tf_version, system), "numpy"],
            limits,
            of_python(tf_version, python),
            python,
            system,
            from_source,
        )
        if not isinstance(answer, str):
            return answer
        name = wheels.without_wheel(answer)
        if name is None or name in from_source:
            return answer
        from_source.append(name)


def _resolve(names, limits, preferred, python, system, from_source):
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: os.path.join(folder, name) for name in ("in.txt", "limits.txt", "out.txt")}
        pins = [f"{name}=={version}" for name, version in sorted(preferred.items())]
        _write(paths["in.txt"], names)
        _write(paths["limits.txt"], limits + (pins if system == "linux" else []))
        _write(paths["out.txt"], pins)  # uv keeps the versions of an output file that exists, where they fit
        command = UV + [paths["in.txt"], "--no-header", "--no-annotate"]
        command += ["--constraints", paths["limits.txt"], "--output-file", paths["out.txt"], "--only-binary", ":all:"]
        command += ["--python-platform", TARGETS[system], "--python-version", PATCHES.get(python, python + ".0")]
        for name in from_source:
            command += ["--no-binary", name]
        # what the cache has is enough for most, and much faster than to ask whether it is still current
        done = _run(command + ["--offline"])
        if "network was disabled" in done.stderr:
            done = _run(command)
        if done.returncode:
            return " ".join(done.stderr.split())
        return _pins(_read(paths["out.txt"]))


def _pins(text):
    return dict(line.split(";")[0].strip().split("==") for line in text.splitlines() if "==" in line)


def _run(command):
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, universal_newlines=True)


def _write(path, lines):
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def _read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def ask_all(names):
    """{(environment, system): what `ask` answers}"""
    asked = [(env_name, system) for env_name in names for system in TARGETS]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(asked, pool.map(_told, asked)))


def _told(pair):
    answer = ask(*pair)
    outcome = answer if isinstance(answer, str) else f"{len(answer)} packages"
    print(f"{pair[0]} {pair[1]}: {outcome}", file=sys.stderr, flush=True)
    return answer


# ----------------------------------------------------------------------------------------------------------------
# Files


def ask_files(answers):
    """{package: {version: {file: sha256}}} of all versions in the answers: the wheels that fit, or the sources."""
    wanted = {}
    for (env_name, _), pins in answers.items():
        if not isinstance(pins, str):
            wanted.setdefault(env_names()[env_name][1], set()).update(_with_flavours(env_name, pins))
    batches = [(python, batch) for python, pins in sorted(wanted.items()) for batch in _batches(pins)]
    files_of = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for listed in pool.map(lambda pair: _listed(*pair), batches):
            for (name, version), files in listed.items():
                files_of.setdefault(name, {}).setdefault(version, {}).update(files)
    return files_of


def _with_flavours(env_name, pins):
    """The pins of an environment and of its flavours."""
    more = {("tensorflow-cpu", _cpu_pin(env_name, pins))} if "tensorflow" in pins else set()
    for name, flavour in (("tf-keras", "keras2"), ("tensorflow-metal", "metal")):
        more |= {(name, _flavour_pin(name, env_name))} if f"{env_name}-{flavour}" in env_names() else set()
    return set(pins.items()) | more


def ask_pips():
    """{version: {file: sha256}} of PIPS."""
    listings = [_listed(python, {"pip": version}) for python, version in PIPS.items()]
    wheels = [(version, files) for listed in listings for (_, version), files in listed.items()]
    return {version: {name: sha for name, sha in files.items() if name.endswith(".whl")} for version, files in wheels}


def _cpu_pin(env_name, pins):
    tf_version, python, _ = env_names()[env_name]
    return of_python(tf_version, python).get("tensorflow-cpu", pins["tensorflow"])


def _flavour_pin(name, env_name):
    tf_version, python, _ = env_names()[env_name]
    return matrix.METAL.get(tf_version) if name == "tensorflow-metal" else of_python(tf_version, python).get(name)


def _batches(pins):
    """The pins in sets that have each package once."""
    by_name = {}
    for name, version in sorted(pins):
        by_name.setdefault(name, []).append(version)
    most = max(map(len, by_name.values()))
    return [{name: versions[i] for name, versions in by_name.items() if i < len(versions)} for i in range(most)]


def _listed(python, batch):
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = os.path.join(folder, "in.txt"), os.path.join(folder, "pylock.toml")
        _write(wanted, [f"{name}=={version}" for name, version in sorted(batch.items())])
        command = UV + [wanted, "--no-deps", "--universal", "--format", "pylock.toml"]
        command += ["--python-version", PATCHES.get(python, python + ".0"), "--output-file", out]
        done = _run(command)
        if done.returncode:
            if len(batch) > 1:  # one of them can't be had on this Python alone: ask for each
                files_of = {}
                for pin in batch.items():
                    files_of.update(_listed(python, dict([pin])))
                return files_of
            print(f"{batch} on Python {python}: {done.stderr}", file=sys.stderr)
            return {}
        return _files(_read(out))


def _files(text):
    """{(package, version): {file: sha256}} of what uv writes."""
    hashes = {}
    for block in text.split("[[packages]]")[1:]:
        name, version = (re.search(rf'(?m)^{key} = "(.+)"', block).group(1) for key in ("name", "version"))
        pairs = re.findall(r'url = "[^"]*/([^"/]+)".*?sha256 = "(\w+)"', block)
        hashes[name, version] = {file.split("#")[0].replace("%2B", "+"): sha for file, sha in pairs}
    return hashes


# ----------------------------------------------------------------------------------------------------------------
# The record


def recorded(answers, files, before=None):
    """The record of `locks.json`. The flavours follow from their base: they only exchange or add one package.

    What was not asked for stays as it is in the record `before`, which then keeps its date: it is the older one.
    """
    entries = {env_name: {} for env_name in env_names()}
    for env_name, (tf_version, python, flavour) in env_names().items():
        if (locks.base(env_name), "linux") not in answers:
            entries[env_name] = before["locks"][env_name]
            continue
        of_base = {system: answers[locks.base(env_name), system] for system in TARGETS}
        for system in SYSTEMS_OF.get(flavour, TARGETS):
            pins = of_base[system]
            if isinstance(pins, str):
                entries[env_name][system] = _reason(pins, tf_version, python)
            else:
                common = {} if (system, flavour) == ("linux", "") else of_base["linux"]
                entries[env_name][system] = locks.difference(_flavoured(env_name, system, pins), common)
    version = subprocess.run(["uv", "--version"], stdout=subprocess.PIPE, universal_newlines=True).stdout.split()[1]
    record = {"date": datetime.date.today().isoformat(), "with": "uv " + version, "files": files, "locks": entries}
    if before is not None:
        record.update({"date": before["date"], "with": before["with"], "files": _together(before["files"], files)})
    return dict(record, files=_used(record))


def _together(files, more):
    """The files of both, {package: {version: {file: sha256}}}."""
    return {
        name: {
            version: dict(files.get(name, {}).get(version, {}), **more.get(name, {}).get(version, {}))
            for version in list(files.get(name, {})) + list(more.get(name, {}))
        }
        for name in list(files) + list(more)
    }


def _reason(answer, tf_version, python):
    if "has no wheels" in answer or "no wheels of" in answer:
        return f"there are no wheels of TensorFlow {tf_version} for Python {python}"
    raise SystemExit(f"TensorFlow {tf_version} on Python {python}: {answer}")


def _flavoured(env_name, system, pins):
    flavour = env_names()[env_name][2]
    pins = dict(pins)
    if flavour == "cpu":
        pins["tensorflow-cpu"] = _cpu_pin(env_name, pins)
        del pins["tensorflow"]
    elif flavour:
        name = {"keras2": "tf-keras", "metal": "tensorflow-metal"}[flavour]
        pins[name] = _flavour_pin(name, env_name)
    return pins


def _used(record):
    """The files that a lock needs, out of all that were listed."""
    used = {"pip": record["files"]["pip"]}
    for env_name in record["locks"]:
        locked = locks.lock(record, env_name)
        for system, pins in locked.packages.items():
            for name, version in pins.items():
                chosen = locks.files(record, env_name, system, name, version)
                if not chosen:
                    raise SystemExit(f"{env_name} on {system}: no file of {name} {version}")
                used.setdefault(name, {}).setdefault(version, {}).update((file.name, file.sha256) for file in chosen)
    return {name: dict(sorted(versions.items())) for name, versions in sorted(used.items())}


def written(record):
    """JSON with one line per version and per environment and system, which gives readable diffs."""
    text = json.dumps({key: record[key] for key in ("date", "with")}, indent=1)[:-2]
    for part in ("files", "locks"):
        blocks = []
        for name, entries in record[part].items():
            lines = ",\n   ".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
            blocks.append(f"  {json.dumps(name)}: {{\n   {lines}\n  }}")
        text += ',\n "{}": {{\n{}\n }}'.format(part, ",\n".join(blocks))
    return text + "\n}\n"


# ----------------------------------------------------------------------------------------------------------------
# The checks


def problems(record):
    """What of the record does not fit constraints/."""
    misfits = [f"no lock of {env_name}" for env_name in env_names() if env_name not in record["locks"]]
    for env_name, (tf_version, python, _) in env_names().items():
        lock = locks.lock(record, env_name)
        tested = of_python(tf_version, python)
        pins = lock.packages.get("linux", {})
        misfits += [
            f"{env_name}: {name} is {version}, and {tested.get(name)} in constraints/"
            for name, version in pins.items()
            if tested.get(name) != version
        ]
        misfits += [
            f"{env_name}: TensorFlow {locks.tensorflow(of_system)} on {system}"
            for system, of_system in lock.packages.items()
            if not locks.tensorflow(of_system).startswith(tf_version + ".")
        ]
        misfits += [
            f"{env_name}: no file of {name} on {system}"
            for system, of_system in lock.packages.items()
            for name, version in of_system.items()
            if not locks.files(record, env_name, system, name, version)
        ]
    return misfits


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["ask", "check"])
    parser.add_argument("env_names", nargs="*", metavar="ENVIRONMENT", help="of ask: without flavour (default: all)")
    arguments = parser.parse_args(argv)
    what, plain = arguments.what, [env_name for env_name, (_, _, flavour) in env_names().items() if not flavour]
    if not set(arguments.env_names) <= set(plain):
        parser.error(f"ENVIRONMENT must be an environment without flavour. Received: {' '.join(arguments.env_names)}")
    if what == "ask":
        answers = ask_all(arguments.env_names or plain)
        before = locks.read() if arguments.env_names else None
        text = written(recorded(answers, dict(ask_files(answers), pip=ask_pips()), before))
        with open(locks.PATH, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    record = locks.read()
    errors = problems(record)
    print("\n".join(errors) or f"{len(record['locks'])} locks fit the constraints.")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
