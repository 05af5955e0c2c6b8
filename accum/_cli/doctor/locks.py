"""The locks: for each environment and system, the exact packages to install and the sha256 of their files.

`locks.json` is their one source; scripts/release/ask_locks.py writes it. Here it is read, and written out in the two
forms that installers take: a requirements file with hashes, and `pylock.<name>.toml` (PEP 751). Needs no TensorFlow.
"""

import functools
import json
import os
import re
from typing import Any, Dict, List, NamedTuple, Optional

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "locks.json")

SYSTEMS = {
    "linux": ("Linux x86_64", "sys_platform == 'linux' and platform_machine == 'x86_64'"),
    "linux-arm64": ("Linux aarch64", "sys_platform == 'linux' and platform_machine == 'aarch64'"),
    "windows": ("Windows", "sys_platform == 'win32'"),
    "macos-x86_64": ("macOS on Intel", "sys_platform == 'darwin' and platform_machine == 'x86_64'"),
    "macos-arm64": ("macOS on Apple silicon", "sys_platform == 'darwin' and platform_machine == 'arm64'"),
}
"""{system as in the matrix: (its name, its marker)}"""

_FAMILIES = (("linux", "linux-arm64"), ("macos-x86_64", "macos-arm64"))
_PLATFORM_TAGS = {
    "linux": r"(many)?linux.*_x86_64",
    "linux-arm64": r"(many)?linux.*_aarch64",
    "windows": r"win_amd64",
    "macos-x86_64": r"macosx_.*_(x86_64|universal2|intel)",
    "macos-arm64": r"macosx_.*_(arm64|universal2)",
}
_ENV_NAME = re.compile(r"py3(\d+)-tf(\d+\.\d+)(?:-(\w+))?")


class Lock(NamedTuple):
    """`packages`: {system: {package: version}}; `absent`: {system: why there is no TensorFlow}."""

    env_name: str
    packages: Dict[str, Dict[str, str]]
    absent: Dict[str, str]


class File(NamedTuple):
    name: str
    sha256: str

    @property
    def is_wheel(self):
        return self.name.endswith(".whl")


