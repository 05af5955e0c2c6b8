"""The number of examples that a model computes at once."""

from typing import NamedTuple, Optional, Union

from accum import _check
from accum._tf import Options, tf

WHOLE_BATCH = 2**31 - 1
"""A size that no batch reaches."""


class SizeInUse:
    """The size of the micro-batches into which a model splits each batch.

    Args:
      given: what the user passed: None, an int >= 1 or "auto".
      tokens: the largest number of tokens in a micro-batch, an int >= 1, or None.
      memory_limit: bytes in which micro-batches must fit under "auto"; None: what the device or the process has.

    Attributes:
      given, tokens: the same.
      fixed: the size if it is an int, else None.
      memory_limit: the same.
      measured: the number of examples in the largest batch for which memory was measured under "auto", or 0.
    """

    def __init__(
        self, given: Union[int, str, None], *, tokens: Optional[int] = None, memory_limit: Optional[int] = None
    ) -> None:
        self.given = _check.micro_batch_size(given)
        self.tokens = _check.micro_batch_tokens(tokens, self.given)
        self.memory_limit = memory_limit
        self.measured = 0
        self.fixed: Optional[int] = None if self.is_auto else self.given
        self._limit = WHOLE_BATCH  # under "auto", the largest size that has not run out of memory

    @property
    def splits(self) -> bool:
        """Whether the model computes its batches in micro-batches."""
        return self.given is not None or self.tokens is not None

    @property
    def is_auto(self) -> bool:
        return isinstance(self.given, str)

    @property
    def limit(self) -> int:
        """The size under "auto", `WHOLE_BATCH` as long as whole batches fit."""
        return self._limit

    @property
    def in_use(self) -> Union[int, str, None]:
        """What a user sees: the given or reduced size, "auto" as long as whole batches fit, or None."""
        return self.given if self._limit == WHOLE_BATCH else self._limit

    def is_to_be_measured(self, count: int, is_alone: bool) -> bool:
        """Whether memory is to be measured before a batch is computed.

        Args:
          count: the number of examples in the batch.
          is_alone: whether there is no other worker. Several measure before the first batch only: later, `count` may
            exceed what was measured on one of them, which would wait for the others forever.
        """
        return self._limit == WHOLE_BATCH and (count > self.measured if is_alone else self.measured == 0)

    def choose(self, size: int, described: str) -> None:
        """Use a size that was chosen by measuring, and tell the user.

        Args:
          size: the number of examples, less than in the batch.
          described: what was measured.
        """
        self._limit = size
        _check.warn(f"`micro_batch_size` is {size} from now on: {described}.")

    def halve(self, count: int, error: Optional[BaseException]) -> None:
        """Halve the size after memory has run out.

        Args:
          count: the number of examples in the batch; of a replica, under a strategy.
          error: the `ResourceExhaustedError`, or None if it was raised by another worker.

        Raises:
          RuntimeError: not even one example fits.
        """
        tried = min(self._limit, count)
        if tried <= 1:
            raise RuntimeError(
                "Memory ran out with one example at a time: `micro_batch_size` can't be reduced further. Use smaller "
                "examples or a smaller model, or recompute activations with `tf.recompute_grad`."
            ) from error
        self._limit = tried // 2

    def report(self) -> None:
        """Tell the user the size that has turned out to fit."""
        _check.warn(f"Memory ran out, so `micro_batch_size` is {self._limit} from now on.")


class BatchesOfFit(NamedTuple):
    """The batches that `fit` computes.

    Attributes:
      size: the number of examples in each, but perhaps the last one.
      described: where that comes from, for a message.
    """

    size: int
    described: str


def batches_of_fit(given: Options) -> Optional[BatchesOfFit]:
    """Return the batches that `fit` will compute, or None if its arguments do not tell.

    Args:
      given: the arguments of `tf.keras.Model.fit` that were passed, by their names.
    """
    x = given.get("x")
    if isinstance(x, tf.data.Dataset):
        sizes = {_first_length(spec.shape) for spec in tf.nest.flatten(x.element_spec) if hasattr(spec, "shape")}
        size = sizes.pop() if len(sizes) == 1 else None
        return None if size is None else BatchesOfFit(size, f"batches of {size} examples")
    leaves = tf.nest.flatten(x)
    if not all(hasattr(leaf, "__array__") and hasattr(leaf, "shape") for leaf in leaves):
        return None
    if given.get("batch_size") is None and given.get("steps_per_epoch") is not None:
        return None  # Keras divides the data by the steps
    batch, examples = given.get("batch_size") or 32, _first_length(leaves[0].shape) if leaves else None
    if examples is None:
        return None
    examples = int(examples * (1.0 - (given.get("validation_split") or 0.0)))
    if examples < batch:
        return BatchesOfFit(examples, f"batch_size={batch}, {examples} examples")
    return BatchesOfFit(batch, f"batch_size={batch}")


def _first_length(shape: Union[tf.TensorShape, tuple]) -> Optional[int]:
    lengths = tf.TensorShape(shape)
    return lengths.as_list()[0] if lengths.rank else None
