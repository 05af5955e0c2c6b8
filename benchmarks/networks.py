"""Measure `whole_batch` on networks that people use, beside plain Keras and plain splitting.

    python benchmarks/networks.py run [--size small] [--network U-Net ResNet50] [--json FILE]
    python benchmarks/networks.py gpu [--json FILE]      # on a GPU: all that a GPU makes different, in 15 minutes
    python benchmarks/networks.py table FILES            # print the tables of `--json` files again
    python benchmarks/networks.py pages [--write]        # print what README.md and docs/ should show, or write it

Memory is the peak beyond that of the built model, in a process that makes one run: that of the process, and that of the
tensors, which TensorFlow's allocator counts on a GPU and, with oneDNN, on the CPU. A first step includes the trace.
Later steps of all runs take turns in one process, in an order drawn anew each round; ratios are those of medians. With
`run`, seconds are those of the processor; with `gpu`, they are seconds on the wall. `gpu` also lets memory run out
under `micro_batch_size="auto"`, and compares epochs of `fit`. With `--smoke`, it runs anywhere, with tiny sizes.

`--size default --run "full batch" "plain splitting" default` is for what the default of `whole_batch` costs.
`--size tried` is for where a step ends, not for what it takes: a network of each family of `keras.applications`, in
small. `run --size tried --measure time --run "full batch" "plain splitting" '"all"' --rounds 0` tries them all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FULL, MICRO, SPLIT = "full batch", "one micro-batch", "plain splitting"
ALL, KEPT = '"all"', '"all", recompute=False'
DEFAULT = "default"
RUNS = (FULL, MICRO, SPLIT, ALL, KEPT)
FAMILIES = [
    "ResNet50",
    "ResNet50V2",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "EfficientNetB0",
    "EfficientNetV2B0",
] + ["DenseNet121", "NASNetMobile", "RegNetX002", "RegNetY002", "ResNetRS50"]
AT_LEAST_75 = ["InceptionV3", "InceptionResNetV2", "Xception"]
# size -> network -> (images in a batch, in a micro-batch, side of an image)
SIZES = {
    "small": {
        "U-Net": (32, 4, 96),
        "ResNet50": (32, 4, 64),
        "MobileNetV2": (32, 4, 96),
        "EfficientNetB0": (32, 4, 64),
        "DenseNet121": (32, 4, 64),
    },
    "large": {
        "U-Net": (64, 4, 192),
        "ResNet50": (64, 4, 224),
        "MobileNetV2": (64, 4, 224),
        "EfficientNetB0": (64, 4, 224),
        "DenseNet121": (64, 4, 224),
    },
    "default": {"ResNet50": (32, 4, 64), "U-Net": (32, 4, 96), "BERT": (32, 4, 128), "LSTM": (32, 4, 100)},
    "gpu": {"U-Net": (128, 8, 256), "ResNet50": (128, 8, 224)},
    "tried": dict(dict.fromkeys(FAMILIES, (8, 2, 64)), **dict.fromkeys(AT_LEAST_75, (8, 2, 75))),
    "smoke": {"tiny": (8, 2, 8)},
}
NETWORKS = list(dict.fromkeys(name for size in ("small", "tried", "default") for name in SIZES[size]))


def work(task):
    """Do `task` in a separate process. Returns its result, or {"failed": why}."""
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "work", json.dumps(task)]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONHASHSEED="0")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    if done.returncode:
        return {"failed": done.stderr.decode()[-2000:] or f"exit status {done.returncode}"}
    return json.loads(done.stdout.decode().splitlines()[-1])


def work_here(task):
    """Do `task` in this process, the worker."""
    from measuring.networks import WORKERS

    return WORKERS[task["what"]](task)


def tasks_of(settings):
    """All tasks but those that depend on the results of others."""
    tasks = []
    for size in settings["sizes"]:
        for name, (batch, micro, side) in SIZES[size].items():
            if settings["networks"] and name not in settings["networks"]:
                continue
            common = {"network": name, "size": size, "batch": batch, "micro": micro, "side": side}
            common["eager"] = settings["eager"]
            if "memory" in settings["measure"]:
                memory = dict(common, what="memory", steps=settings["steps"])
                tasks += [dict(memory, run=run) for _ in range(settings["processes"]) for run in settings["runs"]]
            if "time" in settings["measure"]:
                timed = [run for run in settings["runs"] if run != MICRO]
                time = dict(common, what="time", rounds=settings["rounds"], runs=timed)
                tasks += [dict(time, seed=seed) for seed in range(settings["processes"])]
    return tasks


def last_tasks(settings, results):
    """What `gpu` measures beside: sizes that are found, and `fit`."""
    tasks = []
    (size,) = settings["sizes"]
    for name, (batch, micro, side) in SIZES[size].items():
        common = {"network": name, "size": size, "batch": batch, "micro": micro, "side": side}
        options = [{"whole_batch": "all"}] + ([] if settings["smoke"] else [{}])
        sized = dict(common, what="auto", fits=micro, options=options, steps=settings["steps"])
        tasks.append(dict(sized, limit_mib=limit_of(results, name)))
    whole = [run for run in settings["runs"] if run != MICRO]
    return tasks + [dict(common, what="fit", runs=whole, rounds=settings["rounds"])]


def limit_of(results, name):
    """MiB into which a network's full batch does not fit, but half of it does; 4 GiB if the device does not say."""
    found = {row["run"]: row for row in rows_of(results, name, "memory") if "device_mib" in row}
    if not {FULL, MICRO, ALL} <= set(found):
        return 4096
    full, micro, exact = (found[run]["device_mib"] for run in (FULL, MICRO, ALL))
    return int(max((full + micro) / 2, 1.2 * exact)) + 256