def read(path: str = PATH) -> Any:
    """The contents of `locks.json`."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def minor(env_name):
    """The minor version of Python 3 that an environment is for."""
    return int(_match(env_name).group(1))


def tf_version(env_name):
    """The TensorFlow version of an environment."""
    return _match(env_name).group(2)


def _match(env_name):
    match = _ENV_NAME.fullmatch(env_name)
    if match is None:
        raise ValueError(f"environment must be named like py39-tf2.10. Received: {env_name}")
    return match


def base(env_name):
    """The environment without its flavour: py39-tf2.10 for py39-tf2.10-cpu."""
    return "-".join(env_name.split("-")[:2])


def lock(record, env_name) -> Lock:
    """The lock of an environment.

    `locks.json` holds of each system only what differs from Linux x86_64, and of a flavour what differs from its base.
    """
    packages: Dict[str, Dict[str, str]] = {}
    absent: Dict[str, str] = {}
    for system, entry in record["locks"][env_name].items():
        if isinstance(entry, str):
            absent[system] = entry
        else:
            like = record["locks"][base(env_name)] if env_name != base(env_name) else {}
            common = like.get("linux", {}) if system != "linux" or env_name != base(env_name) else {}
            if env_name == base(env_name) and system != "linux":
                common = record["locks"][env_name]["linux"]
            pins = dict(common, **entry)
            packages[system] = {name: pins[name] for name in sorted(pins) if pins[name] is not None}
    return Lock(env_name, packages, absent)


def difference(pins, common):
    """What turns `common` into `pins`: {package: version, or None if it is not installed}."""
    changed = {name: version for name, version in pins.items() if common.get(name) != version}
    changed.update({name: None for name in common if name not in pins})
    return {name: changed[name] for name in sorted(changed)}


def tensorflow(pins: Dict[str, str]) -> str:
    """The version of TensorFlow in the pins of a system, whatever its distribution."""
    return next(pins[name] for name in ("tensorflow", "tensorflow-cpu", "tensorflow-macos") if name in pins)


# ----------------------------------------------------------------------------------------------------------------
# Files


def files(record, env_name, system, package, version) -> List[File]:
    """The files of a package for an environment and system: its wheels there, or else its sources."""
    python = minor(env_name)
    of_version = [File(name, sha) for name, sha in sorted(record["files"][package][version].items())]
    wheels = [file for file in of_version if file.is_wheel and fits(file.name, python, system)]
    return wheels or [file for file in of_version if not file.is_wheel]


@functools.lru_cache(maxsize=None)
def fits(wheel, minor, system):
    """Whether a wheel, by its name, can be installed on CPython 3.`minor` and a system."""
    pythons, abis, platforms = (tags.split(".") for tags in wheel[: -len(".whl")].split("-")[-3:])
    if not any(_runs(tag, abis, minor) for tag in pythons):
        return False
    return any(tag == "any" or re.fullmatch(_PLATFORM_TAGS[system], tag) for tag in platforms)


def _runs(python, abis, minor):
    tag = re.fullmatch(r"(py|cp)3(\d*)", python)
    if tag is None:
        return False
    kind, number = tag.groups()
    if "abi3" in abis or kind == "py":
        return not number or int(number) <= minor
    own = {f"cp3{minor}", f"cp3{minor}m", "none"}
    return number == str(minor) and bool(own & set(abis))


def built(record, lock_: Lock, system) -> List[str]:
    """The packages that have no wheel for a system: an installer compiles or packs them from their sources."""
    pins = lock_.packages.get(system, {})
    return [
        name for name, version in pins.items() if not files(record, lock_.env_name, system, name, version)[0].is_wheel
    ]


# ----------------------------------------------------------------------------------------------------------------
# Markers


def marker(systems, among) -> Optional[str]:
    """The marker that is true on `systems` of those `among` which a lock is for; None if it is true on all."""
    left = [system for system in SYSTEMS if system in systems]
    if set(left) == set(among):
        return None
    terms = []
    for family in _FAMILIES:
        if all(system in left for system in family):
            terms.append(SYSTEMS[family[0]][1].split(" and ")[0])
            left = [system for system in left if system not in family]
    terms += [f"({SYSTEMS[system][1]})" if " and " in SYSTEMS[system][1] else SYSTEMS[system][1] for system in left]
    text = " or ".join(terms)
    return text[1:-1] if len(terms) == 1 and text.startswith("(") else text


def _versions(lock_: Lock):
    """[(package, version, the systems that install it)]"""
    merged: Dict[Any, List[str]] = {}
    for system, pins in lock_.packages.items():
        for name, version in pins.items():
            merged.setdefault((name, version), []).append(system)
    return [(name, version, merged[name, version]) for name, version in sorted(merged)]


def _files_of(record, lock_, systems, name, version):
    chosen = [file for system in systems for file in files(record, lock_.env_name, system, name, version)]
    return sorted(set(chosen), key=lambda file: (not file.is_wheel, file.name))


# ----------------------------------------------------------------------------------------------------------------
# The two forms


def only(lock_: Lock, system) -> Lock:
    """The lock for one system alone."""
    return lock_._replace(packages={system: lock_.packages[system]}, absent={})


def siblings(record, lock_: Lock) -> List[str]:
    """What the lock of `tensorflow` or `tensorflow-cpu` says if the other one has another patch on Linux x86_64."""
    plain = base(lock_.env_name)
    if (
        lock_.env_name not in (plain, plain + "-cpu")
        or "linux" not in lock_.packages
        or plain + "-cpu" not in record["locks"]
    ):
        return []
    full, cpu = (lock(record, env_name).packages["linux"] for env_name in (plain, plain + "-cpu"))
    if tensorflow(full) == tensorflow(cpu):
        return []
    patches = f"tensorflow has {tensorflow(full)}, tensorflow-cpu has {tensorflow(cpu)}"
    return [f"The newest patches differ: {patches} (locks {plain} and {plain}-cpu)."]


def without(lock_: Lock, names) -> Lock:
    """The lock without some of its packages."""
    left = {system: {n: v for n, v in pins.items() if n not in names} for system, pins in lock_.packages.items()}
    return lock_._replace(packages=left)


def head(record, lock_: Lock) -> List[str]:
    """What a lock says first, as lines of comment."""
    python = f"3.{minor(lock_.env_name)}"
    names = ", ".join(SYSTEMS[system][0] for system in SYSTEMS if system in lock_.packages)
    lines = [
        f"TensorFlow {tf_version(lock_.env_name)} for Python {python} on {names}, as of {record['date']}.",
        "Written by scripts/user/write_locks.py from constraints/tf{}.txt; see docs/pins.md.".format(
            tf_version(lock_.env_name)
        ),
    ]
    lines += siblings(record, lock_)
    for system in SYSTEMS:
        if system in lock_.absent:
            lines.append(f"No TensorFlow on {SYSTEMS[system][0]}: {lock_.absent[system]}.")
        elif built(record, lock_, system):
            lines.append(f"No wheels on {SYSTEMS[system][0]}, built there: {', '.join(built(record, lock_, system))}.")
    return lines


def requirements(record, lock_: Lock) -> str:
    """A requirements file with hashes, for `pip install --require-hashes --no-deps -r`."""
    lines = ["# " + text for text in head(record, lock_)]
    for name, version, systems in _versions(lock_):
        where = _marker_of(lock_, name, systems)
        start = f"{name}=={version}" + (f" ; {where}" if where else "")
        lines.append(hashed(start, _files_of(record, lock_, systems, name, version)))
    return "\n".join(lines) + "\n"


def hashed(requirement: str, files: List[File]) -> str:
    """A requirement with the hashes of its files, as pip reads it."""
    hashes = sorted({file.sha256 for file in files})
    return " \\\n".join([requirement] + [f"    --hash=sha256:{sha}" for sha in hashes])


def _marker_of(lock_, name, systems):
    """The marker of a package. TensorFlow's excludes other systems only, so that it fails where it has no files."""
    where = marker(systems, lock_.packages)
    if where is None or not re.fullmatch(r"tensorflow(-cpu|-macos)?", name):
        return where
    others = [system for system in lock_.packages if system not in systems]
    return marker(systems, list(SYSTEMS)) if name == "tensorflow-macos" else _not(others)


