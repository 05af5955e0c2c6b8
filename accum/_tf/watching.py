"""Observe which optimizers apply gradients and which layers are called, by wrapping methods of their base classes.

Also which variables are read, and for which tensors a tape records.
"""

import contextlib
import functools
import inspect
import threading
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence

from accum._tf import patches
from accum._tf.graphs import untouched_by_autograph
from accum._tf.optimizers import GraphOptimizer, LegacyOptimizer, NewOptimizer
from accum._tf.patches import ClassPatch
from accum._tf.variables import key_of
from accum._tf.version import IS_KERAS_3, tf

try:  # a private module: no public name tells what a `ForwardAccumulator` follows
    from tensorflow.python.eager import forwardprop_util
except ImportError:
    forwardprop_util = None  # dies with 1.15, which has none
try:  # a private module: no public name tells which variables are read, and costs nothing else
    from tensorflow.python.eager import record
except ImportError:
    from tensorflow.python.eager import tape as record  # dies with 2.12
from tensorflow.python.ops import gradients_util  # a private module: what every form of `tf.gradients` calls


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether a `tf.GradientTape` of this thread records what is computed from a tensor."""
    return bool(record.should_record_backprop([tensor]))


def is_accumulated(values: Sequence[Any]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` of this thread follows what is computed from tensors or variables."""
    if forwardprop_util is None:
        return False
    return bool(forwardprop_util.pack_tangents([tf.convert_to_tensor(value) for value in values]).tangents)


def unrecorded() -> Any:
    """Return a context in which no `tf.GradientTape` of this thread records anything."""
    return record.stop_recording()


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


READS_COST_NOTHING = _RecorderOfReads is not tf.GradientTape
"""Whether what is called while reads are recorded is traced as without."""


class VariableReads:
    """Records, as a context, which trainable variables this thread reads: eagerly, or in the graph that it traces."""

    def __init__(self) -> None:
        self._recorder = _RecorderOfReads()

    def __enter__(self) -> "VariableReads":
        self._recorder.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._recorder.__exit__(*details)

    def variables(self) -> List[tf.Variable]:
        """Return the variables that have been read since the context began."""
        return list(self._recorder.watched_variables())

    def include_any(self, variables: Iterable[tf.Variable]) -> bool:
        """Whether one of `variables` has been read since the context began."""
        return not {key_of(var) for var in variables}.isdisjoint(map(key_of, self.variables()))


_in_this_thread = threading.local()
"""`.see`: function of an optimizer; `.call`: of a call of a layer; `.check`: of the sources of a gradient; or None."""


@contextlib.contextmanager
def _telling(patch: ClassPatch, name: str, function: Optional[Callable[..., Any]]) -> Iterator[None]:
    """Let the methods of `patch` find `function` in this thread, in this context."""
    before = getattr(_in_this_thread, name, None)
    setattr(_in_this_thread, name, function)
    try:
        with patch.on():
            yield
    finally:
        setattr(_in_this_thread, name, before)


def watching_optimizers(see: Optional[Callable[[Any], None]]) -> Any:
    """Return a context in which `see(optimizer)` is called before an optimizer applies gradients in this thread.

    TensorFlow has no API that tells which optimizers a function calls. So the methods of the base classes are wrapped
    as long as anyone watches, which is while a train step is traced or runs eagerly.

    Args:
      see: function of an optimizer; None: do not watch in this context.
    """
    return _telling(_OPTIMIZERS, "see", see)


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


def _seen(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    @untouched_by_autograph
    def apply_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell_watcher(self)
        return function(self, *args, **kwargs)

    return apply_gradients


_OPTIMIZERS = ClassPatch(patches.OPTIMIZERS, _entry_points, _seen)


def replacing_calls(call: Optional[Callable[..., Any]]) -> Any:
    """Return a context in which each call of a Keras layer in this thread is `call(layer, own, args, kwargs)`.

    With None, it is what it was.

    `own` is the method `__call__` of the layer's base class. A train step may call any layer, so that of the base class
    is wrapped as long as anyone watches.
    """
    return _telling(_CALLS, "call", call)


def _replaced_call(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = getattr(_in_this_thread, "call", None)
        if call is None:
            return function(self, *args, **kwargs)
        return call(self, functools.partial(function, self), args, kwargs)

    return __call__


def _calls() -> Any:
    layer = tf.keras.layers.Layer
    return [(next(base for base in layer.__mro__ if "__call__" in vars(base)), "__call__")]


_CALLS = ClassPatch(patches.CALLS, _calls, _replaced_call)


def checking_gradients(check: Callable[[Any], None]) -> Any:
    """Return a context in which `check(sources)` is called before a gradient is taken in this thread."""
    return _telling(_GRADIENTS, "check", check)


def _checked_gradient(function: Callable[..., Any]) -> Any:
    signature = inspect.signature(function)
    name = "sources" if "sources" in signature.parameters else "xs"

    @functools.wraps(function)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        check = getattr(_in_this_thread, "check", None)
        if check is not None:
            check(signature.bind(*args, **kwargs).arguments[name])
        return function(*args, **kwargs)

    return gradient


_GRADIENTS = ClassPatch(
    patches.GRADIENTS,
    lambda: [(tf.GradientTape, "gradient"), (gradients_util, "_GradientsHelper")],
    _checked_gradient,
)
