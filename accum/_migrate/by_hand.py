"""Find gradients that a file adds up by hand, and report them with the guide's recipe. They are never rewritten.

A gradient is followed only by name: from its computation, through the addition, to `apply_gradients`. If one of the
three is missing, nothing is reported.
"""

import re

import libcst as cst
from libcst import matchers

from accum._migrate.arguments import last_name
from accum._migrate.uses import module_of

GRAPH = (
    "gradients are added up by hand here. `accum.compat.v1.AccumOptimizer` replaces that with one train op or three; "
    "see docs/migrating.md, TensorFlow 1: accumulate, apply, zero"
)
EAGER = (
    "gradients are added up by hand here. Pass each micro-batch's gradients to `accum.GradientAccumulateOptimizer` "
    "instead; see docs/migrating.md, TensorFlow 2: a list of sums"
)
CLASS = (
    "it is an optimizer of your own that accumulates. Replace it with the plain optimizer, wrapped in "
    "`accum.GradientAccumulateOptimizer`, or in `accum.compat.v1.AccumOptimizer` in a static graph; see "
    "docs/migrating.md, Optimizers copied into your own code"
)
HINTS = (rb"apply_gradients|Optimizer\)", rb"(?i)accum|assign_add|zeros_like|steps_per_update|niter|\+=|in zip\(")
GRADIENT_CALLS = ("compute_gradients", "get_gradients", "gradient", "gradients")
ADDING = ("add", "add_n", "accumulate_n")
STEPS = re.compile("accumulation|accum_?(steps|iters|num|freq)|steps_per_update|^niter$")  # not Adagrad's `accumulator`
ZERO = re.compile(r"^0(\.0*)?$")
UPDATES = ("update_step", "_apply_", "_resource_apply_")
OF_TENSORS = ("dtype", "device", "name", "op", "shape")
TENSORFLOW = ("keras", "tensorflow", "tensorpack", "tf_keras")
OTHERS = ("flax", "jax")


def may_be_in(content):
    """Whether the bytes of a file contain any hint that it accumulates by hand."""
    return all(re.search(hint, content) for hint in HINTS)


def find(module):
    """Find the places where gradients are added up: [(node, name, reason)], each name once."""
    file = _File()
    module.visit(file)
    if not file.is_of_tensorflow:
        return []
    reason = EAGER if file.is_eager else GRAPH
    found = [(node, node.name.value, CLASS) for node in file.classes]
    found += [(node, "GradientAccumulator", reason) for node in file.accumulators]
    gradients = file.reached_from(file.gradients)
    names = set()
    for name, node, added, is_sure in file.sums:
        starts = {name} | file.iterated.get(name, set())
        if not (file.adds_a_gradient(added, starts, gradients) if is_sure else file.is_a_sum(added, starts)):
            continue
        label = min(file.iterated.get(name) or {name})
        if label not in names and file.is_applied(file.reached_from(starts)):
            names.add(label)
            found.append((node, label, reason))
    return found


