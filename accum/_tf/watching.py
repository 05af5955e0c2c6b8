"""Observe which optimizers apply gradients, by wrapping the methods of their base classes."""

import contextlib
import functools
import threading
from typing import Any, Callable, Iterator, List, Optional

from accum._tf.graphs import untouched_by_autograph
from accum._tf.optimizers import GraphOptimizer, LegacyOptimizer, NewOptimizer
from accum._tf.version import IS_KERAS_3, tf


def _entry_points() -> Any:
    """Return a list of (class, method name): the methods by which the optimizers of each family apply gradients."""
    points = [(GraphOptimizer, "apply_gradients")]
    if LegacyOptimizer is not None:
        points.append((LegacyOptimizer, "apply_gradients"))
    if NewOptimizer is not None:
        name = "apply" if IS_KERAS_3 else "apply_gradients"
        points.append((next(base for base in NewOptimizer.__mro__ if name in vars(base)), name))
    return points


_in_this_thread = threading.local()  # .see: function of an optimizer, or None
_lock = threading.Lock()
_originals: List[Any] = []  # the replaced methods: (class, name, function), while anyone watches
_watchers = 0


@contextlib.contextmanager
def watching_optimizers(
    see: Optional[Callable[[Any], None]], see_tape: Optional[Callable[[], None]] = None
) -> Iterator[None]:
    """Call `see(optimizer)` before an optimizer applies gradients in this thread.

    TensorFlow has no API that tells which optimizers a function calls. So the methods of the base classes are wrapped
    as long as anyone watches, which is while a train step is traced or runs eagerly.

    Args:
      see: function of an optimizer; None: do not watch in this context.
      see_tape: function to call when a `tf.GradientTape` begins to record; None: do not watch tapes in this context.
    """
    before = getattr(_in_this_thread, "see", None), getattr(_in_this_thread, "see_tape", None)
    _in_this_thread.see, _in_this_thread.see_tape = see, see_tape
    _wrap_entry_points()
    try:
        yield
    finally:
        _unwrap_entry_points()
        _in_this_thread.see, _in_this_thread.see_tape = before


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
            _originals.append((tf.GradientTape, "__enter__", tf.GradientTape.__enter__))
            tf.GradientTape.__enter__ = _seen_tape(tf.GradientTape.__enter__)


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


def _seen_tape(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def enter(self: Any) -> Any:
        see_tape = getattr(_in_this_thread, "see_tape", None)
        if see_tape is not None:
            see_tape()
        return function(self)

    return enter
