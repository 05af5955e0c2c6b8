"""Find gradients that a file adds up by hand, and report them with the guide's recipe. They are never rewritten.

A gradient is followed by name, from its computation to the sum, and from there to `apply_gradients`, through lists,
functions and placeholders. A sum that is applied in another file is recognised by its name and its zeros.
"""

import re
from typing import Any, NamedTuple, Optional

import libcst as cst
from libcst import matchers

from accum._migrate import guide
from accum._migrate.arguments import last_name
from accum._migrate.flows import Flows, has_gradient_call
from accum._migrate.split_line import split_line

GRAPH = (
    "gradients are added up by hand here. If the inputs of a whole batch fit into memory, run the plain train op once, "
    "on the whole batch, and write before the optimizer: `{line}`. Otherwise `accum.compat.v1.AccumOptimizer` replaces "
    "the sums with one train op or three; " + guide.see("TensorFlow 1: accumulate, apply, zero")
)
EAGER = (
    "gradients are added up by hand here. Pass each micro-batch's gradients to `accum.GradientAccumulateOptimizer` "
    "instead; " + guide.see("TensorFlow 2: a list of sums")
)
MODEL = (
    "a `train_step` adds gradients up by hand here. Let it make a plain step for each micro-batch, without sums, and "
    "wrap the model: `accum.GradientAccumulateModel.from_model(model, accum_steps=K)`; "
    + guide.see("TensorFlow 2: a train_step of your own")
)
CLASS = (
    "it is an optimizer of your own that accumulates. Replace it with the plain optimizer, wrapped in "
    "`accum.GradientAccumulateOptimizer`, or in `accum.compat.v1.AccumOptimizer` in a static graph; "
    + guide.see("Optimizers copied into your own code")
)
TAPE = "GradientTape"
OF_GRAPHS = re.compile(
    r"\b(compute_gradients|get_variable|placeholder|Session|initialized_value|get_gradients)\b|tf\.gradients"
)
HINTS = (
    rb"(?i)grad|Optimizer\)",
    rb"(?i)accum|assign_add|update_add|zero|steps_per_update|iter_?size|niter|\+=|in zip",
)
STEPS = re.compile("accumulation|accum_?(steps|iters|num|freq)|steps_per_update|iter_?size|^niter$")
"""Arguments that count micro-batches. Adagrad's `accumulator` does not."""

SUMS_OF_PAIRS = re.compile(r"(?s)zeros(_like|_initializer)?\b.*\bfor\b[^\n]*\bin\b.*assign_add\(.*\.apply_gradients\(")
"""What an optimizer that is constructed with `n` does if it counts micro-batches: a sum for each variable, applied."""

HELD = re.compile(r"grads?_?acc|acc(um\w*)?_?grad|grad\w*_(sum|buffer)|aggregated_grad|grad\w*_aggregat", re.IGNORECASE)
"""Names of sums of gradients."""

OTHER_SUMS = re.compile(r"accum_(var|update)|\brho\b|delta_acc|ConditionalAccumulator")
"""Adadelta's sums, and those over replicas."""

CALLED_GRADIENT = re.compile(r"(^|_)(grads?|gradients?|gvs?)(_|$)", re.IGNORECASE)
ZERO = re.compile(r"^0(\.0*)?$")
UPDATES = re.compile("^(update_step|_(resource_)?apply_(dense|sparse).*)$")
TENSORFLOW = {"keras", "tensorflow", "tensorpack", "tf", "tf_keras"}
OTHERS = {"flax", "jax", "mxnet", "paddle", "torch"}


class Found(NamedTuple):
    """A place that accumulates.

    Attributes:
      node: its node in the file.
      name: what it is called.
      reason: what to do about it.
      definition: the class or function at the top of the file that contains it, or None.
    """

    node: Any
    name: str
    reason: str
    definition: Optional[str]


def may_be_in(content):
    """Whether the bytes of a file contain any hint that it accumulates by hand."""
    return all(re.search(hint, content) for hint in HINTS)


def find(module, has_tape_elsewhere=False):
    """Find the places where gradients are added up, each name once, as a list of `Found`.

    Args:
      module: the `libcst.Module`.
      has_tape_elsewhere: whether another file of the program has a `GradientTape`.
    """
    file = _File()
    module.visit(file)
    if not file.modules & TENSORFLOW or file.modules & OTHERS:
        return []
    is_eager = file.has_tape or has_tape_elsewhere and not OF_GRAPHS.search(module.code)
    reason = EAGER if is_eager else GRAPH.format(line=split_line(file.calls, module))
    matches = [Found(node, node.name.value, CLASS, definition) for node, definition in file.classes]
    matches += [Found(node, "GradientAccumulator", reason, definition) for node, definition in file.accumulators]
    names = set()
    for addition in file.sums:
        label = min(file.iterated.get(addition.name) or {addition.name})
        if label not in names and file.is_of_gradients(addition, is_eager):
            names.add(label)
            is_of_model = is_eager and addition.is_in_train_step
            matches.append(Found(addition.node, label, MODEL if is_of_model else reason, addition.definition))
    return matches


