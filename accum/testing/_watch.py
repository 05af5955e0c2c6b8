"""The Keras callback and the session hook that record a run."""

from accum import _tf
from accum._tf import tf
from accum.testing._names import names_of


class _LossOfStep:
    """Computes the mean loss since the last step from Keras' mean over the epoch so far."""

    def __init__(self):
        self._seen = 0.0, 0.0
        self.clear()

    def clear(self):
        self._total, self._count, self._error = 0.0, 0.0, 0.0

    def begin_epoch(self):
        """Start over with Keras' mean, but keep the sums of an unfinished cycle."""
        self._seen = 0.0, 0.0

    def take(self, metric, logs):
        """Add a micro-batch: its contribution to Keras' sums, or else the loss that its train step returned."""
        total, count = self._seen
        if metric is not None:
            total, count = (float(value) for value in _tf.variables.values_of([metric.total, metric.count]))
        # There is no such mean, or it does not change, as in Keras 3 with the user's own train step.
        if count == self._seen[1]:
            if logs and "loss" in logs:
                self._total, self._count = self._total + float(logs["loss"]), self._count + 1.0
            return
        self._total += total - self._seen[0]
        self._count += count - self._seen[1]
        self._error += abs(total) * 2.0**-24  # the sum is a float32, rounded once per micro-batch
        self._seen = total, count

    @property
    def value(self):
        """(loss, its error), or (None, 0) if there is no loss."""
        return (self._total / self._count, self._error / self._count) if self._count else (None, 0.0)


class KerasCallback(tf.keras.callbacks.Callback):
    """Records the optimizer's steps in `fit`, not the micro steps between them."""

    def __init__(self, recorder, variables=None):
        super().__init__()
        if variables is not None and not callable(variables):
            raise TypeError(f"`variables` must be a function that takes the model. Received: {variables!r}.")
        self._recorder = recorder
        self._variables = variables or (lambda model: model.trainable_variables)
        self._loss = _LossOfStep()
        self._micro_batches = 0
        self._last_step = 0

    def on_train_begin(self, logs=None):
        step, last = self._steps_made(), self._recorder.last_step
        if last is not None and step < last:
            raise ValueError(
                "A recorder records one run: use another file for another model. Received: a model that has made "
                f"{step} steps, after {last} were recorded."
            )
        self._last_step = step
        if self.model.built and (last is None or step > last):
            self._recorder.step(variables=self._values, step=step, is_start=last is None)

    def on_epoch_begin(self, epoch, logs=None):
        self._loss.begin_epoch()

    def on_train_batch_end(self, batch, logs=None):
        self._micro_batches += 1
        self._loss.take(self._metric(), logs)
        self._record_step()

    def on_epoch_end(self, epoch, logs=None):
        self._record_step()  # the last cycle may have been flushed

    def on_train_end(self, logs=None):
        self._record_step()

    def _record_step(self):
        step, last = self._steps_made(), self._recorder.last_step
        if last is not None and step <= last:
            return
        loss, error = self._loss.value if step - self._last_step == 1 else (None, 0.0)  # else of several steps
        self._last_step = step
        self._recorder.step(loss, self._values, step, loss_error=error)
        self._loss.clear()

    def _steps_made(self):
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None:
            return self._micro_batches
        return int(
            _tf.variables.values_of([_tf.optimizers.without_loss_scale(optimizer).iterations])[0]
        )  # in Keras 3.8, its own stay 0

    def _metric(self):
        """Return Keras' mean of the loss over the epoch, or None if the user's own train step computes the loss."""
        for metric in self.model.metrics:
            if metric.name == "loss" and hasattr(metric, "total") and hasattr(metric, "count"):
                return metric
        return None

    def _values(self):
        variables = list(self._variables(self.model))
        return dict(zip(names_of(variables), _tf.variables.values_of(variables)))


class SessionHook(tf.compat.v1.train.SessionRunHook):
    """Records the steps of a session, which advance the global step, and not the runs between them."""

    def __init__(self, recorder, loss=None, variables=None):
        self._recorder = recorder
        self._loss = loss
        self._requested = variables
        self._losses = []
        self._runs = 0

    def begin(self):
        graph = tf.compat.v1.get_default_graph()
        if isinstance(self._loss, str):
            self._loss = graph.get_tensor_by_name(self._loss)
        watched = tf.compat.v1.trainable_variables() if self._requested is None else self._requested
        variables = list(watched() if callable(watched) else watched)
        if not variables:
            raise ValueError("There is no variable to record: pass `variables`, or build the graph before the session.")
        self._variables = dict(zip(names_of(variables), variables))
        self._global_step = _tf.graphs.global_step()

    def after_create_session(self, session, coord):
        self._losses = []
        self._record_step(session, is_start=self._recorder.last_step is None)

    def before_run(self, run_context):
        return None if self._loss is None else tf.compat.v1.train.SessionRunArgs(self._loss)

    def after_run(self, run_context, run_values):
        self._runs += 1
        if self._loss is not None:
            self._losses.append(float(run_values.results))
        # Read the variables in a separate run: in the run of the train op, the order of ops is not defined.
        self._record_step(run_context.session)

    def end(self, session):
        self._record_step(session)  # a hook before this one may have flushed the last cycle

    def _record_step(self, session, is_start=False):
        step = self._runs if self._global_step is None else int(session.run(self._global_step))
        if self._recorder.last_step is not None and step <= self._recorder.last_step:
            return
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._recorder.step(loss, lambda: session.run(self._variables), step, is_start=is_start)
        self._losses = []
