"""Collect what a file binds, adds, feeds and applies, by name, so that a gradient can be followed through it.

`grads` stands for `grads`, `self.grads` and `grads[0]`. Names are not told apart by scope.
"""

import re
from typing import Any, NamedTuple, Optional

import libcst as cst
from libcst import matchers

from accum._migrate.arguments import last_name
from accum._migrate.uses import module_of

GRADIENT_CALLS = ("compute_gradients", "get_gradients", "gradient", "gradients")
ADDING = ("add", "add_n", "accumulate_n")
ASSIGNING = ("assign", "assign_add", "update", "update_add")
GROWING = ("append", "extend")
RUNNING = ("run", "eval")
OTHER_THAN_ITS_ARGUMENTS = GRADIENT_CALLS + ("global_norm", "matmul", "norm", "pow", "square")
OTHER_THAN_GRADIENTS = re.compile("loss|norm|size|step")  # beside which a function may return gradients
OF_TENSORS = ("dtype", "device", "name", "op", "shape")


class Sum(NamedTuple):
    """An addition.

    Attributes:
      name: the name to which something is added.
      node: the expression or statement.
      added: what is added.
      is_sure: whether it is certainly a sum rather than a growing list.
      is_op: whether a variable of TensorFlow is assigned, rather than a Python name.
      definition: the class or function at the top of the file that contains it, or None.
      is_in_train_step: whether it is in a method `train_step`, as Keras calls it.
    """

    name: str
    node: Any
    added: Any
    is_sure: bool
    is_op: bool
    definition: Optional[str]
    is_in_train_step: bool


