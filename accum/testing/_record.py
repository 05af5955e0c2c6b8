"""Record a run step by step: by hand, from a Keras callback, or from a hook of a static graph's session."""

import numbers
from typing import Any, Dict, List, Optional

import numpy as np

from accum import _check
from accum.testing._file import Writer, to_json
from accum.testing._fingerprint import as_numbers, fingerprint
from accum.testing._names import names_of


def record(path: str, *, every: int = 1, overwrite: bool = False) -> "Recorder":
    """Record a run in a file: its losses, and a fingerprint of its variables after each step.

    Compare two recordings with `compare` or `python -m accum compare`. They may come from different TensorFlow
    versions, or one from Keras and the other from a static graph. A recording holds each variable's name, shape and
    dtype, and at each step its norm, its mean and 8 projections on fixed pseudo-random vectors,

        p_j = sum_i(u_ji v_i),   u_ji uniform on [-1/2, 1/2], a hash of i and j,

    which take about 200 bytes per step. If the projections of two variables agree, so do the variables: let d be their
    difference, x_j its projections, and e = sqrt(12 mean_j(x_j^2)) the estimate of its norm. Then
    P(|d| > c e) <= (2.31 / c)^8 for any d, which is 8e-6 for c = 10.

    Each step is written to the file immediately, so a run that is killed leaves all earlier steps. The file has one
    JSON document per line. It is created, or replaced, when the first step is recorded.

    Args:
      path: file, `str` or `os.PathLike`, in an existing folder.
      every: int >= 1: record only steps whose number it divides (and step 0). A fingerprint takes about 50 ns per
        element: a second for 20 million.
      overwrite: whether to replace an existing file.

    Returns:
      A `Recorder`.

    Raises:
      TypeError, ValueError: `path` is not in an existing, writable folder, is a folder, or exists already; `every` is
        not an int >= 1.

    Example:
      >>> with accum.testing.record("run.json") as recorder:
      ...     model.fit(x, y, callbacks=[recorder.keras_callback()])
      >>> with accum.testing.record("graph.json") as recorder:
      ...     hooks = [recorder.session_hook(loss)]
      ...     with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
      ...         session.run(train_op)
      >>> with accum.testing.record("loop.json") as recorder:
      ...     for x, y in batches:
      ...         recorder.step(loss=train(x, y), variables=model.trainable_variables)
    """
    return Recorder(path, every=every, overwrite=overwrite)


