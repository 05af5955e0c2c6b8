"""Accumulate the gradients of one variable: add those of a micro-batch, read the sum, clear it.

Every method runs on one replica.

A dense buffer is not zeroed between cycles: the first micro-batch of a cycle overwrites it. So a NaN does not outlive
its cycle. The gradient of the last micro-batch is added to the value that is read, and not stored.

If the gradients are `tf.IndexedSlices`, a mask marks the rows that they touch. Only these rows are read, passed to the
inner optimizer and cleared, so a cycle never processes the whole table of an embedding.
"""

from typing import Optional, Set, Union

from accum import _tf
from accum._engine._gradients import weighted
from accum._engine._replicas import local_variable, true_after
from accum._tf import Gradient, Scalar, tf
from accum._tf.graphs import is_ref_variable
from accum._tf.tracking import CheckpointOnly


class Accumulator(CheckpointOnly):
    """The sum of one variable's gradients over the micro steps of a cycle.

    Attributes:
      total: variable of the trainable variable's shape, in the accumulator's dtype.
      rows: bool variable of shape [rows], True for touched rows of `total`; None for dense gradients.
    """

    def __init__(self, total: tf.Variable, rows: Optional[tf.Variable] = None) -> None:
        super().__init__()
        self.total = total
        self.rows = rows

    def start(self, grad: Optional[Gradient], weight: Optional[Scalar]) -> tf.Operation:
        """Overwrite the buffer with `weight * grad`. Returns an op."""
        if self.rows is not None:
            return self.add(grad, weight)  # the end of the last cycle cleared the touched rows
        total = local_variable(self.total)
        if grad is None:
            return total.assign(tf.zeros_like(total), read_value=False)
        if isinstance(grad, tf.IndexedSlices):
            grad = tf.convert_to_tensor(grad)
        return total.assign(weighted(tf.cast(grad, total.dtype.base_dtype), weight), read_value=False)

    def add(self, grad: Optional[Gradient], weight: Optional[Scalar]) -> tf.Operation:
        """Add `weight * grad` to the buffer. Returns an op."""
        total = local_variable(self.total)
        if grad is None:
            return tf.no_op()
        if isinstance(grad, tf.IndexedSlices):
            return self._add_rows(grad, weight)
        grad = weighted(tf.cast(grad, total.dtype.base_dtype), weight)
        added = total.assign_add(grad, read_value=False)
        return added if self.rows is None else tf.group(added, self._touch(grad))

    def has_one_pass(self, grad: Optional[Gradient]) -> bool:
        """Whether `add_in_one_pass` accepts `grad`: a dense gradient whose dtype can represent any float32 weight."""
        dtype = self.total.dtype.base_dtype
        is_dense = self.rows is None and isinstance(grad, tf.Tensor)
        return is_dense and dtype in (tf.float32, tf.float64) and not is_ref_variable(local_variable(self.total))

    def add_in_one_pass(self, grad: tf.Tensor, weight: Scalar) -> tf.Operation:
        """Add `weight * grad`, with a weight other than 0, in a single pass over the buffer. Returns an op."""
        total = local_variable(self.total)
        grad, weight = (tf.cast(value, total.dtype.base_dtype) for value in (grad, weight))
        # The kernel of gradient descent is the only one that multiplies and adds in place.
        return tf.raw_ops.ResourceApplyGradientDescent(var=total.handle, alpha=-weight, delta=grad)

    def blend(self, grad: Optional[Gradient], share: tf.Tensor, is_first: Union[bool, tf.Tensor]) -> tf.Operation:
        """Make the running mean (1 - share) * mean + share * grad, where mean is 0 if `is_first`. Returns an op."""
        total = local_variable(self.total)
        before = tf.where(is_first, tf.zeros_like(total), total.read_value())
        touched = self._touch(grad)
        if grad is None:
            grad = tf.zeros_like(total)
        elif isinstance(grad, tf.IndexedSlices):
            grad = tf.convert_to_tensor(grad)
        # The form mean + share * (grad - mean) could overflow in a 16-bit dtype.
        kept = before * tf.cast(1.0 - share, before.dtype)
        moved = total.assign(kept + weighted(tf.cast(grad, before.dtype), share), read_value=False)
        return moved if touched is None else tf.group(moved, touched)

    def peek(self, grad: Optional[Gradient], weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]) -> Gradient:
        """Return the sum including `weight * grad`, without storing it if the gradient is dense.

        Args:
          grad: tensor, `tf.IndexedSlices` or None.
          weight: scalar; None: 1.
          is_first: whether this is the first micro step of the cycle: a bool tensor, or False if it is known not to be.
        """
        if self.rows is not None or isinstance(grad, tf.IndexedSlices):
            return self._peek_rows(grad, weight, is_first)
        total = local_variable(self.total)
        if grad is None:
            value = total.read_value()
            return value if is_first is False else tf.where(is_first, tf.zeros_like(value), value)
        grad = weighted(tf.cast(grad, total.dtype.base_dtype), weight)
        if is_first is False:
            return total.read_value() + grad
        return tf.cond(is_first, lambda: tf.identity(grad), lambda: total.read_value() + grad)

    def stored(self) -> Gradient:
        """Return the stored sum: a tensor, or `tf.IndexedSlices` of the touched rows, each once, in ascending order.

        XLA fills a list of unknown length up with zeros, and then scatters the row 0 to which these point once more.
        There, each row that is not touched is one of zeros for the first that is.
        """
        total = local_variable(self.total)
        if self.rows is None:
            return total.read_value()
        mask, shape = local_variable(self.rows).read_value(), tf.constant(total.shape.as_list(), tf.int64)
        if _tf.graphs.is_compiled_by_xla_here():
            first = tf.argmax(tf.cast(mask, tf.int32), output_type=tf.int64)
            rows = tf.where(mask, tf.range(total.shape[0], dtype=tf.int64), tf.fill(tf.shape(mask), first))
            is_touched = tf.reshape(mask, [-1] + [1] * (total.shape.rank - 1))
            values = tf.where(is_touched, total.read_value(), tf.zeros_like(total))
            return tf.IndexedSlices(values, rows, dense_shape=shape)
        rows = tf.where(mask)[:, 0]
        # Gather from the variable, because reading a resource variable copies the table. A ref variable must be read.
        table = total.read_value() if is_ref_variable(total) else total
        return tf.IndexedSlices(tf.gather(table, rows), rows, dense_shape=shape)

    def _peek_rows(
        self, grad: Optional[Gradient], weight: Optional[Scalar], is_first: Union[bool, tf.Tensor]
    ) -> Gradient:
        """Store a sparse gradient, which merges it with the rows already stored, and return the sum."""
        if is_first is False or self.rows is not None:
            kept = self.add(grad, weight)
        else:
            kept = tf.cond(
                is_first,
                lambda: true_after(self.start(grad, weight)),
                lambda: true_after(self.add(grad, weight)),
            )
        with tf.control_dependencies([] if kept is None else [kept]):
            return self.stored()

    def clear_rows(self) -> tf.Operation:
        """Assign zeros to the touched rows, and clear the mask. Returns an op."""
        total, mask = local_variable(self.total), local_variable(self.rows)
        rows = tf.where(mask.read_value())[:, 0]
        row_shape = tf.concat([tf.shape(rows), total.shape.as_list()[1:]], axis=0)
        cleared = scatter(total, rows, tf.zeros(row_shape, total.dtype.base_dtype), "update")
        with tf.control_dependencies([cleared]):
            return mask.assign(tf.zeros_like(mask), read_value=False)

    def clear(self) -> tf.Operation:
        """Assign zeros to the whole buffer, and clear the mask. Returns an op."""
        parts = [local_variable(self.total)] + ([] if self.rows is None else [local_variable(self.rows)])
        return tf.group(*[part.assign(tf.zeros_like(part), read_value=False) for part in parts])

    def _add_rows(self, grad: tf.IndexedSlices, weight: Optional[Scalar]) -> tf.Operation:
        total = local_variable(self.total)
        values = weighted(tf.cast(grad.values, total.dtype.base_dtype), weight)
        added = scatter(total, grad.indices, values, "add")
        return added if self.rows is None else tf.group(added, self._touch(grad))

    def _touch(self, grad: Optional[Gradient]) -> Optional[tf.Operation]:
        """Mark the rows that a gradient touches. Returns an op, or None if there is nothing to mark."""
        if self.rows is None or grad is None:
            return None
        mask = local_variable(self.rows)
        if isinstance(grad, tf.IndexedSlices):
            return scatter(mask, grad.indices, tf.ones_like(grad.indices, tf.bool))
        return mask.assign(tf.ones_like(mask), read_value=False)


