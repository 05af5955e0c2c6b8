"""Draw cases in which a network in a static graph is trained in Sessions.

A case is a dict of plain values:

    "input": "vector", "sequence" or "tokens"
    "has_masks": whether sequences are padded, and a mask says where
    "is_stateful": whether the first layer is recurrent, and its states are fed from batch to batch
    "layers": list of names of `static_models.LAYERS`
    "outputs": 1 or 2, in a dict with targets by name
    "is_per_token": whether there is an output for each token
    "is_ragged": whether targets have rows of different lengths
    "has_weights": whether examples have weights
    "has_metric": whether the mean of another number is taken over each cycle
    "optimizer", "arguments": of `tf.compat.v1.train`
    "options": "accum_steps"; "micro_batch_size" and "whole_batch" of `value_and_gradients`, or without them None
    "last_cycle": "flush" ends the last cycle, "carry" does not
    "sizes": the numbers of examples of the batches
    "strategy": None or "mirrored" (two replicas)
    "precision": "float32" or "float16"
    "resource": whether there are resource variables
    "resume": after which batch the run is saved, and goes on in another graph and Session; or None
    "seed"
"""

from hypothesis import strategies as st

from property_tests.drawing import compatible
from property_tests.features import FEATURES

OPTIMIZERS = [
    ("GradientDescentOptimizer", {}),
    ("MomentumOptimizer", {"momentum": 0.9}),
    ("MomentumOptimizer", {"momentum": 0.9, "use_nesterov": True}),
    ("AdamOptimizer", {"epsilon": 1e-2}),
    ("RMSPropOptimizer", {"epsilon": 1e-2}),
    ("AdagradOptimizer", {}),
]

ONE_NUMBER = "`accum.compat.v1.value_and_gradients` returns one number, the loss"
EXCLUDED = {
    ("micro_batch_size", "stateful layers"): ONE_NUMBER + ", and no next states",
    ("whole_batch", "stateful layers"): ONE_NUMBER + ", and no next states",
    ("stateful layers", "strategy"): "each replica has states of its own",
    ("micro_batch_size", "own metrics"): ONE_NUMBER,
    ("whole_batch", "own metrics"): ONE_NUMBER,
}


@st.composite
def static_cases(draw):
    wanted = draw(compatible(EXCLUDED))
    if "stateful layers" not in wanted and draw(st.integers(0, 3)) == 0:
        wanted |= {"strategy"}
    is_split = bool(wanted & {"micro_batch_size", "whole_batch"})
    if not is_split and not wanted & {"accum_steps", "stateful layers", "own metrics"}:
        is_split = draw(st.booleans())
    case = draw(_network(wanted, is_split))
    count = draw(st.integers(1, 4))
    options = {"accum_steps": 1, "micro_batch_size": None, "whole_batch": None}
    if is_split:
        options["micro_batch_size"] = draw(st.integers(1, 4))
    if "whole_batch" in wanted:
        options["whole_batch"] = draw(st.sampled_from(["all", "batch_norm", "loss"]))
        if "penalty" in case["layers"]:
            options["whole_batch"] = "batch_norm"  # the function that is split computes the losses that it adds
    if "accum_steps" in wanted or not is_split:
        options["accum_steps"] = draw(_accum_steps(2 if "accum_steps" in wanted else 1))
    is_alone = case["strategy"] is None  # in a static graph, each replica normalises by its own examples
    if options["whole_batch"] in ("all", "batch_norm") and options["accum_steps"] == 1 and is_alone:
        case["layers"].append("batch_norm")
    if case["is_stateful"]:
        sizes = [draw(st.integers(1, 5))] * count
    else:
        sizes = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    if case["strategy"] is not None:
        sizes = [2 * size for size in sizes]
    resume = draw(st.integers(0, count - 1)) if "checkpoint" in wanted else None
    last = draw(st.sampled_from(["flush", "carry"])) if case["strategy"] is None else "carry"
    return dict(case, options=options, sizes=sizes, resume=resume, last_cycle=last, seed=draw(st.integers(0, 2**16)))


def _accum_steps(least):
    schedule = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 3))
    return st.integers(least, 4) | schedule.map(lambda drawn: {0: drawn[0], drawn[1]: drawn[2]})


@st.composite
def _network(draw, wanted, is_split):
    kinds = ["vector", "sequence", "tokens"]
    if "sparse rows" in wanted:
        kinds = ["tokens"]
    elif wanted & {"masks", "stateful layers"}:
        kinds = ["sequence"]
    kind = draw(st.sampled_from([kind for kind in kinds if kind != "tokens" or "sparse rows" in wanted]))
    layers = draw(st.lists(st.sampled_from(["dense", "residual"]), max_size=2))
    for feature, name in (("add_loss", "penalty"), ("dropout", "dropout")):
        if feature in wanted:
            layers.insert(draw(st.integers(0, len(layers))), name)
    is_low = "mixed precision" in wanted
    name, arguments = draw(st.sampled_from(OPTIMIZERS[:3] if is_low else OPTIMIZERS))
    # A loss that divides by tokens and one that is a mean over examples can't share a weight.
    may_be_per_token = kind != "vector" and not ("masks" in wanted and wanted & {"add_loss", "strategy"})
    return {
        "input": kind,
        "has_masks": "masks" in wanted,
        "is_stateful": "stateful layers" in wanted,
        "layers": layers,
        "outputs": 2 if "named outputs" in wanted else 1,
        "is_per_token": may_be_per_token and draw(st.booleans()),
        "is_ragged": "ragged targets" in wanted,
        "has_weights": "sample weights" in wanted,
        "has_metric": "own metrics" in wanted,
        "optimizer": name,
        "arguments": dict(arguments),
        "strategy": "mirrored" if "strategy" in wanted else None,
        "precision": "float16" if is_low else "float32",
        "resource": "strategy" in wanted or draw(st.booleans()),
    }


def features_of(case):
    """Return the features of a case."""
    options = case["options"]
    has = {
        "accum_steps": options["accum_steps"] != 1,
        "micro_batch_size": options["micro_batch_size"] is not None,
        "whole_batch": options["whole_batch"] is not None,
        "masks": case["has_masks"],
        "named outputs": case["outputs"] > 1,
        "ragged targets": case["is_ragged"],
        "sample weights": case["has_weights"],
        "add_loss": "penalty" in case["layers"],
        "own metrics": case["has_metric"],
        "stateful layers": case["is_stateful"],
        "dropout": "dropout" in case["layers"],
        "mixed precision": case["precision"] == "float16",
        "sparse rows": case["input"] == "tokens",
        "checkpoint": case["resume"] is not None,
        "strategy": case["strategy"] is not None,
    }
    return {feature for feature in FEATURES if has[feature]}


def laws(case):
    """Return the laws that a case is about."""
    options = case["options"]
    laws_of_case = {"L1", "L2", "L3", "L5", "L15"}
    laws_of_case |= {"L6"} if case["last_cycle"] == "flush" else set()
    laws_of_case |= {"L8"} if case["input"] == "tokens" else set()
    laws_of_case |= {"L10"} if case["precision"] == "float16" else set()
    laws_of_case |= {"L11"} if case["strategy"] is not None else set()
    laws_of_case |= {"L12"} if case["resume"] is not None else set()
    laws_of_case |= {"L14"} if options["accum_steps"] == 1 and options["micro_batch_size"] is None else set()
    laws_of_case |= {"L18"} if options["micro_batch_size"] is not None else set()
    laws_of_case |= {"L19"} if options["whole_batch"] is not None else set()
    laws_of_case |= {"L20"} if "dropout" in case["layers"] else set()
    return laws_of_case
