"""What a Keras optimizer lends to the engine."""

import contextlib
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from accum import _check, _tf
from accum._engine._adapter import OptimizerAdapter
from accum._tf import Gradient, GradsAndVars, Transform, tf


class KerasAdapter(OptimizerAdapter):
    """Lends a Keras optimizer to the engine."""

    def __init__(self, wrapper: Any, name: str) -> None:
        self.name = name
        self._wrapper = wrapper
        self._given: Dict[int, Any] = {}  # variable key -> what Keras 3 puts around the variable

    def scalar(self, name: str, initial_value: tf.Tensor, per_replica: bool = False) -> tf.Variable:
        name = f"{self.name}/{name}"
        with _tf.on_host() if initial_value.dtype in (tf.int64, tf.bool) else contextlib.ExitStack():
            return _tf.new_keras_variable(self._wrapper, name, initial_value, per_replica)

    def buffer(self, var: tf.Variable, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Variable:
        name = f"{var.name.split(':')[0]}/{self.name}/{name}"
        with tf.distribute.get_strategy().extended.colocate_vars_with(var):
            return _tf.new_keras_variable(self._wrapper, name, tf.zeros(shape, dtype), per_replica=True)

    def check(self, variables: Sequence[tf.Variable]) -> None:
        overwritten = [var.name for var in variables if _tf.is_overwritten(self._as_given(var))]
        if overwritten:
            raise ValueError(
                "Of a variable that its gradient replaces, such as a scale of float8, there is no mean over "
                f"micro-batches. Received: {overwritten}."
            )
        refused = _tf.refused_by_inner(self._wrapper.optimizer, variables)
        if refused:
            raise ValueError(
                "The inner optimizer was built for other variables, and one of its family takes no more: call "
                "`build` with all of them first, or make a new optimizer. Received: "
                f"{[var.name for var in refused]}."
            )

    def unwrapped(self, grads_and_vars: Iterable[Any]) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        """List of (gradient, `tf.Variable`) from what a user gave: those are the engine's variables."""
        listed = list(grads_and_vars)
        if not _tf.IS_KERAS_3 or any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in listed):
            return listed  # what is no pair is refused where all are checked
        self._given.update((_tf.variable_key(var), var) for _, var in listed)
        return [(grad, _tf.native(var)) for grad, var in listed]

    def wrapped(self, grads_and_vars: Iterable[Any]) -> List[Tuple[Optional[Gradient], Any]]:
        """The same list for Keras and for code of users: with the variables that they gave."""
        return [(grad, self._as_given(var)) for grad, var in grads_and_vars]

    def _as_given(self, var: tf.Variable) -> Any:
        return self._given.get(_tf.variable_key(var), var) if _tf.IS_KERAS_3 else var

    def prepare(self, variables: Sequence[tf.Variable], used: Sequence[tf.Variable] = ()) -> None:
        variables, used = ([self._as_given(var) for var in group] for group in (variables, used))
        _tf.prepare_inner(self._wrapper.optimizer, variables, used)

    def make_step(
        self, grads_and_vars: GradsAndVars, transform: Optional[Transform], replicas: int
    ) -> Optional[tf.Operation]:
        given = self.wrapped(grads_and_vars)
        if transform is not None:
            given = list(transform(given))
            _check.pairs(self.unwrapped(given))
        with _tf.without_sum_of_one(self._wrapper.optimizer):
            return _tf.awaited(_tf.apply_inner(self._wrapper.optimizer, given, replicas))

    def steps(self) -> tf.Tensor:
        return _tf.native(self._wrapper.iterations)
