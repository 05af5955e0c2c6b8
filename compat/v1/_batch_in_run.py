"""The batch of a run: how many examples it has, whether the chosen branches are those of the run, and loops over it."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from accum import _tf
from accum._engine._draws import Draws, uniform_seed
from accum._engine._part import Key, Part
from accum._rows import Layout
from accum._tf import tf
from accum.compat.v1._frontier import Edge, edges_of, is_of_shapes, repoint, taken_by_size
from accum.compat.v1._inside import Inside, is_random, lengths_found_in
from accum.compat.v1._micro_batch_loop import Joined, over_micro_batches, rows_of_micro_batch

tf1 = tf.compat.v1


class BatchInRun:
    """Tensors of the batch that a run of the graph gets.

    Args:
      inside: what of the graph is inside.
      size: the largest number of examples in a micro-batch.

    Attributes:
      size: as passed.
      whole: how many examples there are, an int32 scalar tensor.
      total: how many examples are split: all, or one if the run chooses other branches, so that nothing takes them.
      fed: {key of what is fed: its `total` rows}.
      draws: the random numbers of the batch.
    """

    def __init__(self, inside: Inside, size: int) -> None:
        self._inside = inside
        self.size = size
        self.whole = self.total = self._number_of_examples()
        self.fed = dict(inside.fed, **{one.name: self._checked(one) for one in inside.batch[1:]})
        self._known: Dict[Key, tf.Tensor] = {}
        self._shapes: Dict[Key, tf.Tensor] = {}
        self._is_given: Optional[tf.Tensor] = None
        if inside.given:
            self._choose(inside.given)
        self.draws = Draws(uniform_seed, self.total)
        self._numbers = {op.name: number for number, op in enumerate(filter(is_random, inside.of_batch))}

    def _number_of_examples(self) -> tf.Tensor:
        checks = [
            tf1.assert_equal(
                tf.rank(self._inside.graph.get_tensor_by_name(key)),
                0,
                message=f"{key} must be a scalar. [accum: split-batch]",
            )
            for key in self._inside.analysis.scalars
        ]
        first = self._inside.batch[0]
        if self._inside.count is not None:
            message = f"The graph takes batches of {self._inside.count} examples, no others. [accum: batch-axis]"
            checks.append(tf1.assert_equal(tf.shape(first)[0], self._inside.count, message=message))
        with tf.control_dependencies(checks):
            return tf.identity(tf.shape(first)[0])

    def _checked(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor of the batch that raises an error, where it is taken, if it has another length."""
        check = tf1.assert_equal(
            tf.shape(tensor)[0],
            self.whole,
            message=f"All tensors of a batch need one entry for each example: {tensor.name}. [accum: batch-axis]",
        )
        with tf.control_dependencies([check]):
            return tf.identity(tensor)

    def _choose(self, given: Dict[Key, bool]) -> None:
        """Let the split compute one example if the branches are others."""
        matches = [
            tf.equal(self._inside.graph.get_tensor_by_name(key), value, name="is_given") for key, value in given.items()
        ]
        self._is_given = tf.reduce_all(tf.stack(matches))
        self.total = tf.where(self._is_given, self.whole, tf.minimum(self.whole, 1))
        for key, tensor in self.fed.items():
            layout = self._inside.layout(self._inside.fed[key])
            self.fed[key] = rows_of_micro_batch(tensor, layout, tf.constant(0), self.total, self.whole)

    def either(self, value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        """Return one value if the branches are the given ones, else the other."""
        with _tf.graphs.control_flow_of_tf(1):
            result = tf1.cond(self._is_given, lambda: tf.identity(value), lambda: tf.identity(other))
        result.set_shape(other.shape)
        return result

    def with_other_values(self, keys: Sequence[Key]) -> Dict[Key, tf.Tensor]:
        """Return tensors of the graph as they are if other branches are chosen; otherwise, those of one example.

        Then nothing takes these. They are computed by copies of both branches, from the whole batch at once.
        """
        tensors = [self._inside.graph.get_tensor_by_name(key) for key in keys]
        count = tf.where(self._is_given, tf.minimum(self.whole, 1), self.whole)
        part = Part(tensors, self._inside.batch)
        feeds = {
            one.name: rows_of_micro_batch(one, Layout(0), tf.constant(0), count, self.whole)
            for one in self._inside.batch
        }
        return dict(part.compute({key: rows for key, rows in feeds.items() if part.takes(key)}))

    def require_chosen(self, upstream: tf.Tensor) -> tf.Tensor:
        """Return a gradient that raises an error where the branches are others than the split ones."""
        if not self._inside.given:
            return upstream
        check = tf1.assert_equal(
            self._is_given,
            True,
            message=f"The gradients that `split_batch` computes are for given={self._inside.given}, but another value "
            "is fed. [accum: split-batch]",
        )
        with tf.control_dependencies([check]):
            return tf.identity(upstream)

    def computed(self, part: Part, combined: Sequence[Any], upstream: Dict[Key, Tuple[tf.Tensor, Layout]]) -> List[Any]:
        """Compute a part for each micro-batch.

        Args:
          part: a `Part`.
          combined: what is kept of each micro-batch.
          upstream: {key of a placeholder in the part: (gradient of the batch, where its examples lie)}.
        """
        random = [op for op in part.ops if is_random(op) and op not in self._inside.trusted]
        if random:
            self.draws.begin()
        known = self.known(part)

        def compute(begin: tf.Tensor, count: tf.Tensor) -> Dict[str, Any]:
            values = self._part_of(part, begin, count, known, upstream)
            for op in random:
                self.draw(self.draws, op, values, begin, count)
            return values

        return over_micro_batches(self.total, self.size, compute, combined)

    def _part_of(
        self,
        part: Part,
        begin: tf.Tensor,
        count: tf.Tensor,
        known: Dict[Key, tf.Tensor],
        upstream: Dict[Key, Tuple[tf.Tensor, Layout]],
    ) -> Dict[str, Any]:
        """Compute a part for some examples, given the place of the first and their number."""
        whole = {key: (tensor, self._inside.layout(self._inside.fed[key])) for key, tensor in self.fed.items()}
        whole.update(upstream)
        fed = {
            key: rows_of_micro_batch(tensor, layout, begin, count, self.total)
            for key, (tensor, layout) in whole.items()
            if part.takes(key)
        }
        return part.compute(fed, lambda tensor: known.get(tensor.name, tensor))

    def known(self, part: Part) -> Dict[Key, tf.Tensor]:
        """Return {key of a number that a part takes from the graph: the same, computed from shapes}.

        In the graph, it would be computed from what it is the shape of, for the whole batch at once.
        """
        numbers, shapes = self._numbers_in(part)
        self._known.update(self.sizes([one for one in numbers if one.name not in self._known], {}))
        known = {one.name: self._known[one.name] for one in numbers}
        for one in shapes:
            value, number = tf.get_static_value(one), self._known.get(one.op.inputs[0].name)
            if value is not None:
                known[one.name] = tf.constant(value, one.dtype)
            elif number is not None:
                known[one.name] = tf.shape(number, out_type=one.dtype)
        return known

    def _numbers_in(self, part: Part) -> Tuple[List[tf.Tensor], List[tf.Tensor]]:
        """Return numbers that a part takes from the graph, computed from shapes, and those whose shapes it takes."""
        shapes = [one for one in part.boundary if one.op.type == "Shape"]
        tensors = {one.name: one for one in [*part.boundary, *(one.op.inputs[0] for one in shapes)]}
        return [one for one in tensors.values() if is_of_shapes(self._inside, one)], shapes

    def sizes(self, tensors: Sequence[tf.Tensor], joined: Dict[Key, tf.Tensor]) -> Dict[Key, tf.Tensor]:
        """Return {key of a number that depends on lengths: the same for the whole batch}, given joined rows."""
        taken = [taken_by_size(self._inside, one.name) for one in tensors]
        every = [shape for _, shapes in taken for shape in shapes]
        of_joined = {
            one.name: tf.shape(joined[rows.name], out_type=one.dtype)
            for one in every
            for rows in one.op.inputs
            if rows.name in joined
        }
        self._find_shapes([one for one in every if one.name not in of_joined])
        sizes = {}
        for tensor, (rows, shapes) in zip(tensors, taken):
            found = [op.outputs[0] for op in lengths_found_in(self._inside.graph)]
            part = Part([tensor], rows + shapes + found + list(self._inside.fed.values()))
            known = {one.name: one for one in found}
            known.update((one.name, of_joined.get(one.name, self._shapes.get(one.name))) for one in shapes)
            known.update((one.name, joined[one.name]) for one in rows)
            sizes[tensor.name] = part.compute(dict(self._inside.fed, **known))[tensor.name]
        return sizes

    def _find_shapes(self, tensors: Sequence[tf.Tensor]) -> None:
        """Compute shapes of rows of the whole batch. Where only one example tells the lengths, it is computed."""
        new = {one.name: one for one in tensors if one.name not in self._shapes}
        unknown: Dict[Key, tf.Tensor] = {}
        part: Optional[Part] = None
        while new:
            for key, tensor in new.items():
                layout, lengths = self._layout_of(tensor), tensor.op.inputs[0].shape.as_list()
                if layout.factor != 1 or None in lengths[: layout.axis] + lengths[layout.axis + 1 :]:
                    unknown[key] = tensor
                else:
                    lengths[layout.axis] = self.whole
                    self._shapes[key] = _stacked(lengths, tensor.dtype)
            new = {}
            if unknown:
                images = [self._inside.image_of(one.op.inputs[0]) for one in unknown.values()]
                part = Part(images, list(self._inside.fed.values()), self._inside.is_taken)
                taken = (one for number in self._numbers_in(part)[0] for one in self._shapes_of(number))
                new = {one.name: one for one in taken if one.name not in {**unknown, **self._shapes}}
        if part is not None:
            self._find_by_example(part, list(unknown.values()))

    def _shapes_of(self, number: tf.Tensor) -> List[tf.Tensor]:
        return taken_by_size(self._inside, number.name)[1]

    def _layout_of(self, shape: tf.Tensor) -> Layout:
        return self._inside.layout(self._inside.image_of(shape.op.inputs[0]))

    def _find_by_example(self, part: Part, tensors: Sequence[tf.Tensor]) -> None:
        """Compute shapes of rows of a part, which gets what it takes of these itself."""
        values = self._part_of(part, tf.constant(0), tf.minimum(self.total, 1), {}, {})
        for tensor in tensors:
            rows, layout = self._inside.image_of(tensor.op.inputs[0]), self._layout_of(tensor)
            shape = tf.identity(tf.shape(values[rows.name]))
            lengths_found_in(self._inside.graph).add(shape.op)
            lengths = tf.unstack(shape, num=rows.shape.rank)
            lengths[layout.axis] *= self.whole
            self._shapes[tensor.name] = _stacked(lengths, tensor.dtype)
        known = self.known(part)
        for own in part.ops:
            copy = values[own.name]
            for at, one in enumerate(list(copy.inputs)):
                if one.name in known:
                    repoint([Edge(copy, at)], known[one.name])

    def draw(self, draws: Draws, op: tf.Operation, values: Dict[str, Any], begin: tf.Tensor, count: tf.Tensor) -> None:
        """Let what has been computed use the examples' share of the batch's random numbers."""
        copy = values[op.name]
        edges = edges_of(copy.outputs[0])
        drawn = _tf.random_ops.random_op_of(copy)
        assert drawn is not None
        rows = draws.rows(drawn, self._numbers[op.name], begin, count)
        repoint(edges, rows)
        for key in [key for key, value in values.items() if value is copy.outputs[0]]:
            values[key] = rows

    def joining(self, tensor: tf.Tensor) -> Joined:
        """Return how the rows of micro-batches become those of the batch."""
        return Joined(tensor, self._inside.layout(tensor), tensor.shape)


def _stacked(lengths: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    return tf.stack([tf.cast(length, dtype) for length in lengths])
