"""Draw cases in which a Keras model is trained.

A case is a dict of plain values:

    "input": "vector", "image", "sequence" or "tokens"
    "layers": list of names of `models.LAYERS`, as far as they fit the input
    "outputs": 1 or 2
    "loss", "sample_weight": a name of `models.LOSSES`; whether examples have weights
    "optimizer", "arguments": of Keras
    "options": what the model wrapper is given
    "cycles": list of lists: the sizes of the batches of each cycle
    "replicas": 1 or 2
    "is_traced": whether the train step is a graph
    "precision": a Keras policy
    "resume": after which batch the run is saved, and goes on in new objects; or None
    "seed"
"""

from hypothesis import strategies as st

from prover import models

OPTIMIZERS = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"clipnorm": 0.5}),
    ("SGD", {"clipvalue": 0.05}),
    ("Adam", {"epsilon": 1e-2}),
    ("Adam", {"epsilon": 1e-2, "amsgrad": True}),
    ("RMSprop", {"epsilon": 1e-2}),
    ("Adagrad", {"epsilon": 1e-2}),
]


@st.composite
def model_cases(draw, modes=("accum_steps", "micro_batch_size", "whole_batch")):
    mode = draw(st.sampled_from(modes))
    kind = draw(st.sampled_from(sorted(models.INPUTS)))
    known = [name for name in models.layers_for(kind) if mode == "whole_batch" or name != "batch_norm"]
    name, arguments = draw(st.sampled_from(OPTIMIZERS))
    meets = mode == "whole_batch"
    case = {
        "input": kind,
        "layers": draw(st.lists(st.sampled_from(known), max_size=4)),
        "outputs": draw(st.sampled_from([1, 1, 2])),
        "loss": draw(st.sampled_from(sorted(models.MEANS) + (sorted(models.MEETING) if meets else []))),
        "sample_weight": False,
        "optimizer": name,
        "arguments": dict(arguments),
        "replicas": draw(st.sampled_from([1, 1, 1, 2])),
        "is_traced": draw(st.integers(0, 9)) == 0,
        "precision": draw(st.sampled_from(["float32"] * 8 + ["float64"])),
        "seed": draw(st.integers(0, 2**16)),
    }
    if case["loss"] in models.MEANS:
        case["sample_weight"] = draw(st.booleans())
    case.update(draw(_batches(mode, case["replicas"])))
    if case["replicas"] > 1:  # `fit` takes batches of one size, of which each replica has a part
        sizes = case["cycles"][0][0]
        case["cycles"] = [[sizes] * len(cycle) for cycle in case["cycles"]]
    count = sum(map(len, case["cycles"]))
    case["resume"] = draw(st.none() | st.integers(0, count - 1)) if case["replicas"] == 1 else None
    return case


@st.composite
def _batches(draw, mode, replicas):
    """Draw the options, and sizes of batches. Each replica has an example of each batch."""
    size = st.integers(replicas, 8)
    if mode == "accum_steps":
        steps = draw(st.integers(1, 4))
        cycles = draw(st.lists(st.lists(size, min_size=steps, max_size=steps), min_size=1, max_size=3))
        return {"options": {"accum_steps": steps}, "cycles": cycles}
    options = {"micro_batch_size": draw(st.integers(1, 5))}
    if mode == "whole_batch":
        options["whole_batch"] = draw(st.sampled_from(["all", "all", "loss", "batch_norm"]))
    steps = draw(st.sampled_from([1, 1, 2])) if mode == "micro_batch_size" else 1
    if steps > 1:
        options["accum_steps"] = steps
    cycles = draw(st.lists(st.lists(size, min_size=steps, max_size=steps), min_size=1, max_size=3))
    return {"options": options, "cycles": cycles}


def laws(case):
    """Return the laws that a case is about."""
    found = {"L1", "L3", "L5"}
    found |= {"L18"} if "micro_batch_size" in case["options"] else set()
    found |= {"L19"} if "whole_batch" in case["options"] else set()
    found |= {"L7"} if any("clip" in name for name in case["arguments"]) else set()
    found |= {"L8"} if case["input"] == "tokens" else set()
    found |= {"L11"} if case["replicas"] > 1 else set()
    found |= {"L12"} if case["resume"] is not None else set()
    found |= {"L13"} if "batch_norm" in case["layers"] else set()
    return found
