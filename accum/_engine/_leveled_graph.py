"""The operations of a traced function, each with its level: how many barriers are before it (law L19).

The level of an operation is the largest number of barriers on any path to it, or None if it does not depend on the
batch. The gradient of an operation belongs to the same level. Gradients of what does not depend on the batch are
computed once, from sums over the micro-batches, at the level `WEIGHTS`.
"""

from typing import Any, Dict, Iterable, List, Optional, Set

from accum import _tf
from accum._engine._trace import SCOPE, Trace, Unrepeatable
from accum._tf import tf
from accum._tf.graph_parts import name_of

Key = str
WEIGHTS = -1
"""The level of the gradients of what does not depend on the batch."""
JOIN_ROWS = ("ConcatV2", "UnsortedSegmentSum")
"""What takes the rows of `tf.IndexedSlices`, whose places do not add up as gradients do."""


class LeveledGraph:
    """The operations of a `Trace`, in an order in which they can run, with the level of each.

    Attributes:
      trace: the same.
      graph_def: the `tf.compat.v1.GraphDef` of its graph.
      library: the `Library` of the functions in it.
      captures: {key in the graph: tensor outside of it}.
      nodes: {name of an operation: it}.
      of_trace: names of those that the trace has; others were added.
      aliases: {key of a tensor: key of the one that is taken instead of it}.
      drawn: names of operations that can't be computed again, and are always kept.
      ordered: names of the operations, in order.
      order_of: {name: its place in `ordered`}.
      waits: {name: keys of what comes before the operation, though it does not take it}.
      levels: {name: its level}.
      islands: {name of an operation that runs with the whole batch: which of `trace.wholes`}.
      gradients: names of the operations of the gradient.
      own: names of what is another for each micro-batch.
      count: how many levels there are.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.graph_def = trace.graph.as_graph_def()
        self.nodes = _tf.graph_parts.nodes_of(self.graph_def)
        self.library = _tf.graph_parts.Library(trace.graph, self.graph_def)
        self.of_trace = set(self.nodes)
        self.captures = {key: outside for outside, key in trace.captures}
        self.aliases: Dict[Key, Key] = {}
        self.drawn: Set[str] = set()
        self.ordered: List[str] = []
        self.order_of: Dict[str, int] = {}
        self.waits: Dict[str, List[Key]] = {}
        self.levels: Dict[str, Optional[int]] = {}
        self.islands: Dict[str, int] = {}
        self.gradients: Set[str] = set()
        self.own: Set[str] = set()
        self.count = 1
        self._end_without_effect()

    # ------------------------------------------------------------------------------------------------------------
    # Its operations

    def inputs(self, node: Any) -> List[Key]:
        """Return the keys of what an operation takes."""
        return [self.aliases.get(key, key) for key in node.inputs]

    def add(self, node: Any) -> None:
        """Add an operation."""
        self.nodes[node.name] = node

    def spec(self, key: Key) -> tf.TensorSpec:
        """Return shape and dtype of a tensor of a micro-batch."""
        return _tf.graph_parts.spec_of(self.trace.graph, self.nodes[name_of(key)], key)

    def is_base(self, key: Key) -> bool:
        """Whether a tensor is known in every phase: a placeholder, but for what stands for a variable."""
        return self.nodes[name_of(key)].type == "Placeholder"

    def is_cotangent(self, key: Key) -> bool:
        """Whether a placeholder stands for a gradient of the loss of the batch."""
        return name_of(key) in self.cotangents()

    def level(self, key: Key) -> Optional[int]:
        """Return the level of a tensor, None if it does not depend on the batch."""
        return self.levels[name_of(key)]

    def is_of_batch(self, key: Key) -> bool:
        """Whether a tensor is the same for all micro-batches, and known without what is called with all of them."""
        return name_of(key) not in self.own and name_of(key) not in self.islands

    def reached(self, keys: Iterable[Key]) -> Set[str]:
        """Return the names of the operations from which tensors are computed."""
        names: Set[str] = set()
        stack = [name_of(key) for key in keys]
        while stack:
            name = stack.pop()
            if name not in names:
                names.add(name)
                stack += [name_of(key) for key in self.inputs(self.nodes[name])]
                stack += [name_of(key) for key in self.waits.get(name, [])]
        return names

    def data_fetches(self) -> List[Key]:
        """Return the keys of all that is computed of the data."""
        wholes = [key for whole in self.trace.wholes for key in whole.inputs + whole.results]
        return self.forward_keys() + wholes + self.grad_keys()

    def forward_keys(self) -> List[Key]:
        """Return the keys of what the forward pass computes but for what is called with the whole batch."""
        trace = self.trace
        keys = trace.outputs + [loss.value for loss in trace.losses]
        keys += [key for moments, _ in trace.moments for key in moments]
        return keys + [key for mark in trace.statistics for key in mark.moments]

    def grad_keys(self) -> List[Key]:
        """Return the keys of all gradients."""
        trace = self.trace
        keys = [key for mark in trace.statistics for key in mark.grads if key is not None]
        for whole in trace.wholes:
            keys += [key for key in whole.argument_grads + whole.part_grads if key is not None]
        for grad in trace.grads:
            keys += [] if grad is None else [grad] if isinstance(grad, str) else list(grad)
        return keys + [key for key in trace.watched_grads if key is not None]

    def _end_without_effect(self) -> None:
        """Let the gradient be 0 by what is called with the whole batch, or by what it returns, but has no effect."""
        for whole in self.trace.wholes:
            ends = list(zip(whole.result_cotangents, whole.results, whole.part_grads))
            ends += zip(whole.input_cotangents, whole.inputs, whole.argument_grads)
            for cotangent, tensor, grad in ends:
                if cotangent is not None and grad is None:
                    zeros = f"accum_zeros/{name_of(cotangent)}"
                    dtype = self.trace.graph.get_tensor_by_name(tensor).dtype
                    self.add(_tf.graph_parts.new_node(zeros, "ZerosLike", [tensor], T=dtype))
                    self.aliases[cotangent] = f"{zeros}:0"

    # ------------------------------------------------------------------------------------------------------------
    # Levels

    def find_levels(self) -> None:
        """Order the operations and find their levels, anew after a change of `nodes`, `aliases` or `drawn`."""
        self._order()
        trace = self.trace
        self.levels, self.islands, self.own = {}, {}, set()
        shared = {name_of(key) for mark in trace.statistics for key in (mark.number, mark.mean, mark.variance)}
        behind = shared | {name_of(key) for mark in trace.statistics for key in mark.begins}
        arguments = {name_of(key): number for number, whole in enumerate(trace.wholes) for key in whole.arguments}
        parts = {name_of(key) for whole in trace.wholes for key in whole.parts}
        inputs = {name_of(key) for key in trace.inputs + [trace.share, trace.position]}
        cotangents = self.cotangents()
        is_gradient: Dict[str, bool] = {}
        for name in self.ordered:
            node = self.nodes[name]
            before = [name_of(key) for key in self.inputs(node)]
            is_gradient[name] = name in cotangents or any(is_gradient[one] for one in before)
            is_drawn = name in self.drawn and name not in self.islands
            if name in inputs or name in parts or is_drawn or any(one in self.own for one in before):
                self.own.add(name)
            levels = [self.levels[one] for one in before if not is_gradient[one]]
            levels += [self.levels[name_of(key)] for key in self.waits.get(name, [])]
            level = max([one for one in levels if one is not None], default=None)
            if name in inputs or (name in self.drawn and level is None):
                level = 0
            elif name in arguments or name in behind:
                level = 0 if level is None else level + 1
            elif name in parts:
                level = (level or 0) + 1
            islands = [self.islands[one] for one in before if one in self.islands and not is_gradient[one]]
            if name in arguments:
                self.islands[name] = arguments[name]
            elif islands and name not in parts:
                self.islands[name] = islands[0]
            self.levels[name] = level
        self.gradients = {name for name, flag in is_gradient.items() if flag}
        self._find_levels_of_gradients(cotangents)
        self.count = 1 + max([level for level in self.levels.values() if level is not None], default=0)

    def _order(self) -> None:
        """Sort the operations such that each comes after what it takes, and what is behind a barrier after that."""
        waits: Dict[str, List[Key]] = {}
        for mark in self.trace.statistics:
            for key in [mark.number, mark.mean, mark.variance] + mark.begins:
                waits[name_of(key)] = list(mark.moments)
        for whole in self.trace.wholes:
            for key in whole.arguments:
                waits[name_of(key)] = whole.inputs
            for key in whole.parts:
                waits[name_of(key)] = whole.results
        self.waits = waits
        done: Set[str] = set()
        self.ordered = []
        for first in self.nodes:
            stack = [(first, False)]
            while stack:
                name, is_ready = stack.pop()
                if is_ready:
                    self.ordered.append(name)
                elif name not in done:
                    done.add(name)
                    stack.append((name, True))
                    for key in self.inputs(self.nodes[name]) + waits.get(name, []):
                        if name_of(key) not in done:
                            stack.append((name_of(key), False))
        self.order_of = {name: number for number, name in enumerate(self.ordered)}

    def cotangents(self) -> Dict[str, Key]:
        """Return {name of a placeholder: the tensor by which it is the gradient}."""
        trace = self.trace
        pairs = list(zip(trace.cotangents, trace.outputs)) + [(loss.cotangent, loss.value) for loss in trace.losses]
        for mark in trace.statistics:
            pairs += [(key, mark.moments.mean) for key in mark.cotangents]
        for whole in trace.wholes:
            pairs += list(zip(whole.result_cotangents, whole.results)) + list(zip(whole.input_cotangents, whole.inputs))
        return {name_of(self.aliases.get(one, one)): other for one, other in pairs if one}  # type: ignore[arg-type]

    def _find_levels_of_gradients(self, cotangents: Dict[str, Any]) -> None:
        users: Dict[str, List[str]] = {}
        forward: Dict[str, Optional[str]] = {}
        for name in self.ordered:
            if name in self.gradients:
                forward[name] = self._differentiated(name)
                for key in self.inputs(self.nodes[name]):
                    users.setdefault(name_of(key), []).append(name)
        ends = {name_of(grad) for grad in self.trace.grads if isinstance(grad, str)}
        is_weights: Dict[str, bool] = {}
        for name in reversed(self.ordered):
            if name in self.gradients and name not in cotangents:
                one = forward[name]
                if one is not None:  # casts come before sums, which have more digits than what is cast
                    is_weights[name] = self.levels[one] is None and self.nodes[name].type != "Cast"
                else:
                    uses = users.get(name, [])
                    all_are = all(is_weights[use] for use in uses) and (bool(uses) or name in ends)
                    is_weights[name] = self.nodes[name].type == "AddN" and all_are
        for name in self.ordered:
            if name in cotangents:
                level, made_by = self.level(cotangents[name]), name_of(cotangents[name])
                self.levels[name] = WEIGHTS if level is None else level
                if made_by in self.islands and name not in self._input_cotangents():
                    self.islands[name] = self.islands[made_by]
            elif name in self.gradients:
                before = [name_of(key) for key in self.inputs(self.nodes[name])]
                one = forward[name]
                levels = [self.levels[before_it] for before_it in before if before_it in self.gradients]
                levels += [] if one is None else [self.levels[one]]
                joins = self.nodes[name].type in JOIN_ROWS
                known = {level for level in levels if level is not None}
                if joins and WEIGHTS in known and len(known) > 1:
                    raise Unrepeatable(
                        "rows of a variable are looked up by the examples, and others independently of them: look the "
                        f"latter up in a variable of their own. Received: {name!r}. [accum: whole-batch-gradient]"
                    )
                self.levels[name] = WEIGHTS if is_weights[name] and not joins else min(known)
                islands = {self.islands.get(before_it) for before_it in before if before_it in self.gradients}
                number = next(iter(islands)) if one is None and len(islands) == 1 else self.islands.get(one or "")
                if number is not None:
                    self.islands[name] = number

    def _input_cotangents(self) -> Set[str]:
        return {name_of(key) for whole in self.trace.wholes for key in whole.input_cotangents if key is not None}

    def _differentiated(self, name: str) -> Optional[str]:
        """Return the name of the operation whose gradient an operation computes, or None."""
        if not name.startswith(SCOPE + "/"):
            return None
        end = len(name)
        while end > 0:
            end = name.rfind("_grad/", 0, end)
            if end > 0 and name[len(SCOPE) + 1 : end] in self.nodes:
                return name[len(SCOPE) + 1 : end]
        return None
