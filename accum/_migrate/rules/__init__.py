"""The rules for other libraries, one file each: their names, and how to rewrite their calls.

A rule is a function `rule(call, surroundings) -> Change`. It returns None for a call that does not accumulate. It
raises `NotUnderstood` for a call that it can't rewrite without changing the numbers, which then stays unchanged.
"""

from typing import Callable, NamedTuple, Optional, Tuple

import libcst as cst

from accum._migrate.arguments import NotUnderstood


class Change(NamedTuple):
    """How a call is rewritten.

    Attributes:
      edit: function from the call to its replacement. Other calls within the call may have been rewritten already.
      imports: import lines that the new expression needs.
      note: how the numbers change, where the other library does not compute what its documentation says.
      keeps_name: whether the new expression still uses the imported name.
    """

    edit: Callable[[cst.Call], cst.BaseExpression]
    imports: Tuple[str, ...] = ()
    note: Optional[str] = None
    keeps_name: bool = False


def unknown(call, surroundings):
    """Report a name of a library that has no rule of its own."""
    raise NotUnderstood("there is no rule for it, so it can't be rewritten")


def require_known(arguments, names):
    """Raise `NotUnderstood` for an argument that is not in `names`.

    In an optimizer that accumulates, `clipnorm` and `clipvalue` of Keras' base class clip each micro-batch.
    """
    for name in arguments.names:
        if name in ("clipnorm", "clipvalue"):
            raise NotUnderstood(
                f"`{name}` clips each micro-batch in that library, but the accumulated gradient in accum"
            )
        if name not in names:
            raise NotUnderstood(f"there is no rule for its argument `{name}`")


FRAMEWORKS = {"accelerate", "byteps", "composer", "deepspeed", "diffusers", "fairseq", "flax", "horovod.mxnet"}
FRAMEWORKS |= {"horovod.torch", "jax", "lightning", "mlx", "mxnet", "optax", "paddle", "peft", "pytorch_lightning"}
FRAMEWORKS |= {"sentence_transformers", "timm", "torch", "transformers", "trl", "unsloth"}
"""Other libraries that use the same names and arguments for things of their own."""


def is_in(packages, name):
    """Whether a full name begins with one of `packages`."""
    parts = name.split(".")
    return parts[0] in packages or ".".join(parts[:2]) in packages


def copied(name, classes):
    """Return the rule for a class of a library that is imported from the user's own module, or None."""
    module, _, last = name.rpartition(".")
    return _copied if module and last in classes and not is_in(FRAMEWORKS | {"accum"}, name) else None


def _copied(call, surroundings):
    raise NotUnderstood("it comes from a module of your own, and may not be the library's class")
