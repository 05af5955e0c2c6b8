"""Rewrite one file: plan the changes first, then make them in one pass."""

import difflib
import io
from typing import Any, Dict, List, NamedTuple, Tuple

import libcst as cst
from libcst.metadata import MetadataWrapper

from accum._migrate import by_hand, imports, mentions, spoken, users
from accum._migrate.arguments import NotUnderstood
from accum._migrate.rules import (
    adam_accumulate,
    bojone,
    cyberzhg,
    gradient_accumulator,
    h2g_net,
    horovod,
    keras3,
    runai,
    stylegan2,
    tensorpack,
    unknown,
)
from accum._migrate.surroundings import Surroundings
from accum._migrate.uses import Uses, module_of

BY_NAME = (gradient_accumulator, cyberzhg, bojone, adam_accumulate, h2g_net, runai, tensorpack)
"""The first library with a rule for a name applies. H2G-Net's rule accepts its class names from any module."""

BY_ARGUMENT = (keras3, horovod, stylegan2)
SOURCES = BY_NAME + BY_ARGUMENT
WORDS = tuple(word for source in SOURCES for word in source.WORDS)
"""A file without any of these words contains nothing to rewrite."""

CLUES = tensorpack.PER_TOWER + (by_hand.TAPE,)
"""Words in one file that affect how other files of the same run are rewritten."""

HOLDERS = runai.HOLDERS + tensorpack.HOLDERS
RULES_BY_ARGUMENT = (keras3.optimizer, horovod.distributed_optimizer, stylegan2.optimizer)
"""Rules for common names that accumulate only with a certain argument."""

Remark = Tuple[int, str]


class Outcome(NamedTuple):
    """The result for one file.

    Attributes:
      code: its new text, equal to the old text if there is nothing to change.
      notes: how numbers change, as (line, text).
      left: code that was not understood and stays unchanged, as (line, text).
      is_rewritten: whether anything was rewritten.
    """

    code: str
    notes: List[Remark]
    left: List[Remark]
    is_rewritten: bool


def rewrite(code, clues, path_of=lambda name: None):
    """Rewrite the text of a file. Returns an `Outcome`.

    Args:
      code: the text.
      clues: dict {one of `CLUES`: path of the nearest file that contains it}.
      path_of: function from the full name of an import to the file in which it accumulates by hand, or None.

    Raises:
      SyntaxError: the text is not Python 3, or uses syntax that the installed LibCST does not know.
    """
    wrapper = MetadataWrapper(_parsed(code), unsafe_skip_copy=True)
    uses = Uses(wrapper)
    changes, notes, left = _plan(uses, Surroundings(uses, code, clues))
    left += _from_stars(wrapper.module, uses)
    left += _exported(uses)
    left += _mentioned(uses, left)
    used = _of_other_files(uses, path_of)
    left += used + [remark for remark in _by_hand(uses, by_hand.TAPE in clues) if remark[0] not in dict(used)]
    left += _beside(uses, left) if changes or not all(map(_is_of_horovod, left)) else []
    left += [] if changes or left else _spoken(code)
    if changes:
        rewritten = wrapper.module.visit(_Rewriter(changes, imports.Imports(uses, changes)))
        rewritten = imports.without_placeholders(rewritten.code)
        code = _spliced(code, wrapper.module.code, rewritten)
    return Outcome(code, sorted(notes), sorted(left), bool(changes))


def _parsed(code):
    try:
        module = cst.parse_module(code)
    except cst.ParserSyntaxError as error:
        raise SyntaxError(f"line {error.raw_line}: {error.message}") from None
    if len(_lines(module.code)) != len(_lines(code)):
        raise SyntaxError("LibCST does not preserve its lines")
    return module


def _lines(code):
    """Split a text into lines at "\\n" only, keeping the line ends."""
    return io.StringIO(code, newline="\n").readlines()


def _spliced(code, read, rewritten):
    """Put the rewritten lines among the original ones, because LibCST loses white space, as in `except (A, B) :`."""
    if read == code:
        return rewritten
    original, before, after = _lines(code), _lines(read), _lines(rewritten)
    spliced = []
    for kind, start, end, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        spliced += original[start:end] if kind == "equal" else after[first:last]
    return "".join(spliced)


def _find_rule(name, is_whole=False):
    """Return the rule for a full name, or None. A module has a rule only if it is used as a value (`is_whole`)."""
    rules = [rule for rule in (source.rule(name) for source in SOURCES) if rule]
    rules += [unknown] if is_whole and name in HOLDERS else []
    return rules[0] if rules else None


