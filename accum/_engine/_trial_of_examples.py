"""Find out, by computing, whether the examples of a traced function meet elsewhere than at its barriers (law L19).

Between two barriers, the results of an example must not depend on other examples. Code can break this in countless
ways: a softmax over the first axis, a product of a matrix with its transpose, a rotation, a shape that mixes examples.
No list of operations is complete. So the function is computed on made-up numbers: once on two examples together, and
once on each of them alone, but with the statistics of both. The results must be the same.

The weights are made up too, all of them positive: a layer that begins with zeros would hide what comes before it. The
trial runs in a graph and a session of its own. It changes nothing, and reads no variable.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from accum import _check, _tf
from accum._engine._cut_graph import CutGraph, Phase
from accum._engine._trace_and_barriers import StatisticsMark, WholeMark, is_differentiable
from accum._tf import tf

Key = str
Values = Dict[Key, Any]
EXAMPLES = 2
SCALES = (1.0, 0.1)
"""Sizes of the weights. A softmax of large numbers is the same with and without a few more small ones."""
UNKNOWN_LENGTH = 8
"""The length of any other axis that is unknown in the trace."""
ROUNDING = 1e-6
"""What rounding may leave of a variance or a mean that is 0, in squares of the mean, or in values."""
LARGEST = 2**20
"""The numbers in an example up to which a trial is made: it computes eight examples, on the host."""


class Outcome(NamedTuple):
    """What a trial has shown.

    Attributes:
      meetings: names of the operations where examples meet, if a result of one depends on others.
      failure: why nothing could be computed, or None.
    """

    meetings: List[str]
    failure: Optional[str]


def trial_of_examples(graph: CutGraph, are_means: bool = False) -> Outcome:
    """Compute a function on two examples together, and on each of them alone.

    Args:
      graph: the function. All that it takes of an example must be dense.
      are_means: whether the outputs are a mean over the examples and its weight, spread over the examples.
    """
    if graph.trace.other_draws:  # they draw other numbers in each run; a warning has named them
        return Outcome([], None)
    if graph.drawn:
        return Outcome([], f"{_check.shown(sorted(graph.drawn))} may return something else each time")
    count = _numbers_of_example(graph)
    if count > LARGEST:
        return Outcome([], f"an example has {count:,} numbers, which would take long")
    with tf.Graph().as_default(), _tf.graph_parts.plain_session() as session:
        try:
            trial = _Trial(graph, session)
            return Outcome(next(filter(None, (trial.meetings(are_means, scale) for scale in SCALES)), []), None)
        except Exception as error:  # whatever it is: nobody has asked for a trial, so it must not end training
            return Outcome([], _told(error))


class _Imported(NamedTuple):
    """A phase in the graph of the trial: placeholders for what it takes, and what it computes."""

    places: Dict[Key, tf.Tensor]
    fetched: Dict[Key, tf.Tensor]


class _Trial:
    """The runs of a function: with both examples, and with each of them alone."""

    def __init__(self, graph: CutGraph, session: Any) -> None:
        self._cut, self._trace = graph, graph.trace
        self._session = session
        self._random = np.random.RandomState(0)
        self._outsides = {key: outside for outside, key in graph.trace.captures}
        self._readers: Dict[Key, List[tf.Operation]] = {}  # of each tensor
        for op in graph.trace.graph.get_operations():
            for key in graph.inputs_of(op.name):
                self._readers.setdefault(key, []).append(op)
        self._shared: Values = {}  # what is the same in all runs
        self._fed_scale = tf.compat.v1.placeholder(tf.float32, [])
        self._variables = self._made_up_variables()
        trace = graph.trace
        inputs = {key: self._input(graph.spec(key)) for key in trace.inputs}
        self._runs: List[Values] = []
        for begin, end in [(0, EXAMPLES)] + [(number, number + 1) for number in range(EXAMPLES)]:
            values = {key: value[begin:end] if _is_batched(graph.spec(key)) else value for key, value in inputs.items()}
            values[trace.share], values[trace.position] = np.array((end - begin) / EXAMPLES), np.array(begin)
            self._runs.append(values)
        # All at once, because a session takes long to learn of new operations.
        self._forward = [self._import(phase, phase.fetches) for phase in graph.forward]
        self._islands = [self._import(phase, phase.fetches) for phase in graph.wholes]

    def meetings(self, are_means: bool, scale: float) -> List[str]:
        """Return the names of the operations where examples meet, in the first level that has any."""
        cut, trace = self._cut, self._trace
        self._scale = scale
        self._shared = {trace.seed: np.array([1, 2]), trace.total: np.array(EXAMPLES)}
        self._session.run([var.initializer for var in self._variables.values()], {self._fed_scale: scale})
        ends = [key for key in trace.outputs if cut.level(key) is not None]
        is_right = self._is_mean if are_means else self._is_apart
        losses = [loss for loss in trace.losses if cut.level(loss.value) is not None]
        for level, phase in enumerate(cut.forward):
            for number, (mark, island) in enumerate(zip(trace.wholes, cut.wholes)):
                if island.level == level:
                    meeting = [key for key in mark.inputs if not self._is_apart(key)]
                    if meeting:
                        return self._origins(cut.forward[cut.level(meeting[0]) or 0], meeting)
                    self._run_whole(mark, self._islands[number])
            self._run(self._forward[level], self._runs)
            meeting = [key for key in ends if cut.level(key) == level and not is_right(key)]
            meeting += [
                loss.value
                for loss in losses
                if cut.level(loss.value) == level and not self._adds_up(loss.value, loss.is_sum)
            ]
            for statistics in trace.statistics:
                if cut.level(statistics.moments.mean) == level:
                    meeting += [] if self._pools(statistics) else [statistics.moments.mean]
                    self._hand_over(statistics)
            if meeting:
                return self._origins(phase, meeting)
        return []

    # ------------------------------------------------------------------------------------------------------------
    # What is made up

    def _input(self, spec: tf.TensorSpec) -> np.ndarray:
        """Return two examples of an argument.

        They differ at each place, and on average. But neither is the larger one everywhere.
        """
        is_batched = _is_batched(spec)
        shape = _made_up_shape(spec)
        if spec.dtype.is_integer:
            place = np.arange(np.prod(shape[1:], dtype=int))  # what is not batched has no axes
            value = place // 2 % 2
            if is_batched:
                value = np.stack([value, np.where(place % 3 == 1, value, 1 - value)])
            value = value.reshape(shape)
        elif spec.dtype.is_bool:
            value = np.ones(shape, bool)
        elif spec.dtype.is_floating or spec.dtype.is_complex:
            value = self._random.uniform(0.1, 1.0, shape)
            if is_batched:
                is_other = np.arange(value[0].size).reshape(shape[1:]) % 3 == 2
                value = value * np.stack([np.where(is_other, 2.0, 1.0), np.where(is_other, 1.0, 2.0)])
        else:
            raise ValueError(f"values of {spec.dtype.name} can't be made up")
        return np.asarray(value, spec.dtype.as_numpy_dtype)

    def _weights(self, key: Key, shape: Sequence[int], dtype: tf.DType) -> np.ndarray:
        if not (dtype.is_floating or dtype.is_complex):
            return np.zeros(shape, dtype.as_numpy_dtype)
        value = self._random.uniform(0.5, 1.5, shape) * self._scale / self._divisor(key, shape)
        return np.asarray(value, dtype.as_numpy_dtype)

    def _divisor(self, key: Key, shape: Sequence[int]) -> float:
        """Return by what to divide weights such that results neither grow nor vanish beside those of other weights."""
        kinds, waiting = set(), [key]
        while waiting:
            for op in self._readers.get(waiting.pop(), ()):
                kinds.add(op.type)
                if op.type in ("ReadVariableOp", "Identity", "Cast"):
                    waiting += [output.name for output in op.outputs]
        if kinds & {"Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"}:
            return 1.0
        if "DepthwiseConv2dNative" in kinds:
            return float(shape[0] * shape[1])
        if len(shape) == 1:
            return 10.0 if kinds & {"Add", "AddV2", "BiasAdd"} else 1.0
        return float(max(int(np.prod(shape[:-1])), 1))

    def _capture(self, key: Key) -> np.ndarray:
        """Return a value for what comes from outside of the graph."""
        outside = self._outsides[key]
        value = tf.get_static_value(outside)
        if value is not None:
            return value
        inside = self._trace.graph.get_tensor_by_name(key)
        if not inside.shape.is_fully_defined() or not is_differentiable(inside):
            raise ValueError(f"{outside!r} is unknown when the graph is built")
        return self._weights(key, inside.shape.as_list(), inside.dtype)

    def _variable(self, handle: tf.Tensor) -> tf.TensorSpec:
        """Return the spec of a variable, given its handle outside of the graph."""
        spec = _tf.graph_parts.spec_of_variable(handle)
        if spec is None:
            raise ValueError(f"the shape of the variable of {handle!r} is unknown")
        return spec

    def _made_up_variables(self) -> Dict[Key, tf.Variable]:
        """Return variables that take the place of those outside."""
        phases = self._cut.forward + self._cut.wholes
        handles = {**self._outsides, **self._cut.states}
        fed = dict.fromkeys(key for phase in phases for key in phase.feeds)
        keys = [key for key in fed if key in self._cut.states or self._cut.spec(key).dtype == tf.resource]
        made = {}
        for number, key in enumerate(keys):
            spec = self._variable(handles[key])
            shape, dtype = spec.shape.as_list(), spec.dtype
            value = tf.zeros(shape, dtype)
            if dtype.is_floating:
                drawn = tf.random.uniform(shape, 0.5, 1.5, seed=number)
                value = tf.cast(drawn * self._fed_scale / self._divisor(key, shape), dtype)
            made[key] = tf.compat.v1.Variable(value, use_resource=True, trainable=False)
        return made

    # ------------------------------------------------------------------------------------------------------------
    # Runs

    def _import(self, phase: Phase, keys: Sequence[Key]) -> _Imported:
        """Add a phase to the graph of the trial, with placeholders for what it takes."""
        places: Dict[Key, tf.Tensor] = {}
        feeds: Dict[Key, tf.Tensor] = {}
        for key in phase.feeds:
            if key not in self._variables:
                spec = self._cut.spec(key)
                places[key] = tf.compat.v1.placeholder(spec.dtype, spec.shape)
                feeds[key] = places[key]
            else:
                var = self._variables[key]
                feeds[key] = var.read_value() if key in self._cut.states else var.handle
        phase = phase._replace(fetches=list(keys), effects=[])
        return _Imported(places, self._cut.run(phase, feeds, keeps_devices=False))

    def _run(self, phase: _Imported, runs: Sequence[Values]) -> None:
        for values in runs:
            fed = {place: self._value(key, values) for key, place in phase.places.items()}
            values.update(self._session.run(phase.fetched, fed))

    def _value(self, key: Key, values: Values) -> np.ndarray:
        if key in values:
            return values[key]
        if key not in self._shared:
            self._shared[key] = self._capture(key)
        return self._shared[key]

    def _run_whole(self, mark: WholeMark, island: _Imported) -> None:
        """Compute what is called with the whole batch, and give each run its part."""
        whole = dict(self._runs[0])
        whole.update((key, whole[one]) for key, one in zip(mark.arguments, mark.inputs))
        self._run(island, [whole])
        for part, result in zip(mark.parts, mark.results):
            self._runs[0][part] = whole[result]
            for number, values in enumerate(self._runs[1:]):
                values[part] = whole[result][number : number + 1]

    def _hand_over(self, mark: StatisticsMark) -> None:
        """Let all runs use the statistics of both examples."""
        moments = [self._runs[0][key] for key in mark.moments]
        self._shared.update(zip((mark.number, mark.mean, mark.variance), moments))
        if mark.whole_count is not None and mark.whole_mean is not None:
            self._shared[mark.whole_count], self._shared[mark.whole_mean] = moments[:2]

    # ------------------------------------------------------------------------------------------------------------
    # Comparisons

    def _is_apart(self, key: Key) -> bool:
        """Whether a tensor has one entry for each example, which does not depend on the other."""
        both, *alone = [values[key] for values in self._runs]
        if any(np.ndim(value) == 0 or len(value) != 1 for value in alone):
            return False
        return _are_close(np.concatenate(alone), both)

    def _is_mean(self, key: Key) -> bool:
        """Whether the weighted mean of the examples' values is that of both, unless `key` is that of the weights."""
        if key != self._trace.outputs[0]:
            return True
        both, *alone = [[self._value(one, values) for one in self._trace.outputs] for values in self._runs]
        parts = [both, [np.concatenate(one) for one in zip(*alone)]]
        means = [np.sum(values * weights) / max(np.sum(weights), 1e-9) for values, weights in parts]
        # The values of two normalised examples may cancel, and their mean then is what rounding leaves of 0.
        return _are_close(means[1], means[0], ROUNDING * np.max(np.abs(parts[1][0]), initial=0.0))

    def _adds_up(self, key: Key, is_sum: bool) -> bool:
        both, *alone = [values[key] for values in self._runs]
        return _are_close(np.sum(alone, axis=0) / (1 if is_sum else EXAMPLES), both)

    def _pools(self, mark: StatisticsMark) -> bool:
        """Whether the moments of each example give those of both."""
        counts, means, variances = [np.array([values[key] for values in self._runs], float) for key in mark.moments]
        shares = (counts[1:] / max(float(np.sum(counts[1:])), 1.0)).reshape([-1] + [1] * (means.ndim - 1))
        mean = np.sum(shares * means[1:], axis=0)
        variance = np.sum(shares * (variances[1:] + (means[1:] - mean) ** 2), axis=0)
        # Tokens may all be the same, and their variance then is what rounding leaves of 0.
        return _are_close(mean, means[0]) and _are_close(
            variance, variances[0], ROUNDING * np.max(means**2, initial=0.0)
        )

    def _origins(self, phase: Phase, meeting: Sequence[Key]) -> List[str]:
        """Return the names of the operations at which results begin to depend on other examples."""
        keys = [f"{name}:{index}" for name in phase.nodes for index in range(self._outputs_of(name))]
        keys = [key for key in keys if self._cut.level(key) is not None]
        self._run(self._import(phase, keys), self._runs)
        is_apart = {key: self._is_apart(key) for key in keys}
        origins: Dict[str, None] = {}
        seen, stack = set(meeting), list(meeting)
        while stack:
            name = _tf.graph_parts.name_of(stack.pop())
            before = [key for key in self._cut.inputs_of(name) if is_apart.get(key) is False]
            if not before:
                origins[name] = None
            stack += [key for key in before if key not in seen]
            seen.update(before)
        return sorted(origins)

    def _outputs_of(self, name: str) -> int:
        """Return the number of tensors that an operation makes and that can be looked at."""
        try:
            outputs = self._trace.graph.get_operation_by_name(name).outputs
        except KeyError:  # one that the cut has added
            return 1
        return 0 if any(output.dtype in (tf.resource, tf.variant) for output in outputs) else len(outputs)