def _not(systems):
    either = [" or ".join(part.replace("==", "!=") for part in SYSTEMS[s][1].split(" and ")) for s in systems]
    return " and ".join(f"({text})" if len(either) > 1 and " or " in text else text for text in either)


def pylock(record, lock_: Lock, url: Optional[str] = None) -> str:
    """A PEP 751 lock. Files are looked for in `wheelhouse/` beside it, or below `url`."""
    lines = ["# " + text for text in head(record, lock_)]
    lines += ['lock-version = "1.0"', 'created-by = "accum"', f'requires-python = "==3.{minor(lock_.env_name)}.*"']
    lines += ["environments = ["] + [f'    "{SYSTEMS[s][1]}",' for s in SYSTEMS if s in lock_.packages] + ["]"]
    for name, version, systems in _versions(lock_):
        lines += ["", "[[packages]]", f'name = "{name}"', f'version = "{version}"']
        where = marker(systems, lock_.packages)
        lines += [f'marker = "{where}"'] if where else []
        of_package = _files_of(record, lock_, systems, name, version)
        lines += [f"sdist = {_table(file, url)}" for file in of_package if not file.is_wheel]
        wheels = [f"    {_table(file, url)}," for file in of_package if file.is_wheel]
        lines += ["wheels = ["] + wheels + ["]"] if wheels else []
    return "\n".join(lines) + "\n"


def _table(file, url):
    where = f'path = "wheelhouse/{file.name}"' if url is None else f'url = "{url.rstrip("/")}/{file.name}"'
    return f'{{ name = "{file.name}", {where}, hashes = {{ sha256 = "{file.sha256}" }} }}'


FORMS = {"requirements": requirements, "pylock": pylock}


def file_name(env_name, form):
    """The name of a lock as a file. PEP 751 allows no further dot between `pylock.` and `.toml`."""
    return f"pylock.{env_name.replace('.', '_')}.toml" if form == "pylock" else f"{env_name}.txt"
