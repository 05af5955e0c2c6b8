"""Cut a traced graph at its barriers into phases, each a part of the graph (law L19).

Each level of the graph (`_leveled_graph`) has a forward phase and a backward phase. The edges of the graph define the
inputs that a phase takes from other phases:

    forward 0 -> forward 1 -> ... -> outputs -> loss -> ... -> backward 1 -> backward 0 -> weights

Operations that do not depend on the batch, such as those that read a variable, are repeated in each phase that needs
them. Their gradients are computed once, from sums over the micro-batches, in the phase `weights`.

Operations that are not functions of the graph's inputs are made so: a random operation takes its examples' share of the
random numbers of the batch, see `_draws`; for variables and all others see `_graph_variables`.
"""

import functools
from typing import Any, Callable, Container, Dict, Iterable, List, NamedTuple, Sequence, Set, Tuple

from accum import _tf
from accum._engine._graph_variables import GraphVariables
from accum._engine._leveled_graph import WEIGHTS, Key, LeveledGraph
from accum._engine._trace import Trace, WholeMark
from accum._tf import tf
from accum._tf.graph_parts import name_of


class Phase(NamedTuple):
    """A part of the graph.

    Attributes:
      level: int.
      fetches: keys of what it computes.
      effects: names of operations that run with it.
      nodes: names of its operations, in the order in which they were created.
      feeds: keys of what it takes.
    """

    level: int
    fetches: List[Key]
    effects: List[str]
    nodes: List[str]
    feeds: List[Key]


