"""Control which attributes of an object checkpoints and exports track."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Set

from accum._tf.version import IS_KERAS_3, VERSION, tf


def forwarded(name: str) -> Any:
    """Make a method that forwards to that of `self._inner`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    return forward


def _forwarded_attribute(name: str, attribute: Any) -> Any:
    if isinstance(attribute, property):
        return property(lambda self: getattr(self._inner, name), lambda self, value: setattr(self._inner, name, value))
    return forwarded(name)


def _tracking_attributes() -> Dict[str, Any]:
    """Forward all attributes by which TensorFlow tracks an object for checkpoints; their names differ by version."""
    trackable = [base for base in tf.Module.__mro__ if base.__name__ == "Trackable"][0]
    # From 2.9 on, TensorFlow assumes that a class that defines the last two holds tensors itself.
    kept = "__", "_tf_api", "_serialize_to_tensors", "_restore_from_tensors"
    names = [name for name in vars(trackable) if name.startswith("_") and not name.startswith(kept)]
    return {name: _forwarded_attribute(name, vars(trackable)[name]) for name in names}


TrackedAsInner: Any = type("TrackedAsInner", (), _tracking_attributes())
"""A base class that makes an optimizer look like its inner one in checkpoints, so that each can restore the other's.

`LossScaleOptimizer` does the same from 2.4 on, with a class that has no public name.
"""


def _hidden_from_exports() -> Dict[str, Any]:
    """Return overrides that let a checkpoint see a module's children, and hide them from a SavedModel."""
    if hasattr(tf.Module, "_trackable_children"):

        def children(self: Any, *args: Any, **kwargs: Any) -> Any:
            save_type = args[0] if args else kwargs.get("save_type")
            is_export = getattr(save_type, "value", save_type) == "savedmodel"  # an enum; dies with 2.8
            return {} if is_export else super(CheckpointOnly, self)._trackable_children(*args, **kwargs)

        return {"_trackable_children": children}

    # An export asks for extra dependencies right before the dependencies; a checkpoint does not. Dies with 2.7.
    def announce_export(self: Any, _serialization_cache: Any) -> Any:
        self.__dict__["_is_exporting"] = True
        return {}

    def dependencies(self: Any) -> Any:
        is_export = self.__dict__.pop("_is_exporting", False)
        return [] if is_export else super(CheckpointOnly, self)._checkpoint_dependencies

    return {
        "_list_extra_dependencies_for_serialization": announce_export,
        "_checkpoint_dependencies": property(dependencies),
    }


CheckpointOnly: Any = type("CheckpointOnly", (tf.Module,), _hidden_from_exports())
"""A `tf.Module` whose content is saved in checkpoints but not in a SavedModel (law L12)."""


class Seeds(CheckpointOnly):  # type: ignore[misc]
    """The variables that seed the random numbers of a model of Keras 3, which Keras leaves out of its files."""

    def keep(self, variables: Sequence[Any]) -> bool:
        """Take in the seeds that the model has by now, as attributes, so that what a checkpoint holds of them is read.

        Returns:
          Whether there are any.
        """
        for number, var in enumerate(variables):
            if getattr(self, f"seed_{number}", None) is not var:
                setattr(self, f"seed_{number}", var)
        return bool(variables)


def with_seeds(find: Callable[[Any], Optional[Seeds]]) -> Callable[[Any], Any]:
    """Let the checkpoints of a class of models of Keras 3 hold the `Seeds` that `find` returns for a model, if any."""

    def decorate(cls: Any) -> Any:
        def children(self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
            found = super(cls, self)._trackable_children(save_type, **kwargs)
            seeds = find(self) if save_type == "checkpoint" else None
            return found if seeds is None else dict(found, accum_seeds=seeds)

        def lookup(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            seeds = find(self) if name == "accum_seeds" else None
            return super(cls, self)._lookup_dependency(name, *args, **kwargs) if seeds is None else seeds

        if IS_KERAS_3:  # Keras 2 draws from kernels
            cls._trackable_children, cls._lookup_dependency = children, lookup
        return cls

    return decorate


def begin_as_optimizer(optimizer: Any, base_init: Callable[..., None], name: str) -> None:
    """Run the initialiser of the Keras base class, and in Keras 3 discard the variables that it creates."""
    if IS_KERAS_3:
        base_init(learning_rate=0.0, name=name)
        optimizer._variables.clear()
    else:
        base_init(name=name)


def read_checkpoint(checkpoint: tf.train.Checkpoint, path: str) -> Any:
    """Restore the result of `write` or `save` of a `tf.train.Checkpoint`; returns the status."""
    if VERSION < (2, 3):  # dies with 2.2
        return checkpoint._saver.restore(path)  # `restore` would create a save counter, which `write` does not save
    return checkpoint.read(path)


def stop_automatic_tracking(optimizer: Any) -> None:
    """Keep a new-style optimizer from tracking its own attributes, which would be those of the inner optimizer."""
    optimizer.__dict__["_self_setattr_tracking"] = False


def track(owner: Any, value: Any, name: str) -> None:
    owner._track_trackable(value, name, overwrite=True)


def awaited_children(owner: Any, name: str) -> Optional[Set[str]]:
    """Return the names of the children that a restored checkpoint holds for a missing attribute of `owner`.

    TensorFlow restores them when `owner` gets an attribute of that name. None: no checkpoint holds it.
    """
    waiting = owner._deferred_dependencies.get(name)
    return {child.local_name for child in waiting[-1].object_proto.children} if waiting else None


def awaited_value(owner: Any, name: str) -> Any:
    """Return the value that a restored checkpoint holds for a missing variable of `owner`, a tensor, or None."""
    waiting = owner._deferred_dependencies.get(name)
    try:
        return next(iter(waiting[-1].value_tensors().values())) if waiting else None
    except tf.errors.NotFoundError:  # the file is gone
        return None


def forget_awaited(owner: Any, kept: Sequence[str] = ()) -> None:
    """Forget what a restored checkpoint holds for attributes that `owner` lacks, but for those of the names `kept`."""
    for name in [name for name in owner._deferred_dependencies if name not in kept]:
        del owner._deferred_dependencies[name]


def awaited_names(owner: Any) -> List[str]:
    """Return the names of the attributes that a restored checkpoint holds and `owner` lacks."""
    return [name for name, waiting in owner._deferred_dependencies.items() if waiting]
