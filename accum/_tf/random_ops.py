"""Random operations: note their creation, and draw only a part of their numbers."""

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from accum._tf import op_walks
from accum._tf.graphs import replace_input
from accum._tf.version import tf

try:  # a private module: no public name tells which operations code creates
    from tensorflow.python.framework import op_callbacks
except ImportError:
    op_callbacks = None

PHILOX, PHILOX_BY_DEFAULT = 1, 3
"""The number of the generator Philox in TensorFlow, whose numbers are the same on every device; and of a choice."""

_STATEFUL = {
    "RandomUniform": "RandomUniform",
    "RandomStandardNormal": "RandomNormal",
    "TruncatedNormal": "TruncatedNormal",
    "RandomUniformInt": "RandomUniformInt",
}
_KINDS = ("RandomUniform", "RandomNormal", "TruncatedNormal", "RandomUniformInt", "RandomUniformFullInt")
_BY_SEED = {"Stateless" + kind: kind for kind in _KINDS}
_BY_COUNTER = {"Stateless" + kind + "V2": kind for kind in _KINDS}
_SEEDED_OTHERS = {
    "StatelessMultinomial": 2,
    "StatelessParameterizedTruncatedNormal": 1,
    "StatelessRandomBinomial": 1,
    "StatelessRandomGammaV2": 1,
    "StatelessRandomGammaV3": 2,
    "StatelessRandomPoisson": 1,
}
_SEEDED = {**_SEEDED_OTHERS, **dict.fromkeys(_BY_SEED, 1), **dict.fromkeys(_BY_COUNTER, 2)}
"""Random operations without a state: which of their inputs is the seed, or the counter."""

_OTHERS = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RngReadAndSkip",
    "StatefulRandomBinomial",
    "StatefulStandardNormal",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
    *_SEEDED_OTHERS,
)
"""Random operations whose numbers can't be drawn in part: one takes an unknown number of steps of its generator.

`RngReadAndSkip` is how a `tf.random.Generator` advances, which the first micro-batch would do for the others.
"""


_PYTHON = ("EagerPyFunc", "PyFunc")
"""Operations that run Python, which may draw, unless the function is said to have no state."""

STATEFUL_DRAWS = {"RngSkip", *_STATEFUL, *(kind for kind in _OTHERS if not kind.startswith("Stateless"))}
"""Random operations that draw others when they run again."""

DRAWING = STATEFUL_DRAWS.union(_SEEDED)
"""Random operations."""


class Source(NamedTuple):
    """What random numbers are a function of: a seed, or a key and a counter of a generator.

    Attributes:
      seed: int tensor of shape [2], or None.
      key: uint64 tensor of shape [1].
      counter: uint64 tensor of shape [2].
      generator: int32 scalar tensor.
    """

    seed: Any = None
    key: Any = None
    counter: Any = None
    generator: Any = None


class RandomOp(NamedTuple):
    """A random operation that code has just created.

    Attributes:
      kind: what `draw` takes; None for one whose numbers can't be drawn in part.
      output: the tensor of numbers.
      shape: int tensor, the shape that it draws.
      source: `Source`, or None if it has a state that nobody can read.
      bounds: what follows: of integers, the smallest one and the one after the largest.
    """

    kind: Optional[str]
    output: Any
    shape: Any
    source: Optional[Source]
    bounds: Tuple[Any, ...]


def _random_op(kind: str, inputs: Sequence[Any], output: Any) -> Optional[RandomOp]:
    if kind in _STATEFUL:
        return RandomOp(_STATEFUL[kind], output, inputs[0], None, tuple(inputs[1:]))
    if kind in _BY_SEED:
        return RandomOp(_BY_SEED[kind], output, inputs[0], Source(seed=inputs[1]), tuple(inputs[2:]))
    if kind in _BY_COUNTER:
        return RandomOp(_BY_COUNTER[kind], output, inputs[0], Source(None, *inputs[1:4]), tuple(inputs[4:]))
    return RandomOp(None, output, None, None, ()) if kind in _OTHERS + _PYTHON else None


def random_op_of(op: tf.Operation) -> Optional[RandomOp]:
    """Return what an operation of a graph draws at random, or None if it draws nothing."""
    return _random_op(op.type, list(op.inputs), op.outputs[0]) if op.outputs else None


def is_shuffle(op: RandomOp) -> bool:
    """Whether an operation shuffles the entries of a tensor along the first axis."""
    return op.output.op.type == "RandomShuffle"


def reads_generator(op: RandomOp) -> bool:
    """Whether an operation is how a `tf.random.Generator` advances, for numbers that can be drawn in part."""
    created = op.output.op
    if created.type != "RngReadAndSkip" or not hasattr(tf.raw_ops, "StatelessRandomGetKeyCounter"):  # dies with 2.4
        return False
    generator = tf.get_static_value(created.inputs[1])
    return generator is not None and int(generator) in (PHILOX, PHILOX_BY_DEFAULT)


