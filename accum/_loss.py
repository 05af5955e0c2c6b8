"""What the compiled losses of a model divide by, told each time that they are computed (law L5)."""

from accum import _tf


class ToldLoss:
    """Keras' container of a model's compiled losses, which tells what they divided by where that was no batch size.

    Args:
      container: what Keras' `compile` made of the losses, called in its place and asked for all else.
      tell: function of the denominator, a float32 scalar tensor.
    """

    def __init__(self, container, tell):
        self._container = container
        self._tell = tell

    def __call__(self, y_true, y_pred, *args, **kwargs):
        total = self._container(y_true, y_pred, *args, **kwargs)
        denominator = _tf.loss_denominator(self._container, y_true, y_pred)
        if denominator is not None:
            self._tell(denominator)
        return total

    def __getattr__(self, name):
        if name.startswith("__") or "_container" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._container, name)
