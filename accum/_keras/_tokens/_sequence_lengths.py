"""Where each example of a batch ends, for micro-batches by tokens."""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._batch import Size, as_tensor
from accum._keras._tokens._budget import Sequences
from accum._tf import Data, Leaf, Nested, Wait, tf

MASKS = ("attention_mask", "decoder_attention_mask")
"""Keys of inputs that say which tokens are no padding, as models of `transformers` have them."""

OF_DECODER = ("decoder_input_ids", "labels")
"""Keys of inputs that may be longer than the "attention_mask" says, which is that of the encoder."""

LengthsOf = Callable[[Nested], tf.Tensor]


class _Told(NamedTuple):
    """What tells the lengths: the padded inputs, a function of one of them, and whether they are attention masks."""

    inputs: Sequence[tf.Tensor]
    lengths_of: Callable[[tf.Tensor], tf.Tensor]
    are_masks: bool = False


def sequences_of(model: tf.keras.Model, data: Data, lengths_of: Optional[LengthsOf]) -> Sequences:
    """Return the time axis of what Keras gives to a step.

    Args:
      model: a Keras model.
      data: the data of a train, test or predict step.
      lengths_of: function of x that returns the lengths of its examples, an int tensor of shape [n]. None: ragged
        inputs, masks in the inputs, or layers that make a mask of the inputs tell.

    Raises:
      ValueError: nothing tells the lengths, or they can't be those of the inputs.
    """
    x = _tf.losses.unpack_data(data)[0]
    inputs = [as_tensor(leaf) for leaf in tf.nest.flatten(x)]
    ragged = [leaf for leaf in inputs if isinstance(leaf, tf.RaggedTensor)]
    if ragged and lengths_of is None:
        return Sequences(_longest([leaf.row_lengths() for leaf in ragged]), None, [False] * len(tf.nest.flatten(data)))
    if lengths_of is not None:
        padded, checks = _padded_length(_padded_inputs(inputs))
        lengths = _checked(lengths_of(x), inputs, padded)
    else:
        told = _told_by(model, x, inputs)
        padded, checks = _padded_length(told.inputs)
        lengths = _longest([told.lengths_of(leaf) for leaf in told.inputs])
    leaves = [as_tensor(leaf) for leaf in tf.nest.flatten(data)]
    are_timed = [_is_timed(leaf, padded) for leaf in leaves]
    checks += [_same_length(leaf, padded) for leaf, is_timed in zip(leaves, are_timed) if is_timed]
    if lengths_of is None and told.are_masks and MASKS[1] not in x:
        tokens = [as_tensor(x[name]) for name in OF_DECODER if x.get(name) is not None]
        checks += [_no_token(leaf, lengths) for leaf in tokens if _rank(leaf) == 2 and _is_timed(leaf, padded)]
    _check_inputs_of_model(model, padded)
    with tf.control_dependencies([check for check in checks if check is not None]):
        return Sequences(tf.identity(lengths), padded, are_timed)


def _told_by(model: tf.keras.Model, x: Nested, inputs: Sequence[Leaf]) -> _Told:
    """Return what tells the lengths of the examples in x."""
    masks = [as_tensor(x[name]) for name in MASKS if isinstance(x, dict) and x.get(name) is not None]
    if masks:
        return _Told(masks, _end_of_nonzero, are_masks=True)
    layers = _tf.models.layers_of(model)
    if any(getattr(layer, "mask_zero", False) for layer in layers):
        tokens = [leaf for leaf in inputs if _rank(leaf) == 2]
        integers = [leaf for leaf in tokens if leaf.dtype.is_integer]
        if tokens:
            return _Told(_padded_inputs(integers or tokens), _end_of_nonzero)
    values = [layer.mask_value for layer in layers if isinstance(layer, tf.keras.layers.Masking)]
    features = [leaf for leaf in inputs if (_rank(leaf) or 0) >= 3]
    if values and features:
        return _Told(features, lambda leaf: _end_of(tf.reduce_any(_differs_from_all(leaf, values), axis=-1)))
    raise ValueError(
        "`micro_batch_tokens` needs to know where each sequence ends: pass ragged inputs or a dict with an "
        "'attention_mask', begin the model by `Embedding(…, mask_zero=True)` or `Masking`, or pass `sequence_lengths=`,"
        f" a function of x that returns the lengths of its examples. Received: x of {_described(inputs)}."
        " [accum: tokens-input]"
    )


def _differs_from_all(leaf: tf.Tensor, values: Sequence[Any]) -> tf.Tensor:
    differs = [tf.not_equal(leaf, tf.cast(value, leaf.dtype)) for value in values]
    result = differs[0]
    for other in differs[1:]:
        result = result | other
    return result


def _end_of_nonzero(leaf: tf.Tensor) -> tf.Tensor:
    return _end_of(tf.not_equal(leaf, tf.zeros([], leaf.dtype)))


def _end_of(taken: tf.Tensor) -> tf.Tensor:
    """Return the place after the last true entry along axis 1, over all further axes: int32 [n]."""
    rank = taken.shape.rank
    if rank > 2:
        taken = tf.reduce_any(taken, axis=list(range(2, rank)))
    ends = tf.range(1, tf.shape(taken)[1] + 1)
    return tf.reduce_max(tf.where(taken, ends[None], tf.zeros_like(ends)[None]), axis=1)


def _longest(lengths: Sequence[tf.Tensor]) -> tf.Tensor:
    longest = tf.cast(lengths[0], tf.int32)
    for other in lengths[1:]:
        longest = tf.maximum(longest, tf.cast(other, tf.int32))
    return longest


