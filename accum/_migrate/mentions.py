"""An argument that accumulates where no call of a known name takes it: by an alias, a dict, a `partial`.

It is named and never rewritten: where it arrives can't be told.
"""

import libcst as cst

from accum._migrate.arguments import last_name, text_of
from accum._migrate.uses import module_of

FRAMEWORKS = frozenset(
    "accelerate byteps composer deepspeed diffusers fairseq flax horovod.mxnet horovod.torch jax lightning mlx mxnet optax "
    "paddle peft pytorch_lightning sentence_transformers timm torch transformers trl unsloth".split()
)
"""What has arguments of the same names. A file that imports one of these, and not what a rule is for, is theirs."""

HARMLESS = FRAMEWORKS | frozenset(
    "absl argparse collections dataclasses datasets json logging mlflow pytest ray types typing unittest wandb".split()
)
"""What hands an argument of that name to no optimizer."""

GIVEN = "`{}` goes to what can't be told: if it is an optimizer of {}, write it with its own name, and not unpacked"
MADE = "it is set apart from an optimizer's call, and where it goes can't be told: write it in that call"
KEYWORD_CALLS = ("setattr", "setdefault", "fromkeys", "__setitem__")


def find(source, uses, is_seen):
    """Mentions of `source.ARGUMENT` that may be of its library: [(node, name, reason)].

    Args:
      source: one of the `rules`, for a library that is known by an argument.
      uses: the file's `Uses`.
      is_seen: function from a call to whether a rule has decided on it.
    """
    seen = _Mentions(source)
    uses.module.visit(seen)
    if _is_of_a_framework(source, seen.modules):
        return []
    calls = [call for call in seen.calls if not is_seen(call) and last_name(call.func) not in seen.takers]
    found = [(call, uses.code(call.func), GIVEN.format(source.ARGUMENT, source.LIBRARY)) for call in calls]
    found += [(node, source.ARGUMENT, MADE) for node in seen.made]
    return [each for each in found if not any(_is_harmless(uses, call) for call in uses.calls_around(each[0]))]


def _is_of_a_framework(source, modules):
    return any(_is_in(FRAMEWORKS, name) for name in modules) and not any(map(source.is_home, modules))


def _is_harmless(uses, call):
    names = uses.names(call.func)
    return bool(names) and all(_is_in(HARMLESS, name) for name in names)


def _is_in(packages, name):
    parts = name.split(".")
    return parts[0] in packages or ".".join(parts[:2]) in packages


class _Mentions(cst.CSTVisitor):
    """Collects imported `modules`, `calls` with the argument, nodes where it is `made` otherwise, and `takers`.

    Those are the names of functions and classes of the file itself that spell the argument out: what they do with it is
    in this file too, and is found there.
    """

    def __init__(self, source):
        super().__init__()
        self._source = source
        self._classes = []
        self.modules, self.calls, self.made, self.takers = [], [], [], set()

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
        params = node.params.params + node.params.kwonly_params
        if any(param.name.value == self._source.ARGUMENT for param in params):
            is_made = node.name.value == "__init__" and self._classes
            self.takers.add(self._classes[-1] if is_made else node.name.value)

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

    def visit_DictElement(self, node):
        if self._is_it(node.key) and not self._source.is_off(node.value):
            self.made.append(node)

    def visit_Tuple(self, node):
        """A pair, of which a dict may be made."""
        elements = [element.value for element in node.elements]
        if len(elements) == 2 and self._is_it(elements[0]) and text_of(elements[1]) is None:
            self.made.append(node)

    def visit_Assign(self, node):
        for target in node.targets:
            self._visit_target(target.target, node.value)

    def _visit_target(self, target, value):
        """`options["…"] = 4`, and `optimizer.… = 4`, where it is no attribute of options."""
        if isinstance(target, cst.Subscript):
            index = target.slice[0].slice
            is_it = isinstance(index, cst.Index) and self._is_it(index.value)
        else:
            owner = last_name(target.value) if isinstance(target, cst.Attribute) else None
            is_it = last_name(target) == self._source.ARGUMENT and "optim" in (owner or "").lower()
        if is_it and not (value is not None and self._source.is_off(value)):
            self.made.append(target)
