"""Differences in models: copies, files, training on one batch."""

import functools
import importlib
import inspect
import sys
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from accum._tf import patches
from accum._tf.layers import comes_with_keras, is_stateful_rnn
from accum._tf.version import HAS_KERAS_API, IS_KERAS_3, VERSION, tf


def _functional() -> Optional[type]:
    if not HAS_KERAS_API:
        return None
    if IS_KERAS_3:
        return importlib.import_module(tf.keras.Model.__module__.rpartition(".")[0] + ".functional").Functional
    return tf.keras.Sequential.__bases__[0]


Functional: Any = _functional()
"""The class of functional models. From 2.3 on it is a separate class without a public name in any version."""

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
"""Attributes that Keras creates or traces for one model, which a model made from another one must not share."""

if IS_KERAS_3:  # closures over the model, and the tracker that fills its lists
    _OF_ONE_MODEL |= {"_tracker", "build", "quantize"}


def model_like(model: tf.keras.Model, cls: type) -> tf.keras.Model:
    """Create an instance of `cls`, a subclass of the class of `model`, that shares its layers and variables."""
    made = tf.keras.Model.__new__(cls)
    tf.keras.Model.__init__(made, name=model.name)
    stores = _stores_like(model, made) if IS_KERAS_3 else {}
    for name, value in vars(model).items():
        if name not in _OF_ONE_MODEL:
            own = bound_to(made, model, value)  # such as `self.loss_function = self.elbo`
            made.__dict__[name] = stores[id(own)] if id(own) in stores else _own_copy(own, made)
    frozen = made.__dict__.get("_compiled_trainable_state")  # Keras 2 trains what was trainable in `compile`
    if frozen is not None:
        own = {made if layer is model else layer: trainable for layer, trainable in frozen.items()}
        made.__dict__["_compiled_trainable_state"] = weakref.WeakKeyDictionary(own)
    return made


def _stores_like(model: tf.keras.Model, made: Any) -> Dict[int, List[Any]]:
    """Copy the lists that the tracker of `model` fills to `made`; returns {id of a list: its copy}. Only in Keras 3."""
    theirs, ours = model._tracker, made._tracker
    for store, (_, listed) in ours.config.items():
        listed[:] = theirs.config[store][1]
        ours.stored_ids[store] = set(theirs.stored_ids[store])
    if theirs.locked:
        ours.lock(theirs._lock_violation_msg)
    else:
        ours.unlock()
    return {id(theirs.config[store][1]): listed for store, (_, listed) in ours.config.items()}


def _own_copy(value: Any, made: Any) -> Any:
    if IS_KERAS_3 and type(value).__name__ in ("TrackedList", "TrackedDict", "TrackedSet", "TrackedOrderedDict"):
        return type(value)(value, made._tracker)
    return value.copy() if type(value) in (list, dict, set) else value


def finish_clones(cls: type, finish: Callable[[Any, Any], Any]) -> None:
    """Let `tf.keras.models.clone_model` return `finish(model, clone)` for models of the class `cls`.

    Keras clones a functional or Sequential model as a plain one, whatever its class, and offers no hook to change that.
    """
    module = inspect.getmodule(inspect.unwrap(tf.keras.models.clone_model))
    for name in ("_clone_functional_model", "_clone_sequential_model"):
        if hasattr(module, name):
            patches.CLONES.keep(module, name, _finished(getattr(module, name), cls, finish))


