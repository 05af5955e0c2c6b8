"""Read the arguments of a call by name, and edit them without changing the surrounding white space."""

from typing import Any

import libcst as cst
from libcst import matchers

NO_SPACE = cst.AssignEqual(whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace(""))


class NotUnderstood(Exception):
    """Raised for code that is not understood or can't be rewritten without changing its numbers."""


class Arguments:
    """The arguments of one call of a function whose parameters are known.

    Args:
      call: a `libcst.Call`.
      parameters: names of the function's positional parameters, in order.

    Raises:
      NotUnderstood: the call unpacks `*` or `**`, or has more positional arguments than there are parameters.
    """

    def __init__(self, call, parameters):
        if any(arg.star for arg in call.args):
            raise NotUnderstood("what `*` and `**` unpack into the call is not known")
        positional = [arg for arg in call.args if arg.keyword is None]
        if len(positional) > len(parameters):
            raise NotUnderstood(f"it takes up to {len(parameters)} positional arguments")
        self._call = call
        self._args = list(call.args)
        self._names = [arg.keyword.value if arg.keyword else parameters[i] for i, arg in enumerate(call.args)]

    @property
    def names(self):
        """The names of the given arguments, in order."""
        return list(self._names)

    def value(self, name):
        """Return the expression that is given for `name`, or None."""
        return self._args[self._names.index(name)].value if name in self._names else None

    def code(self, name):
        """Return the source text of `value(name)`."""
        return cst.Module([]).code_for_node(self.value(name))

    def rename(self, old, new):
        """Rename an argument if it is given; a positional argument stays positional."""
        if old in self._names:
            index = self._names.index(old)
            self._names[index] = new
            if self._args[index].keyword:
                self._args[index] = self._args[index].with_changes(keyword=cst.Name(new))
        return self

    def spell_out(self):
        """Turn all positional arguments into keyword arguments."""
        for index, arg in enumerate(self._args):
            if arg.keyword is None:
                self._args[index] = arg.with_changes(keyword=cst.Name(self._names[index]), equal=NO_SPACE)
        return self

    def set(self, name, code):
        """Set `name` to the source text `code`: in place if it is given, otherwise as a new last argument."""
        value = cst.parse_expression(code)
        if name in self._names:
            index = self._names.index(name)
            self._args[index] = self._args[index].with_changes(value=value)
        else:
            self._names.append(name)
            self._append(cst.Arg(value, cst.Name(name), equal=NO_SPACE))
        return self

    def require_no_comment(self, name):
        """Raise `NotUnderstood` if `drop` would also drop a comment."""
        if name in self._names:
            index = self._names.index(name)
            if any(matchers.findall(arg, matchers.Comment()) for arg in self._args[max(index - 1, 0) : index + 1]):
                raise NotUnderstood(f"the comment on `{name}` would be lost")

    def drop(self, name):
        """Remove an argument if it is given. No positional argument may follow it."""
        if name in self._names:
            index = self._names.index(name)
            del self._names[index]
            gone = self._args.pop(index)
            if self._args and index == len(self._args):
                last, space = self._args[-1], gone.whitespace_after_arg
                self._args[-1] = last.with_changes(comma=gone.comma, whitespace_after_arg=space)
        return self

    def call(self, function):
        """Return a call of `function`, a dotted name, with these arguments."""
        changes = {"func": cst.parse_expression(function), "args": self._args}
        if not self._args:
            changes["whitespace_before_args"] = cst.SimpleWhitespace("")
        return self._call.with_changes(**changes)

    def _append(self, arg):
        """Add an argument in the style of the others: on its own line, and with a trailing comma, if they are."""
        if self._args:
            last = self._args[-1]
            comma, space = last.comma, last.whitespace_after_arg
            separator = self._separator(space if isinstance(comma, cst.MaybeSentinel) else comma.whitespace_after)
            if _is_lines(separator):  # the separator now contains any comment beside the last argument
                space = _without_comment(space)
                comma = comma if isinstance(comma, cst.MaybeSentinel) else _bare(comma)
            arg = arg.with_changes(comma=comma, whitespace_after_arg=space)
            separator = cst.Comma(whitespace_after=separator)
            self._args[-1] = last.with_changes(comma=separator, whitespace_after_arg=cst.SimpleWhitespace(""))
        self._args.append(arg)

    def _separator(self, end):
        """Return the white space before a new argument; `end` is what follows the last argument now."""
        has_several = len(self._args) > 1
        space = self._args[0].comma.whitespace_after if has_several else self._call.whitespace_before_args
        if not _is_lines(space):
            return cst.SimpleWhitespace(" ")
        if _is_lines(end):
            return space.with_changes(first_line=end.first_line, empty_lines=[])
        return _without_comment(space)


def _is_lines(space):
    return isinstance(space, cst.ParenthesizedWhitespace)


def _without_comment(space):
    if not _is_lines(space):
        return space
    first_line = cst.TrailingWhitespace(newline=space.first_line.newline)
    return space.with_changes(first_line=first_line, empty_lines=[])


def _bare(comma):
    return comma.with_changes(whitespace_after=_without_comment(comma.whitespace_after))


def last_name(node):
    """Return the last part of a name: `c` for `a.b.c`, where `a.b` may be any expression; None for anything else."""
    node = node.attr if isinstance(node, cst.Attribute) else node
    return node.value if isinstance(node, cst.Name) else None


def text_of(node):
    """Return the value of a string literal, or None for anything else."""
    if not isinstance(node, cst.SimpleString):
        return None
    text = node.evaluated_value
    return text if isinstance(text, str) else None


def wrapped(call, function, arguments):
    """Return `function(call, arguments)`, where `arguments` is source text such as `accum_steps=4`."""
    outer: Any = cst.parse_expression(f"{function}(_, {arguments})")
    return outer.with_changes(args=[outer.args[0].with_changes(value=call)] + list(outer.args[1:]))
