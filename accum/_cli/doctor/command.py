"""`python -m accum doctor`: say whether this environment is supported, and what to change if not."""

import argparse
import json
import os
import platform
import struct
import sys

import accum
from accum._cli.doctor import audit_command, checks, drift, installed, locks, matrix, remedies, trial

TIMEOUT = 120
HERE = "this environment"


def add_parser(commands):
    """Add `doctor` to the subparsers of the command line."""
    parser = commands.add_parser(
        "doctor",
        help="say whether this Python and TensorFlow are supported, and what to change",
        description="Say whether this combination of TensorFlow, Python and system is supported and works, which file "
        "pins its packages, and what to change. Also runs if TensorFlow is missing or broken. "
        "With --audit, --sbom or --pins it does that instead, without importing TensorFlow or using a network. "
        "Exit status: 0 if supported, 1 if not supported or broken; with --audit: 1 if advisories are "
        "known that --accept does not list; 2 for a wrong argument or a database that cannot be read.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--audit",
        action="store_true",
        help="list the known flaws of the installed TensorFlow and what fixes them; with --advisories, of all packages",
    )
    parser.add_argument(
        "--sbom",
        metavar="FILE",
        help="write what is installed to FILE, with hashes, licenses and origins; with --pins, what a lock installs; "
        "with --advisories, also the advisories",
    )
    parser.add_argument(
        "--sbom-format",
        choices=sorted(audit_command.SBOM_FORMATS),
        help="of --sbom: CycloneDX 1.5 (default) or SPDX 2.3, in JSON",
    )
    parser.add_argument(
        "--advisories",
        metavar="PATH",
        help="of --audit and --sbom: a database in the OSV format, as a zip archive or a directory of JSON files",
    )
    parser.add_argument(
        "--accept",
        metavar="FILE",
        help="of --audit: a JSON file of accepted advisories, with a reason and a last day for each",
    )
    parser.add_argument(
        "--pins",
        nargs="?",
        const=HERE,
        metavar="NAME",
        help="print the lock with this name, such as py39-tf2.10, py39-tf2.10-cpu, py311-tf2.18-keras2 or "
        "py310-tf2.12-metal (default: that of this environment)",
    )
    parser.add_argument(
        "--platform",
        metavar="PLATFORM",
        help=f"of --pins: for this system only, one of {', '.join(locks.SYSTEMS)} (default: for all)",
    )
    parser.add_argument(
        "--keep-newer",
        action="store_true",
        help="of --pins: leave out the packages that are installed here in a newer version than the locked one",
    )
    parser.add_argument(
        "--form",
        choices=sorted(locks.FORMS),
        help="of --pins: a requirements file (default) or a pylock.toml (PEP 751)",
    )
    parser.add_argument(
        "--files",
        metavar="URL",
        help="of --form pylock and of --sbom: where the files are (default: in wheelhouse/ beside the lock)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT,
        metavar="S",
        help="seconds that importing TensorFlow may take (default: %(default)s)",
    )
    parser.set_defaults(perform=lambda arguments: perform(arguments, parser))


