"""The rules for other libraries, one file each: their names, and what replaces them.

A rule is a function `rule(call, surroundings) -> Change`. It raises `NotUnderstood` for what it cannot translate
without changing the numbers; then the call stays unchanged. It returns None for a call that does not accumulate.
"""

from typing import Callable, NamedTuple, Optional, Tuple

import libcst as cst

from accum._migrate.arguments import NotUnderstood


class Change(NamedTuple):
    """How a call is rewritten.

    Attributes:
      edit: function from the call, in which other calls may have been rewritten already, to its replacement.
      imports: import lines that the new expression needs.
      note: how the numbers change, because the other library does not compute what its documentation says.
      keeps_name: whether the new expression still uses the called name.
    """

    edit: Callable[[cst.Call], cst.BaseExpression]
    imports: Tuple[str, ...] = ()
    note: Optional[str] = None
    keeps_name: bool = False


def unknown(call, surroundings):
    """The rule for names of a library that have no rule of their own."""
    raise NotUnderstood("nothing is known of it, so it can't be rewritten")


def require_known(arguments, names):
    """Raise `NotUnderstood` for an argument that is not among `names`.

    `clipnorm` and `clipvalue`, arguments of Keras' base class, clip each micro-batch in an optimizer that accumulates.
    """
    for name in arguments.names:
        if name in ("clipnorm", "clipvalue"):
            raise NotUnderstood(f"`{name}` clips each micro-batch there, and the accumulated gradient here")
        if name not in names:
            raise NotUnderstood(f"nothing is known of its argument `{name}`")


FRAMEWORKS = {"accelerate", "byteps", "composer", "deepspeed", "diffusers", "fairseq", "flax", "horovod.mxnet"}
FRAMEWORKS |= {"horovod.torch", "jax", "lightning", "mlx", "mxnet", "optax", "paddle", "peft", "pytorch_lightning"}
FRAMEWORKS |= {"sentence_transformers", "timm", "torch", "transformers", "trl", "unsloth"}
"""Libraries whose own names and arguments are spelled the same."""


def is_in(packages, name):
    """Whether a full name begins with one of `packages`."""
    parts = name.split(".")
    return parts[0] in packages or ".".join(parts[:2]) in packages


def copied(name, classes):
    """The rule for a class with the name of another library's, imported from a module of the user's own."""
    module, _, last = name.rpartition(".")
    return _copied if module and last in classes and not is_in(FRAMEWORKS | {"accum"}, name) else None


def _copied(call, surroundings):
    raise NotUnderstood("it comes from a module of your own, and may not be the library's class")
