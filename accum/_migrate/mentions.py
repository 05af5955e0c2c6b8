"""Find arguments that accumulate but are not in the call of a known name, such as in a dict or `partial`.

They are reported and never rewritten, because it is not known which function receives them.
"""

import libcst as cst
from libcst.helpers import get_full_name_for_node

from accum._migrate.arguments import last_name, text_of
from accum._migrate.rules import FRAMEWORKS, is_in
from accum._migrate.uses import module_of

# Modules whose arguments of the same name have nothing to do with optimizers of Keras or Horovod.
HARMLESS = FRAMEWORKS | {"absl", "dataclasses", "datasets", "json", "logging", "mlflow", "pytest", "ray", "typing"}
HARMLESS |= {"unittest", "wandb"}
GIVEN = "`{}` is passed to something unknown. If that is an optimizer of {}, call it here by its own name"
MADE = "it is set outside an optimizer's call, and where it goes is not known. Write it in that call"
READ = "an optimizer of accum has `accum_steps` instead. If this is an optimizer, read that"
KEYWORD_CALLS = ("setattr", "setdefault", "fromkeys", "__setitem__")
OPTIONS = ("args", "cfg", "config", "flags", "option", "param", "setting")
IMPORTING = ("import_module", "__import__", "importorskip")


def find(source, uses, is_seen):
    """Find mentions of `source.ARGUMENT` that may refer to its library: [(node, name, reason)].

    Args:
      source: one of the `rules`, for a library that is recognised by an argument.
      uses: the file's `Uses`.
      is_seen: function from a node to whether it is a call that a rule handles.
    """
    seen = _Mentions(source)
    uses.module.visit(seen)
    is_away = getattr(source, "NEEDS_ITS_IMPORT", False) and not any(map(source.is_home, seen.modules))
    if is_away or _is_of_a_framework(source, seen.modules):
        return []
    calls = [call for call in seen.calls if not is_seen(call) and last_name(call.func) not in seen.takers]
    matches = [(call, uses.code(call.func), GIVEN.format(source.ARGUMENT, source.LIBRARY)) for call in calls]
    matches += [(node, source.ARGUMENT, getattr(source, "MADE", MADE)) for node in seen.made]
    matches = [match for match in matches if not any(_is_harmless(uses, call) for call in uses.calls_around(match[0]))]
    return matches + [(node, source.ARGUMENT, reason) for node, reason in _of_optimizers(seen, is_seen)]


def _of_optimizers(seen, is_seen):
    """Yield (node, reason) for attributes of objects that are optimizers, or whose name suggests it."""
    optimizers = {name for name, call in seen.bound if is_seen(call)}
    options = {name for name, call in seen.bound if (last_name(call.func) or "").startswith("parse_")}
    for node, owner, reason in seen.attributes:
        name = last_name(owner)
        is_of_options = name in options or reason is READ and _is_called_options(owner)
        if is_seen(owner) or name in optimizers or _is_called_optimizer(name) and not is_of_options:
            yield node, reason


def _is_of_a_framework(source, modules):
    # `import horovod` beside `import horovod.torch` says nothing of its own.
    names = [name for name in modules if not any(other.startswith(name + ".") for other in modules)]
    return any(is_in(FRAMEWORKS, name) for name in names) and not any(map(source.is_home, names))


def _is_harmless(uses, call):
    names = uses.names(call.func)
    return bool(names) and all(is_in(HARMLESS, name) for name in names)


