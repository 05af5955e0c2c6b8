"""The formats in which the Keras of this TensorFlow saves a whole model."""

from versions import IS_KERAS_3

FORMATS = ["keras", "h5"] if IS_KERAS_3 else ["tf", "h5"]


def saved(model, path, format):
    """Save `model` at `path`, with a suffix if needed. Returns the full path."""
    path = str(path) + ("" if format == "tf" else "." + format)
    model.save(path, **({} if IS_KERAS_3 else {"save_format": format}))
    return path
