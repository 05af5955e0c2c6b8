"""Let later calls of a function that creates variables find those of its first call."""

import contextlib
from typing import Any, Callable, Iterator

from accum import _tf
from accum._tf import tf


class FirstCall:
    """The variable scope of the first call, to be made where that call begins.

    Args:
      refusal: message of the error for a variable that a later call creates.
    """

    def __init__(self, refusal: str) -> None:
        self._scope = tf.compat.v1.get_variable_scope()
        self._names = _tf.graphs.default_names()
        self._refusal = refusal

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let `tf.compat.v1.get_variable` return the variables of the first call, in whatever scope this is called."""
        names = _tf.graphs.default_names()
        _tf.graphs.set_default_names(self._names)
        reuse = tf.compat.v1.variable_scope(self._scope, reuse=tf.compat.v1.AUTO_REUSE, auxiliary_name_scope=False)
        try:
            with reuse, tf.variable_creator_scope(self._refuse):
                yield
        finally:
            _tf.graphs.set_default_names(names)

    def _refuse(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        raise ValueError(f"{self._refusal} Received: name={kwargs.get('name')!r}.")
