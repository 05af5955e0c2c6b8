"""The import lines of a file: new ones stand where the old ones are, and those that nothing needs any more go."""

import libcst as cst

from accum._migrate.uses import is_import


class Imports:
    """What becomes of the import statements.

    Args:
      uses: the file's `Uses`.
      changes: dict `{Use: Change}` of what is rewritten.
    """

    def __init__(self, uses, changes):
        self._uses = uses
        self._gone = {use.node for use, change in changes.items() if not change.keeps_name}
        self._needed = {}  # import statement -> lines that its names' new expressions need
        for use, change in changes.items():
            for statement in use.imported_by:
                lines = self._needed.setdefault(statement, [])
                lines += [line for line in change.imports if line not in lines]
        self._at_top = {line for line in _lines(self._needed) if self._is_imported(line)}
        for statement in self._needed:
            self._place_at_top(statement)

    def _is_imported(self, line):
        module = line.split()[1]
        return any(
            each.name == module and isinstance(each.node, cst.Import) and self._is_at_top(each.node)
            for each in self._uses.imports
        )

    def _is_at_top(self, statement):
        return isinstance(self._uses.parent(self._uses.parent(statement)), cst.Module)

    def _place_at_top(self, statement):
        """A line that one statement of the module itself brings, no other one has to."""
        if self._is_at_top(statement):
            self._needed[statement] = [line for line in self._needed[statement] if line not in self._at_top]
            self._at_top.update(self._needed[statement])

    def rewrite(self, original, updated):
        """What takes the place of a line: itself, others, or nothing. For `leave_SimpleStatementLine`."""
        lines = [line for statement in original.body for line in self._lines_at(statement)]
        body = [self._without_dead(*pair) for pair in zip(original.body, updated.body)]
        body = [statement for statement in body if statement is not None]
        if len(body) == len(updated.body) and not lines and all(map(_is_same, body, updated.body)):
            return updated
        new = [cst.parse_statement(line) for line in dict.fromkeys(lines)]
        if body:
            body[-1] = body[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            return cst.FlattenSentinel([updated.with_changes(body=body)] + new)
        if not new and _has_comment(original):
            new = [cst.parse_statement("import accum")]  # once more, for the comment's sake
        if not new:
            return cst.RemoveFromParent()
        new[0] = updated.with_changes(body=new[0].body)
        return cst.FlattenSentinel(new)

    def _lines_at(self, statement):
        lines = self._needed.get(statement, ())
        return lines if statement in self._needed and self._is_at_top(statement) else set(lines) - self._at_top

    def _without_dead(self, original, updated):
        """An import statement without the names that nothing uses any more; None if none is left."""
        if original not in self._needed:
            return updated
        kept = [alias for was, alias in zip(original.names, updated.names) if not self._is_dead(original, was)]
        if len(kept) == len(updated.names):
            return updated
        if not kept:
            return None
        kept[-1] = kept[-1].with_changes(comma=updated.names[-1].comma)
        return updated.with_changes(names=kept)

    def _is_dead(self, statement, alias):
        """Whether all uses of a name were rewritten. One that had no use may be there for others to import."""
        bound = [each for each in self._uses.imports if each.node is statement and _is_of(each, alias)]
        accesses = [access for each in bound for access in each.references]
        if any(self._uses.is_in_all(each.name) for each in bound):
            return False
        return bool(accesses) and all(self._uses.is_within(access.node, self._gone) for access in accesses)


def _is_of(assignment, alias):
    if not is_import(assignment):
        return False
    if alias.evaluated_alias:
        return assignment.name == alias.evaluated_alias
    return (alias.evaluated_name + ".").startswith(assignment.name + ".")


def _lines(needed):
    return [line for lines in needed.values() for line in lines]


def _is_same(one, other):
    return one is other


def _has_comment(line):
    return bool(line.trailing_whitespace.comment or any(empty.comment for empty in line.leading_lines))