class _Mentions(cst.CSTVisitor):
    """Collects where a file mentions the argument.

    Attributes:
      modules: full names of imported modules and names.
      calls: calls with the argument.
      made: nodes outside calls that set it, such as in a dict.
      attributes: attributes with its name, as (node, owner, reason to report it).
      bound: calls whose result is assigned to a name, as (name, call).
      takers: names of functions and classes in this file that have a parameter with its name. What they do with it is
        in this file too, and is found there.
    """

    def __init__(self, source):
        super().__init__()
        self._source = source
        self._classes = []
        self._targets = set()
        self.modules, self.calls, self.made, self.attributes, self.bound, self.takers = [], [], [], [], [], set()

    def _is_it(self, node):
        return text_of(node) == self._source.ARGUMENT

    def visit_Import(self, node):
        self.modules += [alias.evaluated_name for alias in node.names]

    def visit_ImportFrom(self, node):
        names = [] if isinstance(node.names, cst.ImportStar) else [alias.evaluated_name for alias in node.names]
        self.modules += [module_of(node)] + [module_of(node) + "." + name for name in names]

    def visit_ClassDef(self, node):
        self._classes.append(node.name.value)

    def leave_ClassDef(self, original_node):
        self._classes.pop()

    def visit_FunctionDef(self, node):
        if self._spells_it_out(node.params):
            is_made = node.name.value == "__init__" and self._classes
            self.takers.add(self._classes[-1] if is_made else node.name.value)

    def _spells_it_out(self, params):
        return any(param.name.value == self._source.ARGUMENT for param in (*params.params, *params.kwonly_params))

    def visit_AnnAssign(self, node):
        if self._classes and last_name(node.target) == self._source.ARGUMENT:
            self.takers.add(self._classes[-1])
        self._visit_target(node.target, node.value)

    def visit_Call(self, node):
        for arg in node.args:
            if arg.keyword and arg.keyword.value == self._source.ARGUMENT and not self._source.is_off(arg.value):
                self.calls.append(node)
        if last_name(node.func) in KEYWORD_CALLS and any(self._is_it(arg.value) for arg in node.args):
            self.made.append(node)
        if last_name(node.func) == "getattr" and len(node.args) > 1 and self._is_it(node.args[1].value):
            self.attributes.append((node, node.args[0].value, READ))

    def visit_Attribute(self, node):
        if node.attr.value == self._source.ARGUMENT and node not in self._targets:
            self.attributes.append((node, node.value, READ))

    def visit_DictElement(self, node):
        if self._is_it(node.key) and not self._source.is_off(node.value):
            self.made.append(node)

    def visit_Tuple(self, node):
        """Visit a pair of name and value, which may become an item of a dict."""
        elements = [element.value for element in node.elements]
        if len(elements) == 2 and self._is_it(elements[0]) and text_of(elements[1]) is None:
            self.made.append(node)

    def visit_List(self, node):
        self.visit_Tuple(node)

    def visit_Assign(self, node):
        for target in node.targets:
            if isinstance(node.value, cst.Lambda) and self._spells_it_out(node.value.params):
                self.takers.add(last_name(target.target))
            self._visit_target(target.target, node.value)
        if self._is_it(node.value):  # under its new name it may be used anywhere
            self.made.append(node.targets[0].target)

    def _visit_target(self, target, value):
        """Visit the target of an assignment such as `options["…"] = 4` or `optimizer.… = 4`."""
        if isinstance(value, cst.Call):
            self.bound.append((last_name(target), value))
        if isinstance(target, cst.Subscript):
            index = target.slice[0].slice
            is_off = value is not None and self._source.is_off(value)
            if isinstance(index, cst.Index) and self._is_it(index.value) and not is_off:
                self.made.append(target)
        elif isinstance(target, cst.Attribute) and last_name(target) == self._source.ARGUMENT:
            self._targets.add(target)  # also if the value is None, which switches accumulation off
            self.attributes.append((target, target.value, MADE))


def _is_called_optimizer(name):
    name = (name or "").lower()
    return "optim" in name or name == "opt" or name.endswith("_opt")


def _is_called_options(node):
    """Whether an expression looks like options rather than an optimizer, such as `config.optimizer`."""
    name = (get_full_name_for_node(node) or "").lower()
    return any(word in name for word in OPTIONS)


def imports_by_text(sources, uses):
    """Find modules of `sources` that are imported by calling a function: [(node, name, reason)]."""
    visitor = _ImportsByText()
    uses.module.visit(visitor)
    reason = "what is used from a module imported this way is not known. Use an import statement"
    return [(node, text, reason) for node, text in visitor.calls if any(source.is_module(text) for source in sources)]


class _ImportsByText(cst.CSTVisitor):
    def __init__(self):
        super().__init__()
        self.calls = []

    def visit_Call(self, node):
        text = text_of(node.args[0].value) if node.args else None
        if text is not None and last_name(node.func) in IMPORTING:
            self.calls.append((node, text))
