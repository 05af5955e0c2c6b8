"""Recognise a file that speaks of gradient accumulation, by its words alone: in code, comments and strings."""

import re

from accum._migrate import guide

REASON = (
    "this file mentions gradient accumulation, but its code was not recognised. Look here; if it accumulates, "
    + guide.see("Loops of your own")
)
# `gradient_accumulation_steps` is followed as an argument of Keras; AdaGrad has accumulators too.
WORDS = re.compile(
    rb"(?<![a-z])grad(ient)?s?[ _-]?accum(?!ulation_steps|ulators)"
    rb"|accumulat(e|es|ed|ing|ion[ _]of)[ _](the[ _])?(\w+[ _])?grad"
    rb"|(?<!gradient_)accum(ulation|ulate)?_(steps|iters|freq|num)\b|\biter_size\b|\bnum_accum",
    re.IGNORECASE,
)
OF_TENSORFLOW = re.compile(
    rb"^\s*(import|from)\s+(keras|tensorflow|tensorpack|tf_keras|tf_slim)\b|\bimport (keras|tf)\b|\bas tf$",
    re.MULTILINE,
)
OF_OTHERS = re.compile(rb"^\s*(import|from)\s+(accum|flax|jax|mxnet|paddle|torch|transformers)\b", re.MULTILINE)


def find(content):
    """Return the first (line number, word) that speaks of accumulation in the bytes of a TensorFlow file, or None."""
    match = WORDS.search(content)
    if not match or not OF_TENSORFLOW.search(content) or OF_OTHERS.search(content):
        return None
    return content.count(b"\n", 0, match.start()) + 1, match.group().decode()