class Accumulators(CheckpointOnly):
    """The accumulators of a cycle. A checkpoint names each by the number of its variable in the list of variables.

    The numbers do not depend on which variable has a gradient first, so a run resumed in mid-cycle finds its sums.
    """

    def add(self, number: int, accumulator: Accumulator) -> None:
        setattr(self, str(number), accumulator)

    def awaited(self, number: int) -> Optional[Set[str]]:
        """Return the names of the parts that a restored checkpoint holds for an accumulator that has not been created.

        None: it holds none.
        """
        return _tf.tracking.awaited_children(self, str(number))

    def are_awaited_from(self, number: int) -> bool:
        """Whether a restored checkpoint holds an accumulator with this number or a higher one, not created yet."""
        return any(name.isdigit() and int(name) >= number for name in _tf.tracking.awaited_names(self))


def scatter(var: tf.Variable, indices: tf.Tensor, values: tf.Tensor, how: str = "update") -> tf.Operation:
    """Assign or add `values` to rows of a ref or resource variable, in place. Returns an op or tensor to wait for.

    Args:
      var: the variable.
      indices: the rows, an int tensor.
      values: a tensor with one row for each index.
      how: "update" to assign, "add" to add.
    """
    function = {"update": tf.compat.v1.scatter_update, "add": tf.compat.v1.scatter_add}[how]
    return function(var, indices, values)
