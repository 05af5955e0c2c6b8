"""The report of a conversion, and its errors."""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union


class Entry(NamedTuple):
    """One variable of a conversion: its names, its shape, the dtype of the target, and the arithmetic ("" if none)."""

    source: str
    target: str
    shape: Tuple[int, ...]
    dtype: str
    arithmetic: str


class ConversionError(ValueError):
    """Raised if a run can't be converted. Nothing has been written or changed.

    Attributes:
      proposal: what may be passed as `names`, if the variables of the two sides could be paired by what their names,
        shapes and order say; otherwise None.
    """

    proposal: Optional[Union[Dict[str, Optional[str]], List[Optional[str]]]] = None


class Disagreement(ConversionError):
    """Raised if a run can be converted only with the disagreements in the message; `strict=False` accepts them."""


class Report:
    """The result of a conversion, or with `dry_run` the planned result.

    Attributes:
      entries: list of `Entry`, one per variable.
      iterations: number of steps made.
      micro_step: micro steps of the unfinished cycle, 0 between cycles.
      problems: list of str: disagreements and missing counterparts, which `strict=False` accepts.
      notes: list of str: information that the file does not hold, and the assumptions made instead.
    """

    def __init__(self) -> None:
        self.entries: List[Entry] = []
        self.iterations = 0
        self.micro_step = 0
        self.problems: List[str] = []
        self.notes: List[str] = []

    def add(self, source: str, target: str, value: Any, arithmetic: str = "") -> None:
        self.entries.append(Entry(source, target, tuple(value.shape), str(value.dtype), arithmetic))

    def raise_if(self, strict: bool) -> None:
        """Raise `Disagreement` if there are problems and `strict` is true."""
        if strict and self.problems:
            raise Disagreement(
                "The two sides disagree, and nothing was changed:\n- {}\nPass `strict=False` (--lenient on the command "
                "line) to convert nevertheless.".format("\n- ".join(self.problems))
            )

    def __str__(self) -> str:
        rows = [(e.source, "->", e.target, str(list(e.shape)), e.dtype, e.arithmetic) for e in self.entries]
        widths = [max(len(row[column]) for row in rows) for column in range(6)] if rows else []
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.append(f"{self.iterations} steps, {self.micro_step} micro steps of the next cycle.")
        lines += ["Note: " + note for note in self.notes]
        lines += ["Disagreement: " + problem for problem in self.problems]
        return "\n".join(lines)
