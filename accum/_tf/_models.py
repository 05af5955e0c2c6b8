"""Models: copies, files, training on one batch."""

import importlib
import inspect
import sys

from accum._tf._line import HAS_KERAS_FACE, IS_KERAS_3, VERSION, tf


def _functional():
    if not HAS_KERAS_FACE:
        return None
    if IS_KERAS_3:
        return importlib.import_module(tf.keras.Model.__module__.rpartition(".")[0] + ".functional").Functional
    return tf.keras.Sequential.__bases__[0]


Functional = _functional()
"""The class of functional models: one of its own from 2.3 on, which has no public name. Dies with none."""

_OF_ONE_MODEL = {
    "_checkpoint",
    "_metrics_lock",
    "_thread_local",
    "_trackable_saver",
    "predict_function",
    "test_function",
    "train_function",
    "train_tf_function",
}
"""What a Keras model makes for itself, and what was traced for it: a model made of another one needs its own."""

if IS_KERAS_3:  # closures over the model, and what fills its lists
    _OF_ONE_MODEL |= {"_tracker", "build", "quantize"}


def model_like(model, cls):
    """An instance of `cls`, a subclass of the class of `model`, that shares its layers and variables."""
    made = tf.keras.Model.__new__(cls)
    tf.keras.Model.__init__(made, name=model.name)
    stores = _stores_like(model, made) if IS_KERAS_3 else {}
    for name, value in vars(model).items():
        if name not in _OF_ONE_MODEL:
            made.__dict__[name] = stores[id(value)] if id(value) in stores else _own_copy(value, made)
    return made


def _stores_like(model, made):
    """{id of a list that the tracker of `model` fills: that of `made`, with the same in it}. Keras 3 alone."""
    theirs, ours = model._tracker, made._tracker
    for store, (_, listed) in ours.config.items():
        listed[:] = theirs.config[store][1]
        ours.stored_ids[store] = set(theirs.stored_ids[store])
    if theirs.locked:
        ours.lock(theirs._lock_violation_msg)
    else:
        ours.unlock()
    return {id(theirs.config[store][1]): listed for store, (_, listed) in ours.config.items()}


def _own_copy(value, made):
    if IS_KERAS_3 and type(value).__name__ in ("TrackedList", "TrackedDict", "TrackedSet", "TrackedOrderedDict"):
        return type(value)(value, made._tracker)
    return value.copy() if type(value) in (list, dict, set) else value


def unpickled(content):
    """What the pickle of an object of Keras 3 holds."""
    return tf.keras.Model._unpickle_model(content)


def pickled_by_name(reduced):
    """What Keras' own `__reduce__` gave, without its class: a pickle finds none that was made at run time.

    In its place a pickle names `unpickled`, so that whoever loads it imports accum and knows its classes.
    """
    is_by_keras = getattr(reduced[0], "__func__", None) is tf.keras.Model._unpickle_model.__func__
    return (unpickled,) + reduced[1:] if is_by_keras else reduced


def not_made_as_functional(cls):
    """A decorator of `cls`, of which Keras 3 must not think that (inputs, outputs) make it, for its `*args`."""
    if IS_KERAS_3:
        shown = inspect.signature(cls.__init__)
        kept = [parameter for parameter in shown.parameters.values() if parameter.kind != parameter.VAR_POSITIONAL]
        cls.__init__.__signature__ = shown.replace(parameters=kept)
    return cls


def plain_config(model, base):
    """(class name, config) of what `model` would be as an instance of `base`, one of its bases."""
    if base is not Functional and not (VERSION < (2, 3) and is_layered_model(model) and model._is_graph_network):
        return registered_name(base) or base.__name__, base.get_config(model)
    # TF 2.2 makes a functional model of whatever stands in a SavedModel under an unknown name, a Sequential one too.
    # From 2.12 on a class with arguments of its own is taken for one that is made from them alone.
    if IS_KERAS_3:
        twin = tf.keras.Model(model._inputs_struct, model._outputs_struct, name=model.name)
    else:
        twin = tf.keras.Model(model._nested_inputs, model._nested_outputs, name=model.name)
    return "Functional", twin.get_config()


def model_from_plain_config(class_name, config, custom_objects=None):
    """The model that `plain_config` described; one of the user's own classes has to be registered with Keras."""
    own = {"Functional": tf.keras.Model, "Sequential": tf.keras.Sequential}
    cls = own.get(class_name) or registered_object(class_name, custom_objects)
    if cls is None:
        raise ValueError(
            "The class of the model must be registered with Keras, or given in `custom_objects`. "
            "Received: {!r}.".format(class_name)
        )
    takes_objects = "custom_objects" in inspect.signature(cls.from_config).parameters
    return cls.from_config(config, **({"custom_objects": custom_objects} if takes_objects else {}))


def deserialize_compile_config(config):
    """The arguments of `compile` from a file in the `.keras` format, which 2.12 brought."""
    if IS_KERAS_3:
        return tf.keras.utils.deserialize_keras_object(config)
    if VERSION < (2, 13):  # no public name for it; dies with 2.12
        return sys.modules[tf.keras.Model.__module__].saving_lib.deserialize_keras_object(config)
    return tf.keras.saving.deserialize_keras_object(config)


def registered_name(value):
    """The name under which a function or class is registered with Keras, or None."""
    names = [name for name, known in tf.keras.utils.get_custom_objects().items() if known is value]
    return names[0] if names else None


def registered_object(name, custom_objects=None):
    """What is registered with Keras under `name`, or None."""
    return (custom_objects or {}).get(name, tf.keras.utils.get_custom_objects().get(name))


def set_untracked(model, name, value):
    """Set a Python attribute of a Keras model that no checkpoint and no layer list shall see."""
    model.__dict__[name] = value


def is_layered_model(model):
    """Whether `model` is a functional or Sequential model, made of layers that Keras can copy."""
    if IS_KERAS_3:
        return isinstance(model, (tf.keras.Sequential, Functional))
    return isinstance(model, tf.keras.Sequential) or bool(getattr(model, "_is_graph_network", False))


def layers_of(model):
    """Every layer in a model, however deep, once each."""
    if not hasattr(model, "_flatten_layers"):
        return model._gather_unique_layers()[1:]  # without the model itself; dies with 2.2
    # `submodules` fails for a subclassed model that is compiled (2.10 and before), and for recurrent dropout (2.2).
    return list({id(layer): layer for layer in model._flatten_layers(include_self=False)}.values())


def compute_dtypes(model):
    """The names of the dtypes in which the layers of a model compute."""
    dtypes = [getattr(layer, "compute_dtype", None) or layer._compute_dtype for layer in layers_of(model)]  # 2.3's name
    return {tf.as_dtype(dtype).name for dtype in dtypes if dtype is not None}


def train_on(model, batch):
    """Train a model on one batch, a tuple (x, y, sample_weight) of those that there are, as `fit` would.

    `train_on_batch` of Keras 3 hands all three to the train step, where `fit` hands those that there are: a step of the
    user's own may not know them.
    """
    if IS_KERAS_3 and all(leaf is not None for leaf in tf.nest.flatten(batch)):
        model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
    else:
        model.train_on_batch(*batch)


def shape_built_for(model):
    """The shape of input for which a Sequential model was built that had none at first."""
    if VERSION < (2, 3):  # dies with 2.2, where it does not become a functional one
        return model._build_input_shape
    return model.input_shape
