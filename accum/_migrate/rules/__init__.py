"""What is known of other libraries, one file each: which names are theirs, and what to write in their place.

A rule is a function `rule(call, surroundings) -> Change`. It raises `NotUnderstood` for what it can't translate with
the numbers kept; then nothing about that call is changed. It returns None for a call that does not accumulate.
"""

from typing import Callable, NamedTuple, Optional, Tuple

import libcst as cst

from accum._migrate.arguments import NotUnderstood

Change = NamedTuple(
    "Change",
    [
        ("edit", Callable[[cst.Call], cst.BaseExpression]),
        ("imports", Tuple[str, ...]),
        ("note", Optional[str]),
        ("keeps_name", bool),
    ],
)
Change.__new__.__defaults__ = ((), None, False)
Change.__doc__ = """How a call is rewritten.

Attributes:
  edit: function from the call, in which other calls may have been rewritten already, to what takes its place.
  imports: lines that the new expression needs.
  note: what is different in the numbers from now on, because the other library's were not what it says they are.
  keeps_name: whether the new expression still uses the name that was called.
"""


def unknown(call, surroundings):
    """The rule for what a library has beside the names that are known of it."""
    raise NotUnderstood("nothing is known of it here")
