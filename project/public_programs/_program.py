"""What a public program is, and what several of them need to be run."""

import contextlib
import sys
import types
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from unittest import mock

import numpy as np
import tensorflow

version = tensorflow.__version__
is_tf2 = not version.startswith("1.")
tf = tensorflow.compat.v1 if is_tf2 else tensorflow  # what programs import as `tf`
tf1 = tensorflow.compat.v1
K, MICRO, STEPS = 4, 2, 3
ROWS = K * MICRO * STEPS
# Starts a script as a process. Not by its path: its folder would be the first to import from.
START = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
RANDOM = np.random.RandomState(0)

Edits = Dict[str, List[Tuple[str, str, int]]]


class Program(NamedTuple):
    """A public program.

    Attributes:
      repository: its owner and name on GitHub.
      what: what of it runs, for the page.
      edits: {file: [(pattern, replacement, count)]}, what accumulation changes; None: it only runs with `split_batch`.
      run: a function that imports the program, and returns `(data, build)`: made-up arrays of `ROWS` examples, and a
        function `build(accum_steps, *batch)` that returns `(train op, loss)`; and, if it `evaluates`, a function
        `evaluate(*batch)` that returns what the program predicts or generates, a tensor or several. If it is that of
        an `estimator`, `build(accum_steps)` returns a `model_fn`.
      commit: the commit that runs, if it is not the newest.
      inside: the folder in which the tree is put.
      subtree: the folder of the repository that is put there.
      folder: the folder of the tree from which the program imports.
      splits: whether the graph splits a full batch, so that each run of the train op is a step.
      added: lines that `build` adds in place of `edits`, where the program's own function can't be called.
      note: what else the page says.
      evaluates: what its own evaluation or prediction computes, for the page.
      own_names: a pattern of variables that the accumulating program names otherwise, so that its checkpoint lacks
        what the unchanged one would restore.
      remaps: whether TensorFlow 2 may remap operations of its graph to fused ones.
      estimator: "Estimator" or "TPUEstimator", if it runs through one.
      unknown: what is not known of the shapes of its placeholders: "" (of the number of examples alone), "axes" (how
        long any axis is) or "rank".
      line: {file: [(pattern, replacement, count)]}, the line of `split_batch`, where `build` does not call `split`.
    """

    repository: str
    what: str
    edits: Optional[Edits]
    run: Callable[[], Tuple[Tuple[Any, ...], Callable[..., Any]]]
    commit: str = "HEAD"
    inside: str = ""
    subtree: str = ""
    folder: str = ""
    splits: bool = False
    added: int = 0
    note: Optional[str] = None
    evaluates: Optional[str] = None
    own_names: Optional[str] = None
    remaps: bool = True
    estimator: Optional[str] = None
    line: Optional[Edits] = None
    unknown: str = ""


IMPORT = (r"\Aimport |^import ", "import accum.compat.v1\nimport ", 1)
TF_IMPORT = (r"^import tensorflow as tf", "import accum.compat.v1\nimport tensorflow as tf", 1)


def integers(high, *shape):
    return RANDOM.randint(0, high, size=(ROWS,) + shape).astype("int32")


def normal(*shape):
    return RANDOM.normal(size=(ROWS,) + shape).astype("float32")


def uniform(*shape):
    return RANDOM.uniform(size=(ROWS,) + shape).astype("float32")


def namespace(**values):
    return types.SimpleNamespace(**values)


def stand_in(name, **attributes):
    """Let a module that is not installed be imported, for parts of a program that are not called."""
    sys.modules.setdefault(name, namespace(**attributes))


@contextlib.contextmanager
def fed(*tensors, **named):
    """Let placeholders that a program creates be these tensors: by name, else in the order of creation."""
    rest = list(tensors)

    def placeholder(*_, name=None, **__):
        return named[name] if name in named else rest.pop(0)

    with mock.patch.object(tf, "placeholder", placeholder):
        yield


def accumulated(optimizer, accum_steps, **options):
    """Return the optimizer, wrapped as a script would do it whose training function is not called."""
    import accum.compat.v1

    return accum.compat.v1.AccumOptimizer(optimizer, accum_steps, **options) if accum_steps > 1 else optimizer


class Splitting:
    """Whether `split` splits batches, and how often it has done so in the graph that is being built."""

    is_on = False
    calls = 0


def split(loss, batch):
    """Return the loss, of a batch that is split if a program is built for that, as its script would do it."""
    if not Splitting.is_on:
        return loss
    import accum.compat.v1

    Splitting.calls += 1
    return accum.compat.v1.split_batch(loss, batch, MICRO)


def classification(pooled, labels, name="head"):
    return tf1.losses.sparse_softmax_cross_entropy(labels, tf1.layers.dense(pooled, 3, name=name))