def _plan(uses, surroundings):
    """Plan what to do with each use. Returns ({use: change}, notes, left)."""
    changes: Dict[Any, Any] = {}
    notes: Dict[Any, Any] = {}
    left: List[Any] = []
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
    """Return the `Change` for a use, or None if it does not accumulate.

    Raises:
      NotUnderstood: it accumulates, but can't be rewritten.
    """
    rules = [_find_rule(name, is_whole=True) for name in sorted(use.names)]
    single_rules = [rule for rule in rules if rule]
    if use.call is None and all(rule in RULES_BY_ARGUMENT for rule in single_rules):
        return None
    if use.call is None:
        raise NotUnderstood("it is not called here, so what happens to it is not known")
    change = single_rules[0](use.call, surroundings)
    if change is None:
        return None
    if len(set(rules)) > 1:
        raise NotUnderstood("the name is also bound to something else in this file")
    _require_room(use, surroundings)
    return change


def _require_room(use, surroundings):
    if surroundings.is_taken("accum", "accum"):
        raise NotUnderstood("this file uses the name `accum` for something else. Rename that first")
    parents = [surroundings.uses.parent(statement) for statement in use.imported_by]
    if not all(isinstance(parent, cst.SimpleStatementLine) for parent in parents):
        raise NotUnderstood("its import shares a line with the statement that it depends on")
    if not all(surroundings.uses.is_in_the_block_of(statement, use.node) for statement in use.imported_by):
        raise NotUnderstood("its import is in a function, but it is used outside, where `accum` would not be imported")
    if surroundings.uses.is_in_f_string(use.node):
        raise NotUnderstood("it is in an f-string, which cannot contain the quotes that the new code needs")


def _from_stars(module, uses):
    """Report names that may come from star imports."""
    visitor = _StarImports()
    module.visit(visitor)
    star_imports = [(stars, source) for stars in visitor.modules for source in SOURCES if source.is_module(stars)]
    left = []
    for node in uses.unbound() if star_imports else []:
        last = node.attr.value if isinstance(node, cst.Attribute) else getattr(node, "value", None)
        for stars, source in star_imports:
            if last in source.NAMES:
                reason = f"may come from `from {stars} import *`: import it by name"
                left.append((uses.line(node), _remark(last, reason)))
                break
    return left


def _exported(uses):
    """Report names that other files may import from this one; their import stays."""
    is_known = lambda name: _find_rule(name) not in (None,) + RULES_BY_ARGUMENT
    reason = "other files may import it from here. If they don't, or import it from `accum`, remove this import"
    return [(uses.line(node), _remark(name, reason)) for node, name in uses.exported(is_known)]


def _mentioned(uses, left):
    """Report arguments that accumulate but that no rule handles, unless they have been reported already."""
    uses_of = {use.call: use for use in uses.find(_find_rule)}
    is_seen = lambda call: (
        call in uses_of and any(_find_rule(name) in RULES_BY_ARGUMENT for name in uses_of[call].names)
    )
    mentioned = mentions.imports_by_text(SOURCES, uses)
    for source in BY_ARGUMENT:
        mentioned += mentions.find(source, uses, is_seen)
    named = {line for line, _ in left}
    mentioned = [mention for mention in mentioned if named.isdisjoint(map(uses.line, uses.calls_around(mention[0])))]
    return [(uses.line(node), _remark(name, reason)) for node, name, reason in mentioned]


def _by_hand(uses, has_tape_elsewhere):
    """Report gradients that are added up without a library."""
    matches = by_hand.find(uses.module, has_tape_elsewhere)
    return [(uses.line(match.node), _remark(match.name, match.reason)) for match in matches]


def _of_other_files(uses, path_of):
    """Report the first use of each class and function that accumulates in another file."""
    remarks: Dict[Any, Any] = {}
    for use in uses.find(lambda name, is_whole: path_of(name) and not _find_rule(name)):
        for path in filter(None, map(path_of, sorted(use.names))):
            remarks.setdefault(uses.code(use.node), (use.line, _remark(uses.code(use.node), users.REASON.format(path))))
    return list(remarks.values())


def _spoken(code):
    match = spoken.find(code.encode())
    return [(match[0], _remark(match[1], spoken.REASON))] if match else []


def definitions(code):
    """Return the names of the classes and functions of a file that accumulate by hand; none if it can't be parsed."""
    try:
        matches = by_hand.find(_parsed(code))
    except (SyntaxError, RecursionError):
        return set()
    return {match.definition for match in matches if match.definition}


def _beside(uses, left):
    """Report Horovod's optimizers beside code that accumulates, because they would reduce every micro-batch."""
    named = {line for line, _ in left}
    wraps = [(uses.line(call), name) for call, name in horovod.wraps(uses)]
    return [(line, _remark(name, horovod.BESIDE)) for line, name in wraps if line not in named]


def _is_of_horovod(remark):
    return horovod.REASON in remark[1] or horovod.ARGUMENT in remark[1]


def names_a_library(content):
    """Whether the bytes of a file contain a word of a known library."""
    return any(word.encode() in content for word in WORDS)


def is_of_interest(content):
    """Whether the bytes of a file contain any hint of accumulation."""
    return names_a_library(content) or by_hand.may_be_in(content) or spoken.find(content) is not None


def _remark(name, reason):
    return f"`{name}`: {reason}"


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
