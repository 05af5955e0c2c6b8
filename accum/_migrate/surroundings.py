"""The file around a call, as rules see it."""

import libcst as cst
from libcst import matchers

from accum._migrate.arguments import NotUnderstood, text_of
from accum._migrate.uses import module_of
from accum._migrate.values import Values

GRAPH_MODE = ("disable_eager_execution", "disable_v2_behavior")


class Surroundings:
    """The file around a call.

    Args:
      uses: the file's `Uses`.
      code: its text.
      clues: dict {word: path of the nearest file in this run that contains it}, for rules that depend on other files.
    """

    def __init__(self, uses, code, clues):
        self.uses = uses
        self.values = Values(uses.module)
        self.clues = clues
        self._code = code

    @property
    def is_graph_mode(self):
        """Whether the file disables eager execution."""
        return any(word in self._code for word in GRAPH_MODE)

    @property
    def other_backend(self):
        """Whether the file selects a backend of Keras 3 other than TensorFlow."""
        return "KERAS_BACKEND" in self._code and ("jax" in self._code or "torch" in self._code)

    def is_taken(self, name, by):
        """Whether `name` is bound to anything other than the module `by`, anywhere in the file."""
        return any(not _imports_module(assignment, name, by) for assignment in self.uses.assignments(name))

    def tensorflow(self):
        """Return (the name of TensorFlow in this file, the import line that the name needs or None)."""
        for assignment in self.uses.imports:
            name = assignment.name.split(".")[0]
            if self._is_at_top(assignment.node) and not self.is_taken(name, "tensorflow"):
                return name, None
        if not self.uses.assignments("tf"):
            return "tf", "import tensorflow as tf"
        return "tensorflow", "import tensorflow"

    def require_keras_of_tensorflow(self):
        """Raise `NotUnderstood` if the file imports Keras itself, for rules of libraries that build on Keras 2.2.

        Their Keras is not that of TensorFlow, so the new code would have another one in the middle of the old.
        """
        statements = matchers.findall(self.uses.module, matchers.Import() | matchers.ImportFrom())
        if any(name.split(".")[0] == "keras" for statement in statements for name in _modules(statement)):
            raise NotUnderstood(
                "this file imports `keras`, which before TensorFlow 2.6 is another package than `tf.keras`, whose "
                "optimizers accum wraps, from TensorFlow 2.2 on. Move the file to such a TensorFlow and to `from "
                "tensorflow import keras` first"
            )

    def constant(self, node):
        """Return the value of a name that is bound only once in the file, by `name = …`; otherwise return `node`."""
        if isinstance(node, cst.Name):
            assignments = self.uses.assignments(node.value)
            targets = [self.uses.parent(assignment.node) for assignment in assignments if hasattr(assignment, "node")]
            statements = [self.uses.parent(target) for target in targets if isinstance(target, cst.AssignTarget)]
            if len(assignments) == len(statements) == 1:
                return statements[0].value
        return node

    def require_not_unpacked(self, call, argument):
        """Raise `NotUnderstood` if the file mentions `argument` and the call unpacks a dict that may contain it."""
        for arg in call.args if argument in self._code else ():
            if arg.star == "**" and not _is_without(self.constant(arg.value), argument):
                raise NotUnderstood(f"what `**` unpacks into the call is not known, and may contain `{argument}`")

    def require_constant_rate(self, node):
        """Raise `NotUnderstood` unless a learning rate is a number or missing: a schedule would count differently."""
        if node is not None and not is_number(self.constant(node)):
            raise NotUnderstood(
                "a schedule counts micro-batches in that library, but steps in accum. If the learning rate is a "
                "schedule, divide its lengths by the number of micro-batches; if it is a number, rewrite the call by "
                "hand"
            )

    def _is_at_top(self, statement):
        line = self.uses.parent(statement)
        return isinstance(self.uses.parent(line), cst.Module)


def _modules(statement):
    """Return the full names of the modules that a statement imports or imports from."""
    if isinstance(statement, cst.ImportFrom):
        return [module_of(statement)]
    return [alias.evaluated_name for alias in statement.names]


def is_number(node):
    """Whether an expression consists of literal numbers only."""
    if isinstance(node, cst.BinaryOperation):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, cst.UnaryOperation):
        return is_number(node.expression)
    return isinstance(node, (cst.Integer, cst.Float))


def _is_without(node, argument):
    """Whether an expression is a literal dict without `argument`. If it is added later, that is reported there."""
    if isinstance(node, cst.Dict):
        texts = [text_of(getattr(element, "key", None)) for element in node.elements]
        return None not in texts and argument not in texts
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "dict":
        return all(arg.keyword and arg.keyword.value != argument for arg in node.args)
    return False


def _imports_module(assignment, name, module):
    """Whether an assignment is `import module`, `import module.part` or `import module as name`."""
    if not isinstance(getattr(assignment, "node", None), cst.Import):
        return False
    return any(_binds(alias, name) and _root(alias) == module for alias in assignment.node.names)


def _binds(alias, name):
    return name == (alias.evaluated_alias or alias.evaluated_name.split(".")[0])


def _root(alias):
    """Return the module that the bound name refers to: `a` for `import a.b`, and `a.b` for `import a.b as c`."""
    return alias.evaluated_name if alias.evaluated_alias else alias.evaluated_name.split(".")[0]
