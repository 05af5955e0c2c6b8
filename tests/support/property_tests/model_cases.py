"""Draw cases in which a Keras model is trained.

A case is a dict of plain values:

    "input": "vector", "image", "sequence" or "tokens"
    "has_second_input": whether a vector is an input too
    "has_masks": whether sequences are padded, and a mask says where
    "is_stateful": whether the first layer is recurrent, and goes on from batch to batch
    "layers": list of names of `models.LAYERS`, as far as they fit the input
    "outputs": 1 or 2
    "names": None, or how outputs with targets by name are given: "list" or "dict"
    "is_per_token": whether there is an output for each token
    "is_ragged": whether targets have rows of different lengths
    "loss", "loss_reduction": a name of a loss in `losses`; "mean" or "sum"
    "metrics": list of names of `losses.METRICS`
    "sample_weight": None, "examples" or "tokens": what has weights
    "optimizer", "arguments": of Keras
    "options": what the model wrapper is given
    "how": "train_on_batch" or "fit"
    "sizes": the numbers of examples of the batches of an epoch
    "epochs": how many times `fit` goes through them
    "strategy": None, "mirrored" (two replicas) or "one_device"
    "is_traced": whether the steps are graphs
    "then": list of "evaluate" and "predict", which follow training
    "precision": a Keras policy
    "resume": after which batch the run is saved, and goes on in new objects; or None
    "seed"
"""

from hypothesis import strategies as st
from versions import IS_KERAS_3, TF_VERSION

from property_tests import losses, models
from property_tests.drawing import compatible
from property_tests.features import EXCLUDED

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
LACKING = {"ragged targets"} if TF_VERSION < (2, 5) else set()
"""Features that plain Keras does not have: `train_on_batch` takes no ragged tensors."""

EXCLUDED_HERE = dict(EXCLUDED)
if TF_VERSION < (2, 5):
    EXCLUDED_HERE["stateful layers", "mixed precision"] = "plain Keras fails in recurrent layers"
    EXCLUDED_HERE["masks", "mixed precision"] = "plain Keras fails in pooling"
if not IS_KERAS_3:
    EXCLUDED_HERE["stateful layers", "strategy"] = "Keras 2 refuses it"
DIVIDES_BY_TOKENS = TF_VERSION >= (2, 11)
"""Whether the loss of an output with a mask is a mean over the tokens that are left, not over all."""


@st.composite
def model_cases(draw):
    wanted = draw(compatible(EXCLUDED_HERE)) - LACKING
    if "stateful layers" not in wanted and draw(st.integers(0, 3)) == 0:
        wanted |= {"strategy"}
    is_split = bool(wanted & {"micro_batch_size", "whole_batch"})
    if not is_split and "accum_steps" not in wanted and draw(st.booleans()):
        is_split = "stateful layers" not in wanted
    mode = "whole_batch" if "whole_batch" in wanted else "micro_batch_size" if is_split else "accum_steps"
    case = draw(_data_and_place(wanted))
    # Eagerly, dropout draws anew for each micro-batch.
    case["is_traced"] = "dropout" in wanted or draw(st.integers(0, 5)) == 0
    case.update(draw(_batches(mode, case, wanted)))
    case.update(draw(_layers(mode, case, wanted)))
    case.update(draw(_optimizer(case)))
    case.update(draw(_loss(mode, case, wanted)))
    each = [["evaluate"], ["predict"]]  # each takes a trace
    case["then"] = draw(st.sampled_from(each)) if case["is_traced"] else ["evaluate", "predict"]
    case["seed"] = draw(st.integers(0, 2**16))
    return case


@st.composite
def _data_and_place(draw, wanted):
    """Draw the inputs, the precision and the strategy."""
    kinds = sorted(models.INPUTS)
    if "sparse rows" in wanted:
        kinds = ["tokens"]
    elif wanted & {"masks", "stateful layers"}:
        kinds = ["sequence"]
    elif "mixed precision" in wanted:
        kinds = ["vector", "sequence"]
    precision = draw(st.sampled_from(["float32"] * 8 + ["float64"]))
    kind = draw(st.sampled_from([kind for kind in kinds if kind != "tokens" or "sparse rows" in wanted]))
    if "stateful layers" in wanted:
        precision = "float32"  # in float64, plain Keras 2 fails for states
    if "mixed precision" in wanted:  # what TensorFlow's kernels for processors have
        precision = draw(st.sampled_from(models.LOW_PRECISION if kind == "vector" else ["mixed_float16"]))
    # In Keras 3, each replica of a stateful layer would need the states of its own part of the batch.
    strategies = ["one_device"] if "stateful layers" in wanted else ["mirrored"] * 4 + ["one_device"]
    return {
        "input": kind,
        "has_second_input": draw(st.integers(0, 4)) == 0,
        "has_masks": "masks" in wanted,
        "is_stateful": "stateful layers" in wanted,
        "is_per_token": kind in ("sequence", "tokens") and draw(st.booleans()),
        "precision": precision,
        "strategy": draw(st.sampled_from(strategies)) if "strategy" in wanted else None,
    }


