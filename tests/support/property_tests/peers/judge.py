"""Judge one case with one adapter."""

import tempfile

import numpy as np

from property_tests import cycles
from property_tests.peers import cases

TOLERANCE = 2e-6
ROUNDING = 8.0
"""How many times the distance between sums in float32 and in float64 a result may be off."""
LEAST = 1e-4
LONGEST = 200
FOLLOWING = ("L3", "L4", "L5", "L6", "L7", "L8", "L9")
"""Laws whose cases say nothing of them where the plain case is inexact."""


def judge(peer, case):
    """Return {"outcome", "deviation", "error"}.

    "outcome" is "passed", "inexact", "raises", "absent" (there is no such optimizer, option or situation, accumulating
    or not), "not offered", or "as L1" (what fails here fails already in the plain case with the same optimizer and K);
    "deviation" is the largest difference from the full batch, "not finite" or None; "error" is what was raised, or
    which step counter is wrong.
    """
    offers = peer.not_offered.get("{law} {kind}".format(**case), peer.not_offered.get(case["law"]))
    if _is_absent(peer, case):
        return {"outcome": "absent", "deviation": None, "error": None}
    if offers is False:
        return {"outcome": "not offered", "deviation": None, "error": None}
    try:
        deviation, is_within, error = _measured(peer, case)
        outcome = "passed" if is_within and not error else "inexact"
    except Exception as raised:  # whatever a library raises
        deviation, outcome = None, "raises"
        error = "{}: {}".format(type(raised).__name__, " ".join(str(raised).split()))[:LONGEST]
    if offers is not None:
        outcome = "not offered"
    elif outcome != "passed" and case["law"] in FOLLOWING and _is_off(judge(peer, cases.plain(case))):
        outcome = "as L1"
    return {"outcome": outcome, "deviation": deviation, "error": error}


def _is_off(verdict):
    """Whether a case fails by more than another rounding of a gradient near zero explains."""
    deviation = verdict["deviation"]
    return verdict["outcome"] != "passed" and (not isinstance(deviation, float) or deviation > LEAST)


def _is_absent(peer, case):
    if "{law} {kind}".format(**case) in peer.cannot_occur or case["law"] in peer.cannot_occur:
        return True
    if case["law"] == "L13":
        return False
    names = [name for name in case["arguments"] if not name.startswith("ema_")]
    return case["optimizer"] not in peer.optimizers or any(name not in peer.arguments for name in names)


def _measured(peer, case):
    """Return (the largest deviation, whether all are within the tolerance, an error or None)."""
    if case["law"] == "L13":
        inputs = cases.inputs_of(case)
        statistics, expected = peer.batch_norm(case, inputs, [np.concatenate(parts) for parts in inputs])
        return _compared([(one, other, other) for one, other in zip(statistics, expected)]) + (None,)
    micro_batches = cases.micro_batches_of(case)
    steps = cycles.steps_of(case, micro_batches)
    if case["law"] == "L2":
        run = peer.start(case, cycles.initial(case))
        try:
            return _moved(run, steps, micro_batches) + (None,)
        finally:
            run.close()
    seen, step_counts = _seen(peer, case, micro_batches)
    if case["law"] == "L12":  # the oracle is the uninterrupted run
        whole, _ = _seen(peer, dict(case, resume=None), micro_batches)
        return _compared(zip(seen, whole, whole)) + (None,)
    exact = _full_batch(peer, case, micro_batches, [step and step.grads for step in steps])
    rounded = _full_batch(peer, case, micro_batches, [step and step.rounded for step in steps])
    made = [step is not None for step in steps]
    at_steps = [step for step, is_made in zip(zip(seen, exact, rounded), made) if is_made]
    error = None
    if case["law"] == "L3" and step_counts != np.cumsum(made).tolist():
        error = "after {} steps the step counter reads {}".format(sum(made), step_counts[-1])
    return _compared(at_steps) + (error,)


def _seen(peer, case, micro_batches):
    """Return the weights and the step counter after each micro-batch."""
    seen, step_counts = [], []
    run = peer.start(case, cycles.initial(case))
    with tempfile.TemporaryDirectory() as folder:  # Keras restores slots when it creates them
        try:
            for index, micro_batch in enumerate(micro_batches):
                run.take(micro_batch["grads"], micro_batch["weight"])
                if micro_batch["then"] == "restore":
                    run.set_weights(cycles.initial(case))
                elif micro_batch["then"]:
                    getattr(run, micro_batch["then"])()
                if case["resume"] == index:
                    run = run.resumed(folder)
                seen.append(run.weights())
                step_counts.append(int(run.step_count()) if case["law"] == "L3" else None)
        finally:
            run.close()
    return seen, step_counts


def _full_batch(peer, case, micro_batches, steps):
    plain, seen = peer.plain(case, cycles.initial(case)), []
    for micro_batch, grads in zip(micro_batches, steps):
        if grads is not None:
            plain.apply(grads)
        if micro_batch["then"] == "restore":
            plain.set_weights(cycles.initial(case))
        seen.append(plain.weights())
    plain.close()
    return seen


def _moved(run, steps, micro_batches):
    """Return by how much weights and slots move where no step is made."""
    changes = []
    for index, micro_batch in enumerate(micro_batches):
        # Before the first micro-batch some libraries have no slots yet.
        before = [np.array(value) for value in run.weights() + (run.slots() if index else [])]
        run.take(micro_batch["grads"], micro_batch["weight"])
        if steps[index] is None:
            after = [np.array(value) for value in run.weights() + (run.slots() if index else [])]
            changes.append((after, before, before))
    largest, _ = _compared(changes)
    return largest, largest == 0


def _compared(triples):
    """Return the largest difference of (found, expected, expected with other rounding), and whether all are small."""
    largest, is_within = 0.0, True
    for ours, exact, rounded in triples:
        for one, other, near in zip(ours, exact, rounded):
            one, other, near = (np.asarray(value, np.float64) for value in (one, other, near))
            with np.errstate(invalid="ignore"):
                apart = np.where(~np.isfinite(one) & ~np.isfinite(other), 0.0, np.abs(one - other))
                rounding = np.where(np.isfinite(other) & np.isfinite(near), np.abs(other - near), 0.0)
                scale = np.where(np.isfinite(other), np.abs(other), 1.0)
            largest = max(largest, float(np.max(apart, initial=0.0))) if np.isfinite(apart).all() else float("inf")
            is_within = is_within and bool((apart <= TOLERANCE * np.maximum(1.0, scale) + ROUNDING * rounding).all())
    return (largest if np.isfinite(largest) else "not finite"), is_within
