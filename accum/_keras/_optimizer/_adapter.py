"""The adapter through which the engine uses a Keras optimizer."""

import contextlib
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._interfaces import OptimizerAdapter
from accum._keras._optimizer._internals import internals_of
from accum._tf import Gradient, GradsAndVars, Transform, Wait, tf


class KerasAdapter(OptimizerAdapter):
    """Lets the engine use a Keras optimizer.

    Args:
      wrapper: the `GradientAccumulateOptimizer`.
      name: prefix of the names of variables.
    """

    def __init__(self, wrapper: tf.keras.optimizers.Optimizer, name: str) -> None:
        self.name = name
        self._wrapper = wrapper
        self._keras_variables: Dict[int, tf.Variable] = {}  # variable key -> the `keras.Variable` around it, in Keras 3

    def scalar(self, name: str, initial_value: tf.Tensor, per_replica: bool = False) -> tf.Variable:
        name = f"{self.name}/{name}"
        with _tf.variables.on_host() if initial_value.dtype in (tf.int64, tf.bool) else contextlib.ExitStack():
            return _tf.variables.new_keras_variable(self._wrapper, name, initial_value, per_replica)

    def buffer(self, var: tf.Variable, name: str, shape: tf.TensorShape, dtype: tf.DType) -> tf.Variable:
        name = f"{var.name.split(':')[0]}/{self.name}/{name}"
        with tf.distribute.get_strategy().extended.colocate_vars_with(var):
            return _tf.variables.new_keras_variable(self._wrapper, name, tf.zeros(shape, dtype), per_replica=True)

    def check(self, variables: Sequence[tf.Variable]) -> None:
        overwritten = [var.name for var in variables if _tf.variables.is_overwritten(self._as_given(var))]
        if overwritten:
            raise ValueError(
                "A variable that is overwritten with its gradient, such as a float8 scale, has no mean over "
                f"micro-batches, so it can't be trained with accumulation. Received: {overwritten}. [accum: gradients]"
            )
        refused = _tf.inner_optimizer.refused_by_inner(self._wrapper.optimizer, variables)
        if refused:
            raise ValueError(
                "The inner optimizer has been built for a list of variables, to which no others can be added: call "
                "`build` with all variables first, or create a new optimizer. Received: "
                f"{[var.name for var in refused]}. [accum: variable-list]"
            )

    def unwrapped(
        self, grads_and_vars: Iterable[Tuple[Optional[Gradient], tf.Variable]]
    ) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        """Convert the user's pairs to a list of (gradient, `tf.Variable`), which the engine needs."""
        listed = list(grads_and_vars)
        if not _tf.version.WRAPS_VARIABLES or any(
            not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in listed
        ):
            return listed  # anything that is not a pair raises an error later, in `_check.pairs`
        self._keras_variables.update((_tf.variables.key_of(var), var) for _, var in listed)
        return [(grad, _tf.variables.native(var)) for grad, var in listed]

    def wrapped(
        self, grads_and_vars: Iterable[Tuple[Optional[Gradient], tf.Variable]]
    ) -> List[Tuple[Optional[Gradient], tf.Variable]]:
        """Convert the engine's pairs back, to pairs with the variables that the user passed."""
        return [(grad, self._as_given(var)) for grad, var in grads_and_vars]

    def _as_given(self, var: tf.Variable) -> tf.Variable:
        return self._keras_variables.get(_tf.variables.key_of(var), var) if _tf.version.WRAPS_VARIABLES else var

    def prepare(self, variables: Sequence[tf.Variable], used: Sequence[tf.Variable] = ()) -> None:
        variables, used = ([self._as_given(var) for var in group] for group in (variables, used))
        _tf.inner_optimizer.prepare(self._wrapper.optimizer, variables, used)

    def takes_some_variables(self) -> bool:
        return _tf.inner_optimizer.takes_some_variables(self._wrapper.optimizer)

    def tell_of_update(self, grads_and_vars: GradsAndVars, changed: GradsAndVars) -> Sequence[Wait]:
        return internals_of(self._wrapper).tell_of_update(grads_and_vars, changed)

    def transformed(self, transform: Transform, grads_and_vars: GradsAndVars) -> GradsAndVars:
        return self.unwrapped(transform(self.wrapped(grads_and_vars)))

    def make_step(self, grads_and_vars: GradsAndVars, replicas: int) -> Optional[tf.Operation]:
        with _tf.inner_optimizer.without_sum_of_one(self._wrapper.optimizer):
            return _tf.inner_optimizer.awaited(self.apply(grads_and_vars, replicas))

    def apply(self, grads_and_vars: GradsAndVars, replicas: int) -> Wait:
        """Call the inner optimizer, here and nowhere else. Returns what it returns."""
        return _tf.inner_optimizer.apply(self._wrapper.optimizer, self.wrapped(grads_and_vars), replicas)

    def steps(self) -> tf.Tensor:
        return _tf.variables.native(self._wrapper.iterations)
