"""What is replaced in objects of Keras and TensorFlow, which have no hook for it: one `Patch` for each piece.

Nothing is replaced elsewhere. `table` is a part of CONTRIBUTING.md.
"""

import contextlib
import inspect
import threading
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence, Tuple


class Patch(NamedTuple):
    """A piece that is replaced: where it is, for how long, and why.

    Unless a `ClassPatch` makes it, it is an entry of an instance's `__dict__`, which Keras does not track.
    """

    replaced: str
    lasts: str
    why: str

    @contextlib.contextmanager
    def on(self, instance: Any, **methods: Any) -> Iterator[None]:
        """Replace methods or attributes of one instance in this context."""
        before = {name: instance.__dict__[name] for name in methods if name in instance.__dict__}
        for name, method in methods.items():
            if inspect.isfunction(method) and callable(getattr(instance, name, None)):
                # Wrapping layers ask for it: `TimeDistributed` passes a mask if `call` has an argument of that name.
                with contextlib.suppress(ValueError):  # the methods of metrics in 2.2 have none; dies with 2.2
                    method.__signature__ = inspect.signature(getattr(instance, name))  # type: ignore[attr-defined]
        instance.__dict__.update(methods)
        try:
            yield
        finally:
            for name in methods:
                instance.__dict__.pop(name, None)
            instance.__dict__.update(before)

    @contextlib.contextmanager
    def on_all(self, instances: Sequence[Any], name: str, value: Any) -> Iterator[None]:
        """Replace a method of the class of several instances in this context, in the threads of several replicas."""
        for instance in instances:
            instance.__dict__[name] = value
        try:
            yield
        finally:
            for instance in instances:
                instance.__dict__.pop(name, None)  # the thread of another replica may have removed it

    def keep(self, instance: Any, name: str, value: Any) -> None:
        """Replace an attribute of an instance or module until `undo`, or for good."""
        vars(instance)[name] = value

    def undo(self, instance: Any, name: str) -> Any:
        """Return what `keep` has put there, and let the attribute be that of the class; None if there is nothing."""
        return vars(instance).pop(name, None)


class ClassPatch:
    """Methods of classes that are wrapped as long as any thread asks for it.

    Args:
      patch: the `Patch` that describes it.
      points: function that returns a list of (class or module, name of the method or function).
      wrap: function of a method that returns what takes its place.
    """

    _lock = threading.Lock()

    def __init__(
        self,
        patch: Patch,
        points: Callable[[], List[Tuple[type, str]]],
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.patch = patch
        self._points, self._wrap = points, wrap
        self._originals: List[Any] = []  # (class, name, method)
        self._users = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Wrap the methods in this context, for all threads."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                for cls, name in self._points():
                    self._originals.append((cls, name, vars(cls)[name]))
                    setattr(cls, name, self._wrap(vars(cls)[name]))
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    for cls, name, method in self._originals:
                        setattr(cls, name, method)
                    del self._originals[:]


STEPS = Patch(
    "`train_step`, `test_step` and `predict_step` of the model",
    "for good",
    "the step runs on micro-batches, even if it does not call `super()`",
)
LOSSES = Patch(
    "the container of compiled losses", "for good", "it tells by how much a loss divides, and sees whole batches"
)
COMPUTE_LOSS = Patch(
    "`compute_loss` of the user's", "for good", "it sees the outputs of all replicas, and a warning names what it adds"
)
CLONES = Patch(
    "two functions of `tf.keras.models.clone_model`", "for good", "the clone of an accumulating model accumulates"
)
LOGGED_STEP = Patch("`train_step` of a plain model", "one `fit`", "a `StepLogger` sees its logs")
METRICS = Patch("`update_state` and `result` of metrics", "one run or trace of a step", "they wait for the whole batch")
CONTAINERS = Patch(
    "`build` of the containers of losses and metrics", "one run or trace of a step", "only then do losses exist"
)
LOSS_SCALES = Patch(
    "`apply` or `apply_gradients` of a `LossScaleOptimizer`",
    "one run or trace of a step",
    "it hands over the gradients of micro-batches",
)
OPTIMIZERS = Patch(
    "`apply` or `apply_gradients` of the base classes of optimizers",
    "one run or trace of a step, in all threads, which it tells apart",
    "an optimizer that does not accumulate raises an error",
)
CALLS = Patch(
    "`__call__` of the base class of layers",
    "the same, where calls are split",
    "each call is split, wherever the train step makes it",
)
GRADIENTS = Patch(
    "`gradient` of `tf.GradientTape`, and what `tf.gradients` calls",
    "the same",
    "a gradient by an output of a split call, which lacks the way through its other outputs, raises an error",
)
MARKS = Patch(
    "`call`, `add_loss` and `update_state` of layers and metrics in the model",
    "one trace of a call",
    "they leave marks where the whole batch is needed",
)
RECORDED_LOSSES = Patch(
    "the losses in their container, and their `call`", "one call of the container", "it tells what they divide by"
)
SUMS = Patch(
    "the sum over replicas in an optimizer of Keras",
    "one step of the inner optimizer",
    "the gradients are summed already; Keras 3 has no switch for that",
)


def table() -> str:
    """Return the table of all patches in Markdown."""
    rows = ["| `_tf.patches` | Replaced | How long | Why |", "|---|---|---|---|"]
    patches = [(name, value) for name, value in globals().items() if isinstance(value, Patch)]
    return "\n".join(rows + [f"| `{name}` | {' | '.join(patch)} |" for name, patch in patches])