def _rank(leaf: Leaf) -> Optional[int]:
    return leaf.shape.rank if isinstance(leaf, tf.Tensor) else None


def _padded_inputs(inputs: Sequence[Leaf]) -> List[tf.Tensor]:
    """Return the inputs that have a time axis: of unknown length, or else the longest."""
    timed = [leaf for leaf in inputs if (_rank(leaf) or 0) >= 2]
    if not timed:
        raise ValueError(
            "`micro_batch_tokens` trims the time axis of inputs, axis 1, and no input has one: pass `micro_batch_size`."
            f" Received: x of {_described(inputs)}. [accum: tokens-input]"
        )
    unknown = [leaf for leaf in timed if leaf.shape[1] is None]
    longest = max([leaf.shape[1] for leaf in timed if leaf.shape[1] is not None] or [0])
    return unknown or [leaf for leaf in timed if leaf.shape[1] == longest]


def _padded_length(leaves: Sequence[tf.Tensor]) -> Tuple[Size, List[Wait]]:
    """Return the length of axis 1 of all of some tensors, and checks that it is."""
    lengths = [_length(leaf) for leaf in leaves]
    static = sorted({length for length in lengths if isinstance(length, int)})
    if len(static) > 1:
        raise ValueError(
            "`micro_batch_tokens` trims the inputs of a batch to one length, so they must be padded to one length. "
            f"Received: inputs of lengths {static}. [accum: tokens-input]"
        )
    return lengths[0], [_same_length(leaf, lengths[0]) for leaf in leaves[1:]]


def _length(leaf: tf.Tensor) -> Size:
    return tf.shape(leaf)[1] if leaf.shape[1] is None else int(leaf.shape[1])


def _same_length(leaf: tf.Tensor, padded: Size) -> Wait:
    if isinstance(padded, int) and leaf.shape[1] is not None:
        return None
    return tf.debugging.assert_equal(
        tf.shape(leaf)[1],
        padded,
        message="`micro_batch_tokens` trims axis 1 of everything in which its length varies, so it must be the same "
        "length: pad all sequences of a batch to one length, or give axis 1 of what is not a sequence a static length."
        " [accum: tokens-padding]",
    )


def _no_token(leaf: tf.Tensor, lengths: tf.Tensor) -> Wait:
    """Check that a leaf has nothing but padding where attention masks say so: in each place, the same for all examples.

    Otherwise it is what a decoder reads or has to predict, which is longer than what the encoder reads.
    """
    is_padding = tf.range(tf.shape(leaf)[1])[None] >= lengths[:, None]
    highest = tf.reduce_max(tf.where(is_padding, leaf, tf.fill(tf.shape(leaf), leaf.dtype.min)), axis=0)
    lowest = tf.reduce_min(tf.where(is_padding, leaf, tf.fill(tf.shape(leaf), leaf.dtype.max)), axis=0)
    return tf.debugging.Assert(
        tf.reduce_all(highest <= lowest),
        [
            "`micro_batch_tokens` trims sequences where the 'attention_mask' ends, and 'decoder_input_ids' or 'labels' "
            "have tokens there: add a 'decoder_attention_mask', or pass `sequence_lengths=`, a function of x that "
            "returns the length of the longer of both."
        ],
    )


def _is_timed(leaf: Leaf, padded: Size) -> bool:
    """Whether axis 1 of a leaf is the time: it is as long, or as unknown."""
    if (_rank(leaf) or 0) < 2:
        return False
    static = leaf.shape[1]
    return static is None if not isinstance(padded, int) else static == padded


def _checked(lengths: Any, inputs: Sequence[Leaf], padded: Size) -> tf.Tensor:
    """Check the lengths that a function of the user's has returned."""
    lengths = tf.convert_to_tensor(lengths)
    if lengths.shape.rank != 1 or not lengths.dtype.is_integer:
        raise ValueError(
            "`sequence_lengths` must return an int tensor of shape [examples]. Received: shape "
            f"{lengths.shape} of {lengths.dtype.name}."
        )
    lengths = tf.cast(lengths, tf.int32)
    message = "`sequence_lengths` must return one length for each example, none longer than the padded sequences."
    batched = next(leaf for leaf in inputs if (_rank(leaf) or 0) >= 1)
    checks = [
        tf.debugging.assert_equal(tf.size(lengths), tf.shape(batched)[0], message=message),
        tf.debugging.assert_less_equal(lengths, padded, message=message),
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(lengths)


def _check_inputs_of_model(model: tf.keras.Model, padded: Size) -> None:
    """Raise if a functional model expects sequences of one length."""
    if tf.executing_eagerly() and not isinstance(padded, int):
        return
    functional = [part for part in [model] + _tf.models.layers_of(model) if _tf.models.is_layered_model(part)]
    fixed = []
    for part in functional:
        shapes = [getattr(tensor, "shape", None) for tensor in tf.nest.flatten(getattr(part, "inputs", None) or [])]
        listed = [tf.TensorShape(shape).as_list() for shape in shapes if shape is not None]
        fixed += [shape for shape in listed if len(shape) >= 2 and shape[1] is not None and shape[1] == padded]
    if fixed:
        raise ValueError(
            "`micro_batch_tokens` trims the time axis, and the model has inputs of one length: create them with "
            f"`tf.keras.Input((None, …))`. Received: inputs of shape {[tuple(shape) for shape in fixed]}."
            " [accum: tokens-input]"
        )


def _described(inputs: Sequence[Leaf]) -> str:
    return ", ".join(f"{leaf.dtype.name}{leaf.shape}" if hasattr(leaf, "shape") else repr(leaf) for leaf in inputs)