def rows_of(results, name, what, size=None):
    return [
        dict(row, versions=result.get("versions"))
        for result in results
        if (result["task"]["network"], result["task"]["what"]) == (name, what)
        and size in (None, result["task"]["size"])
        for row in result.get("rows", [])
    ]


def run(arguments):
    from measuring import machine

    settings = settings_from(arguments)
    known = {"machine": machine.described(), "settings": settings, "results": []}
    tasks, is_gpu = tasks_of(settings), arguments.command == "gpu"
    while tasks:
        task = tasks.pop(0)
        print(f"{task['size']} {task['network']}: {task['what']} {task.get('run', '')}", file=sys.stderr)
        found = work(task)
        if "failed" in found:
            print(f"FAILED: {found['failed']}", file=sys.stderr)
        known["versions"] = found.pop("versions", known.get("versions"))
        known["results"].append(dict(found, task=task))
        save(known, arguments.json)
        if not tasks and is_gpu:
            tasks, is_gpu = last_tasks(settings, known["results"]), False
    print("\n".join(report(known)))
    return 1 if any("failed" in result for result in known["results"]) else 0


def settings_from(arguments):
    is_gpu, is_smoke = arguments.command == "gpu", arguments.smoke
    return {
        "sizes": ["smoke"] if is_smoke else ["gpu"] if is_gpu else arguments.size,
        "networks": None if is_gpu or is_smoke else arguments.network,
        "runs": [FULL, MICRO, SPLIT, ALL] if is_smoke else list(RUNS) if is_gpu else arguments.run,
        "eager": not is_gpu and arguments.eager,
        "measure": ["memory", "time"] if is_gpu else arguments.measure,
        "processes": 1 if is_gpu else arguments.processes,
        "steps": 2 if is_smoke or is_gpu else arguments.steps,
        "rounds": 1 if is_smoke else 5 if is_gpu else arguments.rounds,
        "clock": "wall" if is_gpu else "processor",
        "smoke": is_smoke,
    }


