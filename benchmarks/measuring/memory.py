"""A worker that measures the memory of one run. Each run needs its own process, because a peak cannot be reset."""

import numpy as np

from measuring import machine
from measuring.timing import api_of

MIB = 2**20


def measure_one(task):
    """Measure the peak memory of training with one API, and the bytes of the variables that it creates.

    The task's "kind" is "micro-batch" (an update on every micro-batch, without the library), "accumulated", "exact"
    (with `whole_batch`), or "full batch" (K times as many examples at once).
    """
    import tensorflow as tf

    from accum._cli.demo.memory import peak_mib
    from measuring import workloads

    is_full, accum_steps = task["kind"] == "full batch", task["accum_steps"]
    batch = task["batch"] * (accum_steps if is_full else 1)
    module, _ = api_of(task["api"])
    is_step = task["api"] in ("one step", "whole batch")
    drawn = module if task["api"] == "whole batch" else workloads
    workload = drawn.WORKLOADS[task["workload"]](task["smoke"], batch)
    initial = drawn.initial_weights(workload)
    # Few batches, met again and again: data are no part of this. Where a step takes whole batches, all runs hold one.
    count = 1 if is_full else accum_steps if is_step else min(accum_steps, 8)
    batches, times = workloads.micro_batches(workload, count), 2 * (1 if is_full else accum_steps) // count
    if is_step:
        times *= 8 if task["api"] == "one step" else 2  # memory grows over the first calls
    known = {"accumulated": "Ours", "exact": "Exact"}
    implementation = getattr(module, known.get(task["kind"], "Plain"))
    on_gpu = _has_gpu_memory(tf)
    idle = peak_mib()
    with _RecordedVariables(tf) as made:
        run = implementation(workload, initial, accum_steps, task["optimizer"])
        losses = run.run(run.prepare(batches, times))
    if not np.all(np.isfinite(losses)):
        raise AssertionError(f"The loss is no number: {losses}.")
    result = {key: task[key] for key in ("workload", "api", "kind", "accum_steps", "batch")}
    result.update(
        peak_mib=peak_mib(),
        idle_mib=idle,
        variables_mib=(run.variable_bytes() if task["api"] == "v1" else made.bytes) / MIB,
    )
    result["parameters_mib"] = sum(value.nbytes for value in initial) / MIB
    if on_gpu:
        result["gpu_peak_mib"] = tf.config.experimental.get_memory_info("GPU:0")["peak"] / MIB
    return {"memory": [result], "versions": machine.versions()}


def _has_gpu_memory(tf):
    found = tf.config.experimental.list_physical_devices("GPU")
    return bool(found) and hasattr(tf.config.experimental, "get_memory_info")


class _RecordedVariables:
    """Counts the bytes of variables created within it, outside static graphs."""

    def __init__(self, tf):
        self.bytes = 0
        self._scope = tf.variable_creator_scope(self._record)

    def _record(self, next_creator, **kwargs):
        variable = next_creator(**kwargs)
        self.bytes += int(np.prod(variable.shape.as_list())) * variable.dtype.base_dtype.size
        return variable

    def __enter__(self):
        self._scope.__enter__()
        return self

    def __exit__(self, *error):
        return self._scope.__exit__(*error)
