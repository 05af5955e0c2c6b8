"""Observe which optimizers apply gradients, by wrapping methods of their base classes, and which variables are read."""

import contextlib
import functools
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional

from accum._tf.graphs import untouched_by_autograph
from accum._tf.optimizers import GraphOptimizer, LegacyOptimizer, NewOptimizer
from accum._tf.variables import key_of
from accum._tf.version import IS_KERAS_3, tf

try:  # a private module: no public name tells which variables are read, and costs nothing else
    from tensorflow.python.eager import record
except ImportError:
    from tensorflow.python.eager import tape as record  # dies with 2.12


def _entry_points() -> Any:
    """Return a list of (class, method name): the methods by which the optimizers of each family apply gradients."""
    points = [(GraphOptimizer, "apply_gradients")]
    if LegacyOptimizer is not None:
        points.append((LegacyOptimizer, "apply_gradients"))
    if NewOptimizer is not None:
        name = "apply" if IS_KERAS_3 else "apply_gradients"
        points.append((next(base for base in NewOptimizer.__mro__ if name in vars(base)), name))
    return points


# A context whose `watched_variables()` are the trainable variables that were read in it. A `tf.GradientTape` has them
# too, but a `tf.function` that is called in it keeps what second gradients need.
_RecorderOfReads = getattr(record, "VariableWatcher", tf.GradientTape)  # a tape dies with 2.2


class VariableReads:
    """Records, as a context, which trainable variables this thread reads: eagerly, or in the graph that it traces."""

    def __init__(self) -> None:
        self._recorder = _RecorderOfReads()

    def __enter__(self) -> "VariableReads":
        self._recorder.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._recorder.__exit__(*details)

    def include_any(self, variables: Iterable[tf.Variable]) -> bool:
        """Whether one of `variables` has been read since the context began."""
        return not {key_of(var) for var in variables}.isdisjoint(map(key_of, self._recorder.watched_variables()))


_in_this_thread = threading.local()  # .see: function of an optimizer, or None
_lock = threading.Lock()
_originals: List[Any] = []  # the replaced methods: (class, name, function), while anyone watches
_watchers = 0


@contextlib.contextmanager
def watching_optimizers(see: Optional[Callable[[Any], None]]) -> Iterator[None]:
    """Call `see(optimizer)` before an optimizer applies gradients in this thread.

    TensorFlow has no API that tells which optimizers a function calls. So the methods of the base classes are wrapped
    as long as anyone watches, which is while a train step is traced or runs eagerly.

    Args:
      see: function of an optimizer; None: do not watch in this context.
    """
    before, _in_this_thread.see = getattr(_in_this_thread, "see", None), see
    _wrap_entry_points()
    try:
        yield
    finally:
        _unwrap_entry_points()
        _in_this_thread.see = before


def tell_watcher(optimizer: Any) -> None:
    """Report that `optimizer` applies gradients in this thread, if it has a method of its own for that."""
    see = getattr(_in_this_thread, "see", None)
    if see is not None:
        see(optimizer)


def unwatched() -> Any:
    """Return a context without watching, for the engine's calls of inner optimizers."""
    if getattr(_in_this_thread, "see", None) is None:
        return contextlib.ExitStack()  # does nothing
    return watching_optimizers(None)


def _wrap_entry_points() -> None:
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers == 1:
            for cls, name in _entry_points():
                _originals.append((cls, name, vars(cls)[name]))
                setattr(cls, name, _seen(vars(cls)[name]))


def _unwrap_entry_points() -> None:
    global _watchers
    with _lock:
        _watchers -= 1
        if not _watchers:
            for cls, name, function in _originals:
                setattr(cls, name, function)
            del _originals[:]


def _seen(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    @untouched_by_autograph
    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell_watcher(self)
        return function(self, *args, **kwargs)

    return apply_gradients
