"""What a case in which a model is trained is about: its features, and the pairs of them."""

import itertools

FEATURES = [
    "accum_steps",
    "micro_batch_size",
    "whole_batch",
    "masks",
    "named outputs",
    "ragged targets",
    "sample weights",
    "add_loss",
    "own metrics",
    "stateful layers",
    "dropout",
    "mixed precision",
    "sparse rows",
    "checkpoint",
    "strategy",
]

SPLIT_STATES = "accum refuses it, because splitting a batch would hand the states of some examples to others"
EXCLUDED = {
    ("micro_batch_size", "stateful layers"): SPLIT_STATES,
    ("whole_batch", "stateful layers"): SPLIT_STATES,
}
"""Pairs that no Keras model has together, and why."""


def pairs(features):
    """Return the names of all pairs of some features, in the order of `FEATURES`."""
    ordered = [feature for feature in FEATURES if feature in features]
    return [" + ".join(pair) for pair in itertools.combinations(ordered, 2)]


def features_of(case):
    """Return the features of a case."""
    options = case["options"]
    has = {
        "accum_steps": options.get("accum_steps", 1) != 1,
        "micro_batch_size": "micro_batch_size" in options,
        "whole_batch": "whole_batch" in options,
        "masks": case["has_masks"],
        "named outputs": case["names"] is not None,
        "ragged targets": case["is_ragged"],
        "sample weights": case["sample_weight"] is not None,
        "add_loss": "penalty" in case["layers"],
        "own metrics": bool(case["metrics"]),
        "stateful layers": case["is_stateful"],
        "dropout": "dropout" in case["layers"] or "keras_dropout" in case["layers"],
        "mixed precision": case["precision"].startswith("mixed"),
        "sparse rows": case["input"] == "tokens",
        "checkpoint": case["resume"] is not None,
        "strategy": case["strategy"] is not None,
    }
    return {feature for feature in FEATURES if has[feature]}