def save(known, path):
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1, sort_keys=True)
            file.write("\n")


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def report(known):
    """Lines of Markdown."""
    from measuring.report import environment, table

    results, clock = known["results"], ("wall", "processor").index(known["settings"]["clock"])
    if not known.get("versions"):
        return failed_lines(results)
    lines = [environment(known), ""]
    measured = list(dict.fromkeys((each["task"]["size"], each["task"]["network"]) for each in results))
    tables = [
        (["MiB beyond the built model: process / tensors"] + list(RUNS) + ["share"], memory_row),
        (["seconds"] + [f"first, {run}" for run in TIMED] + [f"later, {run}" for run in TIMED], time_row),
        (["ratio"] + ["first step to plain Keras", "step to plain splitting", "to the full batch"] * 2, ratio_row),
        (["off plain Keras: weights, statistics", "examples reversed"] + list(TIMED[1:]), apart_row),
    ]
    for head, row in tables:
        made = [row(results, size, name, clock) for size, name in measured]
        made = [each for each in made if set("".join(each[1:])) - set("–/ ")]
        lines += table(head, made) + [""] if made else []
    return lines + auto_lines(results, clock) + fit_lines(results, clock) + failed_lines(results)


TIMED = (FULL, SPLIT, ALL, KEPT)


def label(results, size, name):
    task = next(r["task"] for r in results if (r["task"]["size"], r["task"]["network"]) == (size, name))
    eager = ", eagerly" if task.get("eager") else ""
    return "{network}, {batch} × {side} × {side}, micro-batches of {micro}".format(**task) + eager


def shown(value, form="{:,.0f}"):
    return "–" if value is None else form.format(value)


