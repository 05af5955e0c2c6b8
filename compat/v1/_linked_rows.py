"""Joined rows and their gradient, which a second loop over micro-batches computes, or the same as the rows.

TensorFlow differentiates what takes joined rows as always. From the rows on, the gradient is that of an operation
which takes the weights beside the rows: its gradient by them is computed by copies of what is inside.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from accum import _tf
from accum._engine._gradients import divided
from accum._engine._held_values import NOTHING
from accum._engine._part import Key, Part
from accum._engine._trace import is_differentiable
from accum._rows import Layout
from accum._tf import Gradient, tf
from accum.compat.v1._batch_in_run import BatchInRun
from accum.compat.v1._frontier import Edge, edges_of, repoint
from accum.compat.v1._inside import Inside, is_random
from accum.compat.v1._later_changes import later_changes, read_again, warn_of_reading_again
from accum.compat.v1._micro_batch_loop import Added, Joined, Slices, fetches_of
from accum.compat.v1._shortfall import require_shapes

tf1 = tf.compat.v1
GRADIENT = "AccumSplitBatch"
"""The name under which the gradient of joined rows is registered, once for all graphs."""

NO_GRADIENT = "AccumSplitBatchNoGradient"

Gradients = Callable[[Sequence[Optional[tf.Tensor]]], List[Optional[Gradient]]]
"""A function of the gradients by joined rows, which returns those by the sources."""


class _Template(NamedTuple):
    """A gradient in the graph that is only copied.

    Attributes:
      upstream: placeholders for the gradients by tensors of the frontier.
      grads: the gradient by each source, or None.
      part: the `Part` that computes them, or None if there is no gradient.
    """

    upstream: List[tf.Tensor]
    grads: List[Optional[Gradient]]
    part: Optional[Part]


class LinkedRows:
    """The rows of tensors of the frontier, which are joined, and have a gradient.

    Args:
      inside: what of the graph is inside.
      run: the batch of a run.
      frontier: the tensors.

    Attributes:
      images: those of `frontier`, each once.
      forward: the `Part` that computes these.
      sources: by what they are differentiated: weights, that is whatever is not computed from the batch, and rows that
        were joined before or are computed from variables; and other data.
      joined: {key of a tensor: its rows in the whole batch}, once `link` was called.
      checks: operations for which the gradients wait.
    """

    def __init__(self, inside: Inside, run: BatchInRun, frontier: Sequence[tf.Tensor]) -> None:
        self._inside = inside
        self._run = run
        self._frontier = list(frontier)
        self.images = list({one.name: one for one in map(inside.image_of, frontier)}.values())
        self.forward = self._part(self.images)
        self._weights = [one for one in self.forward.boundary if self._can_be_source(one)]
        if (
            inside.statistics
        ):  # whose gradients are sums of a known shape; nobody learns data, such as a rate of dropout
            tensors = [one for one in self._weights if one.dtype != tf.resource]
            unknown = [one for one in tensors if not one.shape.is_fully_defined()]
            require_shapes([one for one in unknown if one.op in inside.of_variables], "shape")
            self._weights = [one for one in self._weights if all(one is not other for other in unknown)]
        data = [one for one in inside.fed.values() if is_differentiable(one) and self.forward.takes(one.name)]
        # An optimizer learns what data are computed from, too, and may use no gradient before all are there.
        learned = [one for one in data if one.name in inside.joined or _is_learned(one)]
        self._weights += learned
        self._data = [one for one in data if all(one is not other for other in learned)]
        self.sources = self._weights + self._data
        self._is_once = bool(inside.given)  # what runs for other values must not wait for gradients
        self.joined: Dict[Key, tf.Tensor] = {}
        self.checks: List[tf.Operation] = []
        self._inlets: Dict[Key, Edge] = {}
        self._templates: Dict[Tuple[Key, ...], _Template] = {}
        self._changing: Set[tf.Operation] = set()  # operations that change variables, and that have had a look
        self._grads: List[tf.Operation] = []  # which compute the gradients so far
        # (Function that computes gradients anew, those that it has computed) for each so far.
        self._sums: List[Tuple[Callable[[], List[Any]], List[Any]]] = []
        self._warned_of: Set[tf.Operation] = set()  # variables

    def _part(self, fetches: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor] = ()) -> Part:
        """Return what computes tensors from the batch, and from gradients by rows."""
        held = NOTHING if self._inside.statistics else self._inside.held  # segments differentiate what they take
        return Part(fetches, [*self._inside.fed.values(), *upstream], self._inside.is_taken, held)

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[Dict[Key, tf.Tensor]]:
        """Let what is inside take joined rows, in this context, such that nothing before them is differentiated.

        TensorFlow does not stop at the result of a function, although it is told to.

        Yields:
          {key of joined rows: what is taken in their place}.
        """
        joined = {one.name: one for one in self._weights if one.name in self._inside.joined}
        cuts = {key: _hidden(one) for key, one in joined.items()}
        taken = [(Edge(op, place), one.name) for op in self._inside.ops for place, one in enumerate(op.inputs)]
        edges = {key: [edge for edge, name in taken if name == key] for key in joined}
        for key, cut in cuts.items():
            repoint(edges[key], cut)
        try:
            yield cuts
        finally:
            for key, one in joined.items():
                repoint(edges[key], one)

    def _can_be_source(self, tensor: tf.Tensor) -> bool:
        if tensor.dtype == tf.resource:
            if tensor.op.type != "VarHandleOp":  # that of a table, or within a function
                return False
            dtype = _tf.graph_parts.dtype_of_handle(tensor)
            return bool(dtype.is_floating or dtype.is_complex)
        return is_differentiable(tensor) and tensor.op in self._inside.not_constant

    def link(self, joined: Sequence[tf.Tensor], gradients: Optional[Gradients]) -> None:
        """Give joined rows a gradient: those on the way to the losses together, the others each by itself.

        Args:
          joined: rows of the whole batch, for each tensor of the frontier.
          gradients: function that computes the gradient of all rows; None: it is computed for each group.
        """
        of_images = {tensor.name: rows for tensor, rows in zip(self.images, joined)}
        rows_of = {tensor.name: of_images[self._inside.image_of(tensor).name] for tensor in self._frontier}
        if self._inside.given:
            others = self._run.with_other_values(list(rows_of))
            rows_of = {key: self._run.either(rows, others[key]) for key, rows in rows_of.items()}
        # What depends on no value, such as zeros of some shape, has no gradient in plain TensorFlow.
        of_values = [one for one in self._frontier if self._inside.image_of(one).op in self._inside.not_constant]
        floats = list(filter(is_differentiable, of_values))
        of_losses = [one for one in floats if self._is_of_losses(one)]
        for group in [of_losses] + [[one] for one in floats if not self._is_of_losses(one)]:
            if group:
                self._link_group(group, [rows_of[tensor.name] for tensor in group], gradients)
        for tensor in self._frontier:
            if tensor.name not in self.joined:
                self.joined[tensor.name] = self._passed(tensor, rows_of[tensor.name])

    def _is_of_losses(self, tensor: tf.Tensor) -> bool:
        is_loss = any(tensor is loss for loss in self._inside.losses)
        before = self._inside.before_losses_as_built
        return is_loss or any(op in before and not self._inside.is_covered(op) for op in tensor.consumers())

    def _link_group(
        self, group: Sequence[tf.Tensor], values: Sequence[tf.Tensor], gradients: Optional[Gradients]
    ) -> None:
        # The gradient of reading a variable is that of its handle, also where it is `tf.IndexedSlices`.
        has_own_data = gradients is None and bool(self._data)
        sources = [_tf.graph_parts.value_of(one) for one in (self._weights if has_own_data else self.sources)]
        if gradients is not None:
            sources = [
                _final(value) if one.name in self._inside.fed else value for one, value in zip(self.sources, sources)
            ]
        passed = [self._passed(tensor, rows) for tensor, rows in zip(group, values)]
        with self._inside.graph.gradient_override_map({"IdentityN": GRADIENT}):
            linked = tf.identity_n(passed + sources)
        joined = linked[: len(group)]
        for tensor, rows in zip(group, self._with_data(group, joined) if has_own_data else joined):
            rows.set_shape(tensor.shape)
            self.joined[tensor.name] = rows

        def of_group(upstream: Sequence[Optional[tf.Tensor]]) -> List[Optional[Gradient]]:
            if gradients is None:
                return self._gradients(group, upstream, self._weights)
            grads = {tensor.name: grad for tensor, grad in zip(group, upstream)}
            return self._of_segments([grads.get(tensor.name) for tensor in self._frontier], gradients)

        links_of(self._inside.graph)[linked[0].op.name] = _Link(len(group), of_group)

    def _with_data(self, group: Sequence[tf.Tensor], joined: Sequence[tf.Tensor]) -> List[tf.Tensor]:
        """Return joined rows that have a gradient by the data too, which is computed only if it is asked for.

        Optimizers compute all gradients of an operation before they use one of them (`GATE_OP`). So that by the data
        belongs to an operation of its own, which no way from variables to losses passes.
        """
        upstream: List[Optional[tf.Tensor]] = []

        def of_rows(grads: Sequence[Optional[tf.Tensor]]) -> List[Optional[Gradient]]:
            upstream[:] = [None if grad is None or _is_zeros(grad) else grad for grad in grads[: len(group)]]
            return [*upstream, tf.zeros([])]

        def of_data(_: Sequence[Optional[tf.Tensor]]) -> List[Optional[Gradient]]:
            return [*self._gradients(group, upstream, self._data), None]

        with self._inside.graph.gradient_override_map({"IdentityN": GRADIENT}):
            data = tf.identity_n([*self._data, tf.zeros([])])
            rows: List[tf.Tensor] = tf.identity_n([*joined, data[-1]])
        links_of(self._inside.graph)[data[0].op.name] = _Link(0, of_data)
        links_of(self._inside.graph)[rows[0].op.name] = _Link(0, of_rows)
        return rows[: len(group)]

    def _of_segments(self, upstream: Sequence[Optional[tf.Tensor]], gradients: Gradients) -> List[Optional[Gradient]]:
        """Return the gradients by all sources, of rows that were computed in segments."""
        rows = [self.joined[tensor.name] for tensor in self._frontier]
        self._hold_what_changes()
        filled = [
            tf.zeros_like(one) if grad is None else tf.convert_to_tensor(grad) for one, grad in zip(rows, upstream)
        ]
        with tf.control_dependencies(rows):  # as in the plain program, what is computed forward is so before an update
            filled = [tf.identity(grad) for grad in filled]
        of_images: Dict[Key, tf.Tensor] = {}
        for tensor, grad in zip(self._frontier, filled):
            key = self._inside.image_of(tensor).name
            of_images[key] = of_images[key] + grad if key in of_images else grad
        sums = iter(gradients([self._run.require_chosen(of_images[one.name]) for one in self.images]))
        asked = [one for one, grad in zip(self._frontier, upstream) if grad is not None and not _is_zeros(grad)]
        behind = self._behind(asked)
        grads: List[Optional[Gradient]] = []
        for source in self.sources:
            if source.name in self._inside.fed:  # whose identity raises an error where somebody asks for its gradient
                grads.append(tf.zeros_like(source))
            else:
                grad = divided(next(sums), None, _tf.graph_parts.value_of(source).dtype)
                # Segments fill zeros in for rows of other losses, and an optimizer may move weights for these.
                is_none = grad is None or source.op not in behind
                grads.append(None if is_none else _final(grad, checks=self.checks))
        return self._taken_down(grads)

    def _behind(self, tensors: Sequence[tf.Tensor]) -> Set[tf.Operation]:
        """Return the operations from whose values tensors of the frontier are computed."""
        sources = lambda op: [] if op.type in _tf.op_walks.OF_SHAPES else _tf.op_walks.sources_of(op)
        return set(_tf.op_walks.ancestors([self._inside.image_of(one).op for one in tensors], sources=sources))

    def _passed(self, tensor: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Return joined rows by an operation whose input can be replaced later, and which hides the loop.

        TensorFlow walks from variables to losses by floating-point tensors. Others end the walk.
        """
        first = tf.bitcast(rows, _bits(rows)) if is_differentiable(rows) else tf.identity(rows)
        self._inlets[tensor.name] = Edge(first.op, 0)
        return tf.bitcast(first, rows.dtype) if is_differentiable(rows) else first

    def _gradients(
        self, group: Sequence[tf.Tensor], upstream: Sequence[Optional[tf.Tensor]], sources: Sequence[tf.Tensor]
    ) -> List[Optional[Gradient]]:
        """Return the gradient by each of some sources, given those by joined rows."""
        live = [
            (
                self._inside.image_of(tensor),
                self._run.require_chosen(tf.convert_to_tensor(grad)),
            )  # of rows that have been gathered, `tf.IndexedSlices`
            for tensor, grad in zip(group, upstream)
            if grad is not None and not _is_zeros(grad)
        ]
        has_changes = self._hold_what_changes()
        tensors = [tensor for tensor, _ in live]
        template = self._template(tensors, sources)
        if template.part is None:
            return [None for _ in sources]
        is_apart = self._is_once or sources is not self._weights or has_changes
        own = None if is_apart else self._without_rows(tensors, [grad for _, grad in live])
        sums = self._computed(tensors, [grad for _, grad in live], own, sources)
        self._sums.append((lambda: self._computed(tensors, [grad for _, grad in live], own, sources), sums))
        values = iter(sums)
        # TensorFlow finds them by what is computed from these, but not the loop, which it can't differentiate again.
        links = [_tf.graph_parts.value_of(source) for source in self.sources] + [grad for _, grad in live]
        return self._taken_down(
            [None if grad is None else _final(next(values), links, self.checks) for grad in template.grads]
        )

    def _computed(
        self,
        tensors: Sequence[tf.Tensor],
        grads: Sequence[tf.Tensor],
        own: Optional[Sequence[tf.Tensor]],
        sources: Sequence[tf.Tensor],
    ) -> List[Any]:
        """Return the gradients by sources that have one, given those by rows, and the same without waiting (`own`)."""
        template = self._template(tensors, sources)
        pairs = zip(template.upstream, zip(tensors, grads if own is None else own))
        fed = {one.name: (grad, self._inside.layout(tensor)) for one, (tensor, grad) in pairs}
        combined = [self._summing(g, source) for g, source in zip(template.grads, sources) if g is not None]
        if own is None:
            return [] if template.part is None else self._run.computed(template.part, combined, fed)
        with tf.control_dependencies(None):
            return self._at_once(template, combined, fed)

    # ------------------------------------------------------------------------------------------------------------
    # What changes variables before the gradient

    def _hold_what_changes(self) -> bool:
        """Take the values that variables have before something else changes them. Returns whether something does.

        Copies that read a variable by its handle read it again in each loop. If this is a second gradient, an optimizer
        that takes one may move these variables while the other is computed, and it may yet have to be made.
        """
        read, held = read_again(self.forward), self._inside.held
        if not read:
            return False
        rows = list(self.joined.values())
        changes = later_changes(read, self._inside.received, rows, self._grads, self._changing)
        in_turn = {op for op in read if op.type == "VarHandleOp"} if self._grads else set()
        to_hold: Dict[tf.Operation, List[tf.Operation]] = {op: [] for op in in_turn if not held.holds_handles}
        to_hold.update(changes.ops)
        if to_hold and not self._inside.statistics and held.hold(to_hold):  # segments hold no values
            self._templates.clear()
            with tf.control_dependencies(None):  # that this gradient may have
                if not changes.are_behind and not self._is_once:
                    self._compute_rows_again()
                self._compute_sums_again()
        variables = set(changes.ops) | (in_turn if held.holds_handles else set())
        warn_of_reading_again(variables - self._warned_of, self.forward, bool(self._inside.statistics))
        self._warned_of |= variables
        return bool(changes.ops)

    def _taken_down(self, grads: List[Optional[Gradient]]) -> List[Optional[Gradient]]:
        """Return gradients, and remember what computes them."""
        self._grads += [part.op for grad in grads if grad is not None for part in fetches_of(grad)]
        return grads

    def _compute_rows_again(self) -> None:
        """Let joined rows come from copies that take the values that are held by now."""
        rows = self._run.computed(self._part(self.images), [self._run.joining(one) for one in self.images], {})
        rows_of = {tensor.name: one for tensor, one in zip(self.images, rows)}
        for tensor in self._frontier:
            repoint([self._inlets[tensor.name]], rows_of[self._inside.image_of(tensor).name])

    def _compute_sums_again(self) -> None:
        """Let earlier gradients come from such copies."""
        earlier, self._sums = self._sums, []
        for compute, sums in earlier:
            self._sums.append((compute, compute()))
            for old, new in zip(sums, self._sums[-1][1]):
                for one, other in zip(fetches_of(old), fetches_of(new)):
                    repoint(edges_of(one), other)

    # ------------------------------------------------------------------------------------------------------------
    # Forward and backward in one loop

    def _at_once(self, template: _Template, combined: List[Any], fed: Dict[Key, Tuple[tf.Tensor, Layout]]) -> List[Any]:
        """Compute the gradient of each micro-batch with its rows, which come from this loop from now on."""
        self._is_once = True
        fetches = [tensor for grad in template.grads if grad is not None for tensor in fetches_of(grad)]
        part = self._part(self.images + fetches, template.upstream)
        joining: List[Any] = [self._run.joining(tensor) for tensor in self.images]
        results = self._run.computed(part, joining + combined, fed)
        rows_of = {tensor.name: rows for tensor, rows in zip(self.images, results)}
        for tensor in self._frontier:
            repoint([self._inlets[tensor.name]], rows_of[self._inside.image_of(tensor).name])
        return results[len(joining) :]

    def _without_rows(self, live: Sequence[tf.Tensor], grads: Sequence[tf.Tensor]) -> Optional[List[tf.Tensor]]:
        """Return the gradients by joined rows without waiting for these, or None if they depend on their values.

        The gradient of a mean or a sum over examples depends only on how many there are. Then no example's gradient
        waits for another example.
        """
        joined = [self.joined[tensor.name] for tensor in self._frontier]
        if tf.float16 in [one.dtype.base_dtype for one in live] or _tf.graphs.is_in_conditional():
            return None
        if not _depend_on_lengths_alone(grads, {rows.op for rows in joined}):
            return None
        proxies = {
            rows.name: self._zeros_like_rows(self._inside.image_of(one)) for one, rows in zip(self._frontier, joined)
        }
        with tf.control_dependencies(None):
            part = Part(list(grads), joined)
            is_repeatable = not any(is_random(op) or op.op_def.is_stateful for op in part.ops)
            if not is_repeatable or any(proxies[key] is None for key in proxies if part.takes(key)):
                return None
            values = part.compute(
                {key: proxy() for key, proxy in proxies.items() if proxy is not None and part.takes(key)}
            )
        return [values[grad.name] for grad in grads]

    def _zeros_like_rows(self, tensor: tf.Tensor) -> Optional[Callable[[], tf.Tensor]]:
        """Return a function that returns zeros in the shape of joined rows, or None if that is not known before."""
        layout = self._inside.analysis.layout(tensor.name)
        lengths = tensor.shape.as_list()
        others = [length for axis, length in enumerate(lengths) if layout is None or axis != layout.axis]
        varies = any(None in one.shape.as_list()[1:] for one in self._inside.fed.values())
        if layout is None or None in others or (varies and layout.factor != 1):
            return None
        lengths[layout.axis] = self._run.total * layout.factor
        return lambda: tf.zeros(tf.stack(lengths), tensor.dtype.base_dtype)

    def _summing(self, grad: Gradient, source: tf.Tensor) -> Any:
        if source.name in self._inside.fed:
            return Joined(grad, self._inside.layout(source), source.shape)
        return Slices(grad) if isinstance(grad, tf.IndexedSlices) else Added(grad, source)

    def _template(self, tensors: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]) -> _Template:
        key = tuple(tensor.name for tensor in [*tensors, *sources])
        if key not in self._templates:
            # In a loop, TensorFlow takes what an operation waits for as data, so that it would be copied, too.
            with tf.control_dependencies(None), self._cutting() as cuts:
                upstream = [tf.compat.v1.placeholder(one.dtype.base_dtype, one.shape, "upstream") for one in tensors]
                # One source may be computed from another one, whose gradient it then passes on itself.
                by, stops = ([cuts.get(one.name, one) for one in some] for some in (sources, self.sources))
                grads = tf.gradients(tensors, by, upstream, name="gradients", stop_gradients=stops)
                grads = [
                    tf.convert_to_tensor(grad) if grad is not None and source.name in self._inside.fed else grad
                    for grad, source in zip(grads, sources)
                ]
            fetches = [tensor for grad in grads if grad is not None for tensor in fetches_of(grad)]
            part = self._part(fetches, upstream) if fetches else None
            self._templates[key] = _Template(upstream, grads, part)
        return self._templates[key]