def state_of_generator(op: RandomOp, seed: Any) -> Any:
    """Return what an operation that `reads_generator` would, another state for each second number of a seed."""
    state = tf.raw_ops.ReadVariableOp(resource=op.output.op.inputs[0], dtype=tf.int64)
    made = source_of(tf.stack([tf.bitwise.bitwise_xor(state[0], state[2]), seed[1]]))
    return tf.bitcast(tf.concat([made.counter, made.key], 0), tf.int64)


def draws_for_all(op: tf.Operation) -> bool:
    """Whether an operation draws something else than one number, or some for each of an unknown number of examples."""
    drawn = random_op_of(op)
    if drawn is None:
        return False
    shape = drawn_shape(drawn)
    return drawn.kind is None or (bool(shape) and (shape[0] is not None or is_by_another_axis(drawn)))


def is_by_another_axis(op: RandomOp) -> bool:
    """Whether the first axis that an operation draws is as long as one of a tensor that is not its first.

    Or as the first of a tensor that is made of no data, such as a part of a table as long as time steps.
    """
    length, place = op.shape, 0
    while isinstance(length, tf.Tensor):
        made = length.op
        if made.type in ("Cast", "Identity", "Reshape") or (made.type == "ConcatV2" and place == 0):
            length = made.inputs[0]
        elif made.type == "Pack" and 0 <= place < len(made.inputs):
            length, place = made.inputs[place], 0
        elif made.type == "StridedSlice":
            begin = tf.get_static_value(made.inputs[1])
            if begin is None or len(begin) != 1 or (begin[0] < 0 and place):
                return False
            length, place = made.inputs[0], place + int(begin[0])
        elif made.type == "Shape":
            rank = made.inputs[0].shape.rank
            if place < 0 and rank is None:
                return False
            return (place % rank if rank else place) != 0 or op_walks.depends_on_variables_alone(
                made.inputs[0], or_lengths=True
            )
        else:
            return False
    return False


def drawn_shape(op: RandomOp) -> List[Optional[int]]:
    """Return the lengths of axes that an operation draws, as far as they are known.

    TensorFlow 2.2 loses the static lengths of a shape that is stacked from those of a tensor (`SpatialDropout1D`).
    """
    shape: List[Optional[int]] = [None] if op.output.shape.rank is None else op.output.shape.as_list()
    made = op.shape.op if isinstance(op.shape, tf.Tensor) else None
    if made is None or made.type != "Pack" or len(made.inputs) != len(shape):
        return shape
    return [_length_of(axis) if length is None else length for length, axis in zip(shape, made.inputs)]


def _length_of(axis: Any) -> Optional[int]:
    """Return a length that is taken from the shape of a tensor, if that is known."""
    if axis.op.type != "StridedSlice" or axis.op.inputs[0].op.type != "Shape":
        return None
    shape = axis.op.inputs[0].op.inputs[0].shape
    begin = tf.get_static_value(axis.op.inputs[1])
    if shape.rank is None or begin is None or len(begin) != 1 or axis.shape.rank != 0:
        return None
    length: Optional[int] = shape.as_list()[int(begin[0])]
    return length


class _OfThread(threading.local):
    """What replaces random operations in this thread."""

    replace: Optional[Callable[[RandomOp], Any]] = None


_OF_THREAD = _OfThread()
_WATCHED: Dict[int, int] = {}
"""How many contexts need a list of callbacks of TensorFlow's, by its id. The replicas of a strategy share one."""

_LOCK = threading.Lock()


