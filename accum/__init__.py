"""Gradient accumulation for TensorFlow: K micro-batches make the step that the full batch would have made."""

from accum import _commands

__version__ = "0.1.0"
__all__ = ["__version__"]

if _commands.needs_tensorflow():
    from accum._agc import adaptive_clip_grad, compute_norm, unitwise_norm
    from accum._clipping import AdaptiveClipping
    from accum._tf import HAS_KERAS_FACE

    __all__ += ["AdaptiveClipping", "adaptive_clip_grad", "compute_norm", "unitwise_norm"]

    if HAS_KERAS_FACE:
        from accum._batch_norm import AccumBatchNormalization
        from accum._callbacks import AccumulationScheduler, FlushCallback
        from accum._lineage import GAModelWrapper, GAOptimizerWrapper
        from accum._model import GradientAccumulateModel
        from accum._optimizer import GradientAccumulateOptimizer
        from accum._swap import replace_batchnorm_layers

        __all__ += [
            "AccumBatchNormalization",
            "AccumulationScheduler",
            "FlushCallback",
            "GAModelWrapper",
            "GAOptimizerWrapper",
            "GradientAccumulateModel",
            "GradientAccumulateOptimizer",
            "replace_batchnorm_layers",
        ]
