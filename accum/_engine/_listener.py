"""What follows a cycle beside its gradients."""

from typing import Any, Union

from accum._tf import tf


class CycleListener:
    """What lives by the cycle beside the gradients. Every method runs on one replica and returns what to wait for."""

    def on_micro_step(self, is_first: Union[bool, tf.Tensor]) -> Any:
        """Take in what the micro-batch has brought; it is the cycle's first if `is_first`, a bool or bool tensor."""
        raise NotImplementedError

    def on_step(self, is_first: Union[bool, tf.Tensor], has_latest: bool) -> Any:
        """Do what a step does, with what the last micro-batch has brought if `has_latest`, a bool."""
        raise NotImplementedError