class _File(cst.CSTVisitor):
    """Collects what a file binds, adds and applies, by name: `grads` for `grads`, `self.grads` and `grads[0]`.

    Attributes:
      gradients: names that are bound to gradients directly.
      iterated: {name: names over whose elements it iterates}.
      sums: additions, as (name, node, what is added, whether it is certainly a sum rather than a growing list).
      accumulators: calls of `GradientAccumulator`, a class name in transformers and other libraries.
      classes: definitions of optimizers that accumulate.
      is_eager: whether gradients come from a tape.
      is_of_tensorflow: whether the file imports TensorFlow or Keras, and no other library with the same names.
    """

    def __init__(self):
        super().__init__()
        self._imported, self._modules = set(), set()
        self._bound, self._values, self._applied = {}, {}, []
        self._functions, self._calls, self._in_class = {}, [], 0
        self.gradients, self.iterated, self.sums = set(), {}, []
        self.classes, self.accumulators, self.is_eager = [], [], False

    @property
    def is_of_tensorflow(self):
        return bool(self._modules & set(TENSORFLOW)) and not self._modules & set(OTHERS)

    def names(self, node):
        """Return the names in an expression, except those from which gradients are computed."""
        if isinstance(node, cst.Name):
            return set() if node.value in self._imported else {node.value}
        if isinstance(node, cst.Attribute):
            if node.attr.value in OF_TENSORS:
                return set()
            root = self.names(node.value)
            return root - {"self", "cls"} | {node.attr.value} if root else root
        if isinstance(node, cst.Call):
            if last_name(node.func) in GRADIENT_CALLS:
                return set()
            of_function = self.names(node.func.value) if isinstance(node.func, cst.Attribute) else set()
            return of_function.union(*[self.names(arg.value) for arg in node.args])
        if isinstance(node, cst.Lambda):
            return self.names(node.body)
        return set().union(*[self.names(child) for child in node.children])

    def adds_a_gradient(self, added, starts, gradients):
        """Whether what is added to `starts` comes from gradients."""
        return _has_gradient_call(added) or bool((self.names(added) - starts) & gradients)

    def is_a_sum(self, added, starts):
        """Whether `starts` begin at zero and a gradient, recognised by its name, is added to them.

        An element of `starts` does not count as a gradient.
        """
        others = [name for name in self.names(added) - starts if not self.iterated.get(name, set()) & starts]
        has_gradient = _has_gradient_call(added) or any(map(self._is_called_gradient, others))
        return has_gradient and self.starts_at_zero(starts)

    def _is_called_gradient(self, name):
        return any(each in self.gradients or "grad" in each.lower() for each in {name} | self.iterated.get(name, set()))

    def reached_from(self, starts):
        """Return all names to which the values of `starts` may have been passed."""
        reached, is_new = set(starts), True
        while is_new:
            found = {name for name, names in self._flows() if names & reached}
            is_new = not found <= reached
            reached |= found
        return reached

    def _flows(self):
        for name, sources in self._bound.items():
            yield name, sources
        for function, call in self._calls:
            for name, node in zip(self._functions.get(function, ()), call):
                yield name, self.names(node)

    def starts_at_zero(self, names):
        """Whether any of `names` is bound to zeros or None somewhere."""
        values = [value for name in names for value in self._values.get(name, ())]
        return any(_says_zero(value) for value in values)

    def is_applied(self, names):
        """Whether any of `names` is passed to `apply_gradients` as a gradient."""
        return any(self.names(node) & names for node in self._applied)

    # ------------------------------------------------------------------------------------------------------------
    # Visiting nodes

    def visit_Import(self, node):
        for alias in node.names:
            self._modules.add(alias.evaluated_name.split(".")[0])
            self._imported.add(alias.evaluated_alias or alias.evaluated_name.split(".")[0])

    def visit_ImportFrom(self, node):
        self._modules.add(module_of(node).split(".")[0])
        if not isinstance(node.names, cst.ImportStar):
            self._modules.update(alias.evaluated_name for alias in node.names)  # `from .backend import keras`
            self._imported.update(alias.evaluated_alias or alias.evaluated_name for alias in node.names)

    def visit_ClassDef(self, node):
        if any("Optimizer" in (last_name(base.value) or "") for base in node.bases) and _takes_steps(node):
            self.classes.append(node)
            return False  # how an optimizer adds up internally does not matter
        return True

    def visit_FunctionDef(self, node):
        if node.name.value.startswith(UPDATES):
            return False  # the update method of an optimizer adds to variables anyway
        parameters = [param.name.value for param in (*node.params.params, *node.params.kwonly_params)]
        self._functions[node.name.value] = [name for name in parameters if name not in ("self", "cls")]
        self.gradients.update(name for name in parameters if "grad" in name.lower() and "accum" not in name.lower())
        return True

    def visit_Call(self, node):
        function = last_name(node.func)
        self.is_eager |= function == "GradientTape"
        self._calls.append((function, [arg.value for arg in node.args if not arg.keyword and not arg.star]))
        if function == "apply_gradients" and node.args:
            self._applied.append(_gradients_of(node.args[0].value))
        if function in ("assign", "assign_add") and node.args:
            self._visit_assign_op(node, function == "assign_add")
        if function == "GradientAccumulator":
            self.accumulators.append(node)

    def _visit_assign_op(self, node, adds):
        """Visit `sums.assign_add(gradient)`, `tf.assign(sums, sums + gradient)` and the like."""
        is_method = len(node.args) == 1 or node.args[1].keyword is not None
        target = node.func.value if is_method and isinstance(node.func, cst.Attribute) else node.args[0].value
        value = node.args[0 if is_method else 1].value
        if adds or _base(target) in self.names(value) and matchers.findall(value, matchers.Add()):
            self._add(target, node, value, adds)

    def _add(self, target, node, added, is_sure):
        name = _base(target)
        if name is not None:
            self.sums.append((name, node, added, is_sure))

    def visit_AugAssign(self, node):
        if isinstance(node.operator, cst.AddAssign):
            self._add(node.target, node, node.value, isinstance(node.target, cst.Subscript))

    def visit_Assign(self, node):
        for target in node.targets:
            self._bind(target.target, node.value)
            name = _base(target.target)
            if name is not None and name in self.names(node.value) and _adds(node.value):
                self._add(target.target, node, node.value, False)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self._bind(node.target, node.value)

    def visit_For(self, node):
        self._iterate(node.target, node.iter)

    def visit_CompFor(self, node):
        self._iterate(node.target, node.iter)

    def _bind(self, target, value, is_element=False):
        if isinstance(target, (cst.Tuple, cst.List)):
            alike = isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements)
            for index, element in enumerate(target.elements):
                self._bind(element.value, value.elements[index].value if alike else value, is_element)
            return
        name = _base(target)
        if name is not None:
            self._bound.setdefault(name, set()).update(self.names(value))
            self._values.setdefault(name, []).append(value)
            if _has_gradient_call(value):
                self.gradients.add(name)
            if is_element:
                self.iterated.setdefault(name, set()).update(self.names(value))

    def _iterate(self, target, iterable):
        """Bind the targets of a loop to what they iterate over; `for a, b in zip(x, y)` pair by pair."""
        function = last_name(iterable.func) if isinstance(iterable, cst.Call) else None
        parts = [arg.value for arg in iterable.args if not arg.star] if function else []
        elements = [element.value for element in target.elements] if isinstance(target, cst.Tuple) else []
        if function == "enumerate" and len(elements) == 2 and parts:
            self._iterate(elements[1], parts[0])
        elif function == "zip" and len(elements) == len(parts):
            for element, part in zip(elements, parts):
                self._iterate(element, part)
        else:
            self._bind(target, iterable, True)


