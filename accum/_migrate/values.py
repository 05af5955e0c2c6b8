"""Find numbers of micro-batches that may be None, which means no accumulation in Keras 3 but is rejected by accum."""

import libcst as cst
from libcst.helpers import get_full_name_for_node

from accum._migrate.arguments import NotUnderstood, last_name, text_of

NUMBERS = ("abs", "int", "len", "max", "min", "round", "sum", "math.ceil", "math.floor")
NONE = cst.Name("None")


def is_none(node):
    """Whether an expression is the word None."""
    return isinstance(node, cst.Name) and node.value == "None"


class Values:
    """The possible values of the names in a file, as far as the file itself shows them.

    Only the name counts: `steps = …`, `self.steps = …`, `config["steps"] = …`, `{"steps": …}`, `f(steps=…)`,
    `def f(steps=…)` and `add_argument("--steps", …)` all give a value of `steps`.

    Args:
      module: the file's `libcst.Module`.
    """

    def __init__(self, module):
        visitor = _Given()
        module.visit(visitor)
        self._values_of = visitor.values

    def require_number(self, node):
        """Raise `NotUnderstood` for a value that is not a number of micro-batches, or may be None."""
        if self._may_be_none(node, set()):
            raise NotUnderstood(
                f"`{_code(node)}` may be None, which means no accumulation in Keras 3 but is not a valid "
                "`accum_steps`. Use the plain optimizer when it is None"
            )
        if _is_no_number(node):
            raise NotUnderstood(f"`{_code(node)}` is not a number of micro-batches")

    def _may_be_none(self, node, seen):
        name = _name(node)
        if is_none(node) or name is not None:
            values = [] if name in seen else self._values_of.get(name, ())
            return is_none(node) or any(self._may_be_none(value, seen | {name}) for value in values)
        if isinstance(node, cst.NamedExpr):
            return self._may_be_none(node.value, seen)
        if isinstance(node, cst.IfExp):
            return self._may_be_none(node.body, seen) or self._may_be_none(node.orelse, seen)
        if isinstance(node, cst.BooleanOperation):
            sides = [node.right] if isinstance(node.operator, cst.Or) else [node.left, node.right]
            return any(self._may_be_none(side, seen) for side in sides)
        if isinstance(node, cst.Call):
            return get_full_name_for_node(node.func) not in NUMBERS
        # An operation on None already fails without accum.
        return not isinstance(node, (cst.BaseNumber, cst.BinaryOperation, cst.UnaryOperation, cst.Subscript, *LITERALS))


LITERALS = (cst.BaseString, cst.Tuple, cst.List, cst.Dict, cst.Comparison)


def _is_no_number(node):
    if isinstance(node, cst.UnaryOperation):
        return isinstance(node.operator, (cst.Minus, cst.Not))
    if isinstance(node, cst.Name):
        return node.value in ("True", "False")
    return isinstance(node, (cst.Float, cst.Imaginary, *LITERALS)) or getattr(node, "value", None) == "0"


def _name(node):
    """Return the name of a value: `steps` for `steps`, `self.steps` and `config["steps"]`; None if it has none."""
    if isinstance(node, cst.Subscript):
        return text_of(node.slice[0].slice.value) if isinstance(node.slice[0].slice, cst.Index) else None
    return last_name(node)


def _code(node):
    return " ".join(cst.Module([]).code_for_node(node).split())


class _Given(cst.CSTVisitor):
    """Collects `values`, a dict {name: [expressions]}."""

    def __init__(self):
        super().__init__()
        self.values = {}

    def _say(self, name, value):
        if name is not None and value is not None:
            self.values.setdefault(name, []).append(value)

    def _bind(self, target, value):
        if not isinstance(target, (cst.Tuple, cst.List)):
            return self._say(_name(target), value)
        is_alike = isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(target.elements)
        for index, element in enumerate(target.elements):
            if is_alike:
                self._bind(element.value, value.elements[index].value)
            elif _says_none(value):
                self._bind(element.value, NONE)
        return None

    def visit_Assign(self, node):
        for target in node.targets:
            self._bind(target.target, node.value)

    def visit_NamedExpr(self, node):
        self._bind(node.target, node.value)

    def visit_AnnAssign(self, node):
        self._say(_name(node.target), node.value)
        self._annotate(_name(node.target), node.annotation)

    def visit_Param(self, node):
        self._say(node.name.value, node.default)
        self._annotate(node.name.value, node.annotation)

    def _annotate(self, name, annotation):
        if annotation is not None and _says_none(annotation):
            self._say(name, NONE)

    def visit_For(self, node):
        if _says_none(node.iter):
            self._bind(node.target, NONE)

    def visit_CompFor(self, node):
        self.visit_For(node)

    def visit_DictElement(self, node):
        self._say(text_of(node.key), node.value)

    def visit_Comparison(self, node):
        sides = [node.left] + [comparison.comparator for comparison in node.comparisons]
        for side in sides if any(map(is_none, sides)) else ():
            self._say(_name(side), NONE)

    def visit_Call(self, node):
        for arg in node.args:
            if arg.keyword:
                self._say(arg.keyword.value, arg.value)
        kind = last_name(node.func) or ""
        if kind in ("add_argument", "option"):  # of argparse and click
            self._visit_option(node)
        if kind.startswith("DEFINE_") and len(node.args) > 1:  # of absl
            self._say(text_of(node.args[0].value), node.args[1].value)

    def _visit_option(self, node):
        """Visit a command-line option. Its value may be None if it is neither required nor has a default."""
        arguments = {arg.keyword.value: arg.value for arg in node.args if arg.keyword}
        names = [text_of(arg.value) for arg in node.args if not arg.keyword] + [
            "--" + (text_of(arguments.get("dest")) or "")
        ]
        is_set = "action" in arguments or last_name(arguments.get("required")) == "True"
        value = arguments.get("default", None if is_set else NONE)
        for name in names:
            if name is not None and name.startswith("-"):
                self._say(name.lstrip("-").replace("-", "_"), value)


def _says_none(node):
    """Whether an expression contains None, or an annotation contains Optional."""
    visitor = _SaysNone()
    node.visit(visitor)
    return visitor.is_found


class _SaysNone(cst.CSTVisitor):
    def __init__(self):
        super().__init__()
        self.is_found = False

    def visit_Name(self, node):
        self.is_found |= node.value in ("None", "Optional")

    def visit_SimpleString(self, node):
        self.is_found |= "Optional" in node.value or "None" in node.value