class Flows(cst.CSTVisitor):
    """Visits a file.

    Attributes:
      gradients: names that are bound to gradients directly.
      evaluated: names that are bound to what a session returns.
      iterated: {name: names over whose elements it iterates}.
      sums: list of `Sum`.
      values: {name: expressions that are bound to it}.
      calls: all calls, as (last part of the function's name, call, definition that contains it).
      modules: names that the file imports, and the first part of the modules that it imports them from.
    """

    def __init__(self):
        super().__init__()
        self._imported = set()
        self._bound, self._fed, self._applied, self._assigned = {}, set(), [], []
        self._functions, self._passed, self._within, self._flow = {}, [], [], {}
        self.gradients, self.evaluated, self.iterated, self.sums = set(), set(), {}, []
        self.values, self.calls, self.modules = {}, [], set()

    @property
    def definition(self):
        """The class or function at the top of the file that is being visited, or None."""
        return self._within[0] if self._within else None

    @property
    def is_in_train_step(self):
        return "train_step" in self._within[1:]

    def names(self, node):
        """Return the names in an expression, but not divisors, nor what gradients and norms are computed from."""
        if isinstance(node, cst.Name):
            return set() if node.value in self._imported else {node.value}
        if isinstance(node, cst.Attribute):
            if node.attr.value in OF_TENSORS:
                return set()
            root = self.names(node.value)
            return root - {"self", "cls"} | {node.attr.value} if root else root
        if isinstance(node, cst.Call):
            if last_name(node.func) in OTHER_THAN_ITS_ARGUMENTS:
                return set()
            return self._names_of_function(node.func).union(*[self.names(arg.value) for arg in node.args])
        if isinstance(node, cst.Lambda):
            return self.names(node.body)
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            return self.names(node.left)
        return set().union(*[self.names(child) for child in node.children])

    def _names_of_function(self, function):
        """Return the function's own name, which stands for what it returns, or the names of the object it is of."""
        if isinstance(function, cst.Attribute):
            return self.names(function.value) - {"self", "cls"} or self.names(function)
        return self.names(function)

    def reached_from(self, starts):
        """Return all names to which the values of `starts` may have been passed."""
        reached, new = set(starts), set(starts)
        while new:
            new = set().union(*[self._flow.get(name, set()) for name in new]) - reached
            reached |= new
        return reached

    def sources(self, names):
        """Return the names that are assigned to `names`."""
        return set().union(*[self._bound.get(name, set()) for name in names])

    def _flows(self):
        """Yield (name, the names that its values come from)."""
        yield from self._bound.items()
        for function, positional, keywords in self._passed:
            parameters = self._functions.get(function, ())
            for name, node in list(zip(parameters, positional)) + keywords:
                if name in parameters:
                    yield name, self.names(node)
        for name in self._fed:  # what a placeholder is fed with is in the list of placeholders too
            for container in self.iterated.get(name, ()):
                yield container, {name}

    def is_applied(self, names):
        """Whether any of `names` is passed to `apply_gradients` as a gradient."""
        return any(self.names(node) & names for node in self._applied)

    # ------------------------------------------------------------------------------------------------------------
    # Visiting nodes

    def visit_Import(self, node):
        for alias in node.names:
            self.modules.add(alias.evaluated_name.split(".")[0])
            self._imported.add(alias.evaluated_alias or alias.evaluated_name.split(".")[0])

    def visit_ImportFrom(self, node):
        self.modules.add(module_of(node).split(".")[0])
        if not isinstance(node.names, cst.ImportStar):
            names = {alias.evaluated_alias or alias.evaluated_name for alias in node.names}
            self.modules |= names | {alias.evaluated_name for alias in node.names}  # `from .backend import keras`
            self._imported |= names

    def visit_ClassDef(self, node):
        self._within.append(node.name.value)

    def leave_ClassDef(self, original_node):
        self._within.pop()

    def visit_FunctionDef(self, node):
        self._within.append(node.name.value)
        parameters = [param.name.value for param in (*node.params.params, *node.params.kwonly_params)]
        self._functions[node.name.value] = [name for name in parameters if name not in ("self", "cls")]
        self.gradients.update(name for name in parameters if "grad" in name.lower() and "accum" not in name.lower())

    def leave_FunctionDef(self, original_node):
        self._within.pop()

    def visit_Return(self, node):
        if node.value is not None and self._within:
            self._bind(cst.Name(self._within[-1]), node.value)

    def visit_Call(self, node):
        function = last_name(node.func)
        self.calls.append((function, node, self.definition))
        positional = [arg.value for arg in node.args if not arg.keyword and not arg.star]
        keywords = [(arg.keyword.value, arg.value) for arg in node.args if arg.keyword]
        self._passed.append((function, positional, keywords))
        if function == "apply_gradients" and node.args:
            self._applied.append(_gradients_of(node.args[0].value))
        if function in ASSIGNING and node.args:
            self._visit_assign_op(node, function.endswith("add"))
        if function in GROWING and len(positional) == 1 and isinstance(node.func, cst.Attribute):
            self._bind(node.func.value, positional[0])
        if function == "dict" and len(positional) == 1 and _is_zip(positional[0], 2):
            self._feed(*[arg.value for arg in positional[0].args])

    def _visit_assign_op(self, node, adds):
        """Visit `sums.assign_add(gradient)`, `tf.assign(sums, sums + gradient)` and the like."""
        is_method = len(node.args) == 1 or node.args[1].keyword is not None
        target = node.func.value if is_method and isinstance(node.func, cst.Attribute) else node.args[0].value
        value = node.args[0 if is_method else 1].value
        if adds or _base(target) in self.names(value) and matchers.findall(value, matchers.Add()):
            self._add(target, node, value, adds, True)
        elif isinstance(value, cst.Name):
            self._assigned.append((target, node, value.value, self.definition, self.is_in_train_step))

    def leave_Module(self, original_node):
        """Add what is added first and assigned afterwards, as in `new = sums + gradient`, `tf.assign(sums, new)`."""
        for target, node, name, *where in self._assigned:
            for value in self.values.get(name, ()):
                if _base(target) in self.names(value) and matchers.findall(value, matchers.Add()):
                    self.sums.append(Sum(_base(target), node, value, True, True, *where))
        for name, sources in self._flows():
            for source in sources:
                self._flow.setdefault(source, set()).add(name)

    def _add(self, target, node, added, is_sure, is_op=False):
        name = _base(target)
        if name is not None:
            self.sums.append(Sum(name, node, added, is_sure, is_op, self.definition, self.is_in_train_step))

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

    def visit_DictComp(self, node):
        self._feed(node.key, node.value)

    def visit_DictElement(self, node):
        self._feed(node.key, node.value)

    def _feed(self, key, value):
        if isinstance(key, (cst.Name, cst.Attribute, cst.Subscript)):
            self._bind(key, value)
            self._fed.add(_base(key))

    def _bind(self, target, value, is_element=False):
        if isinstance(target, (cst.Tuple, cst.List)):
            alike = isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements)
            for index, element in enumerate(target.elements):
                self._bind(element.value, value.elements[index].value if alike else value, is_element)
            return
        name = _base(target)
        if name is None:
            return
        self._bound.setdefault(name, set()).update(self.names(value))
        self.values.setdefault(name, []).append(value)
        if has_gradient_call(value) and not OTHER_THAN_GRADIENTS.search(name):
            self.gradients.add(name)
        if isinstance(value, cst.Call) and last_name(value.func) in RUNNING:
            self.evaluated.add(name)
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


def _is_zip(node, count):
    return isinstance(node, cst.Call) and last_name(node.func) == "zip" and len(node.args) == count


def _gradients_of(pairs):
    """Return the gradients in `zip(gradients, variables)`, `[(gradient, variable) for …]` and the like."""
    while isinstance(pairs, cst.Call) and last_name(pairs.func) in ("list", "tuple", "iter") and pairs.args:
        pairs = pairs.args[0].value
    if _is_zip(pairs, 2):
        return pairs.args[0].value
    if isinstance(pairs, (cst.ListComp, cst.GeneratorExp)) and isinstance(pairs.elt, cst.Tuple):
        return pairs.elt.elements[0].value
    elements = [element.value for element in pairs.elements] if isinstance(pairs, cst.List) else []
    if elements and all(isinstance(element, cst.Tuple) for element in elements):
        return cst.Tuple([element.elements[0] for element in elements])
    return pairs


def has_gradient_call(node):
    """Whether an expression computes gradients."""
    return any(last_name(call.func) in GRADIENT_CALLS for call in matchers.findall(node, matchers.Call()))


def _adds(node):
    names = [last_name(part) for part in matchers.findall(node, matchers.Name() | matchers.Attribute())]
    return bool(matchers.findall(node, matchers.Add())) or any(name in ADDING for name in names)