@st.composite
def _batches(draw, mode, case, wanted):
    """Draw the options, and the sizes of batches. Each replica has an example of each batch."""
    count = draw(st.integers(1, 3 if case["is_traced"] else 4))
    is_fit = case["strategy"] is not None or draw(st.integers(0, 2)) == 0
    epochs = draw(st.integers(1, 2)) if is_fit else 1
    if case["strategy"] == "mirrored":
        # Keras averages the replicas' means, which is the mean of the batch if their parts are equal.
        sizes = [2 * draw(st.integers(1, 3))] * count
    elif case["is_stateful"] or is_fit and "ragged targets" in wanted or (case["is_traced"] and draw(st.booleans())):
        sizes = [draw(st.integers(1, 6))] * count
    else:
        sizes = draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    options = {} if mode == "accum_steps" else {"micro_batch_size": draw(st.integers(1, 4))}
    if mode == "whole_batch":
        options["whole_batch"] = draw(st.sampled_from(["all", "all", "loss", "batch_norm"]))
        if case["strategy"] == "mirrored" and "ragged targets" in wanted:
            options["whole_batch"] = "batch_norm"  # a loss over the outputs of replicas takes dense targets only
    if mode == "accum_steps" or "accum_steps" in wanted:
        # A model that neither accumulates nor splits is plain Keras, whose replicas draw alike.
        draws_alike = case["strategy"] == "mirrored" and "dropout" in wanted
        options["accum_steps"] = draw(_accum_steps(2 if draws_alike or "accum_steps" in wanted else 1))
        if is_fit:
            options["last_cycle"] = draw(st.sampled_from(["flush", "carry", "drop"]))
    resume = None
    if "checkpoint" in wanted:  # a run of `fit` is resumed at the end of an epoch
        epochs = 2 if is_fit else 1
        resume = count - 1 if is_fit else draw(st.integers(0, count - 1))
    how = {"how": "fit" if is_fit else "train_on_batch", "epochs": epochs, "resume": resume}
    return dict(how, sizes=sizes, options=options)


def _accum_steps(least):
    schedule = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 3))
    return st.integers(least, 4) | schedule.map(lambda drawn: {0: drawn[0], drawn[1]: drawn[2]})


@st.composite
def _layers(draw, mode, case, wanted):
    """Draw the layers, and whether there is a batch without examples."""
    options, kind = case["options"], case["input"]
    # Batch normalisation is that of each batch, so over a cycle of several batches no full batch is its oracle.
    is_normalised = options.get("whole_batch") in ("all", "batch_norm") and options.get("accum_steps", 1) == 1
    names = models.layers_for(kind)
    names = [
        name
        for name in names
        if name not in ("penalty", "dropout", "keras_dropout") and (name != "batch_norm" or is_normalised)
    ]
    if case["is_traced"] and draw(st.integers(0, 4)):  # these take seconds to trace
        names = [name for name in names if name not in ("gru", "lstm")]
    if case["precision"] in models.LOW_PRECISION:
        names = [name for name in names if name in models.LOW_PRECISION_LAYERS]
    chosen = draw(st.lists(st.sampled_from(names), max_size=2))
    if is_normalised and options["whole_batch"] == "batch_norm" and "batch_norm" in names:
        chosen.append("batch_norm")
    for feature, name in (("add_loss", "penalty"), ("dropout", draw(st.sampled_from(_dropouts(case))))):
        if feature in wanted:
            chosen.insert(draw(st.integers(0, len(chosen))), name)
    sizes, is_per_token = list(case["sizes"]), case["is_per_token"]
    sees_all = options.get("whole_batch") in ("all", "loss") and case["strategy"] is None
    if "penalty" in chosen and case["has_masks"] and DIVIDES_BY_TOKENS and not sees_all:
        is_per_token = False  # the two losses divide by different numbers, as a warning says
    # Then replicas are averaged as in plain Keras, whatever they divide by.
    is_averaged = mode == "accum_steps" and options["accum_steps"] == 1
    is_averaged |= mode == "whole_batch" and case["precision"] == "mixed_float16"
    if case["strategy"] == "mirrored" and case["has_masks"] and is_averaged:
        is_per_token = False
    adds = case["has_second_input"] or "residual" in chosen  # in Keras 3, `Add` fails for no examples
    # For no examples, some losses of Keras 3 have an axis, and can't be added to others.
    fails = IS_KERAS_3 and "regularized" in chosen
    takes_none = (
        mode == "accum_steps" and case["how"] == "train_on_batch" and kind == "vector" and not adds and not fails
    )
    if takes_none and not wanted & {"ragged targets", "add_loss", "mixed precision"} and draw(st.integers(0, 3)) == 0:
        sizes[draw(st.integers(0, len(sizes) - 1))] = 0
    return {"layers": chosen, "sizes": sizes, "is_per_token": is_per_token}


