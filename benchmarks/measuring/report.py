"""Tables from a list of results, each of one environment."""

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
    """One table per workload, with a row per implementation and API, and a column per K."""
    times, lines = result["times"], []
    for workload in _met(row["workload"] for row in times):
        mine = [row for row in times if row["workload"] == workload]
        steps = sorted({row["accum_steps"] for row in mine})
        rows = []
        for api, name in _met((row["api"], row["implementation"]) for row in mine):
            found = {row["accum_steps"]: row for row in mine if (row["api"], row["implementation"]) == (api, name)}
            rows.append([api, name] + [_time_cell(found.get(k)) for k in steps])
        head = ["api", workload] + [f"K = {k}" for k in steps]
        lines += table(head, rows) + [""]
    return lines


def _time_cell(row):
    if row is None:
        return ""
    if row.get("is_base", row["implementation"] == "limit"):
        return f"{1000 * row['seconds']:.1f} ms"
    return "{ratio:.2f} ({ratio_25:.2f}–{ratio_75:.2f})".format(**row)


def memory_table(result):
    """Medians over processes of one kind, relative to micro-batches without the library."""
    rows, found = [], {}
    for row in result["memory"]:
        key = row["workload"], row["api"], row["kind"], row["batch"], row["accum_steps"]
        found.setdefault(key, []).append(row)
    medians = {key: {name: _median(of, name) for name in of[0] if name.endswith("_mib")} for key, of in found.items()}
    for (workload, api, kind, batch, k), now in sorted(medians.items()):
        bare = [v for key, v in medians.items() if key[:4] == (workload, api, "micro-batch", batch)]
        more = {name: now[name] - bare[0][name] if bare else float("nan") for name in ("peak_mib", "variables_mib")}
        share = more["variables_mib"] / now["parameters_mib"]
        size = f"{k} x {batch}" if kind in ("accumulated", "exact") else str(batch * (k if kind == "full batch" else 1))
        cells = [now["peak_mib"], now["idle_mib"], more["peak_mib"], now["parameters_mib"], share]
        cells += [now["peak_mib"] / (bare[0]["peak_mib"] + now["parameters_mib"]) if bare else float("nan")]
        cells += [now["gpu_peak_mib"]] if "gpu_peak_mib" in now else []
        rows.append([workload, api, kind, size] + [f"{value:.2f}" for value in cells])
    head = ["MiB", "api", "run", "batch", "peak", "of it idle", "more", "parameters", "accumulators / parameters"]
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
    """(implementation, whose weights) -> its largest deviation, for those that differ from the full batch."""
    found = {}
    for row in result["times"]:
        if (
            row.get("deviation") is not None
            and row["deviation"] > 1e-5
            and not row["implementation"].startswith("an update")
        ):
            key = row["implementation"], "plain Keras'" if row["api"] == "whole batch" else "the limit's"
            found[key] = max(row["deviation"], found.get(key, 0.0))
    return found


def _absences(result):
    """reason -> implementations that it keeps out of the tables."""
    found = {}
    for row in result["absent"]:
        rest = "" if row["why"] == "not installed" else " ({api}, {workload})".format(**row)
        names = found.setdefault(row["why"], [])
        if row["implementation"] + rest not in names:
            names.append(row["implementation"] + rest)
    return found


def merged(text, results):
    """Replace what is between the markers in `text` by the tables of `results`."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    parts = []
    for result in sorted(results, key=_version):
        apis = {row["api"] for row in result["times"] + result["memory"]}
        what = ": a step over micro-batches" if apis and apis <= {"one step", "step in fit"} else ""
        what = ": `whole_batch`" if apis == {"whole batch"} else what
        parts.append(f"## TensorFlow {result['versions']['tensorflow']}{what}\n\n{as_text(result)}")
    return before + BEGIN + "\n" + ("\n".join(parts) or NOTHING + "\n") + END + after


def _version(result):
    return [int(part) for part in result["versions"]["tensorflow"].split(".")[:2]]


def _met(values):
    """Each value once, in order of first occurrence."""
    return list(dict.fromkeys(values))
