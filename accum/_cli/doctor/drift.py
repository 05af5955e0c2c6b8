"""Compare an environment with its lock: packages of other versions, and missing packages."""

from typing import Any, Dict, List, Optional

from accum._cli.doctor import installed, locks, matrix

ALIASES = {"macos-intel": "macos-x86_64", "macos-arm": "macos-arm64", "linux-aarch64": "linux-arm64"}
"""Other names of systems that `--platform` takes."""

_NAMED = 4


def name(case, record) -> Optional[str]:
    """The lock of an environment, such as "py39-tf2.10-cpu"; None if there is none."""
    if not case.is_known:
        return None
    plain = matrix.env_name(case.minor, case.tensorflow)
    flavours = []
    if case.is_keras_2:
        flavours.append("-keras2")
    elif case.holder and case.holder.name == "tensorflow-cpu":
        flavours.append("-cpu")
    elif case.package("tensorflow-metal"):
        flavours.append("-metal")
    for flavour in flavours + [""]:
        if case.facts.system in record["locks"].get(plain + flavour, {}):
            lock = locks.lock(record, plain + flavour)
            if case.facts.system in lock.packages:
                return plain + flavour
    return None


def pins(case, record) -> Dict[str, str]:
    """{package: version} of the lock of an environment; {} if there is none."""
    lock_name = name(case, record)
    return locks.lock(record, lock_name).packages[case.facts.system] if lock_name else {}


def newest_tensorflow(case, record) -> str:
    """The newest patch in the locks of this version, Python and system, of `tensorflow` or `tensorflow-cpu`."""
    lock_names = locks.base(name(case, record)), name(case, record)
    of_environments = [locks.lock(record, env_name).packages.get(case.facts.system) for env_name in lock_names]
    return max((locks.tensorflow(pins) for pins in of_environments if pins), key=installed.key)


def report(case, record) -> Optional[Dict[str, Any]]:
    """The differences, as `--json` prints them; None if there is no lock."""
    lock_name = name(case, record)
    if lock_name is None:
        return None
    here = {package: of[0].version for package, of in case.facts.packages.items()}
    locked = pins(case, record)
    differ = {package: [here[package], locked[package]] for package in sorted(locked) if package in here}
    differ = {package: pair for package, pair in differ.items() if pair[0] != pair[1]}
    newer = newer_than(locked, here)
    missing = [package for package in sorted(locked) if package not in here]
    file, keeps = f"{lock_name}.txt", " --keep-newer" if newer else ""
    fix = f"python -m accum doctor --pins {lock_name} --platform {case.facts.system}{keeps} > {file}"
    fix += f" && python -m pip install --no-deps --require-hashes -r {file}"
    return {
        "name": lock_name,
        "date": record["date"],
        "packages": len(locked),
        "differ": differ,
        "newer": newer,
        "missing": missing,
        "fix": fix if missing or set(differ) - set(newer) else None,
    }


def newer_than(locked: Dict[str, str], here: Dict[str, str]) -> List[str]:
    """The locked packages that are installed in a newer version: to install what is locked would be a step back."""
    return [name for name in sorted(locked) if name in here and installed.key(here[name]) > installed.key(locked[name])]


def text(report: Dict[str, Any]) -> str:
    """The differences as one line."""
    start = f"{report['name']} of {report['date']}: "
    differ, newer, missing = report["differ"], report["newer"], report["missing"]
    if not differ and not missing:
        return start + f"all {report['packages']} packages are as locked"
    said = {package: f"{package} {ours} (locked {theirs})" for package, (ours, theirs) in differ.items()}
    older = [said[package] for package in differ if package not in newer]
    parts = [_listed("differs", "differ", older)] if older else []
    parts += (
        [_listed("is newer, and stays", "are newer, and stay", [said[package] for package in newer])] if newer else []
    )
    parts += [_listed("is missing", "are missing", missing)] if missing else []
    return start + "; ".join(parts)


def _listed(one, many, names):
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} {one if len(names) == 1 else many}: {', '.join(names[:_NAMED])}{more}"
