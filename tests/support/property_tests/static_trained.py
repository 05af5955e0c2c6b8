"""Train the network of a case in a static graph with accumulation, and plainly at the full batch."""

import contextlib
import gc
import os
import tempfile
import weakref

import numpy as np
import tensorflow as tf
from replicas import RUN, mirrored
from versions import TF_VERSION

import accum.compat.v1
from property_tests import models, plain
from property_tests import static_models as networks
from property_tests.fed import Deviation
from property_tests.trained import ROUNDING

tf1 = tf.compat.v1
TOLERANCE = {"float32": 2e-6, "barriers": 2e-5, "float16": 3e-4}
"""For variables of order 1."""
LOG_TOLERANCE = {"float32": 2e-5, "barriers": 2e-4, "float16": 5e-3}
KEEPS_GRAPHS = TF_VERSION < (2, 0)
"""Whether TensorFlow itself keeps each function that has a gradient, and `whole_batch` with it, in a registry."""

CPUS = {"device_count": {"CPU": 4}}
SPACES = [getattr(tf1, "mixed_precision", None), tf1.train.experimental]  # it moved with TF 2.4
SCALES = [space for space in SPACES if hasattr(space, "MixedPrecisionLossScaleOptimizer")][0]


def check(case):
    """Raise `Deviation` unless variables and losses are those of the full batches."""
    schedule = plain.schedule_of(
        dict(case, epochs=1, how="fit", options=dict(case["options"], last_cycle=case["last_cycle"]))
    )
    batches = networks.batches_of(case)
    whole, other = (_plain(case, batches, schedule, order) for order in (1, -1))
    references = []
    ours = _ours(case, batches, schedule, references)
    kind = "barriers" if case["options"]["whole_batch"] else case["precision"]
    kind = "float16" if case["precision"] == "float16" else kind
    for place, (made, state) in enumerate(zip(schedule.made, ours)):
        if state["step"] != made:
            raise Deviation(f"law L3: after batch {place}, {state['step']} steps were counted, not {made}")
        _compare(TOLERANCE[kind], f"after batch {place}", state["variables"], *(run[made][0] for run in (whole, other)))
        if made and (place == 0 or schedule.made[place - 1] < made) and state["logs"] is not None:
            _compare(
                LOG_TOLERANCE[kind], f"logs of step {made}", state["logs"], *(run[made][1] for run in (whole, other))
            )
    gc.collect()
    if KEEPS_GRAPHS and case["options"]["whole_batch"]:
        return
    if any(reference() is not None for reference in references):
        raise Deviation("law L16: a graph is still alive")


def _compare(tolerance, what, ours, whole, other):
    for number, (one, theirs, rounded) in enumerate(zip(ours, whole, other)):
        allowed = tolerance * np.maximum(1.0, np.abs(theirs)) + ROUNDING * np.abs(theirs - rounded).max()
        if not (np.abs(one - theirs) <= allowed).all():
            off = np.abs(one - theirs).max()
            raise Deviation(f"law L1: {what}, number {number} is {off:.2e} off; allowed are {np.min(allowed):.2e}")


def _inner(case):
    return getattr(tf1.train, case["optimizer"])(0.1, **case["arguments"])


# --------------------------------------------------------------------------------------------------------------------
# Full batch


def _plain(case, batches, schedule, order):
    """Return (variables, logs) before the first and after each step of the plain optimizer."""
    with tf.Graph().as_default(), tf1.Session(config=tf1.ConfigProto(**CPUS)) as session:
        data, rows = networks.Data(case), tf1.placeholder(tf.int32, [None])
        network = networks.network_of(case, data.tensors, rows)
        loss = networks.loss_of(case, network.outputs, data.tensors) + sum(network.penalties)
        logs = [loss] + ([networks.metric_of(case, network.outputs, data.tensors)] if case["has_metric"] else [])
        train_op = _inner(case).minimize(loss)
        session.run(tf1.global_variables_initializer())
        variables = tf1.trainable_variables()
        seen, states, state = [(session.run(variables), None)], [], _first_state(case)
        for place, made in enumerate(schedule.made):
            states.append(state)
            feeds = data.fed(batches[place], state)
            feeds[rows] = _rows(case, place)
            state = None if state is None else session.run(network.states, feeds)
            if made == len(seen):
                cycle = schedule.cycles[made - 1]
                feeds = data.fed(
                    models.joined([batches[n] for n in cycle], order), models.joined([states[n] for n in cycle], order)
                )
                feeds[rows] = np.concatenate([_rows(case, n) for n in cycle])[::order]
                values = session.run(logs, feeds)
                session.run(train_op, feeds)
                seen.append((session.run(variables), values))
        return seen


