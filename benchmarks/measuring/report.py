"""Tables and a figure from a list of results, each of one environment."""

import os

BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
NOTHING = "Not measured yet."


def environment(result):
    """One line that says on which machine and with which versions a result was measured."""
    machine, versions = result["machine"], result["versions"]
    kinds = [f"{kind} {versions[kind]}" for kind in ("tensorflow", "keras", "numpy", "accum") if kind in versions]
    cores = "{cores allowed} of {cores} cores".format(**machine)
    threads = "threads as TensorFlow chooses" if not any(versions["threads"]) else str(versions["threads"])
    parts = [machine["date"], machine["cpu"], cores, f"{machine['memory_gib']} GiB", machine["os"]]
    parts += ["Python " + machine["python"]] + kinds + versions["gpus"] + [threads]
    return ", ".join(parts + (["SMOKE TEST: no measurement"] if result["settings"]["smoke"] else []))


def table(head, rows):
    """A table in Markdown, its columns aligned."""
    lines = [head] + rows
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    return [shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|"] + shown[1:]


def time_tables(result):
    """One table per workload, with a row per contender and face, and a column per K."""
    times, lines = result["times"], []
    for workload in _met(row["workload"] for row in times):
        mine = [row for row in times if row["workload"] == workload]
        steps = sorted({row["accum_steps"] for row in mine})
        rows = []
        for face, name in _met((row["face"], row["contender"]) for row in mine):
            found = {row["accum_steps"]: row for row in mine if (row["face"], row["contender"]) == (face, name)}
            rows.append([face, name] + [_time_cell(found.get(k)) for k in steps])
        head = ["face", workload] + [f"K = {k}" for k in steps]
        lines += table(head, rows) + [""]
    return lines


def _time_cell(row):
    if row is None:
        return ""
    if row.get("is_base", row["contender"] == "limit"):
        return f"{1000 * row['seconds']:.1f} ms"
    return "{ratio:.2f} ({ratio_25:.2f}–{ratio_75:.2f})".format(**row)


def memory_table(result):
    """Medians over processes of one kind, relative to micro-batches without the library."""
    rows, found = [], {}
    for row in result["memory"]:
        key = row["workload"], row["face"], row["kind"], row["batch"], row["accum_steps"]
        found.setdefault(key, []).append(row)
    medians = {key: {name: _median(of, name) for name in of[0] if name.endswith("_mib")} for key, of in found.items()}
    for (workload, face, kind, batch, k), now in sorted(medians.items()):
        bare = [v for key, v in medians.items() if key[:4] == (workload, face, "micro-batch", batch)]
        more = {name: now[name] - bare[0][name] if bare else float("nan") for name in ("peak_mib", "variables_mib")}
        share = more["variables_mib"] / now["parameters_mib"]
        size = f"{k} x {batch}" if kind in ("accumulated", "exact") else str(batch * (k if kind == "full batch" else 1))
        cells = [now["peak_mib"], now["idle_mib"], more["peak_mib"], now["parameters_mib"], share]
        cells += [now["peak_mib"] / (bare[0]["peak_mib"] + now["parameters_mib"]) if bare else float("nan")]
        cells += [now["gpu_peak_mib"]] if "gpu_peak_mib" in now else []
        rows.append([workload, face, kind, size] + [f"{value:.2f}" for value in cells])
    head = ["MiB", "face", "run", "batch", "peak", "of it idle", "more", "parameters", "accumulators / parameters"]
    head += ["peak / (micro-batch + gradient)"]
    head += ["GPU peak"] if any(len(row) > len(head) for row in rows) else []
    return table(head, [row + [""] * (len(head) - len(row)) for row in rows]) + [""] if rows else []


def _median(rows, name="peak_mib"):
    values = sorted(row[name] for row in rows if row[name] is not None)
    return values[len(values) // 2] if values else float("nan")


def as_text(result):
    lines = [environment(result) + ".", ""] + time_tables(result) + memory_table(result)
    for (name, goal), off in sorted(_deviations(result).items()):
        lines.append(f"- {name}: up to {off:.0e} off {goal} weights after two cycles.")
    for why, names in _absences(result).items():
        lines.append(f"- {', '.join(names)}: {why}")
    return "\n".join(lines).rstrip() + "\n"


def _deviations(result):
    """(contender, whose weights) -> its largest deviation, for those that do not make the steps of the full batch."""
    found = {}
    for row in result["times"]:
        if (
            row.get("deviation") is not None
            and row["deviation"] > 1e-5
            and not row["contender"].startswith("an update")
        ):
            key = row["contender"], "plain Keras'" if row["face"] == "whole batch" else "the limit's"
            found[key] = max(row["deviation"], found.get(key, 0.0))
    return found


def _absences(result):
    """reason -> contenders that it keeps out of the tables."""
    found = {}
    for row in result["absent"]:
        rest = "" if row["why"] == "not installed" else " ({face}, {workload})".format(**row)
        names = found.setdefault(row["why"], [])
        if row["contender"] + rest not in names:
            names.append(row["contender"] + rest)
    return found


def merged(text, results):
    """Replace what is between the markers in `text` by the tables of `results`."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = []
    for result in sorted(results, key=_line):
        faces = {row["face"] for row in result["times"] + result["memory"]}
        what = ": a step over micro-batches" if faces and faces <= {"one step", "step in fit"} else ""
        what = ": `whole_batch`" if faces == {"whole batch"} else what
        parts.append(f"### TensorFlow {result['versions']['tensorflow']}{what}\n\n{as_text(result)}")
    return before + BEGIN + "\n" + ("\n".join(parts) or NOTHING + "\n") + END + after


HIGHEST = 2.3  # of the ratios that a figure shows; what is slower leaves it at the top


def _line(result):
    return [int(part) for part in result["versions"]["tensorflow"].split(".")[:2]]


def draw(results, path):
    """Draw results for several K as a PNG: one row per environment and face, one column per workload, and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [
        result for result in sorted(results, key=_line) if len({row["accum_steps"] for row in result["times"]}) > 1
    ]
    lines = [(result, face) for result in results for face in _met(row["face"] for row in result["times"])]
    workloads = _met(row["workload"] for result in results for row in result["times"])
    names = _met(row["contender"] for result in results for row in result["times"])
    told = [name for name in names if name != "limit" and ", to the limit" not in name]
    colours = {name: f"C{i}" for i, name in enumerate(told)}
    shape = max(1, len(lines)), len(workloads) + 1
    figure, axes = pyplot.subplots(*shape, figsize=(3.6 * shape[1], 2.9 * shape[0] + 0.8), squeeze=False)
    for line, (result, face) in zip(axes, lines):
        for axis, workload in zip(line, workloads):
            mine = [row for row in result["times"] if (row["workload"], row["face"]) == (workload, face)]
            _draw_times(axis, mine, colours)
            axis.set_title(f"{workload}, {face}, TensorFlow {result['versions']['tensorflow']}", fontsize=9)
        _draw_memory(line[-1], result, face)
    handles = [pyplot.Line2D([], [], color=colours[name], marker="o", lw=_width(name)) for name in told]
    figure.legend(handles, told, loc="lower center", ncol=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.9 / (2.9 * shape[0] + 0.8), 1, 1))
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return os.path.abspath(path)


def _width(name):
    return 2.5 if name.startswith("accum") else 1


def _draw_times(axis, rows, colours):
    for name in _met(row["contender"] for row in rows if row["contender"] in colours):
        mine = sorted((row for row in rows if row["contender"] == name), key=lambda row: row["accum_steps"])
        middle = [row["ratio"] for row in mine]
        spread = [[row["ratio"] - row["ratio_25"] for row in mine], [row["ratio_75"] - row["ratio"] for row in mine]]
        shown = {"color": colours[name], "lw": _width(name), "elinewidth": 0.8}
        axis.errorbar([row["accum_steps"] for row in mine], middle, spread, marker="o", ms=4, capsize=2, **shown)
    axis.set(ylabel="time / limit", ylim=(0.8, HIGHEST))
    _finish(axis, sorted({row["accum_steps"] for row in rows}))


def _draw_memory(axis, result, face):
    """Peak memory beyond that of plain micro-batches, in units of the parameters, if several K were measured."""
    shown = set()
    for workload in _met(row["workload"] for row in result["memory"] if row["face"] == face):
        mine = [row for row in result["memory"] if (row["workload"], row["face"]) == (workload, face)]
        steps = sorted({row["accum_steps"] for row in mine if row["kind"] == "accumulated"})
        if len(steps) < 2:
            continue
        peaks = [_median([r for r in mine if (r["kind"], r["accum_steps"]) == ("accumulated", k)]) for k in steps]
        bare = _median([row for row in mine if row["kind"] == "micro-batch"])
        axis.plot(steps, [(peak - bare) / mine[0]["parameters_mib"] for peak in peaks], marker="o", ms=4, color="black")
        axis.set_title(f"{workload}, {face}: memory", fontsize=9)
        shown.update(steps)
    axis.set(ylabel="more than micro-batches / parameters", ylim=(-0.1, 2.0))
    axis.yaxis.label.set_fontsize(8)
    _finish(axis, sorted(shown))


def _finish(axis, steps):
    if not steps:
        axis.set_visible(False)
        return
    axis.axhline(1.0, color="black", lw=0.8, ls=":")
    axis.set(xscale="log", xlabel="K")
    axis.set_xticks(steps, [str(k) for k in steps])
    axis.minorticks_off()


def _met(values):
    """Each value once, in order of first occurrence."""
    return list(dict.fromkeys(values))