def _created(kind: str, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> Any:
    """TensorFlow calls this for each operation that code has created."""
    del attributes, op_name
    if graph is None or not outputs or _OF_THREAD.replace is None:
        return None
    op = _random_op(kind, inputs, outputs[0])
    if op is None or "Initializer" in op.output.op.name.split("/"):  # the value of a variable
        return None
    new = _OF_THREAD.replace(op)
    return None if new is None else [new]  # TensorFlow adds to the list that it has


@contextlib.contextmanager
def _watching_creation() -> Iterator[None]:
    if hasattr(op_callbacks, "op_callback"):  # dies with 1.15
        with op_callbacks.op_callback(_created):
            yield
        return
    callbacks = id(op_callbacks.context.context().op_callbacks)
    with _LOCK:
        if not _WATCHED.get(callbacks):
            op_callbacks.add_op_callback(_created)
        _WATCHED[callbacks] = _WATCHED.get(callbacks, 0) + 1
    try:
        yield
    finally:
        with _LOCK:
            _WATCHED[callbacks] -= 1
            if not _WATCHED[callbacks]:
                del _WATCHED[callbacks]
                op_callbacks.remove_op_callback(_created)


@contextlib.contextmanager
def replacing(replace: Callable[[RandomOp], Any]) -> Iterator[None]:
    """Give the code in this context, and in this thread, other tensors than its random operations return, in a graph.

    Within another such context, the inner one replaces.

    Args:
      replace: function of a `RandomOp` that returns a tensor like its output, or None to leave it.
    """
    if tf.executing_eagerly():  # where TensorFlow ignores what is returned
        yield
        return
    if op_callbacks is None:
        raise RuntimeError(
            "On this TensorFlow, accum can't see which operations are created, so dropout would draw other numbers for "
            f"micro-batches: use a version that accum has been tested with. Received: TensorFlow {tf.__version__}."
            " [accum: install]"
        )
    outer, _OF_THREAD.replace = _OF_THREAD.replace, replace
    try:
        with _watching_creation() if outer is None else contextlib.ExitStack():
            yield
    finally:
        _OF_THREAD.replace = outer


def source_of(seed: tf.Tensor) -> Source:
    """Return the best `Source` that this TensorFlow has for a seed, an int tensor of shape [2]."""
    if not hasattr(tf.raw_ops, "StatelessRandomGetKeyCounter"):  # dies with 2.4
        return Source(seed=seed)
    made = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    return Source(None, made.key, made.counter, tf.constant(PHILOX))


def draw(kind: str, shape: Any, source: Source, dtype: tf.DType, bounds: Sequence[Any]) -> tf.Tensor:
    """Return random numbers.

    Args:
      kind: as `RandomOp` has it.
      shape: int tensor.
      source: what they are a function of.
      dtype: their dtype.
      bounds: as `RandomOp` has them.
    """
    named = dict(zip(("minval", "maxval"), bounds))
    if kind != "RandomUniformInt":
        named["dtype"] = dtype
    if source.seed is not None:
        return getattr(tf.raw_ops, "Stateless" + kind)(shape=shape, seed=source.seed, **named)
    function = getattr(tf.raw_ops, f"Stateless{kind}V2")
    return function(shape=shape, key=source.key, counter=source.counter, alg=source.generator, **named)


def numbers_per_count(kind: str, dtype: tf.DType) -> Optional[int]:
    """Return how many numbers a generator makes while its counter advances by one; None if that is not fixed."""
    if kind == "TruncatedNormal":
        return None
    return 2 if dtype.size == 8 else 4


def advanced(source: Source, count: tf.Tensor) -> Source:
    """Return a `Source` with a counter that is larger by an int64 scalar."""
    moved = tf.bitcast(source.counter, tf.int64) + tf.stack([count, tf.zeros([], tf.int64)])
    return source._replace(counter=tf.bitcast(moved, tf.uint64))


def set_apart(op: RandomOp, number: tf.Tensor) -> None:
    """Let an operation draw other numbers for each number, an int64 scalar; unless it does for each run, by a state."""
    created = op.output.op
    if created.type not in _SEEDED:
        return
    index = _SEEDED[created.type]
    seed = created.inputs[index]
    if seed.dtype == tf.uint64:  # a counter, of which a generator advances the first half
        moved = tf.bitcast(tf.bitcast(seed, tf.int64) + tf.stack([tf.zeros([], tf.int64), number]), tf.uint64)
    else:  # of which Keras advances the second half
        moved = seed + tf.cast(tf.stack([number, tf.zeros([], tf.int64)]), seed.dtype)
    replace_input(created, index, moved)


def advances_its_seed(op: RandomOp) -> bool:
    """Whether an operation takes its seed from a variable to which the same code assigns, as layers of Keras 3 do."""
    created = op.output.op
    waiting = [created.inputs[_SEEDED[created.type]].op] if created.type in _SEEDED else []
    seen = set()
    while waiting:
        current = waiting.pop()
        if current.type == "ReadVariableOp":
            if any(user.type.startswith("Assign") for user in current.inputs[0].consumers()):
                return True
        elif current.name not in seen:
            seen.add(current.name)
            waiting.extend(tensor.op for tensor in current.inputs)
    return False


def seed_of_program() -> Optional[int]:
    """Return the seed that the user has set for the program, or None, in eager execution."""
    seeds: List[Optional[int]] = []
    tf.function(lambda: seeds.append(seed_of_graph())).get_concrete_function()
    return seeds[0]


def seed_of_graph() -> Optional[int]:
    """Return the seed that the user has set for the program, or None, in a graph."""
    return tf.compat.v1.get_default_graph().seed


def own_seed(op: tf.Operation) -> Optional[int]:
    """Return the seed that the user has given to an operation alone, or None."""
    if "seed" not in op.node_def.attr:  # another callback has replaced it
        return None
    is_alone = seed_of_graph() is None and op.get_attr("seed") == 87654321  # which stands for no seed of the program
    return op.get_attr("seed2") if is_alone else None


def next_seed_of_operation() -> Optional[int]:
    """Return a seed for an operation, whatever else is in the graph; None in eager execution."""
    if tf.executing_eagerly():
        return None
    seeds = tf.compat.v1.get_collection_ref("accum_seeds")
    seeds.append(len(seeds))
    return seeds[-1]
