"""The number of examples that a model computes at once."""

from typing import Any, Optional

from accum import _check


class MicroBatchSize:
    """The size of the micro-batches into which a model splits each batch.

    Args:
      given: what the user passed: None, an int >= 1 or "auto".

    Attributes:
      given: the same.
      current: the size for the step that is being traced or run: an int, an int32 scalar tensor, or None to run the
        whole batch at once.
    """

    def __init__(self, given: Any) -> None:
        self.given = _check.micro_batch_size(given)
        self.current: Optional[Any] = None if given == "auto" else given

    @property
    def in_use(self) -> Any:
        """What a user sees: the given or reduced size, "auto" as long as whole batches fit, or None."""
        return self.given
