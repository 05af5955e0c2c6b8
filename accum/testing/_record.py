"""Writing a run down, step by step: by hand, from a Keras callback or from a hook of a static graph's session."""

import numbers

import numpy as np

from accum.testing._file import Writer, to_json
from accum.testing._fingerprint import as_numbers, fingerprint
from accum.testing._names import names_of


def record(path, *, every=1, overwrite=False):
    """Record a run in a file: its losses, and a fingerprint of its variables after each step.

    Two recordings, also of different TensorFlow lines and of different faces, are compared by `compare` or by
    `python -m accum compare`. Of each variable a recording has name, shape and dtype, and at each step its norm, its
    mean and 8 projections on fixed pseudo-random vectors,

        p_j = sum_i(u_ji v_i),   u_ji uniform on [-1/2, 1/2], a hash of i and j,

    some 200 bytes a step. Where the projections of two variables agree, so do the variables: if d is their difference
    and e = sqrt(12 mean_j(x_j^2)) what its projections x_j say of its norm, then P(|d| > c e) <= (2.31 / c)^8, which is
    8e-6 for c = 10, whatever d is.

    Each step is in the file when it has been recorded: a run that is killed leaves all the steps before. The file has
    one JSON document a line, and comes into being, or replaces another, with its first step.

    Args:
      path: file, `str` or `os.PathLike`, in an existing folder.
      every: int >= 1: only steps whose number it divides are recorded (and step 0). A fingerprint costs some 50 ns for
        each element, so a second for 25 million.
      overwrite: whether to replace a file that is there.

    Returns:
      A `Recorder`.

    Raises:
      TypeError, ValueError: `path` is no file in an existing, writable folder, or is there already; `every` is no
        int >= 1.

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
    """What `record` gives: takes a run in, step by step. As a context manager it closes its file.

    Attributes:
      path: the file.
      last_step: int, the number of the step that was last given, recorded or passed over by `every`; None before.
    """

    def __init__(self, path, *, every=1, overwrite=False):
        if isinstance(every, bool) or not isinstance(every, numbers.Integral):
            raise TypeError("`every` must be an int >= 1. Received: every={!r}.".format(every))
        if every < 1:
            raise ValueError("`every` must be an int >= 1. Received: every={!r}.".format(every))
        self._writer = Writer(path, overwrite)
        self._every = int(every)
        self._variables = None
        self._is_closed = False
        self.path = self._writer.path
        self.last_step = None

    def step(self, loss=None, variables=None, step=None, *, loss_error=0.0):
        """Record one step.

        Args:
          loss: scalar number, array or eager tensor: the loss of the step, that of all of its micro-batches together.
          variables: dict of names to arrays or eager tensors of any shape, or an iterable of eager variables, whose
            names are taken: their values after the step. The same ones at each step that has any. Or a function that
            gives them, which is called where the step is recorded.
          step: int >= 0 that grows from one call to the next, such as the value of `global_step`; None: one more than
            the last, or 1. Step 0 is what a run starts from.
          loss_error: float >= 0, by how much rounding may have made `loss` wrong; `compare` allows for it.

        Raises:
          TypeError, ValueError: neither `loss` nor `variables` are given, or they are not of this kind; `step` does not
            grow; other variables than before; the recorder is closed.
        """
        number = self._number_of(step)
        document, table = {"step": number}, None
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

    def keras_callback(self, variables=None):
        """A callback that records the steps of Keras' `fit`.

        A step is what moves the optimizer's `iterations`: with accumulation one of several micro-batches. Its loss is
        that of what Keras counts in it: the mean over its examples. Keras keeps a mean over the epoch, in float32, from
        which it is taken; `loss_error` says how much rounding that may have cost. Of several steps in one execution
        (`steps_per_execution`) the last is recorded, without a loss.

        Args:
          variables: function of the model that gives those to record; None: its trainable ones.

        Returns:
          A `tf.keras.callbacks.Callback`. It closes no file.

        Raises:
          TypeError: `variables` is no function.
          ValueError: in `fit`, if the optimizer has made fewer steps than are recorded: a recorder is for one run.
        """
        from accum.testing._watch import KerasCallback  # needs TensorFlow

        return KerasCallback(self, variables)

    def session_hook(self, loss=None, variables=None):
        """A hook that records the steps of a `MonitoredSession` or an `Estimator` in a static graph.

        A step is what moves `global_step`: with `AccumOptimizer` one of several runs, and its loss is the mean over
        them. In a graph without a global step each run is a step.

        Args:
          loss: scalar tensor of the graph, or its name such as "loss:0"; None: no loss is recorded.
          variables: list of variables of the graph, or a function without arguments that gives them when the session is
            made; None: the trainable ones.

        Returns:
          A `tf.compat.v1.train.SessionRunHook`. It closes no file.

        Raises:
          ValueError: when the session is made, if there is no variable to record.
        """
        from accum.testing._watch import SessionHook  # needs TensorFlow

        return SessionHook(self, loss, variables)

    def close(self):
        """Close the file; nothing can be recorded after. Closing twice does no harm."""
        self._is_closed = True
        self._writer.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _number_of(self, step):
        if self._is_closed:
            raise ValueError("The recorder is closed: {}.".format(self.path))
        if step is None:
            return 1 if self.last_step is None else self.last_step + 1
        if isinstance(step, bool) or not isinstance(step, numbers.Integral):
            raise TypeError("`step` must be an int >= 0. Received: step={!r}.".format(step))
        if step < 0 or (self.last_step is not None and step <= self.last_step):
            raise ValueError(
                "`step` must be an int >= 0 that grows. Received: step={} after {}.".format(step, self.last_step)
            )
        return int(step)

    def _fingerprints(self, variables):
        values = _by_name(variables)
        table = [
            {"name": name, "shape": [int(size) for size in np.shape(value)], "dtype": np.asarray(value).dtype.name}
            for name, value in values
        ]
        if self._variables is not None and table != self._variables:
            raise ValueError(
                "Each step must have the same variables. Received: {}, and before {}.".format(
                    [tuple(var.values()) for var in table], [tuple(var.values()) for var in self._variables]
                )
            )
        return table, [[to_json(number) for number in fingerprint(value)] for _, value in values]


def _by_name(variables):
    if isinstance(variables, dict):
        pairs = [(name, value) for name, value in variables.items()]
    else:
        variables = list(variables)
        if not all(hasattr(var, "name") and hasattr(var, "numpy") for var in variables):
            raise TypeError(
                "`variables` must be a dict of names to arrays, or eager variables. Received: {!r}.".format(variables)
            )
        pairs = list(zip(names_of(variables), variables))
    if not pairs or not all(isinstance(name, str) for name, _ in pairs):
        raise ValueError("`variables` must hold one at least, by names. Received: {!r}.".format(variables))
    values = [(name[:-2] if name.endswith(":0") else name, _array(value)) for name, value in pairs]
    for _, value in values:
        as_numbers(value)  # raises
    return values


def _array(value):
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _scalar(name, value):
    value = _array(value)
    if value.size != 1 or value.dtype.kind not in "fiub" and value.dtype.name != "bfloat16":
        raise TypeError("`{}` must be a scalar number. Received: {!r}.".format(name, value))
    return float(value.reshape(()).astype(np.float64))
