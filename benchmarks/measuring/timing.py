"""A worker that times one workload with one API and one K; implementations take turns, in random order each round."""

import gc
import importlib.util
import random
import time

import numpy as np

from measuring import machine, statistics

CYCLES_IN_THE_GUARD = 2
IN_FIT = "limit in fit"
# What an API is told as a ratio to, beside the limit itself.
OTHER_BASE = {"model": IN_FIT, "one step": "plain, full batch", "step in fit": "plain, full batch"}
LEAST_MICRO_BATCHES = {
    "v1": 8,
    "optimizer": 8,
    "model": 32,
    "one step": 8,
    "step in fit": 32,
}  # a timing; a call of `fit` has a price of its own
TOLERANCE = {"momentum": 2e-6, "adam": 2e-5}


def api_of(name):
    """The module of an API, and the class of its limit."""
    if name == "v1":
        from measuring import static_graph

        return static_graph, static_graph.Limit
    from measuring import custom_loop, one_step, step_in_fit, through_fit, whole_batch

    apis = {"optimizer": custom_loop, "model": through_fit, "one step": one_step, "step in fit": step_in_fit}
    apis["whole batch"] = whole_batch
    return apis[name], custom_loop.Limit


def missing(needed):
    """Why a implementation cannot run here, or None."""
    import tensorflow as tf

    if needed == "keras 3":
        return None if str(getattr(tf.keras, "__version__", "2")).startswith("3") else "no Keras 3"
    if needed == "no gpu":
        return "not measured on a GPU" if tf.config.experimental.list_physical_devices("GPU") else None
    return None if needed is None or importlib.util.find_spec(needed) else "not installed"


def time_one(task):
    """Returns the rows of the table, and the implementations left out of it, with reasons."""
    from measuring import workloads

    workload = workloads.WORKLOADS[task["workload"]](task["smoke"])
    settings = workload, workloads.initial_weights(workload), task["accum_steps"], task["optimizer"]
    module, limit_class = api_of(task["api"])
    known = {name: missing(needed) for name, (_, needed) in module.implementations().items()}
    absent = {name: why for name, why in known.items() if why}
    cycles = max(1, -(-LEAST_MICRO_BATCHES[task["api"]] // task["accum_steps"]))
    batches = workloads.micro_batches(workload, max(cycles, CYCLES_IN_THE_GUARD) * task["accum_steps"])
    guarded, timed = batches[: CYCLES_IN_THE_GUARD * task["accum_steps"]], batches[: cycles * task["accum_steps"]]

    limit = limit_class(*settings)
    limit.run_in_earnest(limit.prepare(guarded))
    goal, made, deviations = limit.weights(), {"limit": limit}, {}
    for name, (implementation, _) in module.implementations().items():
        if name in absent:
            continue
        try:
            made[name] = implementation(*settings)
            made[name].run(made[name].prepare(guarded))
        except Exception as error:  # whatever another library raises is its result
            if name.startswith("accum"):
                raise
            made.pop(name, None)
            absent[name] = f"fails: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            continue
        if name == IN_FIT:  # makes no step
            continue
        pairs = zip(made[name].weights(), goal)
        deviations[name] = max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)
        if name.startswith("accum") and not deviations[name] <= TOLERANCE[task["optimizer"]]:
            raise AssertionError(f"{name} ends {deviations[name]:.1e} off the limit's weights.")
    moved = max(float(np.abs(after - before).max()) for after, before in zip(goal, settings[1]))
    if not moved > 100 * TOLERANCE[task["optimizer"]]:
        raise AssertionError("The weights hardly move, which proves nothing.")
    seconds = in_turns(made, timed, cycles, task["rounds"], task["warm_up"])
    rows = [dict(statistics.row(name, seconds), deviation=deviations.get(name)) for name in made]
    base = OTHER_BASE.get(task["api"])
    if base in made:
        told = [statistics.row(name, seconds, base) for name in made if name.startswith("accum")]
        rows += [dict(row, implementation=f"{row['implementation']}, to the {base}") for row in told]
    keys = {key: task[key] for key in ("workload", "api", "accum_steps")}
    return {
        "times": [dict(row, **keys) for row in rows],
        "absent": [dict(implementation=name, why=why, **keys) for name, why in absent.items()],
        "versions": machine.versions(),
    }


def in_turns(made, batches, cycles, rounds, warm_up):
    """Seconds per cycle, one value per round, for each implementation."""
    prepared = {name: implementation.prepare(batches) for name, implementation in made.items()}
    seconds = {name: [] for name in made}
    order = random.Random(0)
    for count in range(warm_up + rounds):
        names = list(made)
        order.shuffle(names)
        for name in names:
            gc.collect()
            start = time.perf_counter()
            losses = made[name].run(prepared[name])
            made[name].settle()
            taken = time.perf_counter() - start
            if not np.all(np.isfinite(losses)):
                raise AssertionError(f"{name} ends in a loss that is no number: {losses}.")
            if count >= warm_up:
                seconds[name].append(taken / cycles)
    return seconds
