"""A callback that raises `accum_steps` as the gradient noise scale grows."""

import math
from typing import Callable, Dict, Optional

from accum import _check
from accum._keras._logging._noise_scale import rounded
from accum._keras._logging._step_logger import StepLogger
from accum._keras._optimizer._wrapper import accumulating_optimizer
from accum._tf import Logs

GROWTH = 2
"""By how much `accum_steps` grows at most in one epoch: the estimate may be off by half of its value."""


class NoiseScaleScheduler(StepLogger):
    """Raise `accum_steps` after an epoch whose gradients were too noisy for the size of their steps.

    The gradient noise scale is the number of examples from which on a larger batch saves few steps. It grows during
    training. After each epoch,

        accum_steps = min(noise_scale * share / examples in a micro-batch, 2 * accum_steps, max_accum_steps)

    rounded to an int, if that is more than `accum_steps`, and if the noise scale is certain enough: after 10 steps, if
    its standard error is no more than half of it. `accum_steps` is never lowered. A larger batch at the same learning
    rate acts like a smaller learning rate at the same batch (Smith et al. 2018).

    Everything that `StepLogger` records is recorded too. Keras' `History` gets `accum_steps`, the one of each epoch.
    A `tf.train.Checkpoint` of the model or optimizer holds `accum_steps`; the average of the noise scale starts anew.

    Args:
      max_accum_steps: int >= 1, the upper bound.
      share: float > 0, the desired number of examples in a step, as a multiple of the noise scale.
      filename, log_dir, average_over, append, on_step: as for `StepLogger`.
      verbose: 1 to print a line for each change and a sentence at the end of `fit`, 0 for nothing.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value; in `fit`, as for `StepLogger`, or `accum_steps` is a
        schedule, or was 1 when the first step was made.

    Sources: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162; Smith et al. 2018, https://arxiv.org/abs/1711.00489

    Example:
      >>> model.fit(x, y, batch_size=32, callbacks=[accum.NoiseScaleScheduler(max_accum_steps=64)])
    """

    def __init__(
        self,
        max_accum_steps: int,
        share: float = 1.0,
        filename: Optional[str] = None,
        log_dir: Optional[str] = None,
        average_over: int = 100,
        verbose: int = 1,
        append: bool = False,
        on_step: Optional[Callable[[Dict[str, float]], object]] = None,
    ) -> None:
        super().__init__(filename, log_dir, average_over, verbose, append, on_step)
        self.max_accum_steps = _check.accum_steps(max_accum_steps, "max_accum_steps")
        self.share = _check.positive("share", share)

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        super().on_train_begin(logs)
        if self._why_none:
            _check.warn(f"`NoiseScaleScheduler` changes nothing: {self._why_none}. [accum: step-logger]")
        now = self._synchronized()
        self._optimizer.accum_steps = max(self.max_accum_steps, 2)  # raises now if there can be no accumulators
        self._optimizer.accum_steps = now
        self._optimizer._cycle.counter.keep_request()

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._synchronized()

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        super().on_epoch_end(epoch, logs)
        now = self._synchronized()
        if logs is not None:
            logs["accum_steps"] = now
        wanted = self._wanted(now)
        if wanted > now:
            self._optimizer.accum_steps = wanted
            if self.verbose and self._writes:
                scale = rounded(self._noise_scale.value)
                print(f"The gradient noise scale is about {scale} examples: `accum_steps` is {wanted} from now on.")

    def _synchronized(self) -> int:
        """Return `accum_steps` of the next cycle, which a checkpoint may have restored since it was set."""
        optimizer = accumulating_optimizer(self.model.optimizer)
        requested = optimizer._cycle.counter.requested()
        if requested != optimizer.accum_steps:
            optimizer.accum_steps = requested
        return requested

    def _wanted(self, now: int) -> int:
        sizes = [size for size in self.history["examples"][self._epoch_begins :] if math.isfinite(size)]
        if not self._noise_scale.is_meaningful or not sizes:
            return now
        micro_batch = max(sizes) / now
        return min(round(self._noise_scale.value * self.share / micro_batch), GROWTH * now, self.max_accum_steps)
