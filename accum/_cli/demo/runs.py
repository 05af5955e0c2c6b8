"""Run each training in a process of its own, so that peak memory is measured separately."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from typing import List, NamedTuple, Optional

import numpy as np

from accum._cli import requirements
from accum._cli.demo import apis, data, memory
from accum._cli.demo.settings import Run, runs_to_compare
from accum._tf import tf


class Outcome(NamedTuple):
    """The result of a run.

    Attributes:
      run: the run.
      losses: mean training loss of each epoch, in nats per example.
      accuracy: share of test examples classified correctly, 0 to 1.
      weights: the trained weights.
      updates: number of steps made.
      seconds: duration of the training; with micro-batches, without the tracing of graphs.
      peak_mib: peak memory of its process up to the end of the training, in MiB, or None.
      idle_mib: peak memory before the training; with micro-batches, after another one in batches of two.
    """

    run: Run
    losses: List[float]
    accuracy: float
    weights: List[np.ndarray]
    updates: int
    seconds: float
    peak_mib: Optional[float]
    idle_mib: Optional[float]

    @property
    def training_mib(self):
        """The memory that the training took above what the process had before, in MiB, or None."""
        return None if self.peak_mib is None or self.idle_mib is None else self.peak_mib - self.idle_mib


class RunFailed(Exception):
    """A run's process ended without an outcome."""


def run_all(settings):
    """Run the trainings one after the other. Returns their outcomes.

    Raises:
      RunFailed: if one of the processes ended without an outcome.
      BrokenPipeError: if nobody reads the progress any more.
    """
    # For the new processes; this one has imported TensorFlow already.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    context = _process_context()
    return [_in_own_process(context, settings, run) for run in runs_to_compare(settings)]


def _process_context():
    """How to start processes: never as a fork of this one, whose TensorFlow may already have threads.

    On Linux they are forks of a fresh process that has only imported TensorFlow, which saves seconds per run.
    """
    if not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _in_own_process(context, settings, run):
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_execute, args=(sender, settings, run), daemon=True)
    try:
        with _holding_interrupts():  # from what starts here, and goes on: Ctrl-C reaches every process of a terminal
            process.start()
        sender.close()  # the child has its own copy: if the child dies, `recv` sees the end
        outcome = receiver.recv()
    except EOFError:
        process.join()
        message = f"the run {run.label!r} ended with exit code {process.exitcode}."
        raise RunFailed(message) from None
    except BaseException:  # Ctrl-C
        if process.pid is not None:
            process.terminate()
        raise
    finally:
        if process.pid is not None:
            process.join()
    if isinstance(outcome, OSError):
        raise outcome
    return outcome


@contextlib.contextmanager
def _holding_interrupts():
    """Let Ctrl-C wait until the end of this context, and not reach the processes that start in it."""
    if hasattr(signal, "pthread_sigmask"):  # which processes inherit
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    elif threading.current_thread() is not threading.main_thread():  # others can't set handlers
        yield
    else:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _execute(sender, settings, run):
    """Train and measure, and send the outcome, or the error if the progress can't be written any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    try:
        outcome = _outcome(settings, run)
    except OSError as error:  # the reader is gone, or the disk is full
        requirements.discard_output()
        outcome = error
    sender.send(outcome)


def _outcome(settings, run):
    # Warnings of TensorFlow and Keras would break the progress bar.
    tf.get_logger().setLevel("ERROR")
    warnings.simplefilter("ignore")
    train, test = data.load(settings.seed)
    api = (apis.GraphAPI if settings.is_graph else apis.ModelAPI)(run, settings)
    # TensorFlow needs time and memory to trace and start any training, whatever the batch. The last batch is a
    # single example: the graph is then traced for any size.
    api.warm_up(data.Examples(train.images[:7], train.labels[:7]))
    progress = _Progress(run.label, settings.epochs * -(-len(train.labels) // run.batch_size))
    idle_mib, start = memory.peak_mib(), time.perf_counter()
    losses = api.train(train, settings.epochs, progress)
    seconds, peak_mib = time.perf_counter() - start, memory.peak_mib()
    accuracy = np.mean(np.argmax(api.logits(test.images), axis=-1) == test.labels)
    numbers = float(accuracy), api.weights(), int(api.updates()), seconds, peak_mib, idle_mib
    return Outcome(run, losses, *numbers)


class _Progress:
    """A progress bar that counts backward passes; without a terminal, one line at the end."""

    def __init__(self, label, passes):
        self._is_watched = sys.stdout.isatty()
        verbose = 1 if self._is_watched else 0
        self._bar = tf.keras.utils.Progbar(passes, verbose=verbose, stateful_metrics=["loss"])
        self._label = label
        self._done = 0
        if self._is_watched:
            print(label, flush=True)

    def __call__(self, loss):
        self._done += 1
        self._bar.update(self._done, [("loss", float(loss))])
        if self._done == self._bar.target and not self._is_watched:
            print(f"{self._label}: {self._done} backward passes, loss {loss:.4f}", flush=True)