def _is_learned(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from trainable variables."""
    variables = {var.op for var in tf1.trainable_variables()}
    return not variables.isdisjoint(_tf.op_walks.ancestors([tensor.op]))


class _Link(NamedTuple):
    """What the gradient of an operation that joins rows needs.

    Attributes:
      number: how many of its first operands have no gradient: rows, whose gradient is that by the sources.
      gradients: function of the gradients by its results that returns those by its other operands.
    """

    number: int
    gradients: Gradients


def links_of(graph: tf.Graph) -> Dict[str, _Link]:
    links: Dict[str, _Link] = _tf.graphs.notes_of(graph).setdefault(GRADIENT, {})
    return links


@tf.RegisterGradient(GRADIENT)
def _gradient(op: tf.Operation, *upstream: Optional[tf.Tensor]) -> List[Optional[Gradient]]:
    if tf1.get_default_graph() is not op.graph:
        raise ValueError(
            "The gradients of what `split_batch` has split can't be taken within a conditional, loop or function of "
            f"TensorFlow 2: take them before, and apply them there. Received: {op.name!r}. [accum: split-batch]"
        )
    link = links_of(op.graph).get(op.name)
    if link is None:
        raise ValueError(
            "The rows that `split_batch` has joined have no gradient in a graph that was imported: build the model in "
            f"this graph and call `split_batch` in it. Received: {op.name!r}. [accum: split-batch]"
        )
    return [None] * link.number + link.gradients(upstream)


def _final(grad: Gradient, links: Sequence[tf.Tensor] = (), checks: Sequence[tf.Operation] = ()) -> Gradient:
    """Return a gradient that raises an error where it is differentiated in turn.

    Args:
      grad: a gradient.
      links: what it is computed from, if operations between are hidden; none if they are not.
      checks: operations for which it waits.
    """
    graph = tf1.get_default_graph()

    def final(value: tf.Tensor) -> tf.Tensor:
        value = _hidden(value) if links else value
        with graph.gradient_override_map({"IdentityN": NO_GRADIENT}), tf.control_dependencies(checks):
            return tf.identity_n([value, *links])[0]

    return _tf.inner_optimizer.on_values(final, grad)


def _hidden(value: tf.Tensor) -> tf.Tensor:
    """Return a tensor behind one of integers, at which TensorFlow ends its walk from variables to losses."""
    return tf.bitcast(tf.bitcast(value, _bits(value)), value.dtype) if is_differentiable(value) else value


def _bits(tensor: tf.Tensor) -> tf.DType:
    """Return an integer dtype to which numbers can be cast bit by bit: one or, for complex128, two for each."""
    return {2: tf.int16, 4: tf.int32}.get(tensor.dtype.size, tf.int64)


@tf.RegisterGradient(NO_GRADIENT)
def _no_gradient(op: tf.Operation, *upstream: tf.Tensor) -> None:
    del upstream
    raise ValueError(
        "A gradient through what `split_batch` has split can't be differentiated again, and with batch normalisation, "
        "there is no gradient by the batch: take gradients that are part of the loss before you call `split_batch`. "
        f"Received: {op.inputs[0].name!r}. [accum: split-batch]"
    )


def _depend_on_lengths_alone(tensors: Sequence[tf.Tensor], ops: Set[tf.Operation]) -> bool:
    """Whether tensors depend on the results of operations by their shapes alone, and wait for them no further."""
    stack = [tensor.op for tensor in tensors]
    done: Set[tf.Operation] = set()
    while stack:
        op = stack.pop()
        if op in ops:
            return False
        if op not in done:
            done.add(op)
            stack += [] if op.type in _tf.op_walks.OF_SHAPES else [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return True


def _is_zeros(grad: tf.Tensor) -> bool:
    """Whether TensorFlow has made up a gradient where there is none."""
    return isinstance(grad, tf.Tensor) and grad.op.type == "ZerosLike"