def _told(error: Exception) -> str:
    """Return the line of an error that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "{{node" in line]
    return (named or lines or [type(error).__name__])[0]


def _numbers_of_example(graph: CutGraph) -> int:
    shapes = [graph.spec(key).shape for key in graph.trace.inputs if _is_batched(graph.spec(key))]
    return sum(int(np.prod([length or UNKNOWN_LENGTH for length in shape.as_list()[1:]])) for shape in shapes)


def _is_batched(spec: tf.TensorSpec) -> bool:
    return bool(spec.shape.rank) and spec.shape.as_list()[0] is None


def _made_up_shape(spec: tf.TensorSpec) -> List[int]:
    if spec.shape.rank is None:
        raise ValueError("an argument of unknown rank can't be made up")
    shape = [UNKNOWN_LENGTH if length is None else length for length in spec.shape.as_list()]
    return [EXAMPLES] + shape[1:] if _is_batched(spec) else shape


def _are_close(one: np.ndarray, other: np.ndarray, rounding: float = 0.0) -> bool:
    """Whether numbers are equal but for rounding, which may be as large as `rounding` where they are smaller."""
    if np.shape(one) != np.shape(other):
        return False
    one, other = (np.asarray(value) for value in (one, other))
    if one.dtype.kind not in "fc" and one.dtype.itemsize != 2:
        return bool(np.array_equal(one, other))
    tolerance = 1e-3 if one.dtype.itemsize > 2 else 5e-2
    kind = complex if one.dtype.kind == "c" else float
    one, other = np.asarray(one, kind), np.asarray(other, kind)
    scale = np.max(np.abs(other[np.isfinite(other)]), initial=0.0)
    return bool(np.allclose(one, other, rtol=0.0, atol=max(tolerance * scale, rounding), equal_nan=True))
