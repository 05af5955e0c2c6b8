"""The public names of accum, whose import brings TensorFlow and registers the classes with Keras."""

from accum._check import InexactWarning
from accum._clipping._adaptive import adaptive_clip_grad, compute_norm, unitwise_norm
from accum._clipping._transform import AdaptiveClipping
from accum._tf.version import HAS_KERAS_API

__all__ = ["AdaptiveClipping", "InexactWarning", "adaptive_clip_grad", "compute_norm", "unitwise_norm"]

if HAS_KERAS_API:
    from accum._keras._batch_norm._layer import AccumBatchNormalization
    from accum._keras._batch_norm._replace import replace_batchnorm_layers
    from accum._keras._callbacks import AccumulationScheduler, FlushCallback
    from accum._keras._logging._noise_scale_scheduler import NoiseScaleScheduler
    from accum._keras._logging._step_logger import StepLogger
    from accum._keras._model._model import GradientAccumulateModel
    from accum._keras._model._unwrap import unwrap
    from accum._keras._old_spellings import GAModelWrapper, GAOptimizerWrapper
    from accum._keras._optimizer._wrapper import GradientAccumulateOptimizer
    from accum._keras._value_and_gradients import value_and_gradients

    __all__ += [
        "AccumBatchNormalization",
        "AccumulationScheduler",
        "FlushCallback",
        "GAModelWrapper",
        "GAOptimizerWrapper",
        "GradientAccumulateModel",
        "GradientAccumulateOptimizer",
        "NoiseScaleScheduler",
        "StepLogger",
        "replace_batchnorm_layers",
        "unwrap",
        "value_and_gradients",
    ]
