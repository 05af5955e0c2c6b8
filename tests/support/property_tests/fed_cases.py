"""Draw cases in which gradients are fed to an optimizer.

A case is a dict of plain values:

    "api": "optimizer", or "conditional" or "explicit" for the two ways of a static graph
    "optimizer", "family", "arguments": the inner optimizer, by its name in `FAMILIES`
    "accum_steps", "reduction", "nonfinite": the options
    "variables": list of {"shape", "is_sparse"}
    "resource": whether a static graph has resource variables
    "micro_batches": list of {"grads", "weight", "then"}; a gradient is None, "dense", or a list of rows
    "bad": {micro-batch: (variable, "nan" or "inf")}
    "resume": after which micro-batch the run is saved, and goes on in new objects; or None
    "seed": of the values
"""

import tensorflow as tf
from hypothesis import strategies as st
from optimizers import legacy_family, new_family
from versions import IS_KERAS_3, TF_VERSION

KERAS = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.5}],
    "Adagrad": [{}],
    "Adadelta": [{}],
    "Adamax": [{}],
    "Nadam": [{}],
    "Ftrl": [{}, {"l1_regularization_strength": 0.01}],
    "AdamW": [{"weight_decay": 0.01}],
    "Adafactor": [{}],
    "Lion": [{}],
}
GRAPH = {
    "GradientDescentOptimizer": [{}],
    "MomentumOptimizer": [{"momentum": 0.9}, {"momentum": 0.9, "use_nesterov": True}],
    "AdamOptimizer": [{}],
    "RMSPropOptimizer": [{}, {"centered": True, "momentum": 0.5}],
    "AdagradOptimizer": [{}],
    "AdadeltaOptimizer": [{}],
    "FtrlOptimizer": [{}],
    "ProximalGradientDescentOptimizer": [{}],
    "ProximalAdagradOptimizer": [{}],
}
CLIPPING = [{"clipnorm": 0.5}, {"clipvalue": 0.2}] + ([{"global_clipnorm": 0.7}] if TF_VERSION >= (2, 4) else [])
AVERAGES = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}

FAMILIES = {"legacy": legacy_family(), "new": new_family(), "graph": tf.compat.v1.train}
"""Where optimizers come from: those of Keras that keep slots, those built from a list of variables, those of TF 1."""

ROWS = 5


@st.composite
def fed_cases(draw, apis=("optimizer", "conditional", "explicit")):
    api = draw(st.sampled_from(apis))
    name, family, arguments = draw(_inner(api))
    variables = draw(st.lists(_variable(), min_size=1, max_size=3))
    nonfinite = draw(st.sampled_from(["propagate", "skip_micro", "skip_cycle"])) if api != "explicit" else "propagate"
    count = draw(st.integers(1, 12))
    is_weighted = draw(st.booleans())
    accum_steps = draw(_accum_steps() if api != "explicit" else st.integers(1, 5))
    # A plain Keras 3 optimizer, which K = 1 is, can raise an error for duplicate rows.
    is_unique = IS_KERAS_3 and api == "optimizer" and accum_steps == 1
    # Before 2.14, averages of the weights need a gradient for each variable that the optimizer was built with.
    may_lack = api == "optimizer" and (TF_VERSION >= (2, 14) or "use_ema" not in arguments)
    micro_batches = [draw(_micro_batch(variables, may_lack, is_weighted, is_unique)) for _ in range(count)]
    return {
        "api": api,
        "optimizer": name,
        "family": family,
        "arguments": arguments,
        "accum_steps": accum_steps,
        "reduction": draw(st.sampled_from(["mean", "mean", "sum", "running_mean"])),
        "nonfinite": nonfinite,
        "variables": variables,
        "resource": draw(st.booleans()) if api != "optimizer" else True,
        "micro_batches": micro_batches,
        "bad": draw(_bad(count, len(variables))),
        # A new-style Nadam of Keras 2 keeps a counter in Python, which no checkpoint holds.
        "resume": None if (name, family) == ("Nadam", "new") else draw(st.none() | st.integers(0, count - 1)),
        "seed": draw(st.integers(0, 2**16)),
    }


@st.composite
def _inner(draw, api):
    if api != "optimizer":
        name = draw(st.sampled_from(sorted(GRAPH)))
        return name, "graph", dict(draw(st.sampled_from(GRAPH[name])))
    family = draw(st.sampled_from([name for name in ("legacy", "new") if FAMILIES[name] is not None]))
    name = draw(st.sampled_from([name for name in sorted(KERAS) if hasattr(FAMILIES[family], name)]))
    arguments = dict(draw(st.sampled_from(KERAS[name])))
    arguments.update(draw(st.sampled_from([{}, {}] + CLIPPING + ([AVERAGES] if family == "new" else []))))
    return name, family, arguments


def _accum_steps():
    schedule = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
    return st.integers(1, 5) | schedule.map(lambda drawn: {0: drawn[0], drawn[1]: drawn[2]})


@st.composite
def _variable(draw):
    if draw(st.integers(0, 3)) == 0:
        return {"shape": [ROWS, 2], "is_sparse": True}
    return {"shape": draw(st.lists(st.integers(1, 3), max_size=3)), "is_sparse": False}


@st.composite
def _micro_batch(draw, variables, may_lack, is_weighted, is_unique):
    grads = []
    for variable in variables:
        if may_lack and len(grads) > 0 and draw(st.integers(0, 4)) == 0:
            grads.append(None)
        elif variable["is_sparse"]:
            grads.append(draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4, unique=is_unique)))
        else:
            grads.append("dense")
    weight = draw(st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.5])) if is_weighted else None
    return {"grads": grads, "weight": weight, "then": draw(st.sampled_from([None] * 6 + ["flush", "reset"]))}


@st.composite
def _bad(draw, count, width):
    if draw(st.integers(0, 4)):
        return {}
    position = st.tuples(st.integers(0, width - 1), st.sampled_from(["nan", "inf"]))
    return draw(st.dictionaries(st.integers(0, count - 1), position, min_size=1, max_size=2))


def laws(case):
    """Return the laws that a case is about."""
    laws_of_case = {"L1", "L2", "L3"}
    micro_batches = case["micro_batches"]
    laws_of_case |= {"L4"} if case["reduction"] != "mean" else set()
    laws_of_case |= {"L5"} if micro_batches[0]["weight"] is not None else set()
    laws_of_case |= {"L6"} if any(micro_batch["then"] for micro_batch in micro_batches) else set()
    laws_of_case |= {"L7"} if any("clip" in name for name in case["arguments"]) else set()
    sparse = any(variable["is_sparse"] for variable in case["variables"])
    laws_of_case |= {"L8"} if sparse or any(None in micro_batch["grads"] for micro_batch in micro_batches) else set()
    laws_of_case |= {"L9"} if case["bad"] else set()
    laws_of_case |= {"L12"} if case["resume"] is not None else set()
    laws_of_case |= {"L14"} if case["accum_steps"] == 1 else set()
    laws_of_case |= {"L15"} if case["api"] == "explicit" else set()
    return laws_of_case