def _base(node):
    """Return the short name of the target of an assignment: `sums` for `sums`, `self.sums` and `sums[i]`."""
    while isinstance(node, cst.Subscript):
        node = node.value
    return last_name(node)


def _gradients_of(pairs):
    """Return the gradients in `zip(gradients, variables)`, `[(gradient, variable) for …]` and the like."""
    while isinstance(pairs, cst.Call) and last_name(pairs.func) in ("list", "tuple", "iter") and pairs.args:
        pairs = pairs.args[0].value
    if isinstance(pairs, cst.Call) and last_name(pairs.func) == "zip" and pairs.args:
        return pairs.args[0].value
    if isinstance(pairs, (cst.ListComp, cst.GeneratorExp)) and isinstance(pairs.elt, cst.Tuple):
        return pairs.elt.elements[0].value
    elements = [element.value for element in pairs.elements] if isinstance(pairs, cst.List) else []
    if elements and all(isinstance(element, cst.Tuple) for element in elements):
        return cst.Tuple([element.elements[0] for element in elements])
    return pairs


def _has_gradient_call(node):
    calls = matchers.findall(node, matchers.Call())
    return any(last_name(call.func) in GRADIENT_CALLS for call in calls)


def _adds(node):
    names = [last_name(each) for each in matchers.findall(node, matchers.Name() | matchers.Attribute())]
    return bool(matchers.findall(node, matchers.Add())) or any(name in ADDING for name in names)


def _says_zero(node):
    words = matchers.findall(node, matchers.Name())
    is_number = isinstance(node, (cst.Integer, cst.Float)) and ZERO.search(node.value)
    is_none = isinstance(node, cst.Name) and node.value == "None"
    return bool(is_number or is_none or any("zero" in word.value for word in words))


def _takes_steps(node):
    """Whether a class is constructed with a number of micro-batches."""
    names = []
    for definition in matchers.findall(node, matchers.FunctionDef(name=matchers.Name("__init__"))):
        names += [param.name.value for param in (*definition.params.params, *definition.params.kwonly_params)]
        of_decorators = [arg for each in definition.decorators for arg in getattr(each.decorator, "args", ())]
        names += [arg.keyword.value for arg in of_decorators if arg.keyword]
    return any(map(STEPS.search, names))
