"""Each micro-batch gets its examples' share of the random numbers of the batch, and of the cycle (law L20)."""

import contextlib
import re
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

from accum import _check, _tf
from accum._engine import _replicas
from accum._engine._batch import Size
from accum._engine._draws import (
    NUMBERS_OF_BATCH,
    Chosen,
    CycleDraws,
    Draws,
    number_of_step,
    tells_of_shapes,
    uniform_seed,
    warn_of_others,
)
from accum._keras._optimizer._internals import internals_of
from accum._keras._optimizer._wrapper import accumulating_optimizers
from accum._tf import Nested, Scalar, tf


class BatchDraws:
    """What a model draws for a batch.

    In Keras 3, each draw takes its seed from a variable and advances it. Here each micro-batch of a cycle begins with
    the same seeds, so they advance once. In Keras 2, the seed is a function of the program's and of the step, if the
    program has one: also after a restart.

    Args:
      model: a `GradientAccumulateModel`.
      count: the number of examples, an int or int scalar tensor.
      compiled: whether XLA compiles this.
      is_training: whether the batch is part of a step.

    Attributes:
      done: what the engine gets later, if not within `batch`: a nested structure of tensors, or None.
    """

    def __init__(self, model: tf.keras.Model, count: Size, compiled: bool = False, is_training: bool = False) -> None:
        self._model = model
        self._count = count
        self._compiled = compiled
        self._is_training = is_training
        self._is_eager = tf.executing_eagerly()
        self._graph = None if self._is_eager else tf.compat.v1.get_default_graph()
        self._is_first: Optional[tf.Tensor] = None  # whether the batch is the first of its cycle
        self._begins = False  # whether the next micro-batch is the first
        self._offset: Union[int, tf.Tensor, None] = 0  # the examples of replicas before this one; None: unknown
        self._total = count  # on all replicas
        self._drawn = 0  # how many operations of the calls over the whole batch
        self.done: Nested = None
        self._draws: Any = None
        self._has_drawn = False  # in a step
        self._own_seeds: List[tf.Variable] = []
        self._seeds: List[tf.Variable] = []  # also that of what is drawn without a seed
        self._before: List[tf.Tensor] = []
        self._cycle: Any = None  # the engine's, if there are several batches in one
        self._cycle_draws: Optional[CycleDraws] = None
        if self._is_eager:
            return
        self._own_seeds = [_replicas.local_variable(_tf.variables.native(var)) for var in _tf.steps.seeds_of(model)]
        others = [_replicas.local_variable(_tf.variables.native(var)) for var in _tf.steps.seeds_without_model()]
        self._seeds = self._own_seeds + others
        if is_training:
            self._optimizers = accumulating_optimizers(model)
            self._optimizer = self._optimizers[0]
            internals = internals_of(self._optimizer)
            self._cycle = None if internals.is_passthrough else internals.cycle
            if self._cycle is not None and _tf.steps.HAS_SEED_WITHOUT_MODEL:
                self._model._accum.create_start_of_seed()  # in the first trace, in which Keras may create its seed
            self._share_count()
            self._create_ahead()
        has_others = is_training and (self._cycle is not None or _replicas.count() > 1)
        self._draws = Draws(self._seed, count, compiled, self.base if has_others else None)

    # ------------------------------------------------------------------------------------------------------------

    def split_by(self, size: Size) -> None:
        """Note the largest number of examples that are computed at once."""
        if self._draws is not None and isinstance(size, int):
            self._draws.size = size

    def seed_of_call(self, draws: int, shared: Dict[str, str]) -> tf.Tensor:
        """Return the seed of a call over the whole batch, an int64 tensor of shape [2]: each call draws other numbers.

        Args:
          draws: how many operations draw in the call.
          shared: those of them that draw for all examples together, as `shared` of `Draws`.
        """
        self._warn_of_shared(shared)
        before, self._drawn = self._drawn, self._drawn + draws
        seed = self._seed() + tf.constant([0, before << 32], tf.int64)
        if not any(_tf.graphs.is_loop_body(one) or _tf.graphs.is_function(one) for one in self._graphs_within()):
            return seed
        return seed + tf.stack([uniform_seed()[0], tf.zeros([], tf.int64)])  # one call in a graph may run several times

    def _graphs_within(self) -> Sequence[tf.Graph]:
        return [] if self._is_eager else _tf.graphs.graphs_within(self._graph)

    def _seed(self) -> tf.Tensor:
        drawn = uniform_seed()
        if self._is_eager or not self._is_training:
            return drawn
        self._has_drawn = True
        with _tf.variables.on_host():
            step = self._steps()
            idle = None if self._cycle is not None else self._model._accum.idle_steps
            if idle is not None:
                step += _replicas.local_variable(idle).read_value() * 2**20
            if self._compiled or self._offset is None:  # then no other places are known than those in the batch
                step += tf.cast(self._optimizer.micro_step, tf.int64) * 2**10
            if self._offset is None:
                step += tf.cast(_replicas.number_among_all(), tf.int64)
            graph_seed = _tf.random_ops.seed_of_graph()
            return tf.stack([drawn[0] if graph_seed is None else tf.constant(graph_seed, tf.int64), step])

    def _steps(self) -> tf.Tensor:
        return tf.add_n([number_of_step(optimizer) for optimizer in self._optimizers])

    @contextlib.contextmanager
    def counting_idle_steps(self) -> Iterator[None]:
        """Count the train step in this context if no optimizer that the model knows makes a step in it.

        The next one draws other numbers all the same, as where the weights are updated by hand.
        """
        idle = self._model._accum.idle_steps
        if self._is_eager or not self._is_training or self._cycle is not None or idle is None:
            yield
            return
        before = self._steps()
        yield
        if self._has_drawn:
            with _tf.variables.on_host():
                is_idle = tf.cast(tf.equal(self._steps(), before), tf.int64)
                _replicas.local_variable(idle).assign_add(is_idle)

    def base(self) -> tf.Tensor:
        """Return how many examples of the cycle were before those of this replica, an int64 scalar tensor."""
        if self._offset is None:
            raise LookupError
        if self._cycle is None:
            return tf.cast(self._offset, tf.int64)
        return self._earlier() + tf.cast(self._offset, tf.int64)

    def known_base(self) -> Scalar:
        """Return what `base` does, or 0, with a warning if it is unknown."""
        if self._is_eager or self._compiled or not self._is_training:
            return 0
        try:
            return self.base()
        except LookupError:
            _check.warn(
                "Random numbers differ with the number of replicas, because they can't be drawn by example here: the "
                "model has no dropout or noise layers of Keras, or runs on TensorFlow 2.2 or 2.3 with XLA or several "
                "workers. [accum: random-numbers]",
                _check.InexactWarning,
            )
            return 0

    def _earlier(self) -> tf.Tensor:
        """Return how many examples of the cycle were before this batch."""
        with _tf.variables.on_host():
            examples = _replicas.local_variable(self._kept().examples).read_value()
            return tf.where(self._is_first, tf.zeros_like(examples), examples)

    def _kept(self) -> CycleDraws:
        state = self._cycle.state
        if not hasattr(state, "draws"):
            with tf.init_scope():
                state.draws = CycleDraws(self._optimizer._adapter.name, self._own_seeds)
        self._cycle_draws = state.draws
        return state.draws

    def _create_ahead(self) -> None:
        """Create what draws may need: Keras 2 does not let the call of a `Lambda` layer create variables."""
        if not any(isinstance(layer, tf.keras.layers.Lambda) for layer in _tf.models.layers_of(self._model)):
            return
        for optimizer in self._optimizers:
            number_of_step(optimizer)
        if self._cycle is not None:
            self._kept()

    def _share_count(self) -> None:
        """Find the places of this replica's examples among those of all replicas."""
        replicas = _replicas.count()
        if replicas == 1:
            return
        if self._compiled or not _tf.steps.may_draw(self._model) or _replicas.have_one_number():
            self._offset = None
            return
        own = tf.one_hot(_replicas.number_among_all(), replicas, on_value=1.0) * tf.cast(self._count, tf.float32)
        (counts,) = _replicas.sum_of_group([own], replicas)
        self._offset = tf.reduce_sum(counts[: _replicas.number_among_all()])
        self._total = tf.reduce_sum(counts)

    # ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Let the batch draw in this context, which surrounds all of its micro-batches."""
        if self._is_eager:
            yield
            return
        if self._cycle is not None:
            with _tf.variables.on_host():  # before the engine counts
                self._is_first = tf.equal(self._optimizer.micro_step, 0)
        if self._cycle is not None and self._seeds and not self._compiled and self._offset is not None:
            kept = list(self._kept().seeds) if self._own_seeds else []
            for seed, start in zip(self._seeds, kept + [self._model._accum.start_of_seed]):
                start = _replicas.local_variable(start)
                begun = tf.where(self._is_first, tf.cast(seed.read_value(), tf.int64), start.read_value())
                start.assign(begun)
                seed.assign(tf.cast(begun, seed.dtype))
        self._before = [tf.identity(seed.read_value()) for seed in self._seeds]
        self._begins = True
        yield
        if self._cycle_draws is not None:
            # The engine counts after the gradients. Where one fails, the same batch has the same place again.
            done = (
                [self._optimizer.micro_step]
                if self.done is None
                else tf.nest.flatten(self.done, expand_composites=True)
            )
            with tf.control_dependencies(_tf.graphs.waits_for_all(done)), _tf.variables.on_host():
                examples = self._earlier() + tf.cast(self._total, tf.int64)
                _replicas.local_variable(self._cycle_draws.examples).assign(examples)

    @contextlib.contextmanager
    def whole_batch(self, count: Size) -> Iterator[None]:
        """Let a batch of `count` examples, which is computed at once, draw in this context."""
        with self.batch(), self.of(0, count):
            yield

    @contextlib.contextmanager
    def of(self, begin: Size, count: Size, chosen: Optional[Chosen] = None) -> Iterator[None]:
        """Let one micro-batch draw in this context: `count` examples from place `begin` of the batch on, or chosen."""
        if self._is_eager:
            with self._naming_fixed_numbers(int(count)):
                yield
            return
        for seed, value in zip(self._seeds, self._before) if not self._begins else ():
            seed.assign(value)
        self._begins = False
        with self._draws.of(begin, count, chosen):
            yield
        self._warn_of_shared(self._draws.shared)

    def _warn_of_shared(self, shared: Dict[str, str]) -> None:
        """Warn once of what each batch of a cycle draws anew for all examples together, which the full batch shares."""
        if self._cycle is None:
            return
        reasons = {"batch"}
        if self._compiled or self._offset is None:
            reasons |= {"place", "seed"}
        elif _tf.random_ops.seed_of_graph() is None:
            reasons.add("seed")
        names = [name for name, reason in shared.items() if reason in reasons]
        if names and self._model._accum.is_first_time("shared draws"):
            warn_of_others(names)

    @contextlib.contextmanager
    def _naming_fixed_numbers(self, count: int) -> Iterator[None]:
        """Let the error about shapes say that something has as many rows as the batch, not as the micro-batch."""
        try:
            yield
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            lengths = set(re.findall(r"\[(\d+)", str(error)))
            if tells_of_shapes(error) and {str(count), str(int(self._count))} <= lengths and count != int(self._count):
                raise ValueError(f"{NUMBERS_OF_BATCH} Received: {_check.shown([str(error)])}.") from error
            raise


def counters_of(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the variables that say what a batch of a model draws, beside its seeds."""
    optimizers = accumulating_optimizers(model) if model._accum.optimizers else []
    draws = [getattr(internals_of(optimizer).cycle.state, "draws", None) for optimizer in optimizers[:1]]
    kept = [counter for one in draws if one is not None for counter in one.counters]
    start = model._accum.start_of_seed
    return kept + ([] if start is None else [start])


def warn_of_eager_draws(model: tf.keras.Model) -> None:
    """Warn once that a batch that is split eagerly draws other numbers than the whole batch."""
    draws = tf.executing_eagerly() and (_tf.steps.seeds_of(model) or _tf.models.has_noise(model))
    if draws and model._accum.is_first_time("eager draws"):
        _check.warn(
            "Eagerly, dropout and noise draw other numbers for each size of micro-batches: compile without "
            "`run_eagerly` for the numbers of the whole batch. [accum: random-numbers]",
            _check.InexactWarning,
        )
