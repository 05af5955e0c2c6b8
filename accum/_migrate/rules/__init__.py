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


FRAMEWORKS = {"accelerate", "byteps", "composer", "deepspeed", "diffusers", "fairseq", "flax", "horovod.mxnet"}
FRAMEWORKS |= {"horovod.torch", "jax", "lightning", "mlx", "mxnet", "optax", "paddle", "peft", "pytorch_lightning"}
FRAMEWORKS |= {"sentence_transformers", "timm", "torch", "transformers", "trl", "unsloth"}
"""What has names and arguments of its own that are spelled the same."""


def is_in(packages, name):
    """Whether a full name begins by one of `packages`."""
    parts = name.split(".")
    return parts[0] in packages or ".".join(parts[:2]) in packages


def copied(name, classes):
    """The rule for a class that has the name of another library's, but is imported from a module of one's own."""
    module, _, last = name.rpartition(".")
    return _copied if module and last in classes and not is_in(FRAMEWORKS | {"accum"}, name) else None


def _copied(call, surroundings):
    raise NotUnderstood("it is of a module of your own, and whether that has it from a library can't be told")