def _dropouts(case):
    """Return the names of dropout whose draws those of the full batch tell."""
    # What a dropped cycle has drawn is not drawn again. Where a dataset of unknown length ends, `fit` of plain Keras 3
    # draws once more.
    is_endless = case["how"] == "fit" and len(set(case["sizes"])) > 1
    is_alone = is_endless or case["options"].get("last_cycle") == "drop"
    return models.DROPOUT[:1] if is_alone else models.DROPOUT


@st.composite
def _optimizer(draw, case):
    """Draw an optimizer whose plain run is an oracle."""
    choice = OPTIMIZERS
    if case["input"] == "tokens":  # clipping, and Keras 3, see each duplicate row of a batch
        choice = [one for one in choice if one == ("SGD", {}) or not (IS_KERAS_3 or "clip" in str(one[1]))]
    if case["precision"] in models.LOW_PRECISION:  # others divide by gradients, which have few bits
        choice = [one for one in choice if one[0] == "SGD" and "clip" not in str(one[1])]
    if case["strategy"] is not None and (TF_VERSION < (2, 4) or IS_KERAS_3):
        # There Keras does not clip under a strategy, or clips before replicas are summed.
        choice = [one for one in choice if "clip" not in str(one[1])]
    name, arguments = draw(st.sampled_from(choice))
    return {"optimizer": name, "arguments": dict(arguments)}


@st.composite
def _loss(draw, mode, case, wanted):
    """Draw outputs, and a loss for which the mode is exact."""
    options = case["options"]
    sees_all = options.get("whole_batch") in ("all", "loss") and case["strategy"] != "mirrored"
    is_one_cycle = options.get("accum_steps", 1) == 1
    meets = sees_all and is_one_cycle and case["precision"] not in models.LOW_PRECISION
    is_ragged = "ragged targets" in wanted
    if is_ragged:
        name = "ragged"
    else:
        others = sorted(losses.MEETING) if meets and "sample weights" not in wanted else []
        means = sorted(losses.MEANS)
        if TF_VERSION < (2, 4) and case["precision"] == "float64":
            means.remove("huber")  # it fails there
        name = draw(st.sampled_from(means + others))
    is_sum = meets and name in losses.REDUCED and draw(st.booleans())
    metrics = []
    if "own metrics" in wanted:
        choice = ["distance"] + ([] if is_ragged else ["function"])
        is_alone = mode != "accum_steps" and is_one_cycle and case["strategy"] != "mirrored"
        choice += ["of_batch"] if is_alone and not is_ragged else []  # ragged parts can't be put together again
        metrics = draw(st.lists(st.sampled_from(choice), min_size=1, max_size=2, unique=True))
    # Keras 3 finds the weights of outputs in a list by their places alone.
    names = ["dict"] if IS_KERAS_3 and "sample weights" in wanted else ["list", "dict"]
    weight = "tokens" if case["is_per_token"] else "examples"  # a loss for each token has a weight for each
    return {
        "outputs": 2 if "named outputs" in wanted else draw(st.sampled_from([1, 1, 2])),
        "names": draw(st.sampled_from(names)) if "named outputs" in wanted else None,
        "is_ragged": is_ragged,
        "loss": name,
        "loss_reduction": "sum" if is_sum else "mean",
        "metrics": metrics,
        "sample_weight": weight if "sample weights" in wanted else None,
    }


def laws(case):
    """Return the laws that a case is about."""
    options = case["options"]
    laws_of_case = {"L1", "L2", "L3", "L5"}
    laws_of_case |= {"L6"} if "last_cycle" in options else set()
    laws_of_case |= {"L7"} if any("clip" in name for name in case["arguments"]) else set()
    laws_of_case |= {"L8"} if case["input"] == "tokens" else set()
    laws_of_case |= {"L10"} if case["precision"] in models.LOW_PRECISION else set()
    laws_of_case |= {"L11"} if case["strategy"] == "mirrored" else set()
    laws_of_case |= {"L12"} if case["resume"] is not None else set()
    laws_of_case |= {"L13"} if "batch_norm" in case["layers"] else set()
    laws_of_case |= {"L14"} if options.get("accum_steps") == 1 else set()
    laws_of_case |= {"L18"} if "micro_batch_size" in options else set()
    laws_of_case |= {"L19"} if "whole_batch" in options else set()
    laws_of_case |= {"L20"} if set(models.DROPOUT) & set(case["layers"]) else set()
    return laws_of_case
