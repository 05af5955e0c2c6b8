"""Micro-batches within one batch: run a function on each of them in turn, and combine what it returns (law L18).

    batch -> remainder -> m examples -> m examples -> ...
               |             |             |
             function      function      function
               '------ + ----'------ + ----'------> sums, pooled moments, rows

A batch of n examples is split into ceil(n / m) micro-batches. The first has the remainder, between 1 and m examples,
and runs outside of the loop: it creates the variables and tells what is summed. All others have exactly m examples and
run in a `tf.while_loop`, one after the other, so that the memory of only one is needed. Their constant size is what XLA
can compile. Between workers, the last one runs after the loop: what a loop computes can be used only when it has ended.

Nothing in here communicates between replicas: each replica runs its own part.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._batch import Batch, Size
from accum._engine._combined import Combined, LoopVariable
from accum._tf import Nested, tf

Index = Any
"""Which micro-batch: `FIRST`, `WHOLE`, or its number in the loop, an int or int32 scalar tensor."""

LoopState = Optional[List[LoopVariable]]
"""The loop variables of a `Combined`, or None where a micro-batch returns None."""


class Sizes(NamedTuple):
    """How a batch is split: `first` examples, then `loops` times `size`, which is at most the batch."""

    first: Size
    loops: Size
    size: Size


def sizes_of(count: Size, size: Size) -> Sizes:
    """Return how a batch of `count` examples is split into micro-batches of at most `size`."""
    size = max(size, 1) if isinstance(size, int) else tf.maximum(size, 1)  # 0: of a batch without examples
    if isinstance(count, int) and isinstance(size, int):
        first = (count - 1) % size + 1 if count else 0
        return Sizes(first, (count - first) // size, min(size, max(count, 1)))
    first = tf.minimum(tf.math.floormod(count - 1, size) + 1, count)
    # No micro-batch is larger than the batch: XLA compiles the loop's body even if it never runs.
    return Sizes(first, (count - first) // size, tf.minimum(size, tf.maximum(count, 1)))


FIRST = object()
"""In place of an index: the first micro-batch."""

WHOLE = object()
"""In place of an index: all micro-batches at once."""


class MicroBatches:
    """The micro-batches of one batch, over which functions can run one after the other.

    Args:
      batch: a `Batch`.
      size: int >= 1 or an int32 scalar tensor, the largest number of examples in a micro-batch.
      compiled: whether XLA compiles this, which needs shapes that are known when it does.
      as_function: whether to call functions as a `tf.function` in the loop, for code that must not be in a loop.

    Attributes:
      batch, compiled: the same.
      sizes: how the batch is split.
    """

    def __init__(self, batch: Batch, size: Size, compiled: bool = False, as_function: bool = False) -> None:
        self.batch = batch
        self.compiled = compiled
        self._as_function = as_function
        self._is_within_loop = False  # whether the first micro-batch is in the loop that is being built
        self.sizes = sizes_of(batch.count, size)
        self._lacking = self.sizes.first - self.sizes.size  # so much less than the others has the first micro-batch

    def part(self, batch: Batch, index: Index) -> Nested:
        """Return the micro-batch at `index` of any batch that is split like this one, in the structure of its data."""
        return batch.part(self.begin(index), self.size_of(index))

    def begin(self, index: Index) -> Size:
        """Return the place of the first example of the micro-batch at `index`."""
        if index is FIRST or index is WHOLE:
            return 0
        begin = self._lacking + index * self.sizes.size
        return tf.maximum(begin, 0) if self._is_within_loop else begin

    def share(self, index: Index, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """Return the share of the micro-batch at `index` in the examples of the batch, a scalar."""
        return tf.math.divide_no_nan(tf.cast(self.size_of(index), dtype), tf.cast(self.batch.count, dtype))

    def size_of(self, index: Index) -> Size:
        """Return the number of examples of the micro-batch at `index`."""
        first, _, size = self.sizes
        if index is WHOLE:
            return self.batch.count
        if index is FIRST:
            return first
        is_alike = isinstance(first, int) and first == size
        return size if is_alike or not self._is_within_loop else tf.where(index < 1, first, size)

    def run(
        self,
        function: Callable[[Nested, Index], Nested],
        like: Optional[Callable[[], Nested]] = None,
        after: Sequence[tf.Tensor] = (),
        has_last: bool = False,
    ) -> Nested:
        """Run `function` on each micro-batch in turn, and combine the results.

        Args:
          function: function of a micro-batch, in the structure of the batch's data, and of its index: `FIRST`, or an
            int32 scalar tensor that counts from 1 in the loop. It returns a nested structure of `Combined` and None,
            the same for each micro-batch. Eagerly, a value may be None for some of them only.
          like: function that returns what `function` does, with zeros for what is added up and a `tf.TensorSpec` for
            what is not. With it, the first micro-batch is in the loop of a graph too, as 0, unless XLA compiles this,
            and `function` gets None instead of the micro-batch.
          after: what the loop of a graph waits for.
          has_last: whether the last micro-batch is outside of the loop too, in a graph that XLA does not compile: then
            each value can be used as soon as it is computed, while all those of a loop end with it.

        Returns:
          The structure that `function` returns, with the combined values.
        """
        loops = self.sizes.loops
        self._is_within_loop = like is not None and not tf.executing_eagerly() and not self.compiled
        is_given = like is None
        begin = (self.part(self.batch, FIRST) if is_given else None), FIRST
        first = like() if like is not None and self._is_within_loop else function(*begin)
        leaves = tf.nest.flatten(first)
        states = [None if leaf is None else leaf.start(loops, self.compiled) for leaf in leaves]

        def returned(index: Index) -> List[Optional[Combined]]:
            part = self.part(self.batch, index) if is_given else None
            if self._as_function and not tf.executing_eagerly():  # eagerly, the loop is Python's
                return tf.nest.flatten(within_function(lambda: function(part, index)))
            return tf.nest.flatten(function(part, index))

        if tf.executing_eagerly():
            _add_eagerly(returned, int(loops), leaves, states)
        elif self._is_within_loop:
            states = _add_in_graph(returned, loops, leaves, states, False, after)
        elif not isinstance(loops, int) or loops > 0:
            ends = has_last and not self.compiled
            states = _add_in_graph(returned, loops - 1 if ends else loops, leaves, states, self.compiled)
            states = _add_last(returned, loops, leaves, states) if ends else states
        self._is_within_loop = False
        ended = [None if leaf is None else self._ended(leaf, state) for leaf, state in zip(leaves, states)]
        return tf.nest.pack_sequence_as(first, ended)

    def _ended(self, leaf: Combined, state: Any) -> Any:
        """Return the result for what is combined, from its loop variables after the last micro-batch."""
        return leaf.end(state, self.compiled)

    def run_at_once(self, function: Callable[[Nested, Index], Nested]) -> Nested:
        """Run `function` once, on the whole batch and the index `WHOLE`, and return its results like `run`."""
        result = function(self.part(self.batch, WHOLE), WHOLE)
        leaves = tf.nest.flatten(result)
        ended = [None if leaf is None else leaf.end(leaf.start(0, self.compiled), self.compiled) for leaf in leaves]
        return tf.nest.pack_sequence_as(result, ended)


def within_function(function: Callable[[], Nested], **options: Any) -> Nested:
    """Call `function()` within a `tf.function` with these options, and bring the values that it returns out of it.

    It returns a nested structure of `Combined` and None.
    """
    result: Nested = None

    def values() -> List[List[LoopVariable]]:
        nonlocal result
        result = function()
        return [[] if leaf is None else leaf.values for leaf in tf.nest.flatten(result)]

    outsides = tf.function(_tf.graphs.run_as_written(values), **options)()
    for leaf, outside in zip(tf.nest.flatten(result), outsides):
        if leaf is not None:
            leaf.values = list(outside)
    return result


def _add_eagerly(
    returned: Callable[[int], List[Optional[Combined]]],
    loops: int,
    leaves: List[Any],
    states: List[Any],
) -> None:
    """Add the micro-batches of the loop to `states`, in place. Python code may return None for some of them only."""
    for index in range(1, loops + 1):
        values = returned(index)
        _require_alike(leaves, values, may_lack=True)
        for place, value in enumerate(values):
            if value is None:
                states[place] = None if leaves[place] is None else leaves[place].skip(states[place], index)
            elif leaves[place] is not None:
                states[place] = value.add(states[place], index, compiled=False)
            else:  # the first micro-batch that has it
                leaves[place], states[place] = value, value.start(loops, compiled=False)
                for earlier in range(1, index + 1):
                    states[place] = value.skip(states[place], earlier)


def _add_in_graph(
    returned: Callable[[tf.Tensor], List[Optional[Combined]]],
    loops: Size,
    leaves: Sequence[Optional[Combined]],
    states: Sequence[LoopState],
    compiled: bool,
    after: Optional[Sequence[tf.Tensor]] = None,
) -> List[LoopState]:
    """Return `states` after the micro-batches of a `tf.while_loop`.

    It starts after the first micro-batch has ended, because their memory must not add up; or with that one, after what
    is in `after`.
    """

    def body(index: Index, states: Any) -> Tuple[tf.Tensor, List[List[LoopVariable]]]:
        for leaf, state in zip([leaf for leaf in leaves if leaf is not None], states):
            leaf.enter(state)
        values = returned(index)
        _require_alike(leaves, values)
        added = [value for value in values if value is not None]
        return index + 1, [value.add(state, index, compiled) for value, state in zip(added, states)]

    waits = [value for leaf in leaves if leaf is not None for value in leaf.values] if after is None else after
    with tf.control_dependencies(list(waits)):
        index = tf.identity(tf.constant(1 if after is None else 0))
    # XLA needs a bound to differentiate a loop.
    bound = {"maximum_iterations": loops} if compiled and isinstance(loops, int) else {}
    before = index, [state for state in states if state is not None]
    _, states_after = tf.while_loop(lambda index, _: index <= loops, body, before, parallel_iterations=1, **bound)
    following = iter(states_after)
    return [None if state is None else next(following) for state in states]


def _add_last(
    returned: Callable[[tf.Tensor], List[Optional[Combined]]],
    index: Size,
    leaves: Sequence[Optional[Combined]],
    states: Sequence[LoopState],
) -> List[LoopState]:
    """Return `states` after the micro-batch at `index` too, which begins after all others, if there is one."""
    present = [state for state in states if state is not None]

    def added() -> List[List[LoopVariable]]:
        with tf.control_dependencies([getattr(value, "flow", value) for value in tf.nest.flatten(present)]):
            number = tf.identity(tf.convert_to_tensor(index))
        for leaf, state in zip([leaf for leaf in leaves if leaf is not None], present):
            leaf.enter(state)
        with tf.control_dependencies([number]):
            values = returned(number)
        _require_alike(leaves, values)
        return [value.add(state, number, False) for value, state in zip([v for v in values if v is not None], present)]

    following = iter(added() if isinstance(index, int) else tf.cond(index > 0, added, lambda: present, name="last"))
    return [None if state is None else next(following) for state in states]


def _require_alike(
    leaves: Sequence[Optional[Combined]], values: Sequence[Optional[Combined]], may_lack: bool = False
) -> None:
    """Raise unless a micro-batch returns what another one does, or None for some of it if `may_lack`."""
    is_alike = [
        type(one) is type(other) or (may_lack and (one is None or other is None)) for one, other in zip(leaves, values)
    ]
    if len(leaves) != len(values) or not all(is_alike):
        raise ValueError(
            "A micro-batch computes other gradients or values than the one before it: let every micro-batch use the "
            "same variables in the same way, at any size. [accum: unlike-micro-batches]"
        )
