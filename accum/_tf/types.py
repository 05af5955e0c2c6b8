"""Type aliases for signatures."""

from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import numpy as np

from accum._tf.version import tf

AccumSteps = Union[int, Dict[int, int]]
"""Micro steps per step, or a schedule `{first step: accum_steps}`."""

Gradient = Union[tf.Tensor, tf.IndexedSlices]

GradsAndVars = Sequence[Tuple[Optional[Gradient], tf.Variable]]

Transform = Callable[[List[Tuple[Optional[Gradient], tf.Variable]]], Iterable[Tuple[Optional[Gradient], tf.Variable]]]
"""A function that changes the gradients of a step, such as clipping."""

Scalar = Union[int, float, tf.Tensor]

Dtype = Union[str, type, np.dtype, tf.DType]

Wait = Union[tf.Tensor, tf.Operation, None]
"""What later operations wait for; None: nothing."""

LearningRate = Union[float, tf.Tensor, tf.Variable, Callable[..., tf.Tensor]]
"""A number, or a schedule, which is a function of the step."""

LossOrFunction = Union[tf.Tensor, Callable[[], tf.Tensor]]

VariablesOrFunction = Union[Sequence[tf.Variable], Callable[[], Sequence[tf.Variable]]]

# What can be anything, and what it is:

Nested = Any
"""A nested structure, as `tf.nest` takes it apart: tuples, lists and dicts of tensors, or a tensor alone."""

Leaf = Any
"""What a nested structure holds in one place: a tensor of any kind, None, or another object, which is passed on."""

Data = Any
"""What Keras passes to a step for a batch: `x`, `(x, y)` or `(x, y, sample_weight)`, each of them nested."""

Logs = Any
"""What a step returns: {name: number} from a step of Keras, any nested structure from one of the user's."""

PerReplica = Any
"""A value on each replica: a `tf.distribute.DistributedValues`, or the value itself if there is one replica."""

KerasContainer = Any
"""What Keras keeps compiled losses or metrics in: a private class, which differs between versions."""

Config = Dict[str, Any]
"""What `get_config` returns: values of JSON, and objects of Keras that it can serialize."""

CustomObjects = Optional[Dict[str, Any]]
"""The user's classes and functions by the names that a config has for them."""

Options = Dict[str, Any]
"""Arguments by their names."""

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

SequenceLengths = Callable[[Any], Any]
"""A function of x that returns the lengths of its examples, an int tensor of shape [examples]."""

WholeBatch = Union[WholePart, Sequence[WholePart]]
"""What is computed over the whole batch."""

ReplicasPerGroup = Union[int, Dict[WholePart, Optional[int]], None]
"""The number of replicas whose examples are put together; None: all."""
