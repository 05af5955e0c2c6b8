"""Find the uses of imported names in a file by their full names, with aliases, scopes and shadowing resolved."""

from typing import Any, FrozenSet, NamedTuple, Optional, Set, Tuple

import libcst as cst
from libcst import matchers
from libcst.helpers import get_full_name_for_node
from libcst.metadata import ParentNodeProvider, PositionProvider, QualifiedNameSource, ScopeProvider

from accum._migrate.arguments import text_of

IMPORTS = (cst.Import, cst.ImportFrom)


class Use(NamedTuple):
    """One place where an imported name is used.

    Attributes:
      names: full names that it may refer to, such as "runai.ga.keras.optimizers.Adam"; "" if not to an import.
      line: line number.
      node: the name or dotted name in the file.
      call: the call of it, or None if it is not called there.
      imported_by: the import statements that bind it.
    """

    names: FrozenSet[str]
    line: int
    node: cst.CSTNode
    call: Optional[cst.Call]
    imported_by: Tuple[cst.CSTNode, ...]


class Uses:
    """The imported names of a file.

    Args:
      wrapper: a `libcst.metadata.MetadataWrapper`.
    """

    def __init__(self, wrapper):
        self.module = wrapper.module
        self._all = _all(wrapper.module)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self._scope_of = wrapper.resolve(ScopeProvider)
        self.scopes = _in_order(self._scope_of.values())
        self.imports = [
            assignment for scope in self.scopes for assignment in scope.assignments if is_import(assignment)
        ]

    def find(self, is_known):
        """Find the uses of known names, in the order of the file.

        Args:
          is_known: function of (full name, is_whole), where `is_whole` is false for the beginning of a dotted name.

        Returns:
          List of `Use`.
        """
        use_of_node = {}
        for assignment in self.imports:
            for access in assignment.references:
                use = self._use(access, is_known)
                if use is not None:
                    use_of_node[use.node] = use
        return sorted(use_of_node.values(), key=lambda use: self._position(use.node))

    def _use(self, access, is_known):
        """Return the `Use` of the longest known dotted name that begins with an accessed name, or None."""
        node, longest = access.node, None
        while True:
            names, parent = _names(access.scope, node), self._parents.get(node)
            is_whole = not (isinstance(parent, cst.Attribute) and parent.value is node)
            if any(is_known(name, is_whole) for name in names):
                longest = (node, names)
            if is_whole:
                break
            node = parent
        if longest is None:
            return None
        node, names = longest
        names = names | _names_anywhere(access, node)
        parent = self._parents.get(node)
        call = parent if isinstance(parent, cst.Call) and parent.func is node else None
        statements = tuple(assignment.node for assignment in access.referents if is_import(assignment))
        return Use(frozenset(names), self.line(node), node, call, statements)

    def exported(self, is_known):
        """Yield (import statement, name) for imported names that other files may import from this one.

        These are the names that this file does not use itself, and those in its `__all__`.
        """
        for binding in self.imports:
            is_for_others = isinstance(binding.node, cst.ImportFrom) and (
                not binding.references or self.is_in_all(binding.name)
            )
            if is_for_others and any(map(is_known, _full(binding.get_qualified_names_for(binding.name)))):
                yield binding.node, binding.name

    def is_in_all(self, name):
        """Whether a name is in the file's `__all__`."""
        return name in self._all

    def unbound(self):
        """Yield names and dotted names that the file does not bind: they are built in, or come from a star import."""
        for scope in self.scopes:
            for access in scope.accesses:
                node = access.node
                while isinstance(self._parents.get(node), cst.Attribute) and self._parents[node].value is node:
                    node = self._parents[node]
                if not access.referents:
                    yield node

    def is_within(self, node, nodes):
        """Whether a name is one of `nodes`, or the beginning of one, as `a` is of `a.b.c`."""
        while node not in nodes and isinstance(self._parents.get(node), cst.Attribute):
            node = self._parents[node]
        return node in nodes

    def assignments(self, name):
        """Return all assignments, imports and definitions that bind `name` anywhere in the file."""
        return [
            assignment
            for scope in self.scopes
            for assignment in scope.assignments
            if assignment.name.split(".")[0] == name
        ]

    def names(self, node):
        """Return the full names that a dotted name may have; "" if it is not imported. Other expressions have none."""
        first = node
        while isinstance(first, cst.Attribute):
            first = first.value
        scope = self._scope_of.get(node)
        return _names(scope, node) if isinstance(first, cst.Name) and scope else set()

    def calls_around(self, node):
        """Yield the calls around a node, within its statement, and the node itself if it is a call."""
        while node is not None and not isinstance(node, cst.BaseSmallStatement):
            if isinstance(node, cst.Call):
                yield node
            node = self._parents.get(node)

    def code(self, node):
        """Return the source text of a node on one line."""
        return " ".join(self.module.code_for_node(node).split())

    def is_in_the_block_of(self, statement, node):
        """Whether `node` is in the function, class or module in which `statement` binds its names."""
        block = statement
        while not isinstance(block, (cst.FunctionDef, cst.ClassDef, cst.Module)):
            block = self._parents[block]
        while node is not None and node is not block:
            node = self._parents.get(node)
        return node is block

    def is_in_f_string(self, node):
        """Whether a node is part of an f-string."""
        while node is not None and not isinstance(node, cst.FormattedString):
            node = self._parents.get(node)
        return node is not None

    def parent(self, node):
        """Return the node that contains `node`."""
        return self._parents.get(node)

    def line(self, node):
        """Return the number of the line on which `node` starts."""
        return self._position(node)[0]

    def _position(self, node):
        start = self._positions[node].start
        return start.line, start.column


def _all(module):
    """Return the names in the `__all__` of a file."""
    texts: Set[Any] = set()
    for line in module.body:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            targets = [target.target for target in getattr(statement, "targets", ())] + [
                getattr(statement, "target", None)
            ]
            if any(isinstance(target, cst.Name) and target.value == "__all__" for target in targets):
                texts.update(map(text_of, matchers.findall(statement, matchers.SimpleString())))
    return texts


def is_import(assignment):
    """Whether a name is bound by an import statement."""
    return isinstance(getattr(assignment, "node", None), IMPORTS)


def module_of(statement):
    """Return the full name of the module in a `from … import`, including the dots of a relative import."""
    name = statement.module and get_full_name_for_node(statement.module)
    return "." * len(statement.relative) + (name or "")


def _in_order(scopes):
    """Return each scope once, in a deterministic order."""
    return list({scope: None for scope in scopes if scope is not None})


def _names(scope, node):
    """Return the full names that a node may have; "" is among them if something other than an import may bind it."""
    return _full(scope.get_qualified_names_for(node))


def _names_anywhere(access, node):
    """Return the same as `_names`, including bindings later in the file, which functions see when they are called.

    Newer versions of LibCST leave these out.
    """
    dotted, names = get_full_name_for_node(node), set()
    for referent in access.referents if dotted else ():
        same = [assignment for assignment in referent.scope.assignments if assignment.name == referent.name]
        for assignment in same:
            names |= _full(assignment.get_qualified_names_for(dotted))
    return names


def _full(qualified_names):
    return {name.name if name.source is QualifiedNameSource.IMPORT else "" for name in qualified_names}
