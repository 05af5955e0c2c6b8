"""Type aliases for signatures."""

from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

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

if TYPE_CHECKING:
    from typing import Literal  # novm

    Auto = Literal["auto"]
    LastCycle = Literal["flush", "carry", "drop"]
    Nonfinite = Literal["propagate", "skip_micro", "skip_cycle"]
    Reduction = Literal["mean", "sum", "running_mean"]
    Sparse = Literal["rows", "dense"]
    WeightRule = Literal["examples", "equal"]
    WholePart = Literal["all", "batch_norm", "loss"]
else:  # Python 3.6 and 3.7 have no `Literal`
    Auto = LastCycle = Nonfinite = Reduction = Sparse = WeightRule = WholePart = str

MicroBatchWeight = Union[WeightRule, Callable[[Any, Any, Any], Scalar]]
"""How to weight a micro-batch: a named rule, or a function of `(x, y, sample_weight)`."""

MicroBatchSize = Union[int, Auto, None]
"""The largest number of examples in a micro-batch, or "auto"."""

WholeBatch = Union[WholePart, Sequence[WholePart]]
"""What is computed over the whole batch."""

ReplicasPerGroup = Union[int, Dict[WholePart, Optional[int]], None]
"""The number of replicas whose examples are put together; None: all."""
