"""A callback that logs each step: loss, gradient norm, examples, learning rate and gradient noise scale."""

import csv
import math
import os
import time
from typing import Any, Callable, Dict, List, Optional

from accum import _check, _tf
from accum._keras._logging._noise_scale import NONE, Estimate, NoiseScale, SquaredNorms, advice, estimate
from accum._keras._logging._recorded_sums import StepSums
from accum._keras._logging._step_recorder import ROWS, StepRecorder
from accum._keras._optimizer._internals import accumulation_of
from accum._keras._optimizer._wrapper import accumulating_optimizers
from accum._tf import Logs, tf

COLUMNS: Dict[str, Callable[[StepSums, float], float]] = {
    "step": lambda row, noise_scale: int(row.number) + 1,
    "loss": lambda row, noise_scale: row.loss / row.loss_weight if row.loss_weight else math.nan,
    "gradient_norm": lambda row, noise_scale: math.sqrt(row.squared_norm) if row.squared_norm >= 0.0 else math.nan,
    "examples": lambda row, noise_scale: int(row.examples) if math.isfinite(row.examples) else math.nan,
    "learning_rate": lambda row, noise_scale: row.learning_rate,
    "noise_scale": lambda row, noise_scale: noise_scale,
}
"""What is logged of a step, by the sums that are recorded for it."""

SECONDS = 1.0  # between two reads: each waits for the device


