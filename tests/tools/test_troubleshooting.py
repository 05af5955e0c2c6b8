"""Every message about a program has an entry in docs/troubleshooting.md. Reads source only, so it needs no TensorFlow.

A message contains the code of its entry, `[accum: epoch-end]`, and the address of the entry ends with `#epoch-end`. No
code needs what says all about one argument: "`x` must be …. Received: x=…".
"""

import ast
import glob
import os
import re

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE = os.path.join(ROOT, "docs", "troubleshooting.md")
TOOLS = ("_cli", "_migrate", "convert", "testing")  # they have guides of their own
ERRORS = {"ImportError", "NotImplementedError", "RuntimeError", "TypeError", "Unrepeatable", "ValueError"}
WARNS = {"FirstCall", "_say", "_warn", "warn"}
TEXTS = {"message", "words"}  # variables that hold a text until it is raised
CODE = re.compile(r"\[accum: ([a-z0-9-]+)\]")
OF_ARGUMENT = re.compile(r"`[\w{}]+` must ")
REASON = re.compile(r"[a-z]")  # becomes a part of another message, which has the code


def trees():
    """`{path: its tree}` of the package, without its tools."""
    left_out = tuple(os.path.join(ROOT, "accum", name, "") for name in TOOLS + ("compat",))
    parsed = {}
    for folder in ("accum", "compat"):
        for path in glob.glob(os.path.join(ROOT, folder, "**", "*.py"), recursive=True):
            if not path.startswith(left_out):
                with open(path, encoding="utf-8") as file:
                    parsed[os.path.relpath(path, ROOT)] = ast.parse(file.read(), path)
    return parsed


def text_of(node, constants):
    """The words of an expression, `{}` in place of what only the program knows."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants) or "{}"
    if isinstance(node, (ast.Name, ast.Attribute)):
        return constants.get(name_of(node), "")
    value = node.value if hasattr(node, "value") else getattr(node, "s", None)  # `s` before Python 3.8
    return value if isinstance(value, str) else ""


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def messages_of(node):
    """The expressions in which a statement or call has a message."""
    if isinstance(node, ast.Assign) and TEXTS & {name_of(target) for target in node.targets}:
        return [node.value]
    if isinstance(node, ast.keyword) and node.arg == "message":  # of a check that the graph makes
        return [node.value]
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call):
        return []
    wanted = ERRORS if isinstance(node, ast.Raise) else WARNS
    if not wanted & {name_of(part) for part in ast.walk(call.func)}:
        return []
    return [text for text in call.args if not TEXTS & {name_of(part) for part in ast.walk(text)}]


def messages():
    """`[(place, its text)]`, without what a function only passes on."""
    parsed = trees()
    constants = {
        node.targets[0].id: text_of(node.value, {})
        for tree in parsed.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = []
    for path, tree in sorted(parsed.items()):
        for node in ast.walk(tree):
            texts = [text_of(part, constants) for part in messages_of(node)]
            found += [(f"{path}:{getattr(node, 'lineno', '')}", text) for text in texts if len(text.split(" ")) > 3]
    return found


MESSAGES = messages()


def entries():
    """`[(the anchor above a heading, the code in it)]`."""
    with open(PAGE, encoding="utf-8") as file:
        return re.findall(r"(?m)^\((.+)\)=\n### `\[accum: (.+?)\]`", file.read())


def test_the_messages_are_found():
    assert len(MESSAGES) > 250


@pytest.mark.parametrize("place, text", MESSAGES, ids=[place for place, _ in MESSAGES])
def test_a_message_names_its_entry(place, text):
    assert CODE.search(text) or OF_ARGUMENT.match(text) or REASON.match(text), f"{place} has no code: {text}"


def test_every_code_has_one_entry_and_every_entry_its_messages():
    codes = {code for _, text in MESSAGES for code in CODE.findall(text)}
    anchors = [anchor for anchor, _ in entries()]
    assert sorted(anchors) == sorted(codes)
    assert all(anchor == code for anchor, code in entries())
