"""The scorecard's cases: small, fixed, and each different from plain accumulation in one respect, that of its law.

A case has the keys that `cycles.steps_of` reads, and

    "law", "kind", "index": which case it is; most laws have one kind, ""
    "optimizer", "arguments": a name in `OPTIMIZERS`; clipping, "inverse_time" (a schedule) or "use_ema"
    "variables": list of {"shape", "is_sparse"}
    "micro_batches": list of {"grads": for each variable "dense", None or rows; "weight"; "then"}
    "bad": {micro-batch: "nan" or "inf"}, in the first variable
    "resume": the micro-batch after which the run is saved, and goes on in new objects; or None
    "seed": of the values

Here "then" may also be "restore": the user sets the weights back to their first values.
"""

import zlib

import numpy as np

from property_tests import cycles

COMMON = ["sgd", "momentum", "nesterov", "adam", "rmsprop", "adagrad"]
OPTIMIZERS = COMMON + [
    "amsgrad",
    "centered",
    "adadelta",
    "adamax",
    "nadam",
    "ftrl",
    "adamw",
    "lion",
    "adafactor",
]
RATE = 0.1
DENSE = [{"shape": [3], "is_sparse": False}, {"shape": [2, 2], "is_sparse": False}]
ROWS = [{"shape": [5, 2], "is_sparse": True}, {"shape": [3], "is_sparse": False}]
CYCLES = 3
LAWS = {
    "L1": "Equivalence: K micro-batches make the full batch's step, for each optimizer",
    "L2": "Quiet between steps: weights, slots and averages do not change",
    "L3": "Step counters and schedules count steps",
    "L4": "Sums, where the mean is not wanted",
    "L5": "Micro-batches of unequal size",
    "L6": "An unfinished last cycle",
    "L7": "Clipping acts on the accumulated gradient",
    "L8": "Missing and sparse gradients",
    "L9": "NaN and Inf do not stay",
    "L12": "A run resumed in mid-cycle",
    "L13": "Moving statistics of batch normalisation",
    "L14": "K = 1 is the plain optimizer",
}


def cases():
    """Return all cases, law by law."""
    return [case for law in LAWS for case in _MAKERS[law]()]


def plain(case):
    """Return the case of L1 with the same optimizer, K and seed."""
    return _case("L1", "", case["index"], case["optimizer"], accum_steps=case["accum_steps"], seed=case["seed"])


def micro_batches_of(case):
    """Return the micro-batches with their values, as `cycles` reads them."""
    random = np.random.RandomState(case["seed"] + 1)
    micro_batches = []
    for index, drawn in enumerate(case["micro_batches"]):
        grads = [_values(random, *pair) for pair in zip(case["variables"], drawn["grads"])]
        if index in case["bad"]:
            values = grads[0].values if isinstance(grads[0], cycles.Rows) else grads[0]
            values[(0,) * values.ndim] = float(case["bad"][index])
        micro_batches.append(dict(drawn, grads=grads))
    return micro_batches


def _values(random, variable, kind):
    if isinstance(kind, list):
        return cycles.Rows(np.array(kind), random.normal(size=[len(kind)] + variable["shape"][1:]).astype("float32"))
    values = random.normal(size=variable["shape"]).astype("float32")  # drawn for None too, so that the others are fixed
    return None if kind is None else values


def inputs_of(case):
    """Return the inputs of a batch normalisation layer: for each cycle, those of each micro-batch."""
    random = np.random.RandomState(case["seed"])
    shape = [case["examples"]] + case["shape"]
    return [[random.normal(size=shape).astype("float32") for _ in range(case["accum_steps"])] for _ in range(CYCLES)]


def _case(law, kind, index, optimizer, **changes):
    accum_steps = changes.pop("accum_steps", 2 + index % 3)
    variables = changes.pop("variables", DENSE)
    case = {
        "law": law,
        "kind": kind,
        "index": index,
        "api": "optimizer",
        "optimizer": optimizer,
        "arguments": {},
        "accum_steps": accum_steps,
        "reduction": "mean",
        "nonfinite": "propagate",
        "variables": variables,
        "micro_batches": [_micro_batch(variables) for _ in range(CYCLES * accum_steps)],
        "bad": {},
        "resume": None,
        "seed": zlib.crc32("{} {} {}".format(law, kind, index).encode()) % 2**31,
    }
    case.update(changes)
    return case


