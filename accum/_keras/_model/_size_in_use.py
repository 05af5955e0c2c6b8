"""How many examples a model computes at once, and how many a batch of `fit` has."""

from typing import NamedTuple, Optional, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._tf import Options, Scalar, tf

WHOLE_BATCH = 2**31 - 1
"""A size that no batch reaches."""


class SizeInUse:
    """The size of the micro-batches into which a model splits each batch.

    Args:
      requested: what the user asked for: None, an int >= 1 or "auto".
      tokens: the largest number of tokens in a micro-batch, an int >= 1, or None.
      memory_limit: bytes in which micro-batches must fit under "auto"; None: what the device or the process has.

    Attributes:
      requested, tokens: the same.
      fixed: the size if it is an int, else None.
      memory_limit: the same.
      limit: under "auto", the largest size that has not run out of memory; `WHOLE_BATCH` as long as whole batches fit.
      measured: the number of examples in the largest batch for which memory was measured under "auto", or 0.
    """

    def __init__(
        self, requested: Union[int, str, None], *, tokens: Optional[int] = None, memory_limit: Optional[int] = None
    ) -> None:
        self.requested = _check.micro_batch_size(requested)
        self.tokens = _check.micro_batch_tokens(tokens, self.requested)
        self.memory_limit = memory_limit
        self.measured = 0
        self.fixed: Optional[int] = None if self.is_auto else self.requested
        self.limit = WHOLE_BATCH

    @property
    def splits(self) -> bool:
        """Whether the model computes its batches in micro-batches."""
        return self.requested is not None or self.tokens is not None

    @property
    def is_auto(self) -> bool:
        return isinstance(self.requested, str)

    @property
    def in_use(self) -> Union[int, str, None]:
        """What a user sees: the requested or reduced size, "auto" as long as whole batches fit, or None."""
        return self.requested if self.limit == WHOLE_BATCH else self.limit

    def is_to_be_measured(self, count: int, is_alone: bool) -> bool:
        """Whether memory is to be measured before a batch is computed.

        Args:
          count: the number of examples in the batch.
          is_alone: whether there is no other worker. Several measure before the first batch only: later, `count` may
            exceed what was measured on one of them, which would wait for the others forever.
        """
        return self.limit == WHOLE_BATCH and (count > self.measured if is_alone else self.measured == 0)

    def choose(self, size: int, described: str) -> None:
        """Use a size that was chosen by measuring, and tell the user.

        Args:
          size: the number of examples, less than in the batch.
          described: what was measured.
        """
        self.limit = size
        _check.warn(f"`micro_batch_size` is {size} from now on: {described}. [accum: auto-size]")

    def halve(self, count: int, error: Optional[BaseException]) -> None:
        """Halve the size after memory has run out.

        Args:
          count: the number of examples in the batch; of a replica, under a strategy.
          error: the `ResourceExhaustedError`, or None if it was raised by another worker.

        Raises:
          RuntimeError: not even one example fits.
        """
        tried = min(self.limit, count)
        if tried <= 1:
            raise RuntimeError(
                "Memory ran out with one example at a time: `micro_batch_size` can't be reduced further. Use smaller "
                "examples or a smaller model, or recompute activations with `tf.recompute_grad`. [accum: out-of-memory]"
            ) from error
        self.limit = tried // 2

    def report(self) -> None:
        """Tell the user the size that has turned out to fit."""
        _check.warn(f"Memory ran out, so `micro_batch_size` is {self.limit} from now on. [accum: auto-size]")


class BatchesOfFit(NamedTuple):
    """The batches that `fit` computes.

    Attributes:
      size: the number of examples in each, but perhaps the last one.
      described: where that comes from, for a message.
    """

    size: int
    described: str


def batches_of_fit(passed: Options) -> Optional[BatchesOfFit]:
    """Return the batches that `fit` will compute, or None if its arguments do not tell.

    Args:
      passed: the arguments of `tf.keras.Model.fit` that were passed, by their names.
    """
    x = passed.get("x")
    if isinstance(x, tf.data.Dataset):
        sizes = {_first_length(spec.shape) for spec in tf.nest.flatten(x.element_spec) if hasattr(spec, "shape")}
        size = sizes.pop() if len(sizes) == 1 else None
        return None if size is None else BatchesOfFit(size, f"batches of {size} examples")
    leaves = tf.nest.flatten(x)
    if not all(hasattr(leaf, "__array__") and hasattr(leaf, "shape") for leaf in leaves):
        return None
    if passed.get("batch_size") is None and passed.get("steps_per_epoch") is not None:
        return None  # Keras divides the data by the steps
    batch, examples = passed.get("batch_size") or 32, _first_length(leaves[0].shape) if leaves else None
    if examples is None:
        return None
    examples = int(examples * (1.0 - (passed.get("validation_split") or 0.0)))
    if examples < batch:
        return BatchesOfFit(examples, f"batch_size={batch}, {examples} examples")
    return BatchesOfFit(batch, f"batch_size={batch}")


def _first_length(shape: Union[tf.TensorShape, tuple]) -> Optional[int]:
    lengths = tf.TensorShape(shape)
    return lengths.as_list()[0] if lengths.rank else None


class LargestBatch:
    """The number of examples in the largest batch that a replica has trained on, as long as none has been split."""

    def __init__(self) -> None:
        self._variable: Optional[tf.Variable] = None

    def create(self) -> None:
        """Create the variable, if there is none."""
        if self._variable is None:
            with tf.init_scope():
                self._variable = _tf.variables.new_statistic("largest_batch", [], tf.float32)

    def note(self, count: Scalar) -> None:
        """Note the number of examples in a batch of this replica."""
        self.create()
        variable = _replicas.local_variable(self._variable)
        variable.assign(tf.maximum(variable.read_value(), tf.cast(count, tf.float32)))

    def value(self, strategy: tf.distribute.Strategy) -> int:
        """Return the number for the replicas of this worker, given the model's strategy; 0 before the first batch."""
        parts = [] if self._variable is None else strategy.experimental_local_results(self._variable)
        return max([int(part.numpy()) for part in parts], default=0)
