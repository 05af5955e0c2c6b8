"""Type aliases for signatures."""

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from accum._tf._version import tf

AccumSteps = Union[int, Dict[int, int]]
"""Micro steps per step, or a schedule `{first step: accum_steps}`."""

Gradient = Union[tf.Tensor, tf.IndexedSlices]

GradsAndVars = Sequence[Tuple[Optional[Gradient], tf.Variable]]

Transform = Callable[[List[Tuple[Optional[Gradient], tf.Variable]]], Iterable[Tuple[Optional[Gradient], tf.Variable]]]
"""A function that changes the gradients of a step, such as clipping."""

Scalar = Union[int, float, tf.Tensor]

Names = Union[Sequence[str], Callable[[Any], bool]]
"""Names of variables, or a function that selects variables."""

MicroBatchWeight = Union[str, Callable[[Any, Any, Any], Scalar]]
"""How to weight a micro-batch: a named rule, or a function of `(x, y, sample_weight)`."""

MicroBatchSize = Union[int, str, None]
"""The largest number of examples in a micro-batch, or "auto"."""
