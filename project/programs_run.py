"""Run one public TensorFlow 1 program as it is and accumulating; a process of project/programs.py.

    python programs_run.py NAME FULL MICRO OUT             write what it shows to OUT
    python programs_run.py NAME FULL SPLIT OUT split       write what it shows with `split_batch`
    python programs_run.py NAME FULL MICRO FOLDER killed   train, with checkpoints, and be killed in mid-cycle
    python programs_run.py NAME FULL MICRO FOLDER resumed  go on from the last checkpoint, and write how it ends

Each program is imported from a tree of its own repository: as it is for full batches, and with the changes of
project/public_programs for micro-batches.
"""

import collections
import contextlib
import functools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from unittest import mock

import numpy as np
from tensorflow.core.protobuf import rewriter_config_pb2

from accum.compat.v1 import _split_batch
from accum.testing import _graph_equality as equality
from accum.testing import _order, order_updates
from accum.testing._deviations import deviation, scale
from accum.testing._order import unordered_variables

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from public_programs import (
    PROGRAMS,  # noqa: E402
    _estimators,  # noqa: E402
)
from public_programs._program import MICRO, START, STEPS, K, Splitting, is_tf2, tf, version  # noqa: E402
from public_programs._trees import furthest, imported_from, messages_of, only, summed_rows  # noqa: E402

tf1 = tf.compat.v1
LARGER = 64  # examples of the batch whose memory is measured
ROUNDING = 5e-6  # what only the order of the examples changes by more is not compared
AVERAGES = ("global_step", "moving_mean", "moving_variance")


class Program(equality._Program):
    """A program that keeps its session, because TensorFlow prepares the graph anew for each."""

    _kept, _options = None, {}

    @contextlib.contextmanager
    def _session(self):
        if self._kept is None:
            self._kept = tf1.Session(graph=self._graph, **self._options)
        self._kept.run(self._initialize)
        with self._kept.as_default():
            yield self._kept


def builder(name, trees, losses, sums_rows=False):
    """A function `(accum_steps, *batch)` that builds the program from the tree for that number."""

    def build_graph(accum_steps, *batch):
        with imported_from(trees[accum_steps > 1]), summed_rows() if sums_rows else contextlib.ExitStack():
            train_op, loss = PROGRAMS[name].run()[1](accum_steps, *batch)
        losses.setdefault(accum_steps, loss)
        return train_op

    return build_graph


