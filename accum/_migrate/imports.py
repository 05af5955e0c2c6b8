"""Rewrite the import statements of a file: add those that new code needs, and remove those that are no longer used."""

import re
from typing import Any, Dict

import libcst as cst

from accum._migrate.uses import is_import

BOTH = "import accum.compat.v1"
PLACEHOLDER = "accum_migrate_was_here"


def without_placeholders(code):
    """Remove the placeholders of removed import lines from the rewritten text, but keep their comments."""
    return re.sub(PLACEHOLDER + r"[ \t]*(#|\r?\n)", r"\1", code)


class Imports:
    """Decides what happens to each import statement.

    Args:
      uses: the file's `Uses`.
      changes: dict `{Use: Change}` of the code to rewrite.
    """

    def __init__(self, uses, changes):
        self._uses = uses
        self._gone = {use.node for use, change in changes.items() if not change.keeps_name}
        self._needed: Dict[Any, Any] = {}  # import statement -> import lines that the new code for its names needs
        for use, change in changes.items():
            for statement in use.imported_by:
                lines = self._needed.setdefault(statement, [])
                lines += [line for line in change.imports if line not in lines]
        in_order = sorted(self._needed, key=uses.line)
        at_top = [statement for statement in in_order if self._is_at_top(statement)]
        others = [statement for statement in in_order if statement not in at_top]
        self._at_top = {line for line in _lines(self._needed) if self._is_imported(line)}
        placed = {id(self._uses.module): self._at_top}
        for statement in at_top + others:
            self._place(statement, placed)

    def _is_imported(self, line):
        module = line.split()[1]
        return any(
            binding.name == module and isinstance(binding.node, cst.Import) and self._is_at_top(binding.node)
            for binding in self._uses.imports
        )

    def _is_at_top(self, statement):
        return isinstance(self._uses.parent(self._uses.parent(statement)), cst.Module)

    def _place(self, statement, placed):
        """Keep only the needed lines that neither the module nor an earlier statement of the same block provides."""
        block = self._uses.parent(self._uses.parent(statement))
        before = placed.setdefault(id(block), set())
        lines = [line for line in self._needed[statement] if line not in before | self._at_top]
        if BOTH in lines or BOTH in before | self._at_top:  # it binds `accum` too
            lines = [line for line in lines if line != "import accum"]
        self._needed[statement] = lines
        before.update(lines)

    def rewrite(self, original, updated):
        """Return the replacement of a line: itself, other lines, or nothing. For `leave_SimpleStatementLine`."""
        lines = [line for statement in original.body for line in self._needed.get(statement, ())]
        body = [self._without_dead(*pair) for pair in zip(original.body, updated.body)]
        body = [statement for statement in body if statement is not None]
        if len(body) == len(updated.body) and not lines and all(map(_is_same, body, updated.body)):
            return updated
        new = [cst.parse_statement(line) for line in dict.fromkeys(lines)]
        if body:
            body[-1] = body[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            return cst.FlattenSentinel([updated.with_changes(body=body)] + new)
        if not new and not _has_comment(original):
            return cst.RemoveFromParent()
        if not new:  # its comment stays
            block = self._uses.parent(original)
            has_others = isinstance(block, cst.Module) or not all(map(_is_import_line, block.body))
            new = [cst.parse_statement(PLACEHOLDER if has_others else "pass")]
        new[0] = updated.with_changes(body=new[0].body)
        return cst.FlattenSentinel(new)

    def _without_dead(self, original, updated):
        """Return an import statement without the names that are no longer used; None if no name is left."""
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
        """Whether all uses of a name were rewritten. A name without any use may be meant for other files to import."""
        bound = [binding for binding in self._uses.imports if binding.node is statement and _is_of(binding, alias)]
        accesses = [access for binding in bound for access in binding.references]
        if any(self._uses.is_in_all(binding.name) for binding in bound):
            return False
        return bool(accesses) and all(self._uses.is_within(access.node, self._gone) for access in accesses)


def _is_of(assignment, alias):
    if not is_import(assignment):
        return False
    if alias.evaluated_alias:
        return assignment.name == alias.evaluated_alias
    return (alias.evaluated_name + ".").startswith(assignment.name + ".")


def _is_import_line(line):
    is_simple = isinstance(line, cst.SimpleStatementLine)
    return is_simple and all(isinstance(part, (cst.Import, cst.ImportFrom)) for part in line.body)


def _lines(needed):
    return [line for lines in needed.values() for line in lines]


def _is_same(one, other):
    return one is other


def _has_comment(line):
    return bool(line.trailing_whitespace.comment or any(empty.comment for empty in line.leading_lines))