def _finished(function: Callable[..., Any], cls: type, finish: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clone(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = function(model, *args, **kwargs)
        return finish(model, made) if isinstance(model, cls) else made

    return clone


def bound_to(made: Any, model: tf.keras.Model, method: Any) -> Any:
    """Rebind a method of the instance `model` to `made`; return any other function, or None, unchanged."""
    if not inspect.ismethod(method) or method.__self__ is not model:
        return method
    return method.__func__.__get__(made, type(made))


def unpickled(content: Any) -> tf.keras.Model:
    """Load a model from its content in a pickle of Keras 3."""
    return tf.keras.Model._unpickle_model(content)


def pickled_by_name(reduced: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """Remove the class from the result of Keras' `__reduce__`: a pickle can't refer to a class made at run time.

    The pickle refers to `unpickled` instead, so that loading it imports accum, which registers its classes.
    """
    is_by_keras = getattr(reduced[0], "__func__", None) is tf.keras.Model._unpickle_model.__func__
    return (unpickled,) + reduced[1:] if is_by_keras else reduced


def not_made_as_functional(cls: Any) -> Any:
    """Decorate `cls`, so that Keras 3 does not infer from its `*args` that it takes (inputs, outputs)."""
    if IS_KERAS_3:
        shown = inspect.signature(cls.__init__)
        kept = [parameter for parameter in shown.parameters.values() if parameter.kind != parameter.VAR_POSITIONAL]
        cls.__init__.__signature__ = shown.replace(parameters=kept)
    return cls


def plain_config(model: tf.keras.Model, base: Any) -> Tuple[str, Dict[str, Any]]:
    """Return the (class name, config) that `model` would have as an instance of its base class `base`."""
    if base is not Functional and not (VERSION < (2, 3) and is_layered_model(model) and model._is_graph_network):
        return registered_name(base) or base.__name__, base.get_config(model)
    # If a SavedModel contains an unknown class name, TF 2.2 loads a functional model, even instead of a Sequential one.
    # From 2.12 on, Keras assumes that a class with arguments of its own is constructed from these alone.
    if IS_KERAS_3:
        twin = tf.keras.Model(model._inputs_struct, model._outputs_struct, name=model.name)
    else:
        twin = tf.keras.Model(model._nested_inputs, model._nested_outputs, name=model.name)
    return "Functional", twin.get_config()


def from_plain_config(
    class_name: str, config: Dict[str, Any], custom_objects: Optional[Dict[str, Any]] = None
) -> tf.keras.Model:
    """Create the model that `plain_config` described; a custom class must be registered with Keras."""
    own = {"Functional": tf.keras.Model, "Sequential": tf.keras.Sequential}
    cls = own.get(class_name) or registered_object(class_name, custom_objects)
    if cls is None:
        raise ValueError(
            "The class of the model must be registered with Keras, or passed in `custom_objects`. Received: "
            f"{class_name!r}. [accum: unregistered]"
        )
    takes_objects = "custom_objects" in inspect.signature(cls.from_config).parameters
    return cls.from_config(config, **({"custom_objects": custom_objects} if takes_objects else {}))


def replace_in_compile_config(model: tf.keras.Model, replace: Callable[[Any], Any]) -> None:
    """Replace arguments of `compile` that files of the `.keras` format and exports repeat (TF >= 2.12)."""
    config = getattr(model, "_compile_config", None)
    if config is not None:
        replaced = {name: replace(value) for name, value in config.config.items()}
        model.__dict__["_compile_config"] = type(config)(**replaced)


def deserialize_compile_config(config: Dict[str, Any]) -> Dict[str, Any]:
    """Deserialize the arguments of `compile` from a file in the `.keras` format (TF >= 2.12)."""
    if IS_KERAS_3:
        return tf.keras.utils.deserialize_keras_object(config)
    if VERSION < (2, 13):  # no public name for it; dies with 2.12
        return sys.modules[tf.keras.Model.__module__].saving_lib.deserialize_keras_object(config)
    return tf.keras.saving.deserialize_keras_object(config)


def registered_name(value: Any) -> Optional[str]:
    """Return the name under which a function or class is registered with Keras, or None."""
    names = [name for name, registered in tf.keras.utils.get_custom_objects().items() if registered is value]
    return names[0] if names else None


def registered_object(name: Any, custom_objects: Optional[Dict[str, Any]] = None) -> Any:
    """Return the object that is registered with Keras under `name`, or None."""
    return (custom_objects or {}).get(name, tf.keras.utils.get_custom_objects().get(name))


def is_layered_model(model: tf.keras.Model) -> bool:
    """Whether `model` is a functional or Sequential model, which Keras can copy layer by layer."""
    if IS_KERAS_3:
        return isinstance(model, (tf.keras.Sequential, Functional))
    return isinstance(model, tf.keras.Sequential) or bool(getattr(model, "_is_graph_network", False))


def name_of_class(model: Any) -> str:
    """Return the name of the class of a model: the user's, if such a class was made to accumulate."""
    base = getattr(type(model), "_base", type(model))
    return (type(model) if comes_with_keras(base) else base).__name__


def layers_of(model: tf.keras.Model) -> List[tf.keras.layers.Layer]:
    """Return every layer in a model, at any depth, once each."""
    if not hasattr(model, "_flatten_layers"):
        return model._gather_unique_layers()[1:]  # without the model itself; dies with 2.2
    # `submodules` fails for compiled subclassed models (up to 2.10), and for recurrent dropout (2.2).
    return list({id(layer): layer for layer in model._flatten_layers(include_self=False)}.values())


def parts_of_user(model: tf.keras.Model) -> List[Any]:
    """Return the model and those of its layers whose `call` is the user's."""
    return [part for part in [model, *layers_of(model)] if not comes_with_keras(type(part).call)]


def has_code_of_user(model: tf.keras.Model) -> bool:
    """Whether Python code of the user's computes something when a model is called: a layer, or a function in one."""
    parts = [model, *layers_of(model)]
    names = ("activation", "function", "regularizer")
    functions = [value for part in parts for name, value in vars(part).items() if name.endswith(names)]
    functions = [one for one in functions if callable(one)] + [type(part).call for part in parts]
    homes = [str(getattr(one, "__module__", "")).split(".")[0] for one in functions if not comes_with_keras(one)]
    return not {"accum", "tensorflow", "tensorflow_addons"}.issuperset(homes)


def has_noise(model: tf.keras.Model) -> bool:
    """Whether a model has dropout or noise layers of Keras 2, whose random numbers have no state that can be read."""
    layers = tf.keras.layers
    kinds = (layers.Dropout, layers.GaussianNoise, layers.GaussianDropout, layers.AlphaDropout)
    return not IS_KERAS_3 and any(isinstance(layer, kinds) for layer in layers_of(model))


def copy_weights(model: tf.keras.Model, copy: tf.keras.Model) -> None:
    """Give a copy of a model its weights, and the constants that layers, such as a `Normalization`, make of them.

    Keras 2 makes them in its own `set_weights`. Keras 3 freezes some weights one by one, as for LoRA.
    """
    copy.set_weights(model.get_weights())
    if not IS_KERAS_3:
        return
    for weight, copied in zip(model.weights, copy.weights):
        copied.trainable = weight.trainable
    for layer in layers_of(copy):
        # Without weights, as in `Discretization`, it would forget what its config holds.
        if layer.weights and hasattr(layer, "finalize_state"):
            layer.finalize_state()


_COUNTERS_OF_KERAS = {"_train_counter", "_test_counter", "_predict_counter", "_steps_per_execution"}
_STATES_OF_KERAS = {"states", "_states"}  # of recurrent layers, which go on from batch to batch


def untracked_variables(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the variables in attributes of a model and its layers that are not in `variables`, as in Keras 3."""
    listed = {id(var) for var in model.variables}
    found: Dict[int, tf.Variable] = {}
    for layer in [model] + layers_of(model):
        for name, value in vars(layer).items():
            parts = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for part in parts if name not in _COUNTERS_OF_KERAS | _STATES_OF_KERAS else ():
                if isinstance(part, tf.Variable) and id(part) not in listed:
                    found[id(part)] = part
    return list(found.values())


def states_of_rnns(model: tf.keras.Model) -> List[tf.Variable]:
    """Return the states with which recurrent layers go on from batch to batch."""
    stateful = filter(is_stateful_rnn, layers_of(model))
    states = [
        part for layer in stateful for part in tf.nest.flatten([vars(layer).get(name) for name in _STATES_OF_KERAS])
    ]
    return [state for state in states if state is not None]


def rank_of_input(layer: tf.keras.layers.Layer) -> Optional[int]:
    """Return the number of axes of what a layer was built for, or None if it tells none."""
    specs = [spec for spec in tf.nest.flatten(getattr(layer, "input_spec", None)) if spec is not None]
    return specs[0].ndim if specs else None


def output_shapes(model: tf.keras.Model, specs: Any) -> List[tf.TensorShape]:
    """Return the shapes of the outputs of a model, given `tf.TensorSpec`s of its inputs."""
    traced = tf.function(lambda inputs: model(inputs, training=False)).get_concrete_function(specs)
    leaves = tf.nest.flatten(traced.structured_outputs)
    return [leaf.shape for leaf in leaves if isinstance(leaf, (tf.Tensor, tf.TensorSpec))]


def compute_dtypes(model: tf.keras.Model) -> Set[str]:
    """Return the names of the dtypes in which the layers of a model compute."""
    dtypes = [getattr(layer, "compute_dtype", None) or layer._compute_dtype for layer in layers_of(model)]  # 2.3's name
    return {tf.as_dtype(dtype).name for dtype in dtypes if dtype is not None}


def train_on(model: tf.keras.Model, batch: Tuple[Any, ...]) -> None:
    """Train a model on one batch, a tuple (x, y, sample_weight) whose last elements may be missing, as `fit` would.

    `train_on_batch` of Keras 3 always passes all three to the train step, but a custom train step may not accept all.
    `fit` passes only those that exist.
    """
    if IS_KERAS_3 and all(leaf is not None for leaf in tf.nest.flatten(batch)):
        model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
    else:
        model.train_on_batch(*batch)


def shape_built_for(model: tf.keras.Model) -> Any:
    """Return the input shape for which a Sequential model without an input shape was built later."""
    if VERSION < (2, 3):  # dies with 2.2, where such a model does not become functional
        return model._build_input_shape
    return model.input_shape


def compute_dtype_of(layer: tf.keras.layers.Layer) -> tf.DType:
    """Return the dtype in which a layer computes."""
    return tf.as_dtype(getattr(layer, "compute_dtype", None) or layer._compute_dtype)  # 2.3's name


def batch_spec_of(iterator: Any) -> Any:
    """Return the specs of what the iterator of Keras 3's `fit` yields on the first replica, or None if it has none."""
    specs = getattr(getattr(iterator, "_distributed_dataset", None), "element_spec", None)
    if specs is None:
        return None
    return tf.nest.map_structure(lambda spec: getattr(spec, "_value_specs", (spec,))[0], specs)