class _File(Flows):
    """Collects, beside what flows where:

    Attributes:
      classes: definitions of optimizers that accumulate, with the definition that contains them.
      accumulators: calls of `GradientAccumulator`, a class of transformers and other libraries, likewise.
      has_tape: whether gradients come from a tape.
    """

    def __init__(self):
        super().__init__()
        self.classes, self._of_evaluated = [], set()

    def leave_Module(self, original_node):
        super().leave_Module(original_node)
        self._of_evaluated = self.reached_from(self.evaluated)

    @property
    def has_tape(self):
        return any(function == TAPE for function, _, _ in self.calls)

    @property
    def accumulators(self):
        return [(call, within) for function, call, within in self.calls if function == "GradientAccumulator"]

    def visit_ClassDef(self, node):
        super().visit_ClassDef(node)
        is_optimizer = any("optimizer" in (last_name(base.value) or "").lower() for base in node.bases)
        if is_optimizer and _accumulates(node):
            self.classes.append((node, self.definition))
        return not is_optimizer  # what an optimizer adds up are its slots

    def visit_FunctionDef(self, node):
        super().visit_FunctionDef(node)
        return not UPDATES.search(node.name.value)  # the update of an optimizer adds to variables anyway

    def is_of_gradients(self, addition, is_eager):
        """Whether a `Sum` adds gradients of several micro-batches."""
        starts = {addition.name} | self.iterated.get(addition.name, set())
        if not self._adds_a_gradient(addition, starts):
            return False
        if not (addition.is_op or is_eager or self.names(addition.added) & self._of_evaluated):
            return False  # tensors of one graph, such as the gradients of several losses
        return self.is_applied(self.reached_from(starts)) or self._is_held(addition, starts)

    def _adds_a_gradient(self, addition, starts):
        """Whether what is added to `starts` comes from gradients; where it may also be a list, `starts` begin at zero.

        An element of `starts` does not count as a gradient.
        """
        names = {name for name in self.names(addition.added) - starts if not self._is_element(name, starts)}
        if has_gradient_call(addition.added) or any(map(self._is_called_gradient, names)):
            return addition.is_sure or self._starts_at_zero(starts)
        sources = self.sources(names.union(*[self.iterated.get(name, set()) for name in names]))
        return addition.is_sure and any(map(self._is_called_gradient, sources - starts))

    def _is_element(self, name, starts):
        return bool(self.iterated.get(name)) and self.iterated[name] <= starts

    def _is_called_gradient(self, name):
        names = {name} | self.iterated.get(name, set())
        return any(name in self.gradients or CALLED_GRADIENT.search(name) for name in names)

    def _is_held(self, addition, starts):
        """Whether a variable is called a sum of gradients, and starts at zero, so that it is applied elsewhere."""
        return addition.is_op and any(map(HELD.search, starts)) and self._starts_at_zero(starts)

    def _starts_at_zero(self, names):
        """Whether any of `names`, or what is put into it, is bound to zeros or None somewhere."""
        names = names | self.sources(names)
        return any(_says_zero(value) for name in names for value in self.values.get(name, ()))


def _says_zero(node):
    words = matchers.findall(node, matchers.Name())
    is_number = isinstance(node, (cst.Integer, cst.Float)) and ZERO.search(node.value)
    is_none = isinstance(node, cst.Name) and node.value == "None"
    return bool(is_number or is_none or any("zero" in word.value for word in words))


def _accumulates(node):
    """Whether an optimizer is constructed with a number of micro-batches, or has a slot for sums of gradients."""
    code, options = cst.Module([]).code_for_node(node), _options(node)
    if any(map(STEPS.search, options)) or "n" in options and SUMS_OF_PAIRS.search(code):
        return True
    return bool(HELD.search(code) and not OTHER_SUMS.search(code))


def _options(node):
    names = []
    for definition in matchers.findall(node, matchers.FunctionDef(name=matchers.Name("__init__"))):
        names += [param.name.value for param in (*definition.params.params, *definition.params.kwonly_params)]
        of_decorators = [arg for decorator in definition.decorators for arg in getattr(decorator.decorator, "args", ())]
        names += [arg.keyword.value for arg in of_decorators if arg.keyword]
    return names