def _seconds(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0. Received: {text}")
    return value


_seconds.__name__ = "float"  # argparse says "invalid float value" by it


def perform(arguments, parser):
    _check(arguments, parser)
    if arguments.pins and not arguments.sbom:
        return _print_pins(arguments, parser)
    if arguments.sbom and arguments.pins:
        record, case = locks.read(), _untried()
        system_, lock = _lock(arguments, parser, record, case, arguments.platform or case.facts.system)
        return audit_command.write_bill_of_lock(arguments, parser, case, record, lock, system_)
    if arguments.audit or arguments.sbom:
        return audit_command.perform(arguments, parser, _untried())
    case = checks.Case(facts(), trial.run(arguments.timeout))
    report = diagnosis(case)
    print(json.dumps(report, indent=2) if arguments.json else text(report))
    return 0 if report["verdict"] == "supported" else 1


def _check(arguments, parser):
    """Exit with a usage error if the options do not go together."""
    if arguments.pins and (arguments.audit or arguments.json):
        parser.error("--pins does not go with --audit or --json.")
    of_sbom = arguments.sbom and not (arguments.platform or arguments.form or arguments.keep_newer)
    if not (arguments.pins or of_sbom) and (
        arguments.platform or arguments.form or arguments.files or arguments.keep_newer
    ):
        parser.error("--platform, --keep-newer, --form and --files are options of --pins.")
    if arguments.files and arguments.form != "pylock" and not arguments.sbom:
        parser.error("--files is an option of --form pylock and of --sbom.")
    if arguments.sbom and (arguments.form or arguments.keep_newer):
        parser.error("--form and --keep-newer do not go with --sbom.")
    if arguments.sbom_format and not arguments.sbom:
        parser.error("--sbom-format is an option of --sbom.")
    if arguments.advisories and not (arguments.audit or arguments.sbom):
        parser.error("--advisories is an option of --audit and --sbom.")
    if arguments.accept and not arguments.audit:
        parser.error("--accept is an option of --audit.")


def _untried():
    """What is known of this environment without importing TensorFlow."""
    return checks.Case(facts(), trial.Trial(None, None, None, None, "tensorflow", None, ""))


def _lock(arguments, parser, record, case, platform_):
    """(system or None for all, lock) that --pins names; exit with a usage error if there is none."""
    name = drift.name(case, record) if arguments.pins == HERE else arguments.pins
    if name not in record["locks"]:
        reason = "There is no lock for this environment" if name is None else f"There is no lock named {name}"
        parser.error(f"{reason}. Names are like py39-tf2.10; known are those in MATRIX.md.")
    lock = locks.lock(record, name)
    if not platform_:
        return None, lock
    system = drift.ALIASES.get(platform_, platform_)
    if system not in locks.SYSTEMS:
        parser.error(f"--platform must be one of {', '.join(locks.SYSTEMS)}. Received: {platform_}")
    if system not in lock.packages:
        parser.error(f"{name} is not for {locks.SYSTEMS[system][0]}: {lock.absent.get(system, 'another lock is')}.")
    return system, locks.only(lock, system)


def _print_pins(arguments, parser):
    record, case = locks.read(), _untried()
    _, lock = _lock(arguments, parser, record, case, arguments.platform)
    if arguments.keep_newer:
        here = {package: of[0].version for package, of in case.facts.packages.items()}
        locked = [pins for system, pins in lock.packages.items() if system in (case.facts.system, arguments.platform)]
        lock = locks.without(lock, [package for pins in locked for package in drift.newer_than(pins, here)])
    render = locks.pylock if arguments.form == "pylock" else locks.requirements
    sys.stdout.write(render(record, lock, *([arguments.files] if arguments.files else [])))
    return 0


def facts():
    """Facts about the environment that this process can find without importing any package."""
    return checks.Facts(
        system=system(sys.platform, platform.machine()),
        python=platform.python_version(),
        bits=8 * struct.calcsize("P"),
        implementation=platform.python_implementation(),
        packages=installed.packages(),
        environ=dict(os.environ),
        keras_config=_keras_config(),
    )


def system(name, machine):
    """The name of a system in the matrix, or the name it would have there."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine.lower(), machine.lower())
    if name == "darwin":
        return "macos-" + machine
    name = {"win32": "windows"}.get(name, name)
    return name if machine == "x86_64" else f"{name}-{machine}"


def _keras_config():
    folder = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    try:
        with open(os.path.join(folder, "keras.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def diagnosis(case):
    """The report, as `--json` prints it."""
    findings = checks.findings(case)
    has_problem = any(finding.level == "problem" for finding in findings)
    works = case.trial.error is None
    verdict = "not supported" if not case.is_in_matrix else "broken" if not works else "not supported"
    interfaces = (
        ["accum", "accum.compat.v1"] if case.is_known and matrix.has_keras_api(case.tensorflow) else ["accum.compat.v1"]
    )
    return {
        "verdict": verdict if has_problem or not works else "supported",
        "cell": case.env_name,
        "accum": accum.__version__,
        "system": case.facts.system,
        "python": case.facts.python,
        "tensorflow": case.version,
        "distributions": {package.name: package.version for package in case.distributions},
        "keras": case.keras,
        "import_seconds": case.trial.seconds,
        "interfaces": interfaces if case.is_known else [],
        "constraints": remedies.constraints(case.tensorflow) if case.is_known else None,
        "install": case.install(),
        "lock": drift.report(case, locks.read()),
        "findings": [dict(finding._asdict()) for finding in findings],
    }


def _next(report):
    """What the reader does after this."""
    if report["verdict"] == "supported" and "accum" in report["interfaces"]:
        return (
            "`python -m accum demo` shows what accumulation does. In your own code, wrap a model in\n"
            "  accum.GradientAccumulateModel.from_model(model, micro_batch_size=8), then compile and fit as before.\n"
            "  `python -m accum verify file.py:function` checks that it trains as on the full batch."
        )
    if report["verdict"] == "supported":
        return (
            "`python -m accum demo` shows what accumulation does. In your own code, wrap the optimizer in\n"
            "  accum.compat.v1.AccumOptimizer(optimizer, accum_steps=8), and run the train op for each micro-batch."
        )
    if any(finding["change"] for finding in report["findings"]):
        return "make the change above, best in a new environment, and run `python -m accum doctor` again."
    if report["install"]:
        return f"in a new environment, run `{report['install']}`, and then `python -m accum doctor` again."
    return "use a Python and a system that TensorFlow supports: README.md has the table."


_INTERFACES = {
    "accum": "Keras models and optimizers (accum)",
    "accum.compat.v1": "static graphs (accum.compat.v1)",
}


def text(report):
    """The report as text."""
    names = ", ".join("{} {}".format(*pair) for pair in sorted(report["distributions"].items()))
    seconds = report["import_seconds"]
    took = "" if seconds is None else f"; imported in {seconds} s"
    rows = [
        ("tested as", report["cell"] or "nothing"),
        ("system", matrix.SYSTEMS.get(report["system"], report["system"])),
        ("Python", report["python"]),
        ("TensorFlow", f"{report['tensorflow']} ({names or 'no metadata'}{took})"),
        ("Keras", report["keras"]),
        ("supports", ", ".join(_INTERFACES[name] for name in report["interfaces"])),
        ("pins", report["constraints"]),
        ("install", report["install"]),
        ("lock", report["lock"] and drift.text(report["lock"])),
        ("fix", report["lock"] and report["lock"]["fix"]),
    ]
    if report["tensorflow"] is None:
        rows[3] = ("TensorFlow", "not found")
    lines = [f"accum {report['accum']}: this environment is {report['verdict']}.", ""]
    lines += [f"  {name:<12}{value}" for name, value in rows if value]
    for finding in report["findings"]:
        lines += ["", f"{finding['level'].capitalize()}: {finding['what']}"]
        lines += [f"  Change: {finding['change']}"] if finding["change"] else []
    lines += ["", "Next: " + _next(report)]
    return "\n".join(lines)
