"""Draw cases in which a Keras model is trained.

A case is a dict of plain values:

    "input": "vector", "image", "sequence" or "tokens"
    "has_second_input": whether a vector is an input too
    "layers": list of names of `models.LAYERS`, as far as they fit the input
    "outputs": 1 or 2
    "is_per_token": whether there is an output for each token
    "loss", "loss_reduction": a name of `models.LOSSES`; "mean" or "sum"
    "sample_weight": None, "examples" or "tokens": what has weights
    "optimizer", "arguments": of Keras
    "options": what the model wrapper is given
    "how": "train_on_batch" or "fit"
    "sizes": the numbers of examples of the batches of an epoch
    "epochs": how many times `fit` goes through them
    "replicas": 1 or 2
    "is_traced": whether the train step is a graph
    "precision": a Keras policy
    "resume": after which batch the run is saved, and goes on in new objects; or None
    "seed"
"""

from exceptions import IS_KERAS_3, TF_VERSION
from hypothesis import strategies as st

from property_tests import models

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
    supported = [name for name in models.layers_for(kind) if mode == "whole_batch" or name != "batch_norm"]
    name, arguments = draw(st.sampled_from(_optimizers(kind)))
    case = {
        "input": kind,
        "has_second_input": draw(st.integers(0, 4)) == 0,
        "layers": draw(st.lists(st.sampled_from(supported), max_size=4)),
        "outputs": draw(st.sampled_from([1, 1, 2])),
        "is_per_token": kind in ("sequence", "tokens") and draw(st.booleans()),
        "optimizer": name,
        "arguments": dict(arguments),
        "replicas": draw(st.sampled_from([1] * 9 + [2])),
        "is_traced": draw(st.integers(0, 9)) == 0,
        "precision": draw(st.sampled_from(["float32"] * 8 + ["float64"] + models.LOW_PRECISION)),
        "seed": draw(st.integers(0, 2**16)),
    }
    case["is_traced"] |= "dropout" in case["layers"]  # eagerly, each micro-batch draws anew, with a warning
    if case["precision"] in models.LOW_PRECISION:  # what TensorFlow's kernels for processors have
        case.update(input="vector", is_per_token=False)
        case["layers"] = [layer for layer in case["layers"] if layer in ("dense", "residual", "shared", "nested")]
    if case["replicas"] > 1 and (TF_VERSION < (2, 4) or IS_KERAS_3) and "clip" in str(case["arguments"]):
        case["arguments"] = {}  # there Keras does not clip under a strategy, or clips before replicas are summed
    case.update(draw(_batches(mode, case)))
    if case["options"].get("whole_batch") == "loss":
        case["layers"] = [layer for layer in case["layers"] if layer != "batch_norm"]
    case.update(draw(_loss(mode, case)))
    may_resume = case["replicas"] == 1 and case["how"] == "train_on_batch"
    case["resume"] = draw(st.none() | st.integers(0, len(case["sizes"]) - 1)) if may_resume else None
    return case


def _optimizers(kind):
    """Return the optimizers whose plain run is an oracle: clipping, and Keras 3, see each duplicate row of a batch."""
    if kind != "tokens":
        return OPTIMIZERS
    return [
        optimizer
        for optimizer in OPTIMIZERS
        if optimizer == ("SGD", {}) or not (IS_KERAS_3 or "clip" in str(optimizer[1]))
    ]


@st.composite
def _batches(draw, mode, case):
    """Draw the options, and the sizes of batches. Each replica has an example of each batch."""
    replicas = case["replicas"]
    count = draw(st.integers(1, 6))
    is_fit = replicas > 1 or draw(st.integers(0, 2)) == 0
    how = {"how": "fit" if is_fit else "train_on_batch", "epochs": draw(st.integers(1, 2)) if is_fit else 1}
    if replicas > 1:  # Keras averages the replicas' means, which is the mean of the batch if their parts are equal
        sizes = [replicas * draw(st.integers(1, 4))] * count
    else:
        sizes = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    adds = case["has_second_input"] or "residual" in case["layers"]  # in Keras 3, `Add` fails for no examples
    # For no examples, some losses of Keras 3 have an axis, and can't be added to others.
    fails = IS_KERAS_3 and "regularized" in case["layers"]
    takes_none = mode == "accum_steps" and not is_fit and case["input"] == "vector" and not adds and not fails
    if takes_none and draw(st.integers(0, 3)) == 0:
        sizes[draw(st.integers(0, count - 1))] = 0
    options = {} if mode == "accum_steps" else {"micro_batch_size": draw(st.integers(1, 5))}
    if mode == "whole_batch":
        options["whole_batch"] = draw(st.sampled_from(["all", "all", "loss", "batch_norm"]))
    if mode == "accum_steps" or (mode == "micro_batch_size" and draw(st.integers(0, 2)) == 0):
        options["accum_steps"] = draw(_accum_steps())
        if is_fit:
            options["last_cycle"] = draw(st.sampled_from(["flush", "carry", "drop"]))
    return dict(how, sizes=sizes, options=options)


def _accum_steps():
    schedule = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
    return st.integers(1, 4) | schedule.map(lambda drawn: {0: drawn[0], drawn[1]: drawn[2]})


@st.composite
def _loss(draw, mode, case):
    """Draw a loss for which the mode is exact."""
    sees_all = case["options"].get("whole_batch") in ("all", "loss") and case["replicas"] == 1
    name = draw(st.sampled_from(sorted(models.MEANS) + (sorted(models.MEETING) if sees_all else [])))
    is_sum = sees_all and name in models.REDUCED and draw(st.booleans())
    weights = [None, "tokens" if case["is_per_token"] else "examples"]  # a loss for each token has a weight for each
    weight = draw(st.sampled_from(weights)) if name in models.MEANS else None
    return {"loss": name, "loss_reduction": "sum" if is_sum else "mean", "sample_weight": weight}


def laws(case):
    """Return the laws that a case is about."""
    laws_of_case = {"L1", "L2", "L3", "L5"}
    laws_of_case |= {"L6"} if "last_cycle" in case["options"] else set()
    laws_of_case |= {"L7"} if any("clip" in name for name in case["arguments"]) else set()
    laws_of_case |= {"L8"} if case["input"] == "tokens" else set()
    laws_of_case |= {"L10"} if case["precision"] in models.LOW_PRECISION else set()
    laws_of_case |= {"L11"} if case["replicas"] > 1 else set()
    laws_of_case |= {"L12"} if case["resume"] is not None else set()
    laws_of_case |= {"L13"} if "batch_norm" in case["layers"] else set()
    laws_of_case |= {"L14"} if case["options"].get("accum_steps") == 1 else set()
    laws_of_case |= {"L18"} if "micro_batch_size" in case["options"] else set()
    laws_of_case |= {"L19"} if "whole_batch" in case["options"] else set()
    laws_of_case |= {"L20"} if "dropout" in case["layers"] else set()
    return laws_of_case