class StepLogger(tf.keras.callbacks.Callback):
    """Log each step of `fit`, that is each update of the weights, rather than each batch.

    - `loss`: the mean over the examples of the step, as compiled.
    - `gradient_norm`: the norm of the gradient of the whole step, before clipping.
    - `examples`: the number of examples in the step.
    - `learning_rate`: the one that the step used.
    - `noise_scale`: the gradient noise scale, in examples, averaged over recent steps. It compares the gradients of
      micro-batches with their mean. Batches much smaller than it make noisy updates, and a larger batch saves steps;
      batches much larger than it save next to none.

    The noise scale is NaN where it can't be known: in a step of a single micro-batch, where losses or batch
    normalization are computed over the whole batch, with `micro_batch_tokens`, and with a loss that sums over examples.
    `fit` ends with a sentence that says whether a larger batch would still help, if the noise scale is certain enough
    for that.

    With several workers, each of them has the rows of all workers together, and the first one writes the files.

    The model must be a `GradientAccumulateModel`, or be compiled with a `GradientAccumulateOptimizer`. Recording costs
    one pass over the gradients of each micro-batch. Without the callback, nothing is recorded and nothing is slower.

    Args:
      filename: a CSV file to write, one row per step; None: none.
      log_dir: a folder for TensorBoard, with one point per step; None: none.
      average_over: the number of steps over which the noise scale is averaged, >= 1. Each older step counts
        1 - 1 / average_over times as much as the one after it.
      verbose: 1 to print the sentence at the end of `fit`, 0 for nothing.
      append: whether to add to `filename` if it exists, under its columns, as for a resumed run; False: write it anew.
      on_step: function that is called with each row, such as `ray.train.report` or `wandb.log`; None: none. A row is a
        dict that maps the names above, and "step", to numbers. About once a second, the function gets the rows since
        then, one by one; with several workers, each worker gets them at the end of each epoch.

    Attributes:
      history: dict from each of the names above, and "step", to a list with one number per step. Keras' own `History`
        gets the mean of each epoch, as `gradient_norm`, `examples_per_step` and `noise_scale` (the last one).
      summary: the sentence, after `fit`.

    Raises:
      ValueError: in `fit`, the model does not accumulate, has several optimizers, runs in graph mode, uses parameter
        servers, or has two of these callbacks; or `filename`, which is appended to, lacks one of the columns.

    Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, https://arxiv.org/abs/1812.06162

    Example:
      >>> logger = accum.StepLogger("steps.csv")
      >>> model.fit(x, y, batch_size=256, callbacks=[logger])
      >>> logger.history["noise_scale"][-1]
    """

    def __init__(
        self,
        filename: Optional[str] = None,
        log_dir: Optional[str] = None,
        average_over: int = 100,
        verbose: int = 1,
        append: bool = False,
        on_step: Optional[Callable[[Dict[str, float]], object]] = None,
    ) -> None:
        super().__init__()
        self.filename = filename
        self.log_dir = log_dir
        self.average_over = _check.accum_steps(average_over, "average_over")
        self.verbose = verbose
        self.append = append
        self.on_step = on_step
        self._recorder: Any = None
        self._has_workers, self._writes = False, True
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.history: Dict[str, List[float]] = {name: [] for name in COLUMNS}
        self.summary = ""
        self._noise_scale = NoiseScale(self.average_over)
        self._file: Any = None
        self._rows: Any = None
        self._writer: Any = None
        self._unread = 0  # batches since the last read
        self._last_batch = -1
        self._last_read = time.time()
        self._epoch_begins = 0
        self._is_training = False

    # ------------------------------------------------------------------------------------------------------------
    # Keras calls `set_model` before it makes the train function, and all other methods after that.

    def set_model(self, model: tf.keras.Model) -> None:
        super().set_model(model)
        self._remove()
        self._optimizer = _only_optimizer(model)
        self._why_none = _reason_for_no_noise_scale(model, self._optimizer)
        self._has_workers = _tf.strategies.has_several_workers(model.distribute_strategy)
        self._writes = _tf.strategies.is_chief(model.distribute_strategy)
        self._recorder = StepRecorder(model, self._optimizer, self._end)
        self._recorder.attach()

    def _end(self) -> None:
        """Log the last steps and close the files, also after an exception, where nothing calls `on_train_end`."""
        if self._is_training and not self._has_workers:  # after an exception, which other workers may not have
            self._read()
        self._is_training = False
        for opened in (self._file, self._writer):
            if opened is not None:
                opened.close()
        self._file = self._writer = None

    def _remove(self) -> None:
        """Take the recorder out of the model, so that training without this callback runs the graph it always ran."""
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        if not self._recorder.is_attached:
            raise ValueError(
                "Two callbacks can't follow the steps of one model: pass one `StepLogger`, or only a "
                f"`NoiseScaleScheduler`, which logs the same. Received: another one in addition to {self!r}."
                " [accum: step-logger]"
            )
        self._begin_anew()
        self._is_training = True
        if self.filename is not None and self._writes:
            columns = _columns_of(self.filename) if self.append else []
            mode = "a" if self.append else "w"
            self._file = open(self.filename, mode, newline="", encoding="utf-8")  # noqa: SIM115, closed after training
            self._rows = csv.DictWriter(self._file, columns or list(COLUMNS))
            if not columns:
                self._rows.writeheader()
        if self.log_dir is not None and self._writes:
            self._writer = tf.summary.create_file_writer(str(self.log_dir))

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        self._recorder.begin_epoch()
        self._last_batch = -1
        self._epoch_begins = len(self.history["step"])

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        batches, self._last_batch = batch - self._last_batch, batch
        self._unread += batches
        # Workers read together: they can't agree on the time.
        is_time = not self._has_workers and time.time() - self._last_read > SECONDS
        if self._unread + 2 * batches > ROWS or is_time:
            self._read()

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        self._read()
        if logs is not None:
            for name, shown in (("gradient_norm", "gradient_norm"), ("examples", "examples_per_step")):
                values = self.history[name][self._epoch_begins :]
                logs[shown] = sum(values) / len(values) if values else math.nan
            if self._noise_scale.has_any:
                logs["noise_scale"] = self._noise_scale.value

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        self._read()
        self._end()
        self._remove()
        self.summary = self._summarized()
        if self.verbose and self._writes:
            print(self.summary, flush=True)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        if not self._is_training:  # `evaluate` with this callback
            self._remove()

    on_predict_end = on_test_end

    # ------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Log the steps since the last read."""
        rows, lost = self._recorder.collect()
        self._unread, self._last_read = 0, time.time()
        logged = [self._logged(row) for row in rows]
        for values in logged:
            for name, value in values.items():
                self.history[name].append(value)
        if lost:
            print(f"StepLogger: {lost} cycles were not logged, because more than {ROWS} passed between two reads.")
        if self._file is not None:
            self._rows.writerows(logged)
            self._file.flush()
        if self._writer is not None:
            self._write_points(logged)
        if self.on_step is not None:
            for values in logged:
                self.on_step(values)

    def _logged(self, row: StepSums) -> Dict[str, float]:
        latest = NONE if self._why_none or row.steps > 1.0 else self._estimated(row)
        self._noise_scale.add(latest)
        has_one = math.isfinite(latest.variance)
        if row.steps > 1.0:  # a train step that calls its optimizer several times: the sums are those of all calls
            last, several = row.number / row.steps + (row.steps - 1.0) / 2.0, row.steps
            row = row._replace(number=last, examples=row.examples / several, squared_norm=-1.0)
            row = row._replace(learning_rate=row.learning_rate / several)
        noise_scale = self._noise_scale.value if has_one else math.nan
        return {name: value_of(row, noise_scale) for name, value_of in COLUMNS.items()}

    def _estimated(self, row: StepSums) -> Estimate:
        """Estimate from one step, with the variance for a single example."""
        mean = row.squared_norm
        if self._optimizer._cycle.plan.reduction == "sum":
            mean = mean / row.divisor**2 if row.divisor else math.nan
        noise = estimate(SquaredNorms(*row[:5], mean))
        return noise._replace(variance=noise.variance * row.examples / row.sizes) if row.sizes else NONE

    def _write_points(self, logged: List[Dict[str, float]]) -> None:
        # `tf.summary.scalar` writes the same, but needs the package `tensorboard` since TF 2.20.
        metadata = tf.compat.v1.SummaryMetadata()
        metadata.plugin_data.plugin_name = "scalars"
        with self._writer.as_default():
            for values in logged:
                for name in COLUMNS:
                    if name != "step" and math.isfinite(values[name]):
                        value = tf.constant(values[name], tf.float32)
                        tf.summary.write(f"step/{name}", value, step=int(values["step"]), metadata=metadata)
        self._writer.flush()

    def _summarized(self) -> str:
        if self._why_none:
            return f"The gradient noise scale was not measured: {self._why_none}."
        if not self.history["step"]:
            return "The gradient noise scale was not measured: no step was made."
        if not self._noise_scale.has_any:
            return (
                "The gradient noise scale was not measured: no step had two micro-batches with a known number of "
                "examples."
            )
        recent = [value for value in self.history["examples"][-self.average_over :] if math.isfinite(value)]
        if math.isnan(self._noise_scale.value):
            return "The gradient noise scale could not be measured, because it varies too much: train for more steps."
        if not self._noise_scale.is_meaningful:
            return (
                f"The gradient noise scale is too uncertain for advice after {len(self.history['step'])} steps: train "
                "for more steps."
            )
        return advice(self._noise_scale.value, sum(recent) / len(recent))