class Recorder:
    """The result of `record`: records a run step by step. As a context manager, it closes its file.

    Attributes:
      path: the file.
      last_step: int, the number of the last step given, recorded or skipped because of `every`; None before the first.
    """

    def __init__(self, path: str, *, every: int = 1, overwrite: bool = False) -> None:
        every = _check.accum_steps(every, "every")
        self._writer = Writer(path, overwrite)
        self._every = every
        self._variables: Optional[List[Any]] = None
        self._is_closed = False
        self.path = self._writer.path
        self.last_step: Optional[int] = None

    def step(
        self,
        loss: Any = None,
        variables: Any = None,
        step: Optional[int] = None,
        *,
        loss_error: Optional[float] = 0.0,
        is_start: bool = False,
    ) -> None:
        """Record one step.

        Args:
          loss: scalar number, array or eager tensor: the loss of the step, over all of its micro-batches.
          variables: the values after the step: a dict from names to arrays or eager tensors of any shape; an iterable
            of eager variables, which are recorded by name; or a function that returns either, which is called only if
            the step is recorded. They must be the same variables at each step that has any.
          step: int >= 0 that grows from one call to the next, such as the value of `global_step`; None: one more than
            the last, or 1. Step 0 holds the initial values of a run.
          loss_error: float >= 0, the largest rounding error of `loss`; `compare` allows for it.
          is_start: whether the variables are the initial values of a resumed run; those of step 0 always are.

        Raises:
          TypeError, ValueError: neither `loss` nor `variables` is given, or one is not valid; `step` does not grow; the
            variables are not those of the earlier steps; the recorder is closed.
        """
        number = self._number_of(step)
        document: Dict[str, Any] = {"step": number}
        table = None
        if is_start:
            document["start"] = True
        if loss is None and variables is None:
            raise ValueError("A step must have a `loss` or `variables`.")
        if loss is not None:
            document["loss"] = to_json(_scalar("loss", loss))
            if loss_error:
                document["loss_error"] = to_json(_scalar("loss_error", loss_error))
        if number % self._every == 0:
            variables = variables() if callable(variables) else variables
            if variables is not None:
                table, document["fingerprints"] = self._fingerprints(variables)
            is_new = table is not None and self._variables is None
            self._writer.write(*([{"variables": table}] if is_new else []), document)
            self._variables = table or self._variables
        self.last_step = number

    def keras_callback(self, variables: Any = None) -> Any:
        """Create a callback that records the steps of Keras' `fit`.

        A step ends when the optimizer's `iterations` advances: with accumulation, after several micro-batches. Its loss
        is the mean over its examples, as Keras counts them. It is computed from the mean over the epoch, which Keras
        keeps in float32; `loss_error` is the largest rounding error that results. If one execution makes several steps
        (`steps_per_execution`), only the last is recorded, without a loss.

        Args:
          variables: function that takes the model and returns the variables to record; None: the trainable ones.

        Returns:
          A `tf.keras.callbacks.Callback`. It does not close the file.

        Raises:
          TypeError: `variables` is not a function.
          ValueError: in `fit`, if the optimizer has made fewer steps than the recording: a recorder is for one run.
        """
        from accum.testing._watch import KerasCallback  # needs TensorFlow

        return KerasCallback(self, variables)

    def session_hook(self, loss: Any = None, variables: Any = None) -> Any:
        """Create a hook that records the steps of a `MonitoredSession` or an `Estimator` in a static graph.

        A step ends when `global_step` advances: with `AccumOptimizer`, after several runs of the session. Its loss is
        the mean over these runs. In a graph without a global step, each run is a step.

        Args:
          loss: scalar tensor of the graph, or its name such as "loss:0"; None: no loss is recorded.
          variables: list of variables of the graph, or a function without arguments that returns them when the session
            is created; None: the trainable ones.

        Returns:
          A `tf.compat.v1.train.SessionRunHook`. It does not close the file.

        Raises:
          ValueError: when the session is created, if there is no variable to record.
        """
        from accum.testing._watch import SessionHook  # needs TensorFlow

        return SessionHook(self, loss, variables)

    def close(self) -> None:
        """Close the file; nothing can be recorded afterwards. Closing twice does nothing."""
        self._is_closed = True
        self._writer.close()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _number_of(self, step):
        if self._is_closed:
            raise ValueError(f"The recorder is closed: {self.path}.")
        if step is None:
            return 1 if self.last_step is None else self.last_step + 1
        if isinstance(step, bool) or not isinstance(step, numbers.Integral):
            raise TypeError(f"`step` must be an int >= 0. Received: step={step!r}.")
        if step < 0 or (self.last_step is not None and step <= self.last_step):
            raise ValueError(f"`step` must be an int >= 0 that grows. Received: step={step} after {self.last_step}.")
        return int(step)

    def _fingerprints(self, variables):
        values = _by_name(variables)
        table = [
            {"name": name, "shape": [int(size) for size in np.shape(value)], "dtype": np.asarray(value).dtype.name}
            for name, value in values
        ]
        if self._variables is not None and table != self._variables:
            raise ValueError(
                f"Each step must have the same variables. Received: {[tuple(var.values()) for var in table]}, "
                f"after {[tuple(var.values()) for var in self._variables]}."
            )
        return table, [[to_json(number) for number in fingerprint(value)] for _, value in values]


def _by_name(variables):
    if isinstance(variables, dict):
        pairs = [(name, value) for name, value in variables.items()]
    else:
        variables = list(variables)
        if not all(hasattr(var, "name") and hasattr(var, "numpy") for var in variables):
            raise TypeError(
                f"`variables` must be a dict of names to arrays, or eager variables. Received: {variables!r}."
            )
        pairs = list(zip(names_of(variables), variables))
    if not pairs or not all(isinstance(name, str) for name, _ in pairs):
        raise ValueError(f"`variables` must hold at least one variable, by name. Received: {variables!r}.")
    values = [(name[:-2] if name.endswith(":0") else name, _array(value)) for name, value in pairs]
    for _, value in values:
        as_numbers(value)  # raises
    return values


def _array(value):
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _scalar(name, value):
    value = _array(value)
    if value.size != 1 or value.dtype.kind not in "fiub" and value.dtype.name != "bfloat16":
        raise TypeError(f"`{name}` must be a scalar number. Received: {value!r}.")
    return float(value.reshape(()).astype(np.float64))
