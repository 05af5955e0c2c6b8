"""`python -m accum doctor`: say whether this environment is supported, and what to change if not."""

import json
import os
import platform
import struct
import sys

import accum
from accum._cli.doctor import checks, environment

SECONDS = 300  # that importing TensorFlow may take


def add_parser(commands):
    """Add `doctor` to the subparsers of the command line."""
    parser = commands.add_parser(
        "doctor",
        help="say whether this Python and TensorFlow are supported, and what to change",
        description="Say whether this combination of TensorFlow, Python and system is supported and works, which file "
        "pins its packages, and what to change. Also runs if TensorFlow is missing or broken. "
        "Exit status: 0 if supported, 1 if not supported or broken, 2 for a wrong argument.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(perform=perform)


def perform(arguments):
    report = diagnosis(this_case())
    print(json.dumps(report, indent=2) if arguments.json else text(report))
    return 0 if report["verdict"] == "supported" else 1


def this_case():
    """The environment of this process, found without importing any package here."""
    return checks.Case(
        environment.trial(SECONDS),
        system(sys.platform, platform.machine()),
        platform.python_version(),
        8 * struct.calcsize("P"),
        environment.packages(),
        os.environ,
    )


def system(name, machine):
    """The name of a system in the matrix, or the name it would have there."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine.lower(), machine.lower())
    name = {"darwin": "macos", "win32": "windows"}.get(name, name)
    return name if machine == "x86_64" and name != "macos" else f"{name}-{machine}"


def diagnosis(case):
    """The report, as `--json` prints it."""
    findings = checks.findings(case)
    has_problem = any(finding.level == "problem" for finding in findings)
    is_broken = case.is_in_matrix and case.trial.error is not None
    return {
        "verdict": "broken" if is_broken else "not supported" if has_problem else "supported",
        "environment": case.name,
        "accum": accum.__version__,
        "system": case.system,
        "python": case.python_version,
        "tensorflow": case.version,
        "distributions": case.distributions,
        "keras": case.trial.keras or case.packages.get("tf-keras" if case.wants_keras_2 else "keras"),
        "constraints": checks.constraints(case.tensorflow),
        "install": case.install(),
        "findings": [dict(finding._asdict()) for finding in findings],
    }


def text(report):
    """The report as text, in the words of `--json`."""
    lines = [f"accum {report['accum']}: this environment is {report['verdict']}.", ""]
    shown = dict(report, distributions=", ".join("{}=={}".format(*pair) for pair in report["distributions"].items()))
    names = ("environment", "system", "python", "tensorflow", "distributions", "keras", "constraints")
    lines += [f"  {name:<15}{shown[name]}" for name in names if shown[name]]
    for finding in report["findings"]:
        lines += ["", f"{finding['level'].capitalize()}: {finding['what']}"]
        lines += [f"  Change: {finding['change']}"] if finding["change"] else []
    return "\n".join(lines)