def median(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def memory_row(results, size, name, clock):
    rows = rows_of(results, name, "memory", size)
    cells, peaks = [], ({}, {})
    for run in RUNS:
        mine = [row for row in rows if row["run"] == run]
        for part, key in zip(peaks, ("host_mib", "device_mib")):
            part[run] = median(row.get(key) for row in mine)
        cells.append(" / ".join(shown(part[run]) for part in peaks))
    return [label(results, size, name)] + cells + [" / ".join(shown(share(part), "{:.2f}") for part in peaks)]


def share(peaks):
    """What `"all"` needs beyond one micro-batch, of what the full batch needs beyond it."""
    if None in (peaks[FULL], peaks[MICRO], peaks[ALL]) or peaks[FULL] <= peaks[MICRO]:
        return None
    return (peaks[ALL] - peaks[MICRO]) / (peaks[FULL] - peaks[MICRO])


def times(results, size, name, clock):
    """{run: (median of the first steps, median of later steps)}, from the processes that measure memory if need be."""
    rows = rows_of(results, name, "time", size)
    alone = [
        dict(row, first=row["clocks"][0], later=row["clocks"][1:])
        for row in rows_of(results, name, "memory", size)
        if row["clocks"]
    ]
    found = {}
    for run in TIMED:
        mine = [row for row in rows or alone if row["run"] == run]
        later = [later[clock] for row in mine for later in row["later"]]
        found[run] = median(row["first"][clock] for row in mine if row["first"]), median(later)
    return found


def time_row(results, size, name, clock):
    found = times(results, size, name, clock)
    cells = [shown(found[run][place], "{:.1f}" if place == 0 else "{:.2f}") for place in (0, 1) for run in TIMED]
    return [label(results, size, name)] + cells


def ratio_row(results, size, name, clock):
    found, cells = times(results, size, name, clock), []
    for run in (ALL, KEPT):
        for place, base in ((0, FULL), (1, SPLIT), (1, FULL)):
            one, other = found[run][place], found[base][place]
            cells.append(shown(one / other if one and other else None, "{:.2f}"))
    return [f"{label(results, size, name)} ({ALL}, then {KEPT})"] + cells


def apart_row(results, size, name, clock):
    rows, cells = rows_of(results, name, "time", size), []
    for run in TIMED:
        found = [row["apart"] for row in rows if row["run"] == run and "apart" in row]
        cells.append(", ".join(f"{max(part):.0e}" for part in zip(*found)) if found else "–")
    return [label(results, size, name)] + cells


def auto_lines(results, clock):
    lines = []
    for result in results:
        for row in result.get("rows", []) if result["task"]["what"] == "auto" else []:
            first, *later = (each[clock] for each in row["clocks"])
            name, batch = result["task"]["network"], result["task"]["batch"]
            parts = [
                f'- {name}, `micro_batch_size="auto"` {row["options"] or ""} under {row["limit_mib"]:,} MiB: '
                f"{row['size']} of {batch} images",
                f"first step {first:.1f} s, later {shown(median(later), '{:.2f}')} s",
                f"peak {shown(row['device_mib'])} MiB",
                f"weights off a run with that size {row['apart'][0]:.0e}",
            ]
            lines.append(", ".join(parts) + ".")
    return lines


def fit_lines(results, clock):
    lines = []
    for result in results:
        rows = result.get("rows", []) if result["task"]["what"] == "fit" else []
        base = next((median(each[clock] for each in row["epochs"]) for row in rows if row["run"] == FULL), None)
        for row in rows:
            seconds = median(each[clock] for each in row["epochs"])
            ratio = shown(seconds / base if seconds and base else None, "{:.2f}")
            why = row.get("failed", f"{shown(seconds, '{:.2f}')} s, {ratio} of the full batch")
            lines.append(f"- {result['task']['network']}, an epoch of `fit`, {row['run']}: {why}.")
    return lines


def failed_lines(results):
    """What raised an error, and what ran out of memory."""
    lines = []
    for result in results:
        task = result["task"]
        for row in [result] + result.get("rows", []):
            if "failed" in row:
                why = row["failed"].strip().splitlines()[-1]
                lines.append(f"- {task['network']}, {task['what']}, {row.get('run', task.get('run', ''))}: {why}")
    return lines


def tables(arguments):
    for path in arguments.files:
        with open(path, encoding="utf-8") as file:
            print("\n".join(report(json.load(file))))
    return 0


def show_in_pages(arguments):
    """Print or write what the pages should say; 1 if they said something else."""
    import pages

    with open(pages.RESULT, encoding="utf-8") as file:
        known = json.load(file)
    changed = pages.changes(known)
    print("\n".join(changed or ["The pages show what was measured."]))
    if arguments.write:
        pages.write(known)
    return 1 if changed and not arguments.write else 0


def parser():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command")
    commands.required = True
    running = commands.add_parser("run", help="measure memory and processor time on this machine")
    running.add_argument("--size", nargs="+", choices=["small", "large", "tried", "default"], default=["small"])
    running.add_argument("--network", nargs="+", choices=NETWORKS, default=NETWORKS)
    running.add_argument("--run", nargs="+", choices=[*RUNS, DEFAULT], default=list(RUNS))
    running.add_argument("--measure", nargs="+", choices=["memory", "time"], default=["memory", "time"])
    running.add_argument("--processes", type=int, default=1, help="of each kind; medians are shown; default: 1")
    running.add_argument("--rounds", type=int, default=5, help="later steps of each run; default: 5")
    running.add_argument("--steps", type=int, default=3, help="of a process that measures memory; default: 3")
    running.add_argument("--eager", action="store_true", help="compile with run_eagerly=True")
    for each in (running, commands.add_parser("gpu", help="measure on a GPU, in about 15 minutes")):
        each.add_argument("--smoke", action="store_true", help="use tiny sizes, only to see whether everything runs")
        each.add_argument("--json", metavar="FILE", help="file for the results")
    commands.add_parser("table", help="print the tables of results").add_argument("files", nargs="+")
    shown_in = commands.add_parser("pages", help="print the rows of README.md and docs/ that the results change")
    shown_in.add_argument("--write", action="store_true", help="write them into the pages")
    commands.add_parser("work").add_argument("task")
    return made


def main(arguments=None):
    arguments = parser().parse_args(arguments)
    if arguments.command == "work":
        print(json.dumps(work_here(json.loads(arguments.task))), flush=True)
        return 0
    return {"run": run, "gpu": run, "table": tables, "pages": show_in_pages}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
