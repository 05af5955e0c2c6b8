"""A `ReportingLoss` reports the number by which a loss divides, each time that it is computed (law L5)."""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from accum import _tf
from accum._engine import _replicas
from accum._keras import _step_context
from accum._keras._steps._added_losses import is_of_no_example
from accum._tf import Nested, tf
from accum._tf.types import KerasContainer


class SeenLoss(NamedTuple):
    """A compiled loss that has been computed.

    Attributes:
      name: of its output.
      loss: an object whose `call` is its function.
      target, output: what it was computed of, for any number of examples.
      is_counted: whether the number by which it divides is known and reported.
      is_weighted: whether its output has a mask or, in Keras 3, its examples have weights. Keras 2 refuses these if the
        loss returns one number.
    """

    name: str
    loss: Any
    target: tf.TensorSpec
    output: tf.TensorSpec
    is_counted: bool
    is_weighted: bool


class ReportingLoss:
    """Wrap Keras' container of compiled losses, and report their denominator if it is not the number of examples.

    Args:
      model: a `GradientAccumulateModel`.
      container: the container that Keras' `compile` made; all other attributes are read from it.
      report: function of the denominator, a float32 scalar tensor; None: report nothing.

    Attributes:
      container: the same.
      unlike: names of losses, of outputs or added by layers, that divide by different numbers -> what each divides by.
      has_warned: whether the user has been told.
      calls: the losses that were last computed.
      outputs: {replica: outputs of the model that losses were last computed of, in a train step that is traced}.
    """

    def __init__(
        self, model: tf.keras.Model, container: KerasContainer, report: Optional[Callable[[tf.Tensor], None]]
    ) -> None:
        self._model = model
        self.container = container
        self._report = report
        self.unlike: Dict[str, str] = {}
        self.has_warned = False
        self.calls: List[SeenLoss] = []
        self.outputs: Dict[int, List[tf.Tensor]] = {}
        # Replica -> what calls in its current train step have reported and returned.
        self._reported: Dict[int, List[Tuple[List[tf.Tensor], tf.Tensor]]] = {}

    @contextlib.contextmanager
    def of_train_step(self) -> Iterator[None]:
        """Look for terms beside the compiled losses in this context, in which a replica runs a train step."""
        replica = _replicas.replica_number()
        self._reported[replica] = []
        try:
            yield
        finally:  # tensors keep their graph
            self._reported.pop(replica, None)
            self.outputs.pop(replica, None)

    def compare(self, total: Any, added: Sequence[tf.Tensor]) -> None:
        """Note whether what a `compute_loss` of the user's returns has terms beside the compiled losses, in a graph.

        Args:
          total: what it has returned.
          added: the losses that layers have added.
        """
        compiled = [returned for _, returned in self._reported.get(_replicas.replica_number(), ())]
        if not compiled or tf.executing_eagerly() or not isinstance(total, tf.Tensor):
            return
        if total.graph is compiled[0].graph and not _adds_up(total, [*compiled, *added]):
            self.unlike = {"compiled losses": "elements that count", "terms of `compute_loss`": "examples"}

    def __call__(
        self, y_true: Nested, y_pred: Nested, sample_weight: Nested = None, *args: object, **kwargs: object
    ) -> tf.Tensor:
        context = _step_context.of_model(self._model)
        if context.replica_losses is None:
            return self._computed(y_true, y_pred, sample_weight, *args, **kwargs)
        with context.replica_losses.compiled(self.container, y_true, y_pred, sample_weight) as gathered:
            return self._computed(*gathered, *args, **kwargs)

    def _computed(
        self, y_true: Nested, y_pred: Nested, sample_weight: Nested, *args: object, **kwargs: object
    ) -> tf.Tensor:
        trimmed = _step_context.of_model(self._model).trimmed
        changed = _tf.losses.zero_if_all_are_ignored(self.container) if trimmed is None else trimmed.scaled
        if self._report is None and changed is None:
            return self.container(y_true, y_pred, sample_weight, *args, **kwargs)
        outputs, weights = _tf.losses.without_empty_masks(y_pred, sample_weight)
        with _tf.losses.recording_losses(self.container, y_true, y_pred, changed) as calls:
            total = self.container(y_true, outputs, weights, *args, **kwargs)
        if self._report is None:
            return total
        if not tf.executing_eagerly() and _replicas.replica_number() in self._reported:
            self.outputs[_replicas.replica_number()] = [one.output for one in calls if _are_dense(one)]
        named = _tf.losses.counted_by_losses(calls)
        counted = {name for name, one in named if one is not None}
        self.calls = [_seen(one, one.name in counted) for one in calls if _are_dense(one)]
        numbers = [one for _, one in named]
        if numbers and not any(one is None for one in numbers):
            # Exact if all outputs share the same mask and weights.
            self._report(tf.add_n([tf.reduce_sum(one) for one in numbers]))
            reported = self._reported.get(_replicas.replica_number())
            if reported is not None:
                if not _divide_alike([one for before, _ in reported for one in before] + numbers):
                    self.unlike = {"compiled losses": "elements that count", "their second call": "other elements"}
                reported.append((numbers, total))
        if _tf.steps.added_losses(self._model):
            named.append(("losses that layers add", None))
        if not _divide_alike([one for _, one in named]):
            self.unlike = {name: "examples" if one is None else "elements that count" for name, one in named}
        return total

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "container" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.container, name)


def _are_dense(call: _tf.losses.LossCall) -> bool:
    return all(isinstance(one, tf.Tensor) and one.shape.rank for one in (call.target, call.output))


def _seen(call: _tf.losses.LossCall, is_counted: bool) -> SeenLoss:
    is_weighted = call.weights is not None or _tf.losses.mask_of(call.output) is not None
    return SeenLoss(call.name, call.loss, _spec(call.target), _spec(call.output), is_counted, is_weighted)


def _spec(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return the spec of a tensor for any number of examples."""
    return tf.TensorSpec([None] + tensor.shape.as_list()[1:], tensor.dtype)


def _divide_alike(counted: Sequence[Optional[tf.Tensor]]) -> bool:
    """Whether the numbers by which losses divide are in the same proportion in all micro-batches, as far as is known.

    Args:
      counted: for each loss, what each element counts; None: 1 each.
    """
    if all(one is None for one in counted):
        return True
    if tf.executing_eagerly():
        shares = [1.0 if one is None else float(tf.reduce_mean(one)) for one in counted]
        return np.allclose(shares, shares[0])
    first, *others = [one for one in counted if one is not None]
    return None not in counted and all(_tf.op_walks.are_alike(first, one, but_for_shapes=True) for one in others)


# Operations whose gradient reaches all their inputs alike, so that their output is a sum of terms, perhaps scaled.
_SUMMING = frozenset(
    ["Add", "AddN", "AddV2", "Cast", "CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "Mean"]
    + ["Neg", "Pack", "Reshape", "Squeeze", "StridedSlice", "Sub", "Sum"]
)


def _adds_up(total: tf.Tensor, losses: Sequence[tf.Tensor]) -> bool:
    """Whether a loss in a graph is a sum of compiled and added losses, and of terms that depend on no example."""
    ends, waiting = {loss.name for loss in losses}, [total]
    while waiting:
        term = waiting.pop()
        if term.name in ends or term.op.type == "Const":
            continue
        if term.op.type in _SUMMING:
            waiting.extend(term.op.inputs)
        elif term.op.type in ("Mul", "RealDiv") and any(is_of_no_example(factor) for factor in term.op.inputs):
            waiting.extend(factor for factor in term.op.inputs if not is_of_no_example(factor))
        elif not is_of_no_example(term):
            return False
    return True
