"""Random numbers that belong to the examples: a micro-batch gets its rows of the batch's random numbers (law L20).

The numbers of TensorFlow's random operations are a function of a seed and of their position in the result. So rows a to
b can be drawn alone by skipping the numbers before a. A counter-based generator skips them by its counter, which
advances by one for every few numbers. For other generators the whole batch is drawn, and sliced.

Operations with a state instead of a seed are replaced by stateless ones. Their numbers are a function of the batch's
seed, of the number of random operations before them, and of the example.
"""

import contextlib
import re
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine._batch import Size
from accum._tf import Scalar, tf
from accum._tf.graphs import GraphContext
from accum._tf.random_ops import RandomOp, Source
from accum._tf.tracking import CheckpointOnly

SHAPES_DIFFER = "ncompatible shapes", "must be equal", "equired broadcastable", "should match", "ust have same"
NUMBERS_OF_BATCH = (
    "With `micro_batch_size`, the train step or the model computes a part of a batch at a time, but combines it with "
    "random numbers for a fixed number of examples, such as `tf.random.normal((batch_size, …))`: draw as many as there "
    "are examples, `tf.random.normal((tf.shape(images)[0], …))`. [accum: random-shape]"
)


def tells_of_shapes(error: Exception) -> bool:
    """Whether an error says that tensors of unlike shapes were combined."""
    return any(words in str(error) for words in SHAPES_DIFFER)


def warn_of_others(names: Sequence[str]) -> None:
    """Warn of operations whose numbers differ with the size of micro-batches."""
    _check.warn(
        "These operations draw random numbers that differ with the size of micro-batches, so a step equals that of the "
        "full batch only on average. One of these is the reason: a loop or `tf.function` around them; "
        "`accum.value_and_gradients` outside of a `tf.function`; a shuffle; a `tf.random.Generator`, or Python; a "
        "first axis that is not that of the examples; XLA, if an update takes several batches, or numbers for all "
        "examples together, if it does so without `tf.random.set_seed`; several replicas, if "
        "the model has no dropout or noise layers of Keras. Draw with `tf.random.uniform` or `normal`, a number for "
        "each example, outside of loops and functions. "
        f"Received: {_check.shown(names)}. [accum: random-numbers]",
        _check.InexactWarning,
    )


def uniform_seed() -> tf.Tensor:
    """Return another seed for each call and run. Its second number is another one even without a program's seed.

    So what has a seed of its own draws the same in every program.
    """
    number = _tf.random_ops.next_seed_of_operation()
    with _tf.variables.on_host():
        seeds = None if _tf.random_ops.seed_of_graph() is None else number, number
        drawn = [tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32, seed=seed) for seed in seeds]
        return tf.cast(tf.stack(drawn), tf.int64)


def number_of_step(optimizer: Any) -> tf.Tensor:
    """Return what tells the draws of one step from those of another, an int64 scalar tensor.

    Args:
      optimizer: of Keras.
    """
    with tf.init_scope():
        iterations = _tf.variables.native(optimizer.iterations)  # Keras may create it only now
    with _tf.variables.on_host():
        return tf.cast(iterations, tf.int64) * 2**20


class CycleDraws(CheckpointOnly):
    """What checkpoints keep of the random numbers of an unfinished cycle.

    Args:
      name: prefix of the names of variables.
      seeds: the variables from which the model takes its seeds, int tensors of shape [2].

    Attributes:
      examples: int64 [], the examples of the cycle so far, on all replicas.
      seeds: int64 [2] each, the seeds with which the cycle began.
    """

    def __init__(self, name: str, seeds: Sequence[tf.Variable]) -> None:
        super().__init__()
        self.examples = _tf.variables.new_counter(f"{name}/examples")
        self.seeds = [_tf.variables.new_counter(f"{name}/seed_{number}", [2]) for number, _ in enumerate(seeds)]

    @property
    def counters(self) -> List[tf.Variable]:
        return [self.examples] + list(self.seeds)


class Chosen(NamedTuple):
    """Examples of a micro-batch that do not follow each other in the batch, and perhaps lack its last time steps.

    Attributes:
      places: int32 [count], their places in the batch.
      length: int32 scalar tensor, the length of the time axis in the micro-batch.
      padded: int32 scalar tensor, its length in the batch; None: there is none, or it is ragged.
    """

    places: tf.Tensor
    length: tf.Tensor
    padded: Optional[tf.Tensor]


