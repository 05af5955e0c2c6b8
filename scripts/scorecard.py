"""Run fixed cases of each law with accum and with other ways to accumulate, and write docs/scorecard.md.

    python scripts/scorecard.py run --peer keras3 optax --json FILE    where their libraries are installed
    python scripts/scorecard.py page FILES                             writes docs/scorecard.json and docs/scorecard.md
    python scripts/scorecard.py page                                   writes docs/scorecard.md anew

Nothing on the page is typed by hand but the notes, in tests/prover/peers/notes.py.
"""

import argparse
import collections
import importlib
import json
import os
import platform
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# In place of this script's folder, where numbers.py would hide Python's own.
sys.path[:1] = [os.path.join(ROOT, "tests"), ROOT]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from prover import peers  # noqa: E402
from prover.peers import cases  # noqa: E402


def adapter(name):
    module, _, cls = peers.ADAPTERS[name].partition(":")
    return getattr(importlib.import_module("prover.peers." + module), cls)


def run(arguments):
    from prover.peers.judge import judge

    found = []
    for name in arguments.peer:
        start, peer, results = time.time(), adapter(name), []
        chosen = [case for case in cases.cases() if not arguments.law or case["law"] in arguments.law]
        for case in chosen:
            if arguments.kind is None or case["kind"] == arguments.kind:
                results.append(dict(judge(peer, case), **{key: case[key] for key in ("law", "kind", "place", "optimizer")}))
                if arguments.verbose:
                    print(json.dumps(results[-1]), flush=True)
        found.append(summary(name, peer, results))
        outcomes = collections.Counter(result["outcome"] for result in results)
        print("{}: {} in {:.0f} s".format(name, dict(outcomes), time.time() - start), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1, sort_keys=True)
            file.write("\n")


def summary(name, peer, results):
    return {
        "peer": name,
        "title": peer.title,
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in peer.packages},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "laws": {law: _counts([each for each in results if each["law"] == law]) for law in cases.LAWS},
    }


def _version(package):
    try:
        from importlib import metadata
    except ImportError:  # before Python 3.8
        import importlib_metadata as metadata
    for name in (package, package + "-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


def _counts(results):
    """Return {kind: counts, largest deviation, and the case that has it or an error}."""
    found = {}
    for kind in sorted({result["kind"] for result in results}):
        mine = [result for result in results if result["kind"] == kind]
        entry = dict(collections.Counter(result["outcome"] for result in mine))
        measured = [result for result in mine if result["deviation"] is not None]
        if measured:
            worst = max(measured, key=lambda result: _as_number(result["deviation"]))
            entry.update({"largest": _rounded(worst["deviation"]), "worst": worst["place"]})
        errors = [result["error"] for result in mine if result["error"]]
        if errors:
            entry["error"] = errors[0]
        found[kind] = entry
    return found


def _as_number(deviation):
    return float("inf") if deviation == "not finite" else deviation


def _rounded(deviation):
    return deviation if deviation == "not finite" else float("{:.1e}".format(deviation))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    running = commands.add_parser("run")
    running.add_argument("--peer", nargs="+", required=True, choices=sorted(peers.ADAPTERS))
    running.add_argument("--law", nargs="*", choices=list(cases.LAWS))
    running.add_argument("--kind")
    running.add_argument("--json")
    running.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    run(arguments)


if __name__ == "__main__":
    main()