def _micro_batch(variables, weight=None, then=None):
    grads = [[0] if variable["is_sparse"] else "dense" for variable in variables]
    return {"grads": grads, "weight": weight, "then": then}


def _random(case):
    return np.random.RandomState(case["seed"] + 2)


def _turns(law, kind, count, optimizers=COMMON, **changes):
    """Return `count` cases with the optimizers in turn; K changes with each round."""
    cases = []
    for index in range(count):
        number = 2 + (index // len(optimizers) + index) % 3
        cases.append(
            _case(law, kind, index, optimizers[index % len(optimizers)], **dict({"accum_steps": number}, **changes))
        )
    return cases


def _averages():
    cases = _turns("L2", "use_ema", 8)
    for case in cases:
        every = [None, 2][case["index"] % 2]
        case["arguments"] = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": every}
    return cases


def _sizes():
    cases = _turns("L5", "", 24)
    for case in cases:
        random = _random(case)
        for micro_batch in case["micro_batches"]:
            micro_batch["weight"] = float(random.randint(1, 5))
    return cases


def _ends(then, kind):
    """Two epochs, each one cycle and a part of one."""
    cases = _turns("L6", kind, 12)
    for case in cases:
        number = case["accum_steps"] + 1 + _random(case).randint(case["accum_steps"] - 1)
        epoch = [_micro_batch(DENSE) for _ in range(number - 1)] + [_micro_batch(DENSE, then=then)]
        case["micro_batches"] = [dict(micro_batch) for micro_batch in epoch + epoch]
    return cases


def _clipping():
    options = [{"clipnorm": 0.5}, {"clipvalue": 0.2}, {"global_clipnorm": 0.7}]
    return [case for arguments in options for case in _turns("L7", list(arguments)[0], 8, arguments=arguments)]


def _missing():
    """The second variable has a gradient in some micro-batches, and in some cycles in none."""
    cases = _turns("L8", "none", 12)
    for case in cases:
        random = _random(case)
        for micro_batch in case["micro_batches"]:
            micro_batch["grads"] = ["dense", None if random.randint(2) else "dense"]
    return cases


def _rows():
    cases = _turns("L8", "rows", 12, variables=ROWS)
    for case in cases:
        random = _random(case)
        for micro_batch in case["micro_batches"]:
            micro_batch["grads"] = [[int(row) for row in random.randint(0, 5, random.randint(1, 5))], "dense"]
    return cases


def _not_finite(case):
    return [float("nan"), float("inf")][case["index"] % 2]


def _restored():
    """A NaN in the first cycle, after which the user sets the weights back. Gradient descent keeps nothing else."""
    cases = _turns("L9", "restore", 12, ["sgd"])
    for case in cases:
        case["bad"] = {int(_random(case).randint(case["accum_steps"])): _not_finite(case)}
        case["micro_batches"][case["accum_steps"] - 1]["then"] = "restore"
    return cases


def _skipped():
    cases = _turns("L9", "skip", 12, nonfinite="skip_micro")
    for case in cases:
        case["bad"] = {int(_random(case).randint(len(case["micro_batches"]))): _not_finite(case)}
    return cases


def _resumed():
    cases = _turns("L12", "", 24)
    for case in cases:
        case["resume"] = case["accum_steps"] + int(_random(case).randint(case["accum_steps"] - 1))
    return cases


def _statistics():
    cases = _turns("L13", "", 20, ["none"])
    for case in cases:
        case.update({"shape": [3] if case["index"] % 2 else [2, 2, 3], "examples": 4})
    return cases


def _schedules():
    return [dict(case, arguments={"inverse_time": 0.5}) for case in _turns("L3", "schedule", 12)]


_MAKERS = {
    "L1": lambda: _turns("L1", "", 2 * len(OPTIMIZERS), OPTIMIZERS),
    "L2": lambda: _turns("L2", "", 24) + _averages(),
    "L3": lambda: _turns("L3", "counter", 12) + _schedules(),
    "L4": lambda: _turns("L4", "", 24, reduction="sum"),
    "L5": _sizes,
    "L6": lambda: _ends("flush", "flush") + _ends("reset", "drop"),
    "L7": _clipping,
    "L8": lambda: _missing() + _rows(),
    "L9": lambda: _restored() + _skipped(),
    "L12": _resumed,
    "L13": _statistics,
    "L14": lambda: _turns("L14", "", len(OPTIMIZERS), OPTIMIZERS, accum_steps=1),
}
