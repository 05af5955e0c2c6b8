"""One file rewritten: what to change is found out first, and then changed in one pass."""

import difflib
import io
from typing import List, NamedTuple, Tuple

import libcst as cst
from libcst.metadata import MetadataWrapper

from accum._migrate import mentions
from accum._migrate.arguments import NotUnderstood
from accum._migrate.imports import Imports
from accum._migrate.rules import gradient_accumulator, h2g_net, horovod, keras3, runai, tensorpack, unknown
from accum._migrate.surroundings import Surroundings
from accum._migrate.uses import Uses, module_of

SOURCES = (gradient_accumulator, h2g_net, runai, tensorpack, keras3, horovod)
WORDS = tuple(word for source in SOURCES for word in source.WORDS)
"""A file without any of them has nothing to be rewritten."""

BY_ARGUMENT = (keras3, horovod)
HOLDERS = runai.HOLDERS + tensorpack.HOLDERS
RULES_BY_ARGUMENT = (keras3.optimizer, horovod.distributed_optimizer)
"""Rules for names that are everyone's: only an argument in the call of one makes it accumulate."""

Remark = Tuple[int, str]
Outcome = NamedTuple("Outcome", [("code", str), ("notes", List[Remark]), ("left", List[Remark])])
Outcome.__doc__ = """What became of a file.

Attributes:
  code: its new text, equal to the old one if there is nothing to change.
  notes: what comes out different, as (line, text).
  left: what was not understood, as (line, text); it is untouched.
"""


def rewrite(code):
    """The `Outcome` for the text of a file.

    Raises:
      SyntaxError: the text is not Python 3, or not one that this LibCST knows.
    """
    wrapper = MetadataWrapper(_parsed(code))
    uses = Uses(wrapper)
    changes, notes, left = _plan(uses, Surroundings(uses, code))
    left += _from_stars(wrapper.module, uses)
    left += _exported(uses)
    left += _mentioned(uses, left)
    if changes:
        rewritten = wrapper.module.visit(_Rewriter(changes, Imports(uses, changes)))
        code = _spliced(code, wrapper.module.code, rewritten.code)
    return Outcome(code, sorted(notes), sorted(left))


def _parsed(code):
    try:
        module = cst.parse_module(code)
    except cst.ParserSyntaxError as error:
        raise SyntaxError("line {}: {}".format(error.raw_line, error.message)) from None
    if len(_lines(module.code)) != len(_lines(code)):
        raise SyntaxError("LibCST does not read it as it is")
    return module


def _spliced(code, read, rewritten):
    """The lines that were rewritten, among those of the file: LibCST loses white space, as in `except (A, B) :`."""
    if read == code:
        return rewritten
    lines, before, after = _lines(code), _lines(read), _lines(rewritten)
    spliced = []
    for kind, start, end, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        spliced += lines[start:end] if kind == "equal" else after[first:last]
    return "".join(spliced)


def _lines(code):
    return io.StringIO(code, newline="\n").readlines()


def _find_rule(name, is_whole=False):
    """The rule for a full name, or None; for the name of a module that holds what accumulates, if it is taken whole."""
    found = [rule for rule in (source.rule(name) for source in SOURCES) if rule]
    found += [unknown] if is_whole and name in HOLDERS else []
    return found[0] if found else None


def _plan(uses, surroundings):
    """What to do with each use: ({use: change}, notes, left)."""
    changes, notes, left = {}, {}, []
    for use in uses.find(_find_rule):
        try:
            change = _change(use, surroundings)
        except NotUnderstood as error:
            left.append((use.line, _remark(uses.code(use.node), error)))
            continue
        if change:
            changes[use] = change
            notes.setdefault(change.note, use.line)
    return changes, [(line, note) for note, line in notes.items() if note], left


def _change(use, surroundings):
    """The `Change` for a use, or None if it is none of ours.

    Raises:
      NotUnderstood: it is, but can't be rewritten.
    """
    rules = [_find_rule(name, is_whole=True) for name in sorted(use.names)]
    known = [rule for rule in rules if rule]
    if use.call is None and all(rule in RULES_BY_ARGUMENT for rule in known):
        return None
    if use.call is None:
        raise NotUnderstood("it is not called here, and what becomes of it can't be told")
    change = known[0](use.call, surroundings)
    if change is None:
        return None
    if len(set(rules)) > 1:
        raise NotUnderstood("the name is bound to something else in this file too")
    _require_room(use, surroundings)
    return change


def _require_room(use, surroundings):
    if surroundings.is_taken("accum", "accum"):
        raise NotUnderstood("`accum` is a name of your own in this file: give that another one")
    lines = [surroundings.uses.parent(statement) for statement in use.imported_by]
    if not all(isinstance(line, cst.SimpleStatementLine) for line in lines):
        raise NotUnderstood("its import shares a line with what the import depends on")
    if not all(surroundings.uses.is_in_the_block_of(statement, use.node) for statement in use.imported_by):
        raise NotUnderstood("its import stands in a function, and it is used outside, where `accum` would be unknown")
    if surroundings.uses.is_in_f_string(use.node):
        raise NotUnderstood("it stands in an f-string, which may not hold the quotes that it takes")


def _from_stars(module, uses):
    """What star imports may have brought: it can't be told, so it is left."""
    found = _StarImports()
    module.visit(found)
    known = [(stars, source) for stars in found.modules for source in SOURCES if source.is_module(stars)]
    left = []
    for node in uses.unbound() if known else []:
        last = node.attr.value if isinstance(node, cst.Attribute) else getattr(node, "value", None)
        for stars, source in known:
            if last in source.NAMES:
                reason = "may come from `from {} import *`: import it by name".format(stars)
                left.append((uses.line(node), _remark(last, reason)))
                break
    return left


def _exported(uses):
    """Names that others may import from this file: what becomes of them can't be told, so their import stays."""
    is_known = lambda name: _find_rule(name) not in (None,) + RULES_BY_ARGUMENT
    reason = "others may import it from here: where they don't, or do from `accum`, leave the import out"
    return [(uses.line(node), _remark(name, reason)) for node, name in uses.exported(is_known)]


def _mentioned(uses, left):
    """Arguments that accumulate, but go where no rule has seen them, and which no remark has been made on."""
    uses_of = {use.call: use for use in uses.find(_find_rule)}
    is_seen = lambda call: call in uses_of and any(
        _find_rule(name) in RULES_BY_ARGUMENT for name in uses_of[call].names
    )
    found = mentions.imports_by_text(SOURCES, uses)
    for source in BY_ARGUMENT:
        found += mentions.find(source, uses, is_seen)
    named = {line for line, _ in left}
    found = [each for each in found if named.isdisjoint(map(uses.line, uses.calls_around(each[0])))]
    return [(uses.line(node), _remark(name, reason)) for node, name, reason in found]


def _remark(name, reason):
    return "`{}`: {}".format(name, reason)


class _StarImports(cst.CSTVisitor):
    def __init__(self):
        super().__init__()
        self.modules = []

    def visit_ImportFrom(self, node):
        if isinstance(node.names, cst.ImportStar):
            self.modules.append(module_of(node))


class _Rewriter(cst.CSTTransformer):
    def __init__(self, changes, imports):
        super().__init__()
        self._edits = {use.call: change.edit for use, change in changes.items()}
        self._imports = imports

    def leave_Call(self, original_node, updated_node):
        edit = self._edits.get(original_node)
        return edit(updated_node) if edit else updated_node

    def leave_SimpleStatementLine(self, original_node, updated_node):
        return self._imports.rewrite(original_node, updated_node)