def _rows(case, place):
    """Return the place of each example in its batch, or in the part of its replica."""
    size = case["sizes"][place]
    return np.arange(size) if case["strategy"] is None else np.tile(np.arange(size // 2), 2)


def _first_state(case):
    return np.zeros((case["sizes"][0], models.STATE), "float32") if case["is_stateful"] else None


# --------------------------------------------------------------------------------------------------------------------
# Ours


def _ours(case, batches, schedule, references):
    """Return {"step", "variables", "logs"} after each batch."""
    count = len(batches)
    cut = count if case["resume"] is None else case["resume"] + 1
    seen, path, state = [], None, _first_state(case)
    with tempfile.TemporaryDirectory() as folder:
        for part in (range(cut), range(cut, count)):
            graph = tf.Graph()
            references.append(weakref.ref(graph))
            with graph.as_default(), tf1.Session(config=tf1.ConfigProto(**CPUS)) as session:
                trained = _Graph(case)
                saver = tf1.train.Saver()
                session.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
                if path is not None:
                    saver.restore(session, path)
                for place in part:
                    state = trained.train(session, batches[place], state)
                    if place == count - 1 and case["last_cycle"] == "flush":
                        trained.end(session)
                    seen.append(trained.seen(session))
                path = saver.save(session, os.path.join(folder, "run"))
            del graph, trained, saver
    return seen


class _Graph:
    """The ops of one graph."""

    def __init__(self, case):
        self._case, self._data = case, networks.Data(case)
        self._flush, self._logs, self._last, self._states = None, [], None, None
        self._strategy = strategy = mirrored() if case["strategy"] else None
        with strategy.scope() if strategy else contextlib.ExitStack():
            self._step = tf1.train.get_or_create_global_step()
            self._optimizer = self._accumulating()
        if strategy is None:
            self._train_op = self._built(self._data.tensors, 1.0)
            if self._optimizer is not None:
                self._flush = self._optimizer.flush()
        else:
            with strategy.scope():
                done = getattr(strategy, RUN)(self._of_replica)
            self._train_op = tf.group(*strategy.experimental_local_results(done))
        local = tf.distribute.get_strategy() if strategy is None else strategy
        self._variables = [local.experimental_local_results(var)[0] for var in tf1.trainable_variables()]

    def _accumulating(self):
        options = self._case["options"]
        if options["micro_batch_size"] is not None and options["accum_steps"] == 1:
            return None
        return accum.compat.v1.AccumOptimizer(_inner(self._case), options["accum_steps"])

    def _of_replica(self):
        """Build the ops of a replica, which has a half of each batch."""
        first = tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), tf.int32)
        half = tf.shape(self._data.tensors["x"])[0] // 2
        begin = (1 - first) * half
        cut = lambda tensor: tensor[begin : begin + half]  # noqa: E731
        data = {
            name: {key: cut(one) for key, one in part.items()} if isinstance(part, dict) else cut(part)
            for name, part in self._data.tensors.items()
        }
        return self._built(data, 0.5)

    def _built(self, data, share):
        """Return the train op for some examples, whose loss counts as a share of that of the batch."""
        case, options = self._case, self._case["options"]
        weight = networks.weight_of(case, data)
        if options["micro_batch_size"] is not None:
            value, pairs = self._split(data, share)
            if self._optimizer is None:
                self._logs = [value] if self._strategy is None else []
                return _inner(case).apply_gradients(pairs, self._step)
            if self._strategy is None:
                self._logs = [self._optimizer.mean_over_cycle(value, weight)]
            return self._optimizer.apply_gradients(pairs, self._step, weight=weight)
        network = networks.network_of(case, data)
        loss = networks.loss_of(case, network.outputs, data) + sum(network.penalties)
        self._states = network.states
        if self._strategy is None:
            logs = [loss] + ([networks.metric_of(case, network.outputs, data)] if case["has_metric"] else [])
            self._logs = [self._optimizer.mean_over_cycle(log, weight) for log in logs]
        if case["precision"] == "float16" and self._strategy is None:
            with self._optimizer.weighing(weight):
                return SCALES.MixedPrecisionLossScaleOptimizer(self._optimizer, 64.0).minimize(loss, self._step)
        return self._optimizer.minimize(share * loss, self._step, weight=weight)

    def _split(self, data, share):
        """Return the loss and its gradients, computed over micro-batches."""
        case, options = self._case, self._case["options"]
        sees_all = options["whole_batch"] in ("all", "loss")

        def function(data):
            network = networks.network_of(case, data)
            if sees_all:
                return network.outputs
            return share * (networks.loss_of(case, network.outputs, data) + sum(network.penalties))

        more = {"weight": lambda data: networks.weight_of(case, data)}
        if options["whole_batch"]:  # the function sees it, so there are no weights
            more = {"whole_batch": options["whole_batch"]}
        if sees_all:
            more["loss"] = lambda outputs, data: share * networks.loss_of(case, outputs, data)
        return accum.compat.v1.value_and_gradients(function, data, None, options["micro_batch_size"], **more)

    def train(self, session, batch, state):
        """Run a batch, and return the next states."""
        fetched = {"train": self._train_op, "logs": self._logs}
        if self._states is not None:
            fetched["states"] = self._states
        result = session.run(fetched, self._data.fed(batch, state))
        self._last = result["logs"] or None
        return result.get("states")

    def end(self, session):
        """End the last cycle. A mean over it was fetched before, so there is none of the whole cycle."""
        if self._flush is not None:
            before = session.run(self._step)
            session.run(self._flush)
            self._last = self._last if session.run(self._step) == before else None

    def seen(self, session):
        step, variables = session.run([self._step, self._variables])
        return {"step": int(step), "variables": variables, "logs": self._last}