class _Rows(NamedTuple):
    """The examples that are computed: int scalars or int scalar tensors."""

    begin: Size
    count: Any  # a `Size`; a tuple has a `count` of another type
    context: GraphContext  # where they are known
    chosen: "Optional[Chosen]" = None  # if they are not the examples from `begin` on


class Draws:
    """What the random operations of one batch draw.

    Args:
      new_seed: function that returns an int64 tensor of shape [2], another one for each batch. It is called once, where
        the batch begins, if there are draws; never in eager execution, where nothing is replaced.
      total: the number of examples of the batch, an int or int scalar tensor.
      compiled: whether XLA compiles this, which draws other numbers, and by place in another order.
      base: function that returns how many examples were before those of the batch, an int64 scalar tensor, or raises
        `LookupError` if that is unknown. None: the batch is all there is.
      sets_seeds_back: whether each micro-batch finds the seeds of layers as the batch did.

    Attributes:
      number: how many operations have drawn.
      others: names of those whose numbers differ with the size of micro-batches.
      joins: whether what examples meet in is computed with the whole batch, so that an operation may draw for it.
      whole: if `joins`, the names of operations that draw for the whole batch; otherwise, they are in `others`.
      shared: {name of an operation that draws for all examples together: what makes other numbers in another batch of
        a cycle: "batch", also if the seed is the same; "seed", that of the program; or "place", in the cycle}.
      drawn: list of (tensor of the numbers of the examples, the tensor in whose place it is).
      size: the largest number of examples that are computed at once, if it is known.
    """

    def __init__(
        self,
        new_seed: Callable[[], tf.Tensor],
        total: Size,
        compiled: bool = False,
        base: Optional[Callable[[], tf.Tensor]] = None,
        sets_seeds_back: bool = True,
    ) -> None:
        self._new_seed = new_seed
        self._context = _tf.graphs.current_graph_context()
        self._seed: Optional[tf.Tensor] = None
        self._total = total
        self._base = base
        self._compiled = compiled
        self._sets_seeds_back = sets_seeds_back
        self._rows: Optional[_Rows] = None
        self.number = 0
        self._own: Dict[int, Optional[int]] = {}  # seeds of operations, by their number
        self.others: List[str] = []
        self.joins = False
        self.whole: List[str] = []
        self.shared: Dict[str, str] = {}
        self.drawn: List[Tuple[tf.Tensor, tf.Tensor]] = []
        self.size: Optional[int] = None
        self._fixed: List[tf.Tensor] = []  # numbers for more rows than that
        self._advancing: List[str] = []
        self._has_warned = False

    @contextlib.contextmanager
    def of(self, begin: Size, count: Size, chosen: Optional[Chosen] = None) -> Iterator[None]:
        """Let the code in this context, which computes some examples, draw their numbers.

        Args:
          begin: the place of the first of them in the batch.
          count: how many they are.
          chosen: which they are, if they are not the examples from `begin` on.
        """
        before = self._rows
        self._rows = _Rows(begin, count, _tf.graphs.current_graph_context(), chosen)
        try:
            if before is not None:
                yield
                return
            self.number, self._fixed = 0, []
            graph = self._rows.context[0]
            done = 0 if graph is None else len(graph.get_operations())
            try:
                with _tf.random_ops.replacing(self._replaced):
                    yield
            except (ValueError, tf.errors.InvalidArgumentError) as error:
                lengths = re.findall(r"\d+", str(error)) if tells_of_shapes(error) else []
                for numbers in [one for one in self._fixed if str(one.shape[0]) in lengths]:
                    raise ValueError(f"{NUMBERS_OF_BATCH} Received: {numbers!r}.") from error
                raise
            if graph is not None and not self.joins:  # which looks into functions
                self.others += _tf.graph_parts.calls_that_draw(graph, graph.get_operations()[done:])
            for numbers in self._fixed:
                if _tf.op_walks.meets_rows(numbers, of_one=self.size == 1):
                    raise ValueError(f"{NUMBERS_OF_BATCH} Received: {numbers!r}.")
        finally:
            self._rows = before
        self._warn()

    def names(self) -> Dict[str, str]:
        """Return `drawn` as a dict of the names of the tensors."""
        return {numbers.name: source.name for numbers, source in self.drawn}

    def begin(self) -> None:
        """Draw the seed of the batch here, rather than where it is first needed."""
        self._seed_of_batch()

    def rows(self, op: RandomOp, number: int, begin: Size, count: Size) -> tf.Tensor:
        """Return the numbers of some examples, where an operation draws along its first axis.

        Args:
          op: the operation, which `can_draw_rows`.
          number: which of the batch's random operations it is.
          begin: the place of the first example in the batch.
          count: how many they are.
        """
        before = self._rows
        self.number = number
        self._rows = _Rows(begin, count, _tf.graphs.current_graph_context())
        try:
            with _tf.random_ops.replacing(lambda op: None):
                rows = self._drawn_rows(op)
            rows.set_shape(op.output.shape)
            return rows
        finally:
            self._rows = before

    def _warn(self) -> None:
        if (self.others or self._advancing) and not self._has_warned:
            self._has_warned = True
            if self._advancing:
                _check.warn(
                    "These operations draw random numbers that differ with the size of micro-batches, because each "
                    "call advances the seed of its layer: train with `GradientAccumulateModel`, or leave out "
                    "`whole_batch=()`. "
                    f"Received: {_check.shown(self._advancing)}. [accum: random-numbers]",
                    _check.InexactWarning,
                )
            if self.others:
                warn_of_others(self.others)

    def _replaced(self, op: RandomOp) -> Optional[tf.Tensor]:
        new, shape = self._other_numbers(op), _static_shape(op)
        if shape and shape[0] is not None and self.size is not None and shape[0] > self.size:
            self._fixed.append(op.output if new is None else new)
        return new

    def _other_numbers(self, op: RandomOp) -> Optional[tf.Tensor]:
        assert self._rows is not None
        if _tf.graphs.is_scratch():  # such as initial weights, which Keras really draws elsewhere
            return None
        # TensorFlow calls a function for other micro-batches, and other batches, without tracing it again.
        if any(map(_tf.graphs.is_function, _tf.graphs.graphs_within(self._rows.context[0]))):
            return None
        if not self._sets_seeds_back and _tf.random_ops.advances_its_seed(op):
            self._advancing.append(op.output.op.name)
            return None
        self.number += 1
        shape = _static_shape(op)
        is_in_loop = _tf.graphs.is_in_loop_within(self._rows.context)
        is_shared = bool(shape) and not self._is_of_examples(shape)
        if self.joins and not is_in_loop and _tf.random_ops.reads_generator(op):
            self.shared[op.output.op.name] = "batch"
            seed = self._seed_of_batch() + tf.constant([0, self.number << 32], tf.int64)
            return _tf.random_ops.state_of_generator(op, seed)
        if self.joins and _tf.random_ops.is_shuffle(op):
            self.shared[op.output.op.name] = "seed" if is_shared else "batch"
            return self._shuffled(op, is_shared)
        is_open = is_shared and self._may_be_of_examples(shape[1:])
        is_open = is_open or (bool(shape) and shape[0] is None and _tf.random_ops.is_by_another_axis(op))
        if self.joins and (op.kind is None or is_in_loop or is_open):
            self.whole.append(op.output.op.name)
            self.shared[op.output.op.name] = "batch"
            return None
        if op.kind is None or is_in_loop or is_open:
            self.others.append(op.output.op.name)
            _tf.random_ops.set_apart(op, tf.cast(self._rows.begin, tf.int64) + tf.cast(self._before(op), tf.int64))
            return None
        if not shape or is_shared:  # the same for all examples
            if op.source is None:
                numbers = _tf.random_ops.draw(op.kind, op.shape, self._source(op), *_numbers(op))
                self.shared[op.output.op.name] = "seed" if self._own[self.number] is None else "place"
                return numbers
            if _tf.random_ops.advances_its_seed(op):
                self.shared[op.output.op.name] = "place"
            return None
        rows = self._drawn_rows(op)
        rows.set_shape(op.output.shape)
        self.drawn.append((rows, op.output))
        return rows

    def _shuffled(self, op: RandomOp, is_shared: bool) -> tf.Tensor:
        """Return a tensor in the order of random numbers that its entries draw, which a shuffle draws unseen."""
        (values,) = op.output.op.inputs
        self._own.setdefault(self.number, _tf.random_ops.own_seed(op.output.op))
        count = tf.shape(values)[:1]
        output = tf.raw_ops.StatelessRandomUniform(shape=count, seed=[0, 0])
        numbers = op._replace(kind="RandomUniform", output=output, shape=count)
        if is_shared:
            drawn = _tf.random_ops.draw("RandomUniform", count, self._source(numbers), *_numbers(numbers))
        else:
            drawn = self._drawn_rows(numbers)
            self.drawn.append((drawn, output))
        shuffled = tf.gather(values, tf.argsort(drawn))
        shuffled.set_shape(op.output.shape)
        return shuffled

    def _is_of_examples(self, shape: Sequence[Optional[int]]) -> bool:
        """Whether the first axis of a shape is the examples, or each example several times in a row."""
        assert self._rows is not None
        count = tf.get_static_value(tf.convert_to_tensor(self._rows.count))
        return shape[0] is None or (count is not None and shape[0] % max(int(count), 1) == 0)

    def _may_be_of_examples(self, lengths: Sequence[Optional[int]]) -> bool:
        """Whether an axis that is not the first may be the examples."""
        assert self._rows is not None
        count = tf.get_static_value(tf.convert_to_tensor(self._rows.count))
        return None in lengths or (count is not None and int(count) > 1 and int(count) in lengths)

    def _source(self, op: RandomOp) -> Source:
        if op.source is not None:
            return op.source
        # Some Keras count the seed of a layer up with each trace, hence for a loop after its first micro-batch.
        own = self._own.setdefault(self.number, _tf.random_ops.own_seed(op.output.op))
        seed = self._seed_of_batch()
        if own is not None:  # of the layer, where the program has none
            seed = tf.stack([tf.constant(own, tf.int64), seed[1]])
        return _tf.random_ops.source_of(seed + tf.constant([0, self.number << 32], tf.int64))

    def _seed_of_batch(self) -> tf.Tensor:
        if self._seed is None:
            with _tf.graphs.in_graph_context(self._context):
                self._seed = self._new_seed()
        return self._seed

    def _drawn_rows(self, op: Any) -> tf.Tensor:
        """Return the rows of the examples in what the operation would return for the batch."""
        assert self._rows is not None
        source, dtype = self._source(op), op.output.dtype
        begin, count = (tf.cast(number, tf.int64) for number in (self._rows.begin, self._rows.count))
        begin += self._before(op)
        shape = tf.cast(op.shape, tf.int64)
        if self._rows.chosen is not None:
            return self._chosen_or_other(op, source, shape, count, self._rows.chosen)
        per_count = _tf.random_ops.numbers_per_count(op.kind, dtype)
        if source.counter is None or per_count is None or self._compiled:
            return self._cut(op, source, shape, begin, count)
        size = tf.reduce_prod(shape)
        first = begin * (size // tf.maximum(count, 1))
        static = _static_shape(op)[1:]
        numbers = tf.TensorShape(static).num_elements()  # of each row
        if static and numbers is not None and not numbers % per_count:  # then every row begins with a count
            return _tf.random_ops.draw(
                op.kind, op.shape, _tf.random_ops.advanced(source, first // per_count), *_numbers(op)
            )
        # Always as many, because XLA has to know how many.
        flat = _tf.random_ops.draw(
            op.kind, [size + per_count - 1], _tf.random_ops.advanced(source, first // per_count), *_numbers(op)
        )
        return tf.reshape(tf.slice(flat, [first % per_count], [size]), op.shape)

    def _chosen_or_other(
        self, op: RandomOp, source: Source, shape: tf.Tensor, count: tf.Tensor, chosen: Chosen
    ) -> tf.Tensor:
        """Return the rows of examples, or other numbers if the first axis is that of the values of a ragged tensor."""
        if chosen.padded is not None or _static_shape(op)[0] is not None:
            return self._chosen_rows(op, source, shape, count, chosen)
        assert op.kind is not None
        kind: str = op.kind
        place = tf.cast(tf.reduce_max(chosen.places), tf.int64)  # another one for each micro-batch
        other = (
            Source(seed=source.seed + tf.cast(place, source.seed.dtype))
            if source.counter is None
            else _tf.random_ops.advanced(source, place * 2**32)
        )
        return tf.cond(
            tf.equal(shape[0] % tf.maximum(count, 1), 0),
            lambda: self._chosen_rows(op, source, shape, count, chosen),
            lambda: _tf.random_ops.draw(kind, op.shape, other, *_numbers(op)),
        )

    def _chosen_rows(
        self, op: RandomOp, source: Source, shape: tf.Tensor, count: tf.Tensor, chosen: Chosen
    ) -> tf.Tensor:
        """Return the rows of examples that do not follow each other, without the time steps that were trimmed."""
        assert op.kind is not None
        kind: str = op.kind
        rows = shape[0] // tf.maximum(count, 1)  # of each example
        own = tf.concat([[rows], shape[1:]], 0)
        whole = self._untrimmed(op, own, chosen)
        places = tf.cast(chosen.places, tf.int64) + self._before(op)
        per_count = _tf.random_ops.numbers_per_count(kind, op.output.dtype)
        if source.counter is None or per_count is None or self._compiled:
            # XLA has to know how many, and compiles for each number that it is told.
            total = tf.cast(self._total, tf.int64) if self._compiled else tf.reduce_max(places) + 1
            drawn = _tf.random_ops.draw(kind, tf.concat([[total * whole[0]], whole[1:]], 0), source, *_numbers(op))
            drawn = tf.gather(tf.reshape(drawn, tf.concat([[total], whole], 0)), places)
            sizes = tf.concat([[count], own], 0)
            return tf.reshape(tf.slice(drawn, tf.zeros_like(sizes), sizes), op.shape)
        size = tf.reduce_prod(whole)
        # Only the numbers up to the last that is needed: if all of them follow each other, no others.
        needed = tf.reduce_prod(own) if _is_prefix(op) else size

        def drawn_at(place: tf.Tensor) -> tf.Tensor:
            first = place * size
            moved = _tf.random_ops.advanced(source, first // per_count)
            flat = _tf.random_ops.draw(kind, [needed + per_count - 1], moved, *_numbers(op))
            example = tf.slice(flat, [first % per_count], [needed])
            return example if _is_prefix(op) else tf.slice(tf.reshape(example, whole), tf.zeros_like(own), own)

        return tf.reshape(_of_each(drawn_at, places, op.output.dtype), op.shape)

    @staticmethod
    def _untrimmed(op: RandomOp, own: tf.Tensor, chosen: Chosen) -> tf.Tensor:
        """Return the shape that an example of shape `own` has in the batch."""
        if chosen.padded is None:
            return own
        following = _tf.random_ops.drawn_shape(op)[1:]
        # Several rows of an example may be its time steps, as in `TimeDistributed`, if no other axis is the time.
        may_be_time = tf.constant([None not in following] + [length is None for length in following])
        is_time = may_be_time & tf.equal(own, tf.cast(chosen.length, tf.int64))
        return tf.where(is_time, tf.cast(chosen.padded, tf.int64), own)

    def _before(self, op: RandomOp) -> Scalar:
        """Return how many examples were before those of the batch."""
        if self._base is None:
            return 0
        try:
            if not self._compiled:
                return self._base()
        except LookupError:
            pass
        self.others.append(op.output.op.name)
        return 0

    def _cut(self, op: Any, source: Source, shape: tf.Tensor, begin: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        static = [_static_shape(op)[0], self._rows.count, self._total]  # type: ignore[union-attr]
        is_all = self._base is None or self._compiled  # otherwise nobody knows how many examples will follow
        total = tf.cast(self._total, tf.int64) if is_all else begin + count
        rows = shape[0] // tf.maximum(count, 1)
        if is_all and all(isinstance(length, int) for length in static):  # XLA has to know it
            rows = tf.constant(static[0] // max(static[1], 1), tf.int64)
            whole_shape = [static[0] // max(static[1], 1) * static[2]] + _static_shape(op)[1:]
        else:
            whole_shape = tf.concat([[rows * total], shape[1:]], 0)
        whole = _tf.random_ops.draw(op.kind, whole_shape, source, *_numbers(op))
        first = tf.concat([[rows * begin], tf.zeros_like(shape[1:])], 0)
        return tf.slice(whole, tf.cast(first, op.shape.dtype), op.shape)


def _is_prefix(op: RandomOp) -> bool:
    """Whether the numbers of an example without its last time steps are the first ones of all of its numbers."""
    return None not in _tf.random_ops.drawn_shape(op)[2:]


def _of_each(function: Callable[[tf.Tensor], tf.Tensor], places: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return `function(place)` for each of `places`, stacked."""
    results = tf.TensorArray(dtype, size=tf.size(places), infer_shape=False)
    _, results = tf.while_loop(
        lambda number, _: number < tf.size(places),
        lambda number, kept: (number + 1, kept.write(number, function(places[number]))),
        (tf.constant(0), results),
    )
    return results.stack()


def _static_shape(op: RandomOp) -> List[Optional[int]]:
    """Return the lengths of axes, as far as they are known; of an unknown number of axes, the first."""
    return [None] if op.output.shape.rank is None else op.output.shape.as_list()


def _numbers(op: RandomOp) -> Any:
    return op.output.dtype, op.bounds
