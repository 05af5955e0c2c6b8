"""Measure the cost of accumulation against its limit: `python benchmarks/speed.py run [--smoke] [--json FILE]`.

The limit of a cycle is the time of K forward and backward passes in a bare `tf.function` (a bare Session for the api
"v1"), and one bare `apply_gradients`. Results are ratios to that limit for every implementation in this environment:
accum, an update on every micro-batch, accumulation by hand, and other libraries. Implementations take turns in one
process, in an order drawn anew each round. A time is divided by the limit's time in the same round, and the result is
the median of these ratios with its quartiles. Before anything is timed, accum must end with the limit's weights.

Memory is the peak of a process that does only one run.

    run                 measure the implementations in this environment, and print tables
    merge FILES         write the tables of `--json` files into project/pages/speed.md
    figure FILES        draw them
"""

import argparse
import json
import os
import random
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE = os.path.join(os.path.dirname(HERE), "project", "pages", "speed.md")
WORKLOADS = ["mlp", "conv", "transformer", "residual", "towers"]
APIS = ["v1", "optimizer", "model", "one step", "step in fit", "whole batch"]
OF_WHOLE_BATCH = {"residual", "towers"}


class WorkerFailed(Exception):
    """A worker ended without a result."""


def work(task):
    """Do `task` in a separate process. Returns its result."""
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "work", json.dumps(task)]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONHASHSEED="0")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    if done.returncode:
        raise WorkerFailed(f"{task}\n{done.stderr.decode()[-3000:]}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def work_here(task):
    """Do `task` in this process, the worker."""
    if task["what"] == "versions":
        from measuring import machine

        return {"versions": machine.versions()}
    if task["what"] == "memory":
        from measuring.memory import measure_one

        return measure_one(task)
    from measuring import timing

    if task["api"] == "whole batch":
        return timing.api_of(task["api"])[0].time_one(task)
    return timing.time_one(task)


def tasks_of(settings):
    """All tasks, each a dict: first timing, then memory, the latter several times in random order."""
    common = {"smoke": settings["smoke"], "optimizer": settings["optimizer"]}
    pairs = [(w, f) for w in settings["workloads"] for f in settings["apis"]]
    named = [dict(common, workload=w, api=f) for w, f in pairs if (w in OF_WHOLE_BATCH) == (f == "whole batch")]
    shared = {"rounds": settings["rounds"], "warm_up": settings["warm_up"], "what": "time"}
    timed = [dict(task, accum_steps=k, **shared) for task in named for k in settings["accum_steps"]]
    measured = []
    for task in named:
        measured += _memory_tasks(dict(task, what="memory"), settings)
    measured *= settings["processes"]
    random.Random(0).shuffle(measured)
    return (timed if "time" in settings["measure"] else []) + (measured if "memory" in settings["measure"] else [])


def _memory_tasks(task, settings):
    """For the MLP, every K against plain micro-batches; for the conv net, 64 x 64 examples against 4,096.

    For a step that takes whole batches: 8 micro-batches against a single one and against the whole batch.
    """
    if task["api"] == "step in fit":
        return []
    if task["api"] == "whole batch":
        batch = 4 if settings["smoke"] else 64
        of_k = ("micro-batch", "accumulated", "exact", "full batch")
        kinds = [(kind, 2 if settings["smoke"] else 8) for kind in of_k]
    elif task["api"] == "one step":
        if task["workload"] == "transformer":
            return []
        batch = 4 if settings["smoke"] else {"mlp": 16, "conv": 64}[task["workload"]]
        kinds = [(kind, 2 if settings["smoke"] else 8) for kind in ("micro-batch", "accumulated", "full batch")]
    elif task["workload"] == "mlp":
        batch = 4 if settings["smoke"] else 16
        kinds = [("micro-batch", 1)] + [("accumulated", k) for k in settings["accum_steps"]]
    elif task["workload"] == "conv":
        batch = 4 if settings["smoke"] else 64
        kinds = [(kind, batch) for kind in ("micro-batch", "accumulated", "full batch")]
    else:
        return []
    return [dict(task, kind=kind, accum_steps=k, batch=batch) for kind, k in kinds]


def run(arguments):
    from measuring import machine, report

    settings = settings_from(arguments)
    result = {"machine": machine.described(), "settings": settings, "times": [], "memory": [], "absent": []}
    result.update(work({"what": "versions"}))
    if result["versions"]["tensorflow"].startswith("1."):
        settings["apis"] = [api for api in settings["apis"] if api == "v1"]
    tasks, failures = tasks_of(settings), 0
    for count, task in enumerate(tasks, 1):
        shown = [str(task.get(key, "")) for key in ("what", "kind", "workload", "api")]
        print(f"{count}/{len(tasks)}: {' '.join(shown)} K = {task['accum_steps']}", file=sys.stderr)
        try:
            found = work(task)
        except WorkerFailed as error:
            failures += 1
            print(f"FAILED: {error}", file=sys.stderr)
            continue
        for key in ("times", "memory", "absent"):
            result[key] += found.get(key, [])
        save(result, arguments.json)
    print(report.as_text(result))
    return 1 if failures else 0


def settings_from(arguments):
    is_smoke = arguments.smoke
    return {
        "smoke": is_smoke,
        "workloads": arguments.workload,
        "apis": arguments.api,
        "accum_steps": arguments.accum_steps or ([1, 3] if is_smoke else [1, 4, 8, 32]),
        "optimizer": arguments.optimizer,
        "rounds": arguments.rounds or (2 if is_smoke else 15),
        "warm_up": 1 if is_smoke else 3,
        "measure": arguments.measure,
        "processes": arguments.processes or (1 if is_smoke else 3),
    }


def save(result, path):
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1, sort_keys=True)
            file.write("\n")


def load(paths):
    results = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            results.append(json.load(file))
    return results


def merge(arguments):
    from measuring import report

    results = load(arguments.files)
    if any(result["settings"]["smoke"] for result in results) and arguments.page == PAGE:
        sys.exit("A smoke test is no measurement: its numbers do not go into the page.")
    with open(arguments.page, encoding="utf-8") as file:
        text = file.read()
    with open(arguments.page, "w", encoding="utf-8") as file:
        file.write(report.merged(text, results))
    return 0


def parser():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command")
    commands.required = True
    running = commands.add_parser("run", help="measure the implementations in this environment")
    running.add_argument("--workload", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    running.add_argument("--api", nargs="+", choices=APIS, default=APIS)
    running.add_argument("--accum-steps", nargs="+", type=int, metavar="K", help="default: 1 4 8 32")
    running.add_argument("--rounds", type=int, help="default: 15")
    running.add_argument("--processes", type=int, help="runs of each kind that measure memory; default: 3")
    running.add_argument("--optimizer", choices=["momentum", "adam"], default="momentum")
    running.add_argument("--measure", nargs="+", choices=["time", "memory"], default=["time", "memory"])
    running.add_argument("--smoke", action="store_true", help="use tiny sizes, only to see whether everything runs")
    running.add_argument("--json", metavar="FILE", help="file for the results")
    merging = commands.add_parser("merge", help="write the tables of results into a page")
    merging.add_argument("files", nargs="*")
    merging.add_argument("--page", default=PAGE)
    commands.add_parser("work").add_argument("task")
    return made


def main():
    arguments = parser().parse_args()
    if arguments.command == "work":
        print(json.dumps(work_here(json.loads(arguments.task))), flush=True)
        return 0
    return {"run": run, "merge": merge}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
