"""Write the line of `split_batch` for a file that builds a static graph, with the names of its losses and inputs."""

import re
from typing import List

import libcst as cst
from libcst import matchers

TAKE_LOSSES = (
    "compute_gradients",
    "create_optimizer",
    "create_train_op",
    "gradients",
    "minimize",
    "optimize_loss",
)
"""Functions of TensorFlow 1, tf-slim and BERT whose first argument is a loss."""

LOSS_KEYWORDS = ("loss", "total_loss", "ys")
OF_NO_EXAMPLES = re.compile(
    r"(?i)(^|_)(decay|drop(out|rate)?|epsilon|grads?|gradients?|is|keep|lr|momentum|phase|prob|rate|step|train(ing)?)(_|$)"
)
"""Names of placeholders for numbers that hold for a whole batch, and for gradients."""

GIVE_BATCHES = ("get_next", "batch", "shuffle_batch")
DOTTED = re.compile(r"[\w.]+")


def split_line(calls, module):
    """Return the line that splits the batch of a graph.

    Args:
      calls: all calls in the file, as (last part of the function's name, call, definition that contains it).
      module: the `libcst.Module`.
    """
    losses = _losses(calls) or ["loss"]
    batch = _placeholders(module) or _batches(module) or _features(module) or ["inputs"]
    return f"{_joined(losses)} = accum.compat.v1.split_batch({_joined(losses)}, {_joined(batch)}, micro_batch_size)"


def _losses(calls):
    """Return the names of the losses whose gradients are computed, in order."""
    found: List[str] = []
    for function, call, _ in calls:
        if function in TAKE_LOSSES:
            named = [arg.value for arg in call.args if arg.keyword and arg.keyword.value in LOSS_KEYWORDS]
            positional = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
            found += map(_code, (named or positional)[:1])
    return _unique(found)


def _placeholders(module):
    """Return the names of placeholders that may hold examples."""
    found = []
    for call, targets in _assigned(module):
        name = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
        values = [_code(arg.value) for arg in call.args]
        is_scalar = any(value in ("[]", "()") or value.endswith("bool") or value == '"bool"' for value in values)
        if name.value == "placeholder" and not is_scalar and len(targets) == 1:
            found += [target for target in targets if not OF_NO_EXAMPLES.search(target.rpartition(".")[2])]
    return _unique(found)


def _batches(module):
    """Return the names to which an iterator or a queue gives a batch."""
    for call, targets in _assigned(module):
        name = call.func.attr if isinstance(call.func, cst.Attribute) else None
        if name is not None and name.value in GIVE_BATCHES:
            return _unique(targets)
    return []


def _features(module):
    """Return the parameters of a `model_fn`."""
    for function in matchers.findall(module, matchers.FunctionDef()):
        names = [param.name.value for param in function.params.params]
        if names[:1] == ["features"]:
            return [name for name in names if name in ("features", "labels")]
    return []


def _assigned(module):
    """Yield (call, names to which its result is assigned)."""
    for node in matchers.findall(module, matchers.Assign(value=matchers.Call()) | matchers.AnnAssign()):
        target = node.targets[0].target if isinstance(node, cst.Assign) else node.target
        if isinstance(node.value, cst.Call) and isinstance(node.value.func, (cst.Attribute, cst.Name)):
            parts = [one.value for one in target.elements] if isinstance(target, (cst.Tuple, cst.List)) else [target]
            yield node.value, [_code(part) for part in parts]


def _code(node):
    return cst.Module([]).code_for_node(node)


def _unique(names):
    """Return plain names, such as `loss` and `self.loss`, once each."""
    return list(dict.fromkeys(name for name in names if DOTTED.fullmatch(name)))


def _joined(names):
    return f"({', '.join(names)})" if len(names) > 1 else names[0]
