"""A script as a user writes it, for `mypy --strict`: it must accept what is right, and report each `# type: ignore`.

mypy reports an `ignore` that ignores nothing, so a typo that passes is an error too. Nothing here is run.
"""

from typing import Any

import accum
import accum.compat.v1


def right(net: Any, inner: Any) -> None:
    model = accum.GradientAccumulateModel.from_model(net, accum_steps=4, last_cycle="carry")
    model = accum.GradientAccumulateModel.from_model(net, micro_batch_size="auto", whole_batch=("loss", "batch_norm"))
    model = accum.GradientAccumulateModel(accum_steps={0: 8, 100: 2}, inputs=net.inputs, outputs=net.outputs)
    model = accum.GradientAccumulateModel.from_model(
        net, micro_batch_size=8, whole_batch="all", replicas_per_group={"loss": None, "batch_norm": 2}
    )
    model = accum.GradientAccumulateModel.from_model(
        net, micro_batch_tokens=4096, sequence_lengths=lambda x: x["lengths"]
    )
    model.accum_steps = 2
    size = model.micro_batch_size
    assert size is None or size == "auto" or int(size) > 0
    optimizer = accum.GradientAccumulateOptimizer("adam", accum_steps=4, reduction="sum", nonfinite="skip_micro")
    optimizer.flush()
    old = accum.compat.v1.AccumOptimizer(inner, accum_steps=4, count_steps=True)
    old.flush()
    accum.FlushCallback("drop")


def wrong(net: Any, inner: Any) -> None:
    accum.GradientAccumulateModel.from_model(net, acum_steps=4)  # type: ignore[call-arg]
    accum.GradientAccumulateModel.from_model(net, accum_steps="4")  # type: ignore[arg-type]
    accum.GradientAccumulateModel.from_model(net, micro_batch_size="automatic")  # type: ignore[arg-type]
    accum.GradientAccumulateModel.from_model(net, micro_batch_size=8, whole_batch="everything")  # type: ignore[arg-type]
    accum.GradientAccumulateModel(inputs=net.inputs, output=net.outputs)  # type: ignore[call-arg]
    accum.GradientAccumulateOptimizer("adam", accum_steps=4, reduction="men")  # type: ignore[arg-type]
    accum.GradientAccumulateOptimizer("adam", accumulation_steps=4)  # type: ignore[call-arg]
    accum.compat.v1.AccumOptimizer(inner, accum_step=4)  # type: ignore[call-arg]
    accum.FlushCallback("flash")  # type: ignore[arg-type]
    accum.value_and_gradients(lambda x: x, net, [], 4, whole_batch="losses")  # type: ignore[arg-type]