def measure(name, trees):
    with imported_from(trees[0]):
        data = PROGRAMS[name].run()[0]
    losses, batches = {}, equality.batches_of(data, K * MICRO, STEPS)
    parts, wholes = [equality._cut(batch, K) for batch in batches], [[batch] for batch in batches]
    cut = wholes if PROGRAMS[name].splits else parts
    build_graph = builder(name, trees, losses)
    own = Program(build_graph, batches[0], 1)
    first = own.first_values()
    own_runs = [own.train(first, wholes) for _ in range(4)]
    rows = Program(build_graph, batches[0], 1, is_ordered=True).train(first, wholes)
    ordered = Program(builder(name, trees, {}, sums_rows=True), batches[0], 1, is_ordered=True)
    expected = ordered.train(first, wholes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        micro = Program(build_graph, batches[0], K)
    shared = {key: value for key, value in first.items() if key in micro.variables}
    ours = micro.train(shared, cut)
    names = own.trained + [key for key in own.variables if key.endswith(AVERAGES)]
    in_reverse = [tuple(array[::-1] for array in batch) for batch in batches]
    turned = ordered.train(first, [[batch] for batch in in_reverse])
    rounded = [key for key in names if furthest(only([key], turned), only([key], expected)) > ROUNDING]
    names = [key for key in names if key not in rounded]
    record = {
        "own_runs_differ": max(furthest(only(names, run), only(names, own_runs[0])) for run in own_runs[1:]),
        "unordered": unordered_variables(own.train_op),
        "agreement": furthest(only(names, ours), only(names, expected)),
        "rows": furthest(only(names, rows), only(names, expected)),
        "rounded": rounded,
        "moved": furthest(only(own.trained, expected[-1:]), only(own.trained, [first])),
        "unaccumulated": furthest(
            only(own.trained, ordered.train(first, [part[:1] for part in parts])), only(own.trained, expected)
        ),
        "warned": sorted(messages_of(caught)),
    }
    record.update(resumption(name, trees, micro, shared, [part for step in cut for part in step]))
    folder = tempfile.mkdtemp()
    paths = [os.path.join(folder, kind) for kind in ("first", "full", "micro", "turned")]
    save(own, first, [], paths[0])
    save(ordered, first, [part for step in wholes for part in step], paths[1])
    loss = save(micro, shared, [part for step in cut for part in step], paths[2], losses[K], batches[0])
    record["exports"] = exports(own, PROGRAMS[name].own_names, losses[1], loss, batches[0], paths[2], folder)
    if PROGRAMS[name].evaluates:
        save(ordered, first, in_reverse, paths[3])
        record.update(evaluation(name, trees[0], batches[0], paths))
    return record


class InOrder(Program):
    """A program that is trained as it is, and then once more with its updates in order."""

    def put_in_order(self):
        order_updates(self.train_op)
        config = tf1.ConfigProto()
        # What thousands of operations wait for takes TensorFlow 1.15 many minutes to rewrite.
        config.graph_options.rewrite_options.dependency_optimization = rewriter_config_pb2.RewriterConfig.OFF
        self._kept, self._options = None, {"config": config}

    def resumed(self, first, batches):
        """Return how a run ends that goes on from a checkpoint, in another session, before its last step."""
        path = os.path.join(tempfile.mkdtemp(), "at")
        save(self, first, batches[:-1], path)
        self._kept = None
        with self._graph.as_default(), self._session() as session:
            tf1.train.Saver().restore(session, path)
            session.run(self.train_op, self._feed(batches[-1]))
            return session.run(self.variables)

    def traced(self, batch):
        """Return the most bytes that a step on a batch of 64 holds at a time, and the names of the operations that ran.

        None and an empty set if the graph fixes another size.
        """
        options, told = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE), tf1.RunMetadata()
        larger = tuple(np.concatenate([array] * (LARGER // (K * MICRO))) for array in batch)
        with self._session() as session:
            try:
                session.run(self.train_op, self._feed(larger), options, told)
            except (ValueError, tf.errors.InvalidArgumentError):
                return None, set()
        held = peak = 0
        for record in sorted(records_in(told.step_stats), key=lambda record: record.alloc_micros):
            held += record.alloc_bytes
            peak = max(peak, held)
        return peak, {node.node_name for device in told.step_stats.dev_stats for node in device.node_stats}


def records_in(stats):
    """Return what TensorFlow notes of memory that a run took or gave back."""
    nodes = (node for device in stats.dev_stats for node in device.node_stats)
    return [record for node in nodes for allocator in node.memory for record in allocator.allocation_records]


def measure_split(name, trees):
    """What a program shows whose batch is split, beside its own full batch."""
    with imported_from(trees[0]):
        data = PROGRAMS[name].run()[0]
    batches = equality.batches_of(data, K * MICRO, STEPS)
    equality._placeholder = placeholder_of(PROGRAMS[name].unknown)
    start = time.time()
    own = InOrder(builder(name, trees, {}), batches[0], 1)
    built = time.time() - start
    first, wholes = own.first_values(), [[batch] for batch in batches]
    by_chance = own.train(first, wholes)
    own.put_in_order()
    expected = own.train(first, wholes)
    moved = furthest(only(own.trained, expected[-1:]), only(own.trained, [first]))
    if not np.isfinite(moved):
        raise ValueError("its own full batch makes weights that are not finite")
    others = [[[tuple(map(other, batch))] for batch in batches] for other in (lambda array: array[::-1], nudged)]
    others = [own.train(first, other) for other in others]
    rounded = changed_twice(own.train_op)
    rounded.update(key for other in others for key in first if relative([key], other, expected) > ROUNDING)
    rounded = sorted(rounded)
    names = [key for key in first if key not in rounded]
    start = time.time()
    with splitting() as splits:
        split = InOrder(builder(name, trees[1:] * 2, {}), batches[0], 1)
    record = dict(what_is_split(splits), built=round(time.time() - start, 2), built_plain=round(built, 2))
    as_it_is = split.train(first, wholes)
    split.put_in_order()
    ours = split.train(first, wholes)
    resumed = split.resumed(first, batches)
    peak, ran = split.traced(batches[0])
    record.update(
        peak=peak,
        peak_full=own.traced(batches[0])[0],
        whole=sorted({one.source(op).name for one in splits for op in one.using()[1]} & ran) if ran else None,
        resumed_off=relative(list(first), [resumed], ours[-1:]),
        same_variables=list(split.variables) == list(own.variables),
        agreement=relative(names, ours, expected),
        as_it_is=relative(names, as_it_is, expected),
        own_as_it_is=relative(names, by_chance, expected),
        moved=moved,
        variables=len(names),
        rounded=rounded,
    )
    return record


def nudged(array):
    """Return an array with other last digits."""
    if array.dtype != np.float32:
        return array
    signs = np.random.RandomState(1).choice([-1.0, 1.0], size=array.shape)
    return (array * (1 + 1.2e-7 * signs)).astype(array.dtype)


def changed_twice(train_op):
    """Return the names of the variables that a train op changes twice and also reads, in no fixed order."""
    updates = _order._Ops(train_op).updates_of()
    return {name for name in unordered_variables(train_op) if len(updates[name]) > 1}


def placeholder_of(unknown):
    """Return a function that creates the placeholder for an array."""

    def placeholder(array):
        axes = [None] * (array.ndim - 1) if unknown else list(array.shape[1:])
        return tf1.placeholder(array.dtype, None if unknown == "rank" else [None] + axes)

    return placeholder


def relative(names, ours, theirs):
    """How far variables are off after any step, each in units of its largest value if that is above 1."""
    pairs = [(one[name], other[name]) for one, other in zip(ours, theirs) for name in names]
    return max(deviation(one, other) / scale(other) for one, other in pairs)


class Splits(list):
    """What `split_batch` found inside a graph, one for each call, and the messages of its warnings."""

    messages = frozenset()


@contextlib.contextmanager
def splitting():
    """Let programs that are built split their batches. Yields the `Splits`."""
    splits, join = Splits(), _split_batch.joined_rows
    Splitting.is_on, Splitting.calls = True, 0

    def noted(inside, *others):
        splits.append(inside)
        return join(inside, *others)

    with mock.patch.object(_split_batch, "joined_rows", noted), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield splits
        finally:
            Splitting.is_on = False
    splits.messages = messages_of(caught)


def what_is_split(splits):
    using = sum(len(split.using()[0]) for split in splits if not split.joined)  # not of what is split behind others
    inside = sum(len(split.using()[1]) for split in splits)
    verdicts = [split.analysis.verdict(op.name) for split in splits for op in split.of_batch]
    unruled = [kind for split in splits for kind in split.analysis.unruled]
    return {
        "calls": Splitting.calls,
        "using": using,
        "inside": inside,
        "statistics": sum(len(split.statistics) for split in splits),
        "operations": sum(verdict is not None for verdict in verdicts),
        "unruled": dict(sorted(collections.Counter(unruled).items())),
        "said": sorted(splits.messages),
    }


def run_from(program, session, start, parts):
    program.load(session, start)
    for part in parts:
        session.run(program.train_op, program._feed(part))


def save(program, start, parts, path, loss=None, batch=None):
    """Train, and save a checkpoint. Returns the loss of a batch, if one is given."""
    with program._graph.as_default(), program._session() as session:
        run_from(program, session, start, parts)
        tf1.train.Saver().save(session, path)
        return None if loss is None else session.run(loss, program._feed(batch))


def killed_after(parts):
    """After how many runs of the train op a run is killed, and how many lie between its checkpoints."""
    return len(parts) // 2 + 1, max(1, len(parts) // 4)


def killed_and_resumed(name, trees, folder):
    """Run the two processes."""
    child = [sys.executable, "-c", START, os.path.abspath(__file__), name, *trees, folder]
    codes = [subprocess.run([*child, kind], stdin=subprocess.DEVNULL).returncode for kind in ("killed", "resumed")]
    if codes != [-signal.SIGKILL, 0]:
        raise RuntimeError(f"the killed and the resumed process ended with {codes}")


def resumption(name, trees, micro, first, parts):
    """How far a run that goes on after it was killed, and an equal uninterrupted one, are off a run."""

    def uninterrupted():
        with micro._session() as session:
            run_from(micro, session, first, parts)
            return session.run(micro.variables)

    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "given"), "wb") as file:
        pickle.dump((first, parts), file)
    killed_and_resumed(name, trees, folder)
    whole, again = uninterrupted(), uninterrupted()
    with open(os.path.join(folder, "end"), "rb") as file:
        resumed_from, end = pickle.load(file)
    resumed, repeated = furthest([end], [whole]), furthest([again], [whole])
    return {
        "resumes": resumed <= 10 * repeated,
        "resumed_off": resumed,
        "killed_after": killed_after(parts)[0],
        "resumed_from": resumed_from,
    }


def in_process(what, name, trees, folder):
    """Build the accumulating program in a process of its own, and train until it is killed, or go on from there."""
    with open(os.path.join(folder, "given"), "rb") as file:
        first, parts = pickle.load(file)
    micro = equality._Program(builder(name, trees, {}), parts[0], K)
    with micro._graph.as_default(), micro._session() as session:
        (train_until_killed if what == "killed" else go_on)(micro, session, first, parts, folder)


def train_until_killed(micro, session, first, parts, folder):
    killed, every = killed_after(parts)
    saver = tf1.train.Saver()
    micro.load(session, first)
    for number, part in enumerate(parts, start=1):
        session.run(micro.train_op, micro._feed(part))
        if number == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if number % every == 0:
            saver.save(session, os.path.join(folder, "at"), global_step=number)


def go_on(micro, session, first, parts, folder):
    path = tf1.train.latest_checkpoint(folder)
    number = int(path.rsplit("-", 1)[1])
    tf1.train.Saver().restore(session, path)
    for part in parts[number:]:
        session.run(micro.train_op, micro._feed(part))
    with open(os.path.join(folder, "end"), "wb") as file:
        pickle.dump((number, session.run(micro.variables)), file)


def evaluation(name, tree, batch, paths):
    """How far what the program predicts from the accumulating run is off what it predicts from the full batch's."""
    results = []
    with tf.Graph().as_default(), imported_from(tree):
        tensors = tf.nest.map_structure(equality._placeholder, batch)
        outputs = tf.nest.flatten(PROGRAMS[name].run()[2](*tensors))
        feed = dict(zip(tf.nest.flatten(tensors), tf.nest.flatten(batch)))
        for path in paths:
            with tf1.Session() as session:
                session.run([tf1.local_variables_initializer(), tf1.tables_initializer()])
                tf1.train.Saver().restore(session, path)
                results.append({str(at): value for at, value in enumerate(session.run(outputs, feed))})
    first, full, micro, turned = results
    return {
        "evaluated": furthest([micro], [full]),
        "evaluation_rounded": furthest([turned], [full]),
        "evaluation_moved": furthest([full], [first]),
    }


def exports(own, own_names, ours, theirs, batch, path, folder):
    """Whether the plain program restores the weights of an accumulating run, and exports the same loss."""
    with own._graph.as_default(), own._session() as session:
        listed = [var for var in tf1.global_variables() if not (own_names and re.search(own_names, var.op.name))]
        tf1.train.Saver(listed).restore(session, path)
        restored = session.run(ours, own._feed(batch))
        fed = tf.nest.flatten(own._fed)
        inputs = {str(index): tensor for index, tensor in enumerate(fed)}
        tf1.saved_model.simple_save(session, os.path.join(folder, "export"), inputs, {"loss": ours})
        names = [tensor.name for tensor in fed] + [ours.name]
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.saved_model.load(session, ["serve"], os.path.join(folder, "export"))
        exported = session.run(names[-1], dict(zip(names, tf.nest.flatten(batch))))
    return bool(abs(restored - theirs) <= 1e-5 * max(1.0, abs(theirs)) and restored == exported)


def leave_operations_as_they_are():
    """Let no session that has no other options remap operations to fused ones."""
    config, session = tf1.ConfigProto(), tf1.Session
    config.graph_options.rewrite_options.remapping = rewriter_config_pb2.RewriterConfig.OFF
    tf1.Session = functools.partial(session, config=config)


def main(name, full, micro, out, what=None):
    tf1.logging.set_verbosity(tf1.logging.ERROR)
    if is_tf2:
        tf.disable_v2_behavior()
        if not PROGRAMS[name].remaps:
            leave_operations_as_they_are()
    trees = [full, micro]
    is_estimator = PROGRAMS[name].estimator is not None
    if what == "split":
        measures = (splitting, what_is_split, relative)
        record = _estimators.measure_split(name, trees, *measures) if is_estimator else measure_split(name, trees)
        with open(out, "w") as file:
            json.dump({**record, "tensorflow": version}, file)
        return
    if what is not None:
        (_estimators.in_process if is_estimator else in_process)(what, name, trees, out)
        return
    record = _estimators.measure(name, trees, killed_and_resumed) if is_estimator else measure(name, trees)
    with open(out, "w") as file:
        json.dump({**record, "tensorflow": version}, file)


if __name__ == "__main__":
    main(*sys.argv[2:])
