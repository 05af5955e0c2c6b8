"""Find where a file uses imported names, by full name; aliases, scopes and shadowing are resolved."""

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
      names: what it may stand for, in full: "runai.ga.keras.optimizers.Adam"; "" for what no import binds.
      line: number of the line.
      node: the name or dotted name as it stands there.
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
        self.imports = [each for scope in self.scopes for each in scope.assignments if is_import(each)]

    def find(self, is_known):
        """The `Use`s of names for which `is_known(full name, is_whole)` is true, in the order of the file.

        `is_whole` tells whether nothing of the dotted name follows.
        """
        found = {}
        for assignment in self.imports:
            for access in assignment.references:
                use = self._use(access, is_known)
                if use is not None:
                    found[use.node] = use
        return sorted(found.values(), key=lambda use: self._position(use.node))

    def _use(self, access, is_known):
        """The longest dotted name around an access that is known: `a` is, and `a.b` is, in `a.b.c`."""
        node, known = access.node, None
        while True:
            names, parent = _names(access.scope, node), self._parents.get(node)
            is_whole = not (isinstance(parent, cst.Attribute) and parent.value is node)
            if any(is_known(name, is_whole) for name in names):
                known = (node, names)
            if is_whole:
                break
            node = parent
        if known is None:
            return None
        node, names = known
        names = names | _names_anywhere(access, node)
        parent = self._parents.get(node)
        call = parent if isinstance(parent, cst.Call) and parent.func is node else None
        statements = tuple(each.node for each in access.referents if is_import(each))
        return Use(frozenset(names), self.line(node), node, call, statements)

    def exported(self, is_known):
        """Names imported from elsewhere that others may import from here, as (import statement, name).

        Such are those that the file doesn't use itself, and those in its `__all__`.
        """
        for each in self.imports:
            is_for_others = isinstance(each.node, cst.ImportFrom) and (not each.references or self.is_in_all(each.name))
            if is_for_others and any(map(is_known, _full(each.get_qualified_names_for(each.name)))):
                yield each.node, each.name

    def is_in_all(self, name):
        """Whether `__all__` of the file has a name."""
        return name in self._all

    def unbound(self):
        """The names and dotted names that nothing in the file binds: built in, or from a star import."""
        for scope in self.scopes:
            for access in scope.accesses:
                node = access.node
                while isinstance(self._parents.get(node), cst.Attribute) and self._parents[node].value is node:
                    node = self._parents[node]
                if not access.referents:
                    yield node

    def is_within(self, node, nodes):
        """Whether a name is one of `nodes`, or the beginning of one: `a` of `a.b.c`."""
        while node not in nodes and isinstance(self._parents.get(node), cst.Attribute):
            node = self._parents[node]
        return node in nodes

    def assignments(self, name):
        """All that binds `name` anywhere in the file."""
        return [each for scope in self.scopes for each in scope.assignments if each.name.split(".")[0] == name]

    def names(self, node):
        """Full names that a dotted name may have; "" for what no import binds. Of anything else, none is known."""
        first = node
        while isinstance(first, cst.Attribute):
            first = first.value
        scope = self._scope_of.get(node)
        return _names(scope, node) if isinstance(first, cst.Name) and scope else set()

    def calls_around(self, node):
        """The calls that a node is an argument of, and the node itself if it is one."""
        while node is not None and not isinstance(node, cst.BaseSmallStatement):
            if isinstance(node, cst.Call):
                yield node
            node = self._parents.get(node)

    def code(self, node):
        """The source text of a node, on one line."""
        return " ".join(self.module.code_for_node(node).split())

    def is_in_the_block_of(self, statement, node):
        """Whether a name that a statement binds is known at `node` also without a `global` that says so."""
        block = statement
        while not isinstance(block, (cst.FunctionDef, cst.ClassDef, cst.Module)):
            block = self._parents[block]
        while node is not None and node is not block:
            node = self._parents.get(node)
        return node is block

    def is_in_f_string(self, node):
        """Whether a node is part of a formatted string."""
        while node is not None and not isinstance(node, cst.FormattedString):
            node = self._parents.get(node)
        return node is not None

    def parent(self, node):
        """The node that holds `node`."""
        return self._parents.get(node)

    def line(self, node):
        """Number of the line on which `node` starts."""
        return self._position(node)[0]

    def _position(self, node):
        start = self._positions[node].start
        return start.line, start.column


def _all(module):
    """The names in the `__all__` of a file."""
    found: Set[Any] = set()
    for line in module.body:
        for statement in line.body if isinstance(line, cst.SimpleStatementLine) else ():
            targets = [each.target for each in getattr(statement, "targets", ())] + [getattr(statement, "target", None)]
            if any(isinstance(target, cst.Name) and target.value == "__all__" for target in targets):
                found.update(map(text_of, matchers.findall(statement, matchers.SimpleString())))
    return found


def is_import(assignment):
    """Whether a name is bound by an import statement."""
    return isinstance(getattr(assignment, "node", None), IMPORTS)


def module_of(statement):
    """Full name of what a `from … import` imports from, with its dots if it is relative."""
    name = statement.module and get_full_name_for_node(statement.module)
    return "." * len(statement.relative) + (name or "")


def _in_order(scopes):
    """Each scope once; by a dict, for the same order every time."""
    return list({scope: None for scope in scopes if scope is not None})


def _names(scope, node):
    """Full names that a node may have; of one that is also bound by no import, an empty one beside it."""
    return _full(scope.get_qualified_names_for(node))


def _names_anywhere(access, node):
    """As `_names`, also by what binds the name later: newer LibCST leaves that out, but functions run later still."""
    dotted, found = get_full_name_for_node(node), set()
    for referent in access.referents if dotted else ():
        same = [each for each in referent.scope.assignments if each.name == referent.name]
        for assignment in same:
            found |= _full(assignment.get_qualified_names_for(dotted))
    return found


def _full(found):
    return {each.name if each.source is QualifiedNameSource.IMPORT else "" for each in found}