def _columns_of(filename: str) -> List[str]:
    """Return the columns of a file of steps, [] if there is none yet, or raise an error if it lacks one of ours."""
    if not os.path.exists(filename):
        return []
    with open(filename, newline="", encoding="utf-8") as file:
        columns = next(csv.reader(file), [])
    lacking = [name for name in COLUMNS if name not in columns]
    if columns and lacking:
        raise ValueError(
            f"A `StepLogger` only appends to a file with all of its columns: pass another `filename` than {filename}. "
            f"Received: columns {', '.join(columns)}, so without {', '.join(lacking)}. [accum: step-logger]"
        )
    return columns


def _only_optimizer(model: tf.keras.Model) -> tf.keras.optimizers.Optimizer:
    if _tf.graphs.in_static_graph():
        raise ValueError("`StepLogger` does not run in Keras' graph mode: enable eager execution. [accum: step-logger]")
    if _tf.strategies.is_parameter_server(model.distribute_strategy):
        raise ValueError(
            "`StepLogger` does not follow the workers of parameter servers. "
            f"Received: {type(model.distribute_strategy).__name__}. [accum: parameter-servers]"
        )
    optimizers = accumulating_optimizers(model)
    if len(optimizers) != 1:
        raise ValueError(
            f"`StepLogger` follows a model with one optimizer. Received: {optimizers!r}. [accum: step-logger]"
        )
    return optimizers[0]


def _reason_for_no_noise_scale(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> str:
    """Return why the gradients of micro-batches can't be compared, or ""."""
    own = accumulation_of(model)
    if own is not None and own.sees_batch_in_training(model):
        return "with `whole_batch`, micro-batches have no losses of their own"
    if own is not None and own.options.arguments["micro_batch_tokens"] is not None:
        return "`micro_batch_tokens` sorts examples by length, so micro-batches are no random samples"
    if _tf.losses.sums_over_examples(getattr(model, _tf.losses.LOSS_CONTAINER, None)):
        return "the loss sums over examples; compile one that is a mean"
    replicas = model.distribute_strategy.num_replicas_in_sync
    if optimizer._cycle.plan.nonfinite == "skip_micro" and replicas > 1:
        return "with several replicas and `nonfinite='skip_micro'`, they may skip micro-batches of others"
    return ""
