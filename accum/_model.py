"""The model face: a Keras model whose `fit` makes one step for several micro-batches.

It is the optimizer wrapper plus what only a model knows: how much a micro-batch weighs and where an epoch ends. A
`train_step` of the user's own stays in force under it.
"""

import inspect

from accum import _agc, _check, _tf
from accum._batch_norm import on_the_clock_of
from accum._callbacks import LAST_CYCLE, FlushCallback, accumulating_optimizer
from accum._cycle import check_options
from accum._optimizer import GradientAccumulateOptimizer
from accum._tf import tf

WEIGHTS = ("examples", "equal")


class GradientAccumulateModel(tf.keras.Model):
    """A Keras model that makes one step of its optimizer for every `accum_steps` micro-batches.

    Its step is the one that the full batch would have made: the mean of the micro-batches' gradients, each weighed by
    its number of examples, so that ragged ones are exact too.

    Args:
      accum_steps: micro steps per step, an int >= 1; or a schedule `{first step: accum_steps}` that holds step 0.
      mixed_precision: accepted; the policy is detected.
      use_agc: whether to clip the accumulated gradient adaptively (`adaptive_clip_grad`). `agc` says the same.
      clip_factor: float > 0, as for `adaptive_clip_grad`.
      eps: float > 0, as for `adaptive_clip_grad`.
      experimental_distributed_support: accepted; strategies are detected.
      *args: as `tf.keras.Model` takes them.
      reduction: "mean", "sum" or "running_mean".
      last_cycle: what becomes of an unfinished cycle at the end of an epoch, before its validation: "flush", "carry" or
        "drop", as for `FlushCallback`.
      micro_batch_weight: "examples", "equal", or a function `(x, y, sample_weight) -> scalar`, such as one that counts
        the tokens that are no padding.
      transform, nonfinite, accumulator_dtype, sparse: as for `GradientAccumulateOptimizer`.
      **kwargs: as `tf.keras.Model` takes them: `inputs` and `outputs`, `name`.

    Raises:
      TypeError, ValueError: for any argument that is none of these.

    Example:
      >>> model = accum.GradientAccumulateModel(accum_steps=4, inputs=model.inputs, outputs=model.outputs)
      >>> model.compile("adam", loss="mse")
      >>> model.fit(x, y, batch_size=8)  # steps as with batch_size=32
    """

    def __init__(
        self,
        accum_steps=1,
        mixed_precision=False,
        use_agc=False,
        clip_factor=0.01,
        eps=1e-3,
        experimental_distributed_support=False,
        *args,
        agc=False,
        reduction="mean",
        last_cycle="flush",
        micro_batch_weight="examples",
        transform=None,
        nonfinite="propagate",
        accumulator_dtype=None,
        sparse="rows",
        **kwargs,
    ):
        del mixed_precision, experimental_distributed_support
        if use_agc or agc:
            transform = _with_clipping(transform, clip_factor, eps)
        options = {
            "accum_steps": accum_steps,
            "reduction": reduction,
            "transform": transform,
            "nonfinite": nonfinite,
            "accumulator_dtype": accumulator_dtype,
            "sparse": sparse,
        }
        check_options(**options)
        last_cycle = _check.one_of("last_cycle", last_cycle, LAST_CYCLE)
        if not callable(micro_batch_weight):
            micro_batch_weight = _check.one_of("micro_batch_weight", micro_batch_weight, WEIGHTS)
        if not args and not ("inputs" in kwargs and "outputs" in kwargs):
            raise ValueError("`GradientAccumulateModel` takes the `inputs` and `outputs` of a functional model.")
        if micro_batch_weight != "equal" and _tf.in_static_graph():
            raise ValueError(
                "Keras in graph mode never calls `train_step`, by which micro-batches are weighed: compile a plain "
                "model with `GradientAccumulateOptimizer`, or give micro_batch_weight='equal'."
            )
        super().__init__(*args, **kwargs)
        _tf.set_untracked(self, "_accum_options", options)
        _tf.set_untracked(self, "_accum_last_cycle", last_cycle)
        _tf.set_untracked(self, "_accum_weight", micro_batch_weight)

    def compile(self, optimizer="rmsprop", *args, **kwargs):
        """As `tf.keras.Model.compile`, around `optimizer`: an instance, a name or a config.

        For a `LossScaleOptimizer` a new one is put around the accumulating optimizer, where it scales the loss; inside
        is a copy of its own inner one, which a second loss scale could not be put around.

        Raises:
          ValueError: the optimizer accumulates already, or stands in a `LossScaleOptimizer` and has made steps.
        """
        super().compile(self._accumulating(optimizer), *args, **kwargs)
        # On the instance, so that a subclass's own `train_step` is weighed too, whether it calls this class's or not.
        _tf.set_untracked(self, "train_step", self._weighed_train_step)

    def _accumulating(self, optimizer):
        if not _tf.is_loss_scale_optimizer(optimizer):
            return GradientAccumulateOptimizer(optimizer, **self._accum_options)
        if int(optimizer.iterations.numpy()) > 0:
            raise ValueError(
                "This LossScaleOptimizer has made steps, and has to be made anew to accumulate within: compile with a "
                "new optimizer, or restore a checkpoint after `compile`."
            )
        inner = _tf.copy_of(_tf.without_loss_scale(optimizer))
        return _tf.loss_scale_around(GradientAccumulateOptimizer(inner, **self._accum_options), like=optimizer)

    def _weighed_train_step(self, data):
        """The class's train step; its `apply_gradients` takes the gradients in with the micro-batch's weight."""
        optimizer = accumulating_optimizer(self.optimizer)
        with optimizer.weighing(self._weight_of(data)), on_the_clock_of(optimizer, self):
            return type(self).train_step(self, data)

    def fit(self, *args, **kwargs):
        """As `tf.keras.Model.fit`; the last cycle of an epoch ends by `last_cycle`."""
        given = inspect.signature(super().fit).bind_partial(*args, **kwargs)
        given.arguments["callbacks"] = _with_callback(
            given.arguments.get("callbacks"), FlushCallback(self._accum_last_cycle)
        )
        return super().fit(*given.args, **given.kwargs)

    def _weight_of(self, data):
        if self._accum_weight == "equal" or accumulating_optimizer(self.optimizer).is_bare:
            return None
        if callable(self._accum_weight):
            return self._accum_weight(*_tf.unpack_data(data))
        return _tf.count_examples(data)


def _with_clipping(transform, clip_factor, eps):
    _check.positive("clip_factor", clip_factor)
    _check.positive("eps", eps)
    clip = _agc.clip_transform(clip_factor, eps)
    if _check.callable_or_none("transform", transform) is None:
        return clip
    return lambda grads_and_vars: clip(transform(grads_and_vars))


def _with_callback(callbacks, callback):
    """What the user gave as `callbacks`, and one more, first."""
    if hasattr(callbacks, "append") and hasattr(callbacks, "on_train_begin"):  # a CallbackList, private up to 2.2
        callbacks.append(callback)
        return callbacks
    if callbacks is None:
        return [callback]
    return [callback] + (list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks])


_tf.register_keras_class(GradientAccumulateModel, "GradientAccumulateModel")
