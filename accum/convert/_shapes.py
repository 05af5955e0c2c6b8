"""How the values of one shape are arranged in another: without dimensions of 1, with some split, or transposed."""

from accum.convert._report import ConversionError


def arrangement(source, target):
    """Return "" for the same shape, "reshaped" or "transposed"; None if the values can't be arranged so.

    A shape is another one reshaped if one of them is the other with neighbouring dimensions merged: GPT-2's
    [1, 8, 24] is [8, 24], and the [8, 8] of a dense layer is the [8, 2, 4] of attention with two heads.
    """
    source, target = tuple(source), tuple(target)
    if source == target:
        return ""
    ours, theirs = ([size for size in shape if size != 1] for shape in (source, target))
    if _merges(ours, theirs) or _merges(theirs, ours):
        return "reshaped"
    return "transposed" if len(source) == 2 and source == target[::-1] else None


def arranged(value, target, name, is_sparse=False):
    """Return `value` in the shape `target`, and the word for what was done."""
    words = arrangement(value.shape, target)
    if words is None or (is_sparse and words and tuple(value.shape)[:1] != tuple(target)[:1]):
        raise ConversionError(f"{name} has shape {list(value.shape)}, which can't be arranged as {list(target)}.")
    if words == "transposed":
        return value.T.copy(), words
    return value.reshape(target), words


def _merges(long, short):
    """Whether multiplying neighbours in `long` can give `short`."""
    rest = list(long)
    for size in short:
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest
