"""The weight of the micro-batch that a model is trained on."""

from typing import Optional, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._tf import Scalar, tf


class WeightVariable:
    """Holds the weight of each replica's micro-batch, a float32 scalar.

    It is a variable because a `tf.function` in a train step, once traced, is called again for the next micro-batch.

    Attributes:
      was_replaced: whether a train step has ever replaced the weight that a micro-batch began with.
    """

    def __init__(self) -> None:
        self.was_replaced = False
        self._variable: Optional[tf.Variable] = None

    def begin(self, weight: Optional[Scalar]) -> Union[Scalar, tf.Variable, None]:
        """Set the weight of a new micro-batch.

        Returns:
          The variable, or None for the weight None.

        Raises:
          ValueError: the weight is negative.
        """
        if weight is None:
            return None
        _check.not_negative("micro_batch_weight", weight, _tf.variables.known_value(weight))
        self.create()
        self._assign(weight)
        return self._variable

    def create(self) -> None:
        """Create the variable, if there is none."""
        if self._variable is None:
            with tf.init_scope():
                self._variable = _tf.variables.new_statistic("micro_batch_weight", [], tf.float32)

    def replace(self, weight: Scalar) -> None:
        """Replace the weight of the micro-batch, if it has one."""
        self.was_replaced = True
        if self._variable is not None:
            self._assign(weight)

    def _assign(self, weight: Scalar) -> None:
        _replicas.local_variable(self._variable).assign(tf.cast(weight, tf.float32))

    @staticmethod
    def read(variable: Union[Scalar, tf.Variable, None]) -> Optional[Scalar]:
        """Return the value of what `begin` returned."""
        return None if variable is None else _replicas.local_variable(variable).read_value()
