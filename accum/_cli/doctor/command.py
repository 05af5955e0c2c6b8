"""`python -m accum doctor`: say whether this environment is supported, and what to change if not."""

import argparse
import json
import os
import platform
import struct
import sys

import accum
from accum._cli.doctor import checks, installed, matrix, trial


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
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=120,
        metavar="S",
        help="seconds that importing TensorFlow may take (default: %(default)s)",
    )
    parser.set_defaults(perform=perform)


def _seconds(text):
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0. Received: {text}")
    return value


_seconds.__name__ = "float"  # argparse says "invalid float value" by it


def perform(arguments):
    report = diagnosis(checks.Case(facts(), trial.run(arguments.timeout)))
    print(json.dumps(report, indent=2) if arguments.json else text(report))
    return 0 if report["verdict"] == "supported" else 1


def facts():
    """Facts about the environment that this process can find without importing any package."""
    return checks.Facts(
        system=system(sys.platform, platform.machine()),
        python=platform.python_version(),
        bits=8 * struct.calcsize("P"),
        implementation=platform.python_implementation(),
        packages=installed.packages(),
        environ=dict(os.environ),
    )


def system(name, machine):
    """The name of a system in the matrix, or the name it would have there."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(machine.lower(), machine.lower())
    if name == "darwin":
        return "macos-" + machine
    name = {"win32": "windows"}.get(name, name)
    return name if machine == "x86_64" else f"{name}-{machine}"


def diagnosis(case):
    """The report, as `--json` prints it."""
    findings = checks.findings(case)
    works = case.trial.error is None
    has_problem = any(finding.level == "problem" for finding in findings)
    is_broken = case.is_in_matrix and not works
    interfaces = (["accum"] if matrix.has_keras_api(case.tensorflow) else []) + ["accum.compat.v1"]
    return {
        "verdict": "broken" if is_broken else "not supported" if has_problem or not works else "supported",
        "cell": case.env_name,
        "accum": accum.__version__,
        "system": case.facts.system,
        "python": case.facts.python,
        "tensorflow": case.version,
        "distributions": case.distributions,
        "keras": case.trial.keras or case.facts.packages.get("tf-keras" if case.wants_keras_2 else "keras"),
        "import_seconds": case.trial.seconds,
        "interfaces": interfaces if case.is_known else [],
        "constraints": checks.constraints(case.tensorflow) if case.is_known else None,
        "install": case.install(),
        "findings": [dict(finding._asdict()) for finding in findings],
    }


_NEXT = {
    "accum": "`python -m accum demo` shows what accumulation does. In your own code, wrap a model in\n"
    "  accum.GradientAccumulateModel.from_model(model, micro_batch_size=8), then compile and fit as before.\n"
    "  `python -m accum verify file.py:function` checks that it trains as on the full batch.",
    "accum.compat.v1": "`python -m accum demo` shows what accumulation does. In your own code, wrap the optimizer in\n"
    "  accum.compat.v1.AccumOptimizer(optimizer, accum_steps=8), and run the train op for each micro-batch.",
}


def _next(report):
    """What the reader does after this."""
    if report["verdict"] == "supported":
        return _NEXT[report["interfaces"][0]]
    if any(finding["change"] for finding in report["findings"]):
        return (
            "make the change above, best in a new environment, and run `python -m accum doctor` again; "
            "`python -m pip check` lists other packages that do not fit."
        )
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
    tensorflow = f"{report['tensorflow']} ({names or 'no metadata'}{took})"
    rows = [
        ("tested as", report["cell"] or "nothing"),
        ("system", matrix.SYSTEMS.get(report["system"], report["system"])),
        ("Python", report["python"]),
        ("TensorFlow", "not found" if report["tensorflow"] is None else tensorflow),
        ("Keras", report["keras"]),
        ("supports", ", ".join(_INTERFACES[name] for name in report["interfaces"])),
        ("pins", report["constraints"]),
    ]
    lines = [f"accum {report['accum']}: this environment is {report['verdict']}.", ""]
    lines += [f"  {name:<12}{value}" for name, value in rows if value]
    for finding in report["findings"]:
        lines += ["", f"{finding['level'].capitalize()}: {finding['what']}"]
        lines += [f"  Change: {finding['change']}"] if finding["change"] else []
    return "\n".join(lines + ["", "Next: " + _next(report)])
