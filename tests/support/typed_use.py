"""User code that `mypy --strict` checks against the installed package, in project/dist.py.

A line with `type: ignore` is wrong, and mypy must report it: an unused `type: ignore` is an error too.
"""

from typing import Any, Callable, Dict, List, Tuple

import tensorflow as tf

import accum
import accum.compat.v1
import accum.convert
import accum.testing


def keras(inputs: tf.Tensor, outputs: tf.Tensor) -> accum.GradientAccumulateModel:
    model = accum.GradientAccumulateModel(accum_steps={0: 8, 1000: 2}, inputs=inputs, outputs=outputs, use_agc=True)
    clipping = accum.AdaptiveClipping(0.01, exclude=["bias"], model=model)
    optimizer = accum.GradientAccumulateOptimizer("adam", accum_steps=4, transform=clipping)
    optimizer.accum_steps = 8
    with optimizer.weighing(32):
        optimizer.apply_gradients([(tf.zeros([]), tf.Variable(0.0))])
    config: Dict[str, Any] = optimizer.get_config()
    accum.GradientAccumulateOptimizer.from_config(config).flush()
    model.compile(optimizer, loss="mse", callbacks=[accum.FlushCallback("drop"), accum.AccumulationScheduler({0: 4})])
    value, gradients = accum.value_and_gradients(lambda x: tf.zeros([]), inputs, [tf.Variable(0.0)], 8, weight="equal")
    return accum.GradientAccumulateModel.from_model(accum.replace_batchnorm_layers(model, accum_steps=4), accum_steps=4)


def keras_wrongly() -> None:
    accum.GradientAccumulateOptimizer("adam", accum_steps="4")  # type: ignore[arg-type]
    accum.GradientAccumulateOptimizer("adam", reduction=None)  # type: ignore[arg-type]
    accum.GradientAccumulateOptimizer("adam", accum_step=4)  # type: ignore[call-arg]
    accum.FlushCallback(last_cycle=True)  # type: ignore[arg-type]


def static_graph(loss: tf.Tensor, global_step: tf.Variable) -> Tuple[tf.Operation, tf.Tensor]:
    optimizer = accum.compat.v1.AccumOptimizer(tf.compat.v1.train.AdamOptimizer(1e-3), accum_steps=4)
    ops: accum.compat.v1.AccumOps = optimizer.accumulation_ops(loss, global_step=global_step)
    accum.compat.v1.FlushHook(optimizer)
    accum.compat.v1.Saver([optimizer])
    value, pairs = accum.compat.v1.value_and_gradients(lambda x: loss, loss, micro_batch_size=8)
    optimizer.apply_gradients(pairs, global_step)
    accum.compat.v1.FlushHook("optimizer")  # type: ignore[arg-type]
    return ops.apply, ops.micro_step


def tools(model: accum.GradientAccumulateModel, build_model: Callable[[], tf.keras.Model]) -> List[str]:
    report = accum.convert.from_v1("checkpoint", model, names={"dense/kernel": None})
    comparison = accum.testing.compare("a.json", "b.json", tolerance=1e-6)
    assert comparison.agrees and accum.testing.assert_accumulation_equals_full_batch(build_model, ([], []), 4).is_equal
    accum.testing.compare("a.json", "b.json", tolerance="1e-6")  # type: ignore[arg-type]
    return report.problems
