"""Run one public TensorFlow 1 program as it is and accumulating; a process of programs.py, on TensorFlow 1.15.

Each program is imported from a tree of its own repository: as it is for full batches, and with the changes of
scripts/dev/public_programs for micro-batches.
"""

import contextlib
import json
import os
import sys
import tempfile
import warnings

import tensorflow as tf
from tensorflow.python.ops import clip_ops

from accum.testing import _graph_equality as equality
from accum.testing import sum_duplicate_rows
from accum.testing._deviations import deviation
from accum.testing._order import unordered_variables

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from public_programs import PROGRAMS  # noqa: E402
from public_programs._program import MICRO, STEPS, K  # noqa: E402

tf1 = tf.compat.v1
ROUNDING = 5e-6  # what only the order of the examples changes by more is not compared
AVERAGES = ("global_step", "moving_mean", "moving_variance")


def is_from(tree, module):
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(path and path.startswith(tree) for path in paths)


@contextlib.contextmanager
def imported_from(tree):
    """Import from a tree, and forget its modules and flags afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, tree)
    try:
        yield
    finally:
        sys.path.remove(tree)
        for name in [name for name in set(sys.modules) - before if is_from(tree, sys.modules[name])]:
            del sys.modules[name]
        for name in list(tf1.flags.FLAGS):
            if not name.startswith(("help", "log", "v", "std", "alsolog", "only_check", "pdb", "run_with", "showpre")):
                with contextlib.suppress(Exception):
                    delattr(tf1.flags.FLAGS, name)


@contextlib.contextmanager
def summed_rows():
    """Let the norms of gradients be those of whole rows, as accumulation passes them."""
    before = tf.clip_by_global_norm

    def clip(gradients, *arguments, **options):
        summed = sum_duplicate_rows(gradients)
        if options.get("use_norm") is not None:  # computed from the slices
            options["use_norm"] = tf.global_norm(summed)
        return before(summed, *arguments, **options)

    modules = (tf, tf1, clip_ops)
    for module in modules:
        module.clip_by_global_norm = clip
    try:
        yield
    finally:
        for module in modules:
            module.clip_by_global_norm = before


def builder(name, trees, losses, sums_rows=False):
    """A function `(accum_steps, *batch)` that builds the program from the tree for that number."""

    def build_graph(accum_steps, *batch):
        with imported_from(trees[accum_steps > 1]), summed_rows() if sums_rows else contextlib.ExitStack():
            train_op, loss = PROGRAMS[name].run()[1](accum_steps, *batch)
        losses.setdefault(accum_steps, loss)
        return train_op

    return build_graph


def furthest(ours, theirs):
    """The largest difference of a trained variable or the step counter after any step."""
    return max(deviation(one[name], other[name]) for one, other in zip(ours, theirs) for name in other)


def only(names, runs):
    return [{name: values[name] for name in names if name in values} for values in runs]


def measure(name, trees):
    with imported_from(trees[0]):
        data = PROGRAMS[name].run()[0]
    losses, batches = {}, equality.batches_of(data, K * MICRO, STEPS)
    parts, wholes = [equality._cut(batch, K) for batch in batches], [[batch] for batch in batches]
    cut = wholes if PROGRAMS[name].splits else parts
    build_graph = builder(name, trees, losses)
    own = equality._Program(build_graph, batches[0], 1)
    first = own.first_values()
    own_runs = [own.train(first, wholes) for _ in range(4)]
    rows = equality._Program(build_graph, batches[0], 1, is_ordered=True).train(first, wholes)
    ordered = equality._Program(builder(name, trees, {}, sums_rows=True), batches[0], 1, is_ordered=True)
    expected = ordered.train(first, wholes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        micro = equality._Program(build_graph, batches[0], K)
    shared = {key: value for key, value in first.items() if key in micro.variables}
    ours = micro.train(shared, cut)
    names = own.trained + [key for key in own.variables if key.endswith(AVERAGES)]
    turned = ordered.train(first, [[tuple(array[::-1] for array in batch)] for batch in batches])
    rounded = [key for key in names if furthest(only([key], turned), only([key], expected)) > ROUNDING]
    names = [key for key in names if key not in rounded]
    resumed, repeated = resumption(micro, shared, [part for step in cut for part in step])
    return {
        "own_runs_differ": max(furthest(only(names, run), only(names, own_runs[0])) for run in own_runs[1:]),
        "unordered": unordered_variables(own.train_op),
        "agreement": furthest(only(names, ours), only(names, expected)),
        "rows": furthest(only(names, rows), only(names, expected)),
        "rounded": rounded,
        "moved": furthest(only(own.trained, expected[-1:]), only(own.trained, [first])),
        "unaccumulated": furthest(
            only(own.trained, ordered.train(first, [part[:1] for part in parts])), only(own.trained, expected)
        ),
        "warned": sorted({str(one.message)[:60] for one in caught if issubclass(one.category, UserWarning)}),
        "resumes": resumed <= 10 * repeated,
        "resumed_off": resumed,
        "exports": exports(own, micro, shared, losses, cut, batches[0]),
    }


def run_from(program, session, start, parts):
    program.load(session, start)
    for part in parts:
        session.run(program.train_op, program._feed(part))


def resumption(micro, first, parts):
    """How far a run that goes on from a checkpoint in mid-cycle, and an equal uninterrupted one, are off a run."""
    path, cut = os.path.join(tempfile.mkdtemp(), "at"), len(parts) // 2
    with micro._graph.as_default():
        saver = tf1.train.Saver()

    def uninterrupted(parts):
        with micro._session() as session:
            run_from(micro, session, first, parts)
            saver.save(session, path)
            return session.run(micro.variables)

    whole, again = uninterrupted(parts), uninterrupted(parts)
    uninterrupted(parts[:cut])
    with micro._session() as session:
        saver.restore(session, path)
        for part in parts[cut:]:
            session.run(micro.train_op, micro._feed(part))
        resumed = session.run(micro.variables)
    return furthest([resumed], [whole]), furthest([again], [whole])


def exports(own, micro, first, losses, cut, batch):
    """Whether the plain program restores the weights of an accumulating run, and exports the same loss."""
    folder = tempfile.mkdtemp()
    with micro._graph.as_default(), micro._session() as session:
        run_from(micro, session, first, [part for step in cut for part in step])
        theirs = session.run(losses[K], micro._feed(batch))
        tf1.train.Saver().save(session, os.path.join(folder, "at"))
    with own._graph.as_default(), own._session() as session:
        tf1.train.Saver().restore(session, os.path.join(folder, "at"))
        ours = session.run(losses[1], own._feed(batch))
        fed = tf.nest.flatten(own._fed)
        inputs = {str(place): tensor for place, tensor in enumerate(fed)}
        tf1.saved_model.simple_save(session, os.path.join(folder, "export"), inputs, {"loss": losses[1]})
        names = [tensor.name for tensor in fed] + [losses[1].name]
    with tf.Graph().as_default(), tf1.Session() as session:
        tf1.saved_model.load(session, ["serve"], os.path.join(folder, "export"))
        exported = session.run(names[-1], dict(zip(names, tf.nest.flatten(batch))))
    return bool(abs(ours - theirs) <= 1e-5 * max(1.0, abs(theirs)) and ours == exported)


if __name__ == "__main__":
    tf1.logging.set_verbosity(tf1.logging.ERROR)
    with open(sys.argv[5], "w") as file:
        json.dump(measure(sys.argv[2], sys.argv[3:5]), file)