class CutGraph:
    """A `Trace` in phases.

    Attributes:
      trace: the same.
      leveled: its `LeveledGraph`.
      variables: the `GraphVariables`.
      forward: list of the forward `Phase` of each level.
      backward: list of the backward `Phase` of each level.
      wholes: list of the forward phases of what is called with the whole batch, one for each of `trace.wholes`.
      wholes_backward: list of their backward phases.
      weights: the `Phase` that ends the gradients by what does not depend on the batch.
      uses: {key of a tensor that later phases use: (its level, forward levels that use it, backward levels)}.
      late: {key of a gradient that a backward phase computes for others: the last level, the lowest, that takes it}.
      summed: keys that the backward phases compute for `weights`.
      first: list of the phases that compute `variables.assigned_first`, one for each, in an order in which they can.
      finals: the `Phase` that computes `variables.assigned`.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.leveled = LeveledGraph(trace)
        self.variables = GraphVariables(self.leveled)
        self._everywhere = self._counts() if trace.compiled else set()
        self._cut()

    def _counts(self) -> Set[str]:
        """Return the names of operations that compute integers from shapes alone.

        XLA must know a number of examples that shapes another tensor, and forgets what a loop has kept of it. So each
        phase computes it anew. It knows the shape of a tensor that has been kept.
        """
        graph = self.leveled
        counts: Set[str] = set()
        for name in graph.ordered:
            node = graph.nodes[name]
            before = {name_of(key) for key in graph.inputs(node)}
            dependent = {one for one in before if graph.levels[one] is not None}
            is_count = bool(dependent) and (node.type in ("Shape", "ShapeN", "Size") or dependent <= counts)
            is_alone = (
                name in graph.of_trace
                and name not in graph.islands
                and name not in graph.gradients
                and name not in graph.waits
            )
            if is_count and is_alone and name not in graph.drawn:
                outputs = self.trace.graph.get_operation_by_name(name).outputs
                if outputs and all(output.dtype.is_integer or output.dtype.is_bool for output in outputs):
                    counts.add(name)
        return counts

    # ------------------------------------------------------------------------------------------------------------
    # Phases

    def _cut(self) -> None:
        graph = self.leveled
        trace, count = self.trace, graph.count
        self.uses: Dict[Key, Tuple[int, Set[int], Set[int]]] = {}
        self.late: Dict[Key, int] = {}
        self.summed: Set[Key] = set()
        fetches: Dict[int, List[Key]] = {level: [] for level in range(WEIGHTS, count)}
        islands: Dict[int, List[Key]] = {number: [] for number, _ in enumerate(trace.wholes)}

        def add(key: Key) -> None:
            name = name_of(key)
            own = islands[graph.islands[name]] if name in graph.islands else fetches[graph.levels[name] or 0]
            if graph.levels[name] == WEIGHTS:
                own = fetches[WEIGHTS]
            if key not in own:
                own.append(key)

        pairs = [grad for grad in trace.grads if isinstance(grad, tuple)]
        places: Dict[Key, Key] = dict(pairs)
        for key in graph.grad_keys():
            if key not in places.values():
                add(key)
        for own in [*fetches.values(), *islands.values()]:  # the places of rows are taken with the rows
            own += dict.fromkeys(places[key] for key in own if places.get(key, key) not in own)
        self.weights = self._phase(WEIGHTS, fetches[WEIGHTS], [], lambda name: graph.levels[name] in (None, WEIGHTS))
        for key in self.weights.feeds:
            if name_of(key) in graph.gradients and not graph.is_base(key):
                add(key)
                self.summed.add(key)
        self.backward: List[Phase] = []
        effects = self.variables.effects(of_gradients=True)
        for level in range(count):
            phase = self._phase(
                level, fetches[level], effects.get(level, []), functools.partial(self._is_within, level, False)
            )
            for key in phase.feeds:
                self._use(key, level, add)
            self.backward.append(phase)
        self.wholes_backward = []
        for number, whole in enumerate(trace.wholes):
            phase = self._phase(
                graph.level(whole.results[0]) or 0, islands[number], [], functools.partial(self._is_island, number)
            )
            self._require_arguments(whole, phase)
            again = graph.drawn.intersection(phase.nodes)
            if again:
                raise ValueError(f"the gradient of what is computed with the whole batch would draw again: {again}")
            self.wholes_backward.append(phase)
        self._cut_forward()

    def _use(self, key: Key, level: int, add: Callable[[Key], None]) -> None:
        """Note that a backward phase takes a tensor."""
        graph = self.leveled
        name = name_of(key)
        if graph.is_base(key):
            return
        if name in graph.gradients or (graph.levels[name] or 0) > level:
            add(key)
            self.late.setdefault(key, level)  # levels are cut in order
        else:
            self._used(key)[2].add(level)

    def _used(self, key: Key) -> Tuple[int, Set[int], Set[int]]:
        return self.uses.setdefault(key, (self.leveled.level(key) or 0, set(), set()))

    def _cut_forward(self) -> None:
        graph = self.leveled
        trace, count = self.trace, graph.count
        wanted: Dict[int, List[Key]] = {level: [] for level in range(count)}
        for key in graph.forward_keys():
            wanted[graph.level(key) or 0].append(key)
        self.wholes = []
        for number, whole in enumerate(trace.wholes):
            fetches = whole.results + [final.value for final in self.variables.assigned_at_once.get(number, [])]
            phase = self._phase(
                graph.level(whole.arguments[0]) or 0,
                fetches,
                self.variables.effects_at_once(number),
                functools.partial(self._is_island, number),
            )
            self._require_arguments(whole, phase)
            self.wholes.append(phase)
            for key in whole.inputs:
                self._used(key)[1].add(phase.level)
                self._used(key)[2].add(phase.level)
        for name in graph.reached([key for key, (_, _, backward) in self.uses.items() if backward]):
            for key in graph.inputs(graph.nodes[name]):  # of what is computed again
                if name_of(key) in graph.drawn and name_of(key) not in graph.islands:
                    self._used(key)[2].add(graph.level(key) or 0)
        effects = self.variables.effects(of_gradients=False)
        phases = {}
        for level in reversed(range(count)):
            keys = list(dict.fromkeys(wanted[level] + [key for key, use in self.uses.items() if use[0] == level]))
            keys = [key for key in keys if not graph.is_base(key)] + [key for key in keys if graph.is_base(key)]
            phase = self._phase(level, keys, effects.get(level, []), functools.partial(self._is_within, level, True))
            for key in phase.feeds:
                if not graph.is_base(key):
                    self._used(key)[1].add(level)
            phases[level] = phase
        self.forward = [phases[level] for level in range(count)]
        self._require_results()
        *self.first, self.finals = (
            self._phase(0, [final.value for final in finals], [], lambda name: graph.is_of_batch(f"{name}:0"))
            for finals in [*([final] for final in self.variables.assigned_first.values()), self.variables.assigned]
        )

    def _require_arguments(self, whole: WholeMark, phase: Phase) -> None:
        """Raise if what is called with the whole batch also takes a tensor of the micro-batch."""
        trace = self.trace
        stored = {key for mark in trace.wholes for key in mark.inputs}
        own = set(whole.arguments + whole.result_cotangents) | set(trace.inputs) - stored
        own |= {trace.share, trace.position}
        others = sorted(key for key in phase.feeds if key not in own and self.leveled.level(key) is not None)
        if others:
            raise ValueError(f"what is computed with the whole batch takes tensors of a micro-batch: {others}")

    def _require_results(self) -> None:
        """Raise if micro-batches take more of what is computed with the whole batch than its results."""
        taken = [key for phase in self.forward + self.backward for key in phase.feeds]
        others = sorted(
            {key for key in taken if name_of(key) in self.leveled.islands and not self.leveled.is_base(key)}
        )
        if others:
            raise ValueError(
                f"micro-batches take what is computed with the whole batch, and no entry of them: {others}"
            )

    def reading(self, keys: Iterable[Key]) -> List[Phase]:
        """Return the backward phases, where tensors are taken instead of computed by the level that makes them."""
        taken: Dict[int, Set[Key]] = {}
        for key in keys:
            taken.setdefault(self.leveled.level(key) or 0, set()).add(key)
        return [
            (
                self._phase(
                    level,
                    phase.fetches,
                    phase.effects,
                    functools.partial(self._is_within, level, False),
                    taken[level],
                )
                if level in taken
                else phase
            )
            for level, phase in enumerate(self.backward)
        ]

    def recomputed(self, begin: int, fetches: Sequence[Key]) -> Phase:
        """Return the part of the graph that computes tensors again from what crosses the cut before a level."""
        return self._phase(
            begin, list(fetches), [], lambda name: self._is_between(name, begin) and name not in self.leveled.drawn
        )

    def _is_between(self, name: str, begin: int) -> bool:
        graph = self.leveled
        level = graph.levels[name]
        is_later = level is None or level >= begin or name in self._everywhere
        return name not in graph.gradients and name not in graph.islands and is_later

    def _is_within(self, level: int, is_first: bool, name: str) -> bool:
        """Whether an operation belongs to the phases of a level, or to all; `is_first`: where nothing is drawn yet."""
        graph = self.leveled
        if name in graph.islands or (name in graph.drawn and not is_first):
            return False
        return graph.levels[name] in (None, level) or name in self._everywhere

    def _is_island(self, number: int, name: str) -> bool:
        return self.leveled.levels[name] is None or self.leveled.islands.get(name) == number

    def _phase(
        self,
        level: int,
        fetches: Sequence[Key],
        effects: Sequence[str],
        is_own: Callable[[str], bool],
        taken: Container[Key] = (),
    ) -> Phase:
        """Collect the operations that compute `fetches`, as far as they are of this phase and not `taken`."""
        graph = self.leveled
        names: Set[str] = set()
        feeds: Dict[Key, None] = {}
        stack: List[Key] = list(fetches) + [f"{name}:0" for name in effects]
        own = {f"{name}:0" for name in effects}
        while stack:
            key = stack.pop()
            name = name_of(key)
            node = graph.nodes[name]
            if key not in own and (key in taken or node.type == "Placeholder" or not is_own(name)):
                feeds[key] = None
            elif name not in names:
                names.add(name)
                stack += graph.inputs(node)
        order = sorted(names, key=graph.order_of.__getitem__)
        return Phase(level, list(fetches), list(effects), order, list(feeds))

    # ------------------------------------------------------------------------------------------------------------

    def watching_reads(self) -> Callable[[], None]:
        """Return a function to call before the gradient is computed, for which some variables are read anew.

        They are looked up by rows, or read in loops and branches. It raises if one may have changed until then.
        """
        read = {key for phase in self.forward + self.backward + self.wholes for key in phase.feeds}
        outside = [handle for key, handle in self.leveled.captures.items() if key in read]
        handles = [_tf.graph_parts.captured(handle) for handle in outside if handle.dtype == tf.resource]
        may_have_changed = _tf.graph_parts.change_from_now(handles)

        def require_unchanged() -> None:
            if may_have_changed():
                raise ValueError(
                    "With `whole_batch`, the gradient of a network must be computed before an embedding in it, or a "
                    "variable that it reads in a loop, is updated: call `tape.gradient` before `apply_gradients`."
                    " [accum: whole-batch-gradient]"
                )

        return require_unchanged

    def run(self, phase: Phase, feeds: Dict[Key, tf.Tensor]) -> Dict[Key, tf.Tensor]:
        """Compute a phase in the current graph, given {key: tensor} for all that it takes, captures left out."""
        values = {
            key: _tf.graph_parts.captured(feeds[key] if key in feeds else self.leveled.captures[key])
            for key in phase.feeds
        }
        protos = [
            _tf.graph_parts.placed(self.leveled.nodes[name], self.leveled.inputs(self.leveled.nodes[name]))
            for name in phase.nodes
        ]
        wanted = [key for key in phase.fetches if key not in values]
        tensors: List[Any] = []
        if protos:
            fetches = wanted + list(phase.effects)
            tensors = _tf.graph_parts.import_part(self.leveled.graph_def, protos, values, fetches, self.trace.graph)
        result = dict(zip(wanted, tensors))
        result.update({key: values[key] for key in phase.fetches if key in values})
        with tf.control_dependencies(tensors[len(wanted) :] if not tf.executing_eagerly() else []):
            return {key: tf.identity(value) for key, value in result.items()} if phase.effects else result
