"""What a conversion did or would do, and what it refuses."""

from collections import namedtuple

Entry = namedtuple("Entry", ["source", "target", "shape", "dtype", "arithmetic"])
Entry.__doc__ = (
    """One variable of a conversion: names, shape, dtype of the target, and what is computed, "" for nothing."""
)


class ConversionError(ValueError):
    """A run that cannot be converted; nothing has been written or changed."""


class Disagreement(ConversionError):
    """A run that can be converted only with what the message names, which `strict=False` accepts."""


class Report:
    """What a conversion did, or with `dry_run` would do.

    Attributes:
      entries: list of `Entry`, one a variable.
      iterations: steps made.
      micro_step: micro steps of the unfinished cycle, 0 between cycles.
      problems: list of str: what does not agree or has no counterpart, and `strict=False` has accepted.
      notes: list of str: what the file cannot say, and what was taken as given for it.
    """

    def __init__(self):
        self.entries = []
        self.iterations = 0
        self.micro_step = 0
        self.problems = []
        self.notes = []

    def add(self, source, target, value, arithmetic=""):
        self.entries.append(Entry(source, target, tuple(value.shape), str(value.dtype), arithmetic))

    def raise_if(self, strict):
        """Raise what `strict` does not accept."""
        if strict and self.problems:
            raise Disagreement(
                "The two sides do not agree, and nothing was changed:\n- {}\n`strict=False` goes on "
                "nevertheless.".format("\n- ".join(self.problems))
            )

    def __str__(self):
        rows = [(e.source, "->", e.target, str(list(e.shape)), e.dtype, e.arithmetic) for e in self.entries]
        widths = [max(len(row[column]) for row in rows) for column in range(6)] if rows else []
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.append("{} steps, {} micro steps of the next cycle.".format(self.iterations, self.micro_step))
        lines += ["Note: " + note for note in self.notes]
        lines += ["Does not agree: " + problem for problem in self.problems]
        return "\n".join(lines)
