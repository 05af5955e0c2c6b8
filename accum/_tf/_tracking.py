"""What checkpoints and exports see of an object."""

from accum._tf._line import IS_KERAS_3, VERSION, tf


def _forwarded(name, attribute):
    """An attribute that is the one of `self._inner`."""
    if isinstance(attribute, property):
        return property(lambda self: getattr(self._inner, name), lambda self, value: setattr(self._inner, name, value))
    return lambda self, *args, **kwargs: getattr(self._inner, name)(*args, **kwargs)


def _tracking_attributes():
    """Everything by which TensorFlow tracks an object for checkpoints: the names differ from line to line."""
    trackable = [base for base in tf.Module.__mro__ if base.__name__ == "Trackable"][0]
    # From 2.9 on, a class that defines the last two is taken for one that holds tensors itself.
    kept = "__", "_tf_api", "_serialize_to_tensors", "_restore_from_tensors"
    names = [name for name in vars(trackable) if name.startswith("_") and not name.startswith(kept)]
    return {name: _forwarded(name, vars(trackable)[name]) for name in names}


TrackedAsInner = type("TrackedAsInner", (), _tracking_attributes())
"""To a checkpoint, such an optimizer is the one that it wraps, so that either's checkpoint restores into the other.

`LossScaleOptimizer` does the same from 2.4 on, with a class that has no public name.
"""


def _hidden_from_exports():
    """The overrides by which a module has its children in checkpoints and none in a SavedModel."""
    if hasattr(tf.Module, "_trackable_children"):

        def children(self, *args, **kwargs):
            save_type = args[0] if args else kwargs.get("save_type")
            is_export = getattr(save_type, "value", save_type) == "savedmodel"  # an enum; dies with 2.8
            return {} if is_export else super(CheckpointOnly, self)._trackable_children(*args, **kwargs)

        return {"_trackable_children": children}

    # An export asks for extra dependencies right before the dependencies; a checkpoint does not. Dies with 2.7.
    def announce_export(self, serialization_cache):
        self.__dict__["_is_exporting"] = True
        return {}

    def dependencies(self):
        is_export = self.__dict__.pop("_is_exporting", False)
        return [] if is_export else super(CheckpointOnly, self)._checkpoint_dependencies

    return {
        "_list_extra_dependencies_for_serialization": announce_export,
        "_checkpoint_dependencies": property(dependencies),
    }


CheckpointOnly = type("CheckpointOnly", (tf.Module,), _hidden_from_exports())
"""A `tf.Module` whose content a checkpoint keeps and a SavedModel leaves out (law L12)."""


def begin_as_optimizer(optimizer, base_init, name):
    """Run the initialiser of an optimizer's Keras base, which in Keras 3 makes variables that nobody is to see."""
    if IS_KERAS_3:
        base_init(learning_rate=0.0, name=name)
        optimizer._variables.clear()
    else:
        base_init(name=name)


def read_checkpoint(checkpoint, path):
    """Restore what `write` or `save` of a `tf.train.Checkpoint` has written; returns the status."""
    if VERSION < (2, 3):  # dies with 2.2
        return checkpoint._saver.restore(path)  # `restore` makes a counter of saves, which `write` has not
    return checkpoint.read(path)


def stop_automatic_tracking(optimizer):
    """Keep a new-style optimizer from tracking its own attributes, which would be those of its inner one."""
    optimizer.__dict__["_self_setattr_tracking"] = False


def track(owner, value, name):
    owner._track_trackable(value, name, overwrite=True)
