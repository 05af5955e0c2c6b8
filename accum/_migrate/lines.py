"""Break lines that the rewrite has made longer than 88 characters, in the style of Black."""

import io
from typing import Any, Set

import libcst as cst
from libcst import matchers
from libcst.metadata import MetadataWrapper, PositionProvider

LONGEST = 88


def of(code):
    """Split a text into lines at "\\n" only, keeping the line ends."""
    return io.StringIO(code, newline="\n").readlines()


def shortened(before, after):
    """Return the text `after` with its new long lines broken within the brackets of calls, where that is possible.

    Lines that are also in the text `before` stay as they are.
    """
    unchanged = set(of(before))
    tried: Set[Any] = set()
    while True:
        long = [line for line in of(after) if len(line.rstrip()) > LONGEST and line not in unchanged | tried]
        if not long:
            return after
        broken = _broken(after, long[0])
        if broken is None:
            tried.add(long[0])
        else:
            after = broken


def _broken(code, line):
    """Put the arguments of a call on `line` on their own lines. Returns new code, or None if no call can be broken."""
    wrapper = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
    positions, lines = wrapper.resolve(PositionProvider), of(code)
    number = lines.index(line)
    spans_of_calls = []
    for call in _calls(wrapper.module):
        spans = [_span(positions[arg]) for arg in call.args]
        if spans and {first_line for span in spans for first_line, _ in span} == {number}:
            spans_of_calls.append((_span(positions[call.func])[1], [(start, end) for (_, start), (_, end) in spans]))
    for opening, columns in sorted(spans_of_calls):  # the outermost first
        new = _split(line, columns, opening, number, wrapper.module.default_indent)
        broken = new and "".join(lines[:number] + new + lines[number + 1 :])
        if broken and _is_same(broken, code):
            return broken
    return None


def _calls(module):
    """Return the calls in a module, except those in f-strings, which can't contain line ends."""
    texts = matchers.findall(module, matchers.FormattedString())
    inside = [call for text in texts for call in matchers.findall(text, matchers.Call())]
    return [call for call in matchers.findall(module, matchers.Call()) if call not in inside]


def _span(position):
    return (position.start.line - 1, position.start.column), (position.end.line - 1, position.end.column)


def _split(line, columns, opening, number, step):
    """Return the lines that replace `line`, or None if it can't be broken here."""
    texts = [line[start:end].strip().rstrip(",").rstrip() for start, end in columns]
    rest = line[columns[-1][1] :].lstrip(" \t,")
    is_generator = len(texts) == 1 and " for " in texts[0]
    indent = line[: len(line) - len(line.lstrip())]
    end = "\r\n" if line.endswith("\r\n") else "\n"
    if opening[0] < number:  # the bracket opens on an earlier line: put each argument on its own line
        if len(texts) == 1 or line[: columns[0][0]].strip() or rest.strip():
            return None
        return [indent + text + "," + end for text in texts]
    bracket = line.index("(", opening[1])
    if line[bracket + 1 : columns[0][0]].strip() or not rest.startswith(")"):
        return None
    inner = indent + step
    one = inner + ", ".join(texts) + end
    several = [one] if len(one.rstrip()) <= LONGEST or is_generator else [inner + text + "," + end for text in texts]
    return [line[: bracket + 1] + end] + several + [indent + rest]


def _is_same(one, other):
    """Whether the text `one` is valid Python, and differs from `other` only in white space and trailing commas."""
    try:
        cst.parse_module(one)
    except cst.ParserSyntaxError:
        return False
    return _bare(one) == _bare(other)


def _bare(code):
    return "".join(code.split()).replace(",)", ")")
