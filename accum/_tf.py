"""Every difference between TensorFlow and Keras lines, under the name of what it means.

Nothing else in the package looks at a version or probes TensorFlow. A new TensorFlow line is an edit of this file;
each branch says with which line it dies.
"""

import contextlib
import functools
import importlib
import inspect
import platform
import re
import sys

import numpy as np

SUPPORTED = "TensorFlow 1.15 or 2.2 to 2.21"

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError(
        "accum runs on {}, which is yours to choose and was not found: "
        "install it with `pip install 'tensorflow<2.22'`, or by the pins that `python -m accum doctor` names.".format(
            SUPPORTED
        )
    ) from None

VERSION = tuple(int(part) for part in re.findall(r"\d+", tf.__version__)[:3])

if not (VERSION[:2] == (1, 15) or (2, 2) <= VERSION[:2] <= (2, 21)):
    raise ImportError(
        "accum runs on {} and found TensorFlow {}: "
        "install a supported line, such as `pip install 'tensorflow==2.15.*'`.".format(SUPPORTED, tf.__version__)
    )

HAS_KERAS_FACE = VERSION >= (2, 2)
"""TF 1.15 never calls an overridden `train_step`, so it has the static-graph face only. Dies with 1.15."""

IS_KERAS_3 = VERSION >= (2, 16) and getattr(tf.keras, "__version__", "2").startswith("3")
"""Whether `tf.keras` is Keras 3: from 2.16 on it is, unless TF_USE_LEGACY_KERAS makes it `tf-keras`, Keras 2."""

if IS_KERAS_3 and tuple(int(part) for part in tf.keras.__version__.split(".")[:2]) < (3, 7):
    raise ImportError(
        "accum runs on Keras 3.7 and later, and found {}: "
        "`pip install -U keras`, or set TF_USE_LEGACY_KERAS=1 with tf-keras installed.".format(tf.keras.__version__)
    )

if IS_KERAS_3 and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        "accum runs on Keras 3 over TensorFlow, and found it over {}: set KERAS_BACKEND=tensorflow.".format(
            tf.keras.backend.backend()
        )
    )

# ----------------------------------------------------------------------------------------------------------------
# Optimizer families


def _legacy_base():
    if IS_KERAS_3:
        return None
    if VERSION >= (2, 11):  # 2.11 made the new optimizers the default; dies with 2.15
        return tf.keras.optimizers.legacy.Optimizer
    return tf.keras.optimizers.Optimizer


def _new_base():
    if VERSION >= (2, 11):
        return tf.keras.optimizers.Optimizer
    if VERSION >= (2, 9):  # a preview of the 2.11 optimizers; dies with 2.10
        return tf.keras.optimizers.experimental.Optimizer
    return None


LegacyOptimizer = _legacy_base()
"""Base of the Keras optimizers that keep slots and hyperparameters (all of them up to 2.10), or None in Keras 3."""

NewOptimizer = _new_base()
"""Base of the Keras optimizers that are built from a variable list (the default from 2.11 on), or None."""

GraphOptimizer = tf.compat.v1.train.Optimizer

FOR_STATIC_GRAPHS = "one of `tf.compat.v1.train`"
if NewOptimizer is not None and not IS_KERAS_3:  # dies with 2.15
    FOR_STATIC_GRAPHS += " or `tf.keras.optimizers.legacy`"


def is_legacy_optimizer(optimizer):
    return LegacyOptimizer is not None and isinstance(optimizer, LegacyOptimizer)


def is_new_optimizer(optimizer):
    return NewOptimizer is not None and isinstance(optimizer, NewOptimizer)


def is_keras_optimizer(optimizer):
    return is_legacy_optimizer(optimizer) or is_new_optimizer(optimizer)


def is_graph_optimizer(optimizer):
    return isinstance(optimizer, GraphOptimizer)


def is_sync_replicas_optimizer(optimizer):
    return isinstance(optimizer, tf.compat.v1.train.SyncReplicasOptimizer)


def _loss_scale_classes():
    classes = []
    if HAS_KERAS_FACE:
        if VERSION >= (2, 4):
            classes.append(tf.keras.mixed_precision.LossScaleOptimizer)
        if VERSION < (2, 11):  # dies with 2.10
            experimental = getattr(tf.keras.mixed_precision, "experimental", None)
            if experimental is not None:
                classes.append(experimental.LossScaleOptimizer)
    return tuple(classes)


_LOSS_SCALE_CLASSES = _loss_scale_classes()


def is_loss_scale_optimizer(optimizer):
    if _LOSS_SCALE_CLASSES and isinstance(optimizer, _LOSS_SCALE_CLASSES):
        return True
    # The 2.11+ class around a new optimizer is no subclass of the public name's concrete class. Dies with 2.15. The one
    # of `tf.compat.v1` moved from namespace to namespace.
    return type(optimizer).__name__.startswith(("LossScaleOptimizer", "MixedPrecisionLossScaleOptimizer"))


def without_loss_scale(optimizer):
    """The optimizer inside a `LossScaleOptimizer`; any other optimizer itself."""
    if not is_loss_scale_optimizer(optimizer):
        return optimizer
    if hasattr(optimizer, "inner_optimizer"):
        return optimizer.inner_optimizer
    return optimizer._optimizer  # 2.2 and 2.3 have no public name for it; dies with 2.3


def get_keras_optimizer(identifier):
    """A Keras optimizer from an instance, a name or a config; raises what Keras raises."""
    return tf.keras.optimizers.get(identifier)


def serialize_keras_optimizer(optimizer):
    return tf.keras.optimizers.serialize(optimizer)


def deserialize_keras_optimizer(config, custom_objects=None):
    if is_keras_optimizer(config):
        return config  # Keras 2.13 and later may have been there first
    if VERSION >= (2, 11):
        # `optimizers.deserialize` gives the string "AdamW" for an AdamW up to 2.15, "Lamb" for a Lamb in Keras 3, and
        # the general one knows no SGD while it reads H5: look among Keras' own here.
        inside = config.get("config", {})
        # Legacy optimizers do not always say that they are.
        is_legacy = not IS_KERAS_3 and inside.get("is_legacy_optimizer", "decay" in inside)
        family = tf.keras.optimizers.legacy if is_legacy else tf.keras.optimizers
        cls = getattr(family, config["class_name"], None)
        is_own = bool(config.get("registered_name")) or config["class_name"] in (custom_objects or {})  # the user's
        if cls is not None and not is_own:
            return cls.from_config(dict(config["config"]))
    return tf.keras.optimizers.deserialize(config, custom_objects=custom_objects)


def aggregated(grads_and_vars):
    """What `_aggregate_gradients` of a legacy optimizer returns when there is nothing to aggregate."""
    if VERSION < (2, 4):  # gradients only; dies with 2.3
        return [grad for grad, _ in grads_and_vars]
    return list(grads_and_vars)


def legacy_adam(*args, **kwargs):
    """Keras' Adam of the family that also works in a static graph, which Keras 3 has none of."""
    if IS_KERAS_3:
        raise NotImplementedError(
            "Keras 3 has no optimizer for static graphs: set TF_USE_LEGACY_KERAS=1 with tf-keras installed, "
            "or use `AccumOptimizer(tf.compat.v1.train.AdamOptimizer(...), accum_steps=...)`."
        )
    family = tf.keras.optimizers.legacy if VERSION >= (2, 11) else tf.keras.optimizers
    return family.Adam(*args, **kwargs)


def copy_of(optimizer):
    """An optimizer of the same class and hyperparameters, which has made no step."""
    return type(optimizer).from_config(optimizer.get_config())


def loss_scale_around(optimizer, like):
    """A `LossScaleOptimizer` around `optimizer` with the settings of `like`, another one."""
    if IS_KERAS_3:
        return type(like)(optimizer, like.initial_scale, like.dynamic_growth_steps)
    if VERSION < (2, 4):  # dies with 2.3
        return type(like)(optimizer, like.loss_scale)
    return tf.keras.mixed_precision.LossScaleOptimizer(
        optimizer,
        dynamic=like.dynamic,
        initial_scale=like.initial_scale,
        dynamic_growth_steps=like.dynamic_growth_steps,
    )


def register_keras_class(cls, name):
    """Make Keras find `cls` under its bare name when it loads a file, without custom objects."""
    tf.keras.utils.get_custom_objects()[name] = cls


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints


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


# ----------------------------------------------------------------------------------------------------------------
# The inner optimizer, called as a black box


def build_inner(optimizer, variables):
    """Create the inner optimizer's variables now, so that no trace of a branch has to."""
    if is_new_optimizer(optimizer):
        if not (IS_KERAS_3 and optimizer.built):  # it would make all of its variables again
            optimizer.build(list(variables))
    elif is_legacy_optimizer(optimizer):
        if VERSION >= (2, 2):
            optimizer._create_all_weights(variables)
        else:  # dies with 1.15
            _ = optimizer.iterations  # made where it is first read
            optimizer._create_hypers()
            optimizer._create_slots(variables)
    # v1 optimizers lift their slots out of the branch by themselves.


def create_graph_slots(optimizer, variables):
    """Create a v1 optimizer's slots where it would do so alone, so that checkpoints know them by the same names.

    Adam names its powers of beta after the scope that it creates them in, a branch of the conditional for one.
    """
    if is_graph_optimizer(optimizer) and not tf.distribute.has_strategy():
        with tf.init_scope():
            optimizer._create_slots(variables)


def prepare_inner(optimizer, variables, used):
    """Create the inner optimizer's variables where it needs them now.

    A new one is built once, as Keras does: for the whole list, also for what has no gradient yet. A legacy one gets
    what it needs for `used`, those of `variables` that a trace updates.
    """
    if is_new_optimizer(optimizer):
        build_inner(optimizer, variables)
    elif used:
        build_inner(optimizer, used)


def refused_by_inner(optimizer, variables):
    """Those of `variables` that the inner optimizer can't update: a new one is built once, for one list."""
    names = ("_trainable_variables_indices", "built") if IS_KERAS_3 else ("_index_dict", "_built")
    index = getattr(optimizer, names[0], None) if is_new_optimizer(optimizer) else None
    if index is None or not getattr(optimizer, names[1], False):
        return []
    return [var for var in variables if optimizer._var_key(var) not in index]


def _clipped_as_in_fit(optimizer, grads_and_vars):
    """Clip by the inner optimizer's `clipnorm` / `clipvalue` where its own `apply_gradients` does not.

    TF 2.2 and 2.3 clip in `minimize` and in `fit`; from 2.4 on `apply_gradients` does. Dies with 2.3.
    """
    if not is_legacy_optimizer(optimizer) or VERSION >= (2, 4):
        return grads_and_vars
    clipnorm, clipvalue = getattr(optimizer, "clipnorm", None), getattr(optimizer, "clipvalue", None)

    def clip(grad):
        grad = grad if clipnorm is None else tf.clip_by_norm(grad, clipnorm)
        return grad if clipvalue is None else tf.clip_by_value(grad, -clipvalue, clipvalue)

    return [(grad if grad is None else clip(grad), var) for grad, var in grads_and_vars]


def apply_inner(optimizer, grads_and_vars, replicas, global_step=None, name=None):
    """One step of the inner optimizer on whole gradients, which it must not reduce over replicas again."""
    if is_graph_optimizer(optimizer):
        # v1 always reduces: each replica hands in its share of the whole. Dies with the v1 optimizers.
        if replicas > 1:
            grads_and_vars = [(scale_gradient(grad, 1.0 / replicas), var) for grad, var in grads_and_vars]
        return optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)
    grads_and_vars = _clipped_as_in_fit(optimizer, grads_and_vars)
    if IS_KERAS_3:
        if hasattr(optimizer, "optimizers"):  # a MultiOptimizer wants each of its variables
            given = {variable_key(var) for _, var in grads_and_vars}
            missing = [var for var in optimizer._trainable_variables if variable_key(var) not in given]
            grads_and_vars = list(grads_and_vars) + [(None, var) for var in missing]
        with _without_reduction(optimizer, replicas):
            done = optimizer.apply_gradients(grads_and_vars)
    elif replicas == 1:
        done = optimizer.apply_gradients(grads_and_vars)
    elif is_new_optimizer(optimizer):
        done = optimizer.apply_gradients(grads_and_vars, skip_gradients_aggregation=True)
    else:
        done = optimizer.apply_gradients(grads_and_vars, experimental_aggregate_gradients=False)
    if global_step is not None:
        with tf.control_dependencies([done]):
            done = global_step.assign_add(tf.ones([], global_step.dtype.base_dtype))
    return done


def awaited(done):
    """What to wait for, from what `apply_inner` gave; in Keras 3 nothing, where a trace orders all by itself."""
    return None if IS_KERAS_3 else done


@contextlib.contextmanager
def _without_reduction(optimizer, replicas):
    """Keep an optimizer of Keras 3 from summing over replicas, which it does after it has clipped and can't be told."""
    parts = [optimizer] + list(getattr(optimizer, "optimizers", ()))  # those that a MultiOptimizer calls
    for part in parts if replicas > 1 else ():
        part.__dict__["_all_reduce_sum_gradients"] = list
    try:
        yield
    finally:
        for part in parts:
            part.__dict__.pop("_all_reduce_sum_gradients", None)


def slot_names(optimizer):
    """Names of an optimizer's slots; one that is built from a list of variables has none."""
    return [] if is_new_optimizer(optimizer) else sorted(optimizer.get_slot_names())


def as_operation(value):
    """What `session.run` runs for its effect: an operation, from a tensor, a variable or an operation."""
    return value if isinstance(value, tf.Operation) else tf.group(value)


def scale_gradient(grad, factor):
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * tf.cast(factor, grad.dtype), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


# ----------------------------------------------------------------------------------------------------------------
# What an inner optimizer keeps, for conversion

CONVERTS = HAS_KERAS_FACE and not IS_KERAS_3
"""Whether Keras' optimizers are those whose slots are known here; those of Keras 3 are not."""

_NEW_SLOTS = {
    "SGD": {"momentum": "momentums"},
    "Adam": {"m": "_momentums", "v": "_velocities"},
    "RMSprop": {"rms": "_velocities", "momentum": "_momentums", "mg": "_average_gradients"},
    "Adagrad": {"accumulator": "_accumulators"},
}
"""Where a new optimizer keeps the slots that a legacy one gives by name. Dies with 2.15."""


def rule_name(optimizer):
    """ "SGD", "Adam", "RMSprop" or "Adagrad" for Keras' own optimizer of that class; None for any other."""
    homes = [tf.keras.optimizers]
    homes += [getattr(homes[0], name) for name in ("legacy", "experimental") if hasattr(homes[0], name)]
    names = [name for name in _NEW_SLOTS for home in homes if type(optimizer) is getattr(home, name, None)]
    return names[0] if names else None


def slot_variable(optimizer, var, role):
    """The slot of `var` in a built optimizer, by the name that legacy optimizers give it."""
    if not is_new_optimizer(optimizer):
        return optimizer.get_slot(var, role)
    slots = getattr(optimizer, _NEW_SLOTS[rule_name(optimizer)][role])
    return slots[optimizer._index_dict[optimizer._var_key(var)]]


def hyperparameter(optimizer, name):
    """A hyperparameter as it is now, a float."""
    is_hyper = is_legacy_optimizer(optimizer) and name in optimizer._hyper
    value = optimizer._get_hyper(name) if is_hyper else getattr(optimizer, name)
    return float(tf.keras.backend.get_value(value))


def rate_of_step(optimizer, step):
    """(the learning rate of the step that follows `step` of them, whether it follows a schedule)."""
    legacy = is_legacy_optimizer(optimizer)
    rate = optimizer._get_hyper("learning_rate") if legacy else optimizer._learning_rate
    is_scheduled = isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule)
    rate = float(tf.keras.backend.get_value(rate(tf.cast(step, tf.float32)) if is_scheduled else rate))
    decay = optimizer._initial_decay if legacy else 0.0
    if decay > 0.0:
        return rate / (1.0 + hyperparameter(optimizer, "decay") * step), True
    return rate, is_scheduled


def is_epsilon_beside_root(optimizer):
    """Whether an optimizer of a `rule_name` adds epsilon to the root, rather than under it."""
    rule = rule_name(optimizer)
    if rule == "RMSprop" and not is_new_optimizer(optimizer):
        return not hyperparameter(optimizer, "momentum") > 0.0  # with momentum it has v1's kernel
    if rule == "RMSprop":
        return VERSION < (2, 11)  # the preview; dies with 2.10
    return rule == "Adam" or not is_new_optimizer(optimizer)


def has_rate_in_momentum(optimizer):
    """Whether RMSprop's momentum sums steps; that of the preview does not. Dies with 2.10."""
    return not is_new_optimizer(optimizer) or VERSION >= (2, 11)


def has_odd_centering(optimizer):
    """Whether a centered RMSprop subtracts something else than the square of a mean: the preview's. Dies with 2.10."""
    return optimizer.centered and is_new_optimizer(optimizer) and VERSION < (2, 11)


def is_of_several_replicas(var):
    """Whether a variable is a mirrored one, of which there are several."""
    strategy = getattr(var, "_distribute_strategy", None)  # has no public name
    return strategy is not None and strategy.num_replicas_in_sync > 1


def write_bundle(prefix, values):
    """Write {name: array} as a `Saver` of the second format does, in eager execution."""
    names = sorted(values)
    tensors = [tf.constant(values[name]) for name in names]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=tensors)


# ----------------------------------------------------------------------------------------------------------------
# Models


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


def _keras_layers(*names):
    """Those of Keras' layers that this line has, the experimental ones included."""
    homes = tf.keras.layers, getattr(tf.keras.layers, "experimental", None)
    found = [getattr(home, name, None) for home in homes for name in names]
    return tuple(layer for layer in found if layer is not None)


DEPTHWISE_CONVOLUTIONS = _keras_layers("DepthwiseConv1D", "DepthwiseConv2D")
"""Layers whose kernels are [..., in, multiplier]. Up to Keras 2 they are called `depthwise_kernel`."""

TRANSPOSED_CONVOLUTIONS = _keras_layers("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
"""Layers whose kernels are [..., out, in]. The first is there from 2.3 on."""

EINSUM_LAYERS = _keras_layers("EinsumDense")
"""Layers whose `equation` says what their kernel's axes are; experimental in 2.3, and there from 2.4 on."""


def set_untracked(model, name, value):
    """Set a Python attribute of a Keras model that no checkpoint and no layer list shall see."""
    model.__dict__[name] = value


def unpack_data(data):
    """(x, y, sample_weight) of what a `train_step` is given."""
    if VERSION >= (2, 3):
        return tf.keras.utils.unpack_x_y_sample_weight(data)
    data = data if isinstance(data, tuple) else (data,)  # dies with 2.2
    return data + (None,) * (3 - len(data))


def count_examples(data):
    """The number of examples in what a `train_step` is given, a float32 scalar."""
    first = tf.nest.flatten(unpack_data(data)[0])[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.float32)
    shape = first.dense_shape if isinstance(first, tf.SparseTensor) else tf.shape(first)
    return tf.cast(shape[0], tf.float32)


def loss_denominator(container, y_true, y_pred):
    """What the losses of a model divided by, a float32 scalar, or None where that was the number of examples.

    From 2.11 on, a built-in reduction divides the loss of a masked output by the number of its unmasked elements, and
    from 2.10 on one with an `ignore_class` by the number of the others. Of several outputs that differ in it, no one
    number is right: None if any has no mask, and otherwise the sum over the outputs, right where their masks are one.
    """
    if VERSION < (2, 10):  # dies with 2.9
        return None
    counts = [_unmasked_elements(*entry) for entry in _losses_of_outputs(container, y_true, y_pred)]
    return tf.add_n(counts) if counts and not any(count is None for count in counts) else None


LOSS_CONTAINER = "_compile_loss" if IS_KERAS_3 else "compiled_loss"
"""The attribute of a compiled model that holds and computes its losses; has no public name in Keras 3."""


def _at(path, structure):
    return functools.reduce(lambda part, key: part[key], path, structure)


def _losses_of_outputs(container, y_true, y_pred):
    """List of (loss, target, output) of what a model was compiled with, where there is a loss and a target."""
    if not IS_KERAS_3:
        places = [tf.nest.flatten(part) for part in (container._conform_to_outputs(y_pred, y_true), y_pred)]
        entries = list(zip(container._losses, *places))
    else:
        try:
            entries = [
                (entry.loss, _at(entry.path, y_true), _at(entry.path, y_pred)) for entry in container._flat_losses
            ]
        except (IndexError, KeyError, TypeError):  # targets of another structure, which Keras matches by itself
            entries = []
    return [entry for entry in entries if entry[0] is not None and entry[1] is not None]


def _unmasked_elements(loss, target, output):
    """How many elements a loss was divided by, if a mask tells it: a float32 scalar or None."""
    if loss.reduction not in ("auto", "sum_over_batch_size", "mean"):
        return None
    mask = getattr(output, "_keras_mask", None) if VERSION >= (2, 11) else None  # has no public name; dies with 2.10
    mask = None if mask is None else tf.cast(mask, tf.float32)
    is_sparse = isinstance(loss, tf.keras.losses.SparseCategoricalCrossentropy)
    ignored = loss.get_config().get("ignore_class") if is_sparse else None
    if ignored is not None:
        taken = tf.cast(tf.not_equal(target, tf.cast(ignored, target.dtype)), tf.float32)
        taken = tf.reshape(taken, tf.shape(output)[:-1])
        mask = taken if mask is None else mask * taken
    return None if mask is None else tf.reduce_sum(mask)


# ----------------------------------------------------------------------------------------------------------------
# Batch normalisation


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


BATCH_NORMS = _keras_layers("BatchNormalization", "SyncBatchNormalization")
"""Keras' own classes of batch normalisation; the second is an argument of the first from 2.12 on."""


def is_synchronized(batch_norm):
    """Whether a layer's statistics are those of all replicas together."""
    own = batch_norm.get_config().get("synchronized")
    return type(batch_norm) in BATCH_NORMS[1:] if own is None else bool(own)


_BATCH_NORM_TAKES_MASK = "mask" in inspect.signature(tf.keras.layers.BatchNormalization.call).parameters


def call_batch_norm(call, inputs, training, mask):
    """Call Keras' own batch normalisation; only from 2.12 on does it have a use for a mask."""
    if _BATCH_NORM_TAKES_MASK:
        return call(inputs, training=training, mask=mask)
    return call(inputs, training=training)  # dies with 2.11


def is_fused(batch_norm):
    """Whether a built layer computes by the fused kernel, of which Keras 3 knows nothing."""
    return bool(getattr(batch_norm, "fused", False))


def unfused(options):
    """The arguments of a batch normalisation that is not fused."""
    return options if IS_KERAS_3 else dict(options, fused=False)


class Resting:
    """Stands in for a variable of Keras 3: has its value, and takes no other."""

    def __init__(self, variable):
        self._variable = variable

    def __tf_tensor__(self, dtype=None, name=None):
        return tf.convert_to_tensor(native(self._variable), dtype=dtype, name=name)

    def assign(self, value):
        """Leave the variable as it is."""


def _resting(name):
    def get(self):
        variable = self.__dict__.get(name)
        return Resting(variable) if variable is not None and self.accum_is_capturing else variable

    return property(get, lambda self, variable: self.__dict__.update({name: variable}))


class _HandsOver:
    """The part of a batch normalisation by which Keras 3 computes statistics, and assigns to the moving ones in `call`.

    They rest while `accum_is_capturing`, and what is computed goes through `accum_hand_over`.
    """

    moving_mean = _resting("moving_mean")
    moving_variance = _resting("moving_variance")

    def _moments(self, inputs, mask):
        return self.accum_hand_over(super()._moments, inputs, mask)


if HAS_KERAS_FACE:
    BATCH_NORM_BASES = ((_HandsOver,) if IS_KERAS_3 else ()) + (tf.keras.layers.BatchNormalization,)
    """What a batch normalisation with an eye on its statistics derives from: in Keras 2 its own methods are enough."""


def uses_mask(batch_norm):
    """Whether a built layer leaves masked values out of its statistics."""
    return _BATCH_NORM_TAKES_MASK and not is_fused(batch_norm)


def records_unbiased_variance(batch_norm):
    """Whether a built layer records its batches' variance with Bessel's correction.

    The fused kernel does, which Keras takes for rank 4, and later for rank 5 too; its own computation does not.
    """
    return is_fused(batch_norm)


def is_no_real_call():
    """Whether Keras calls its layers to lay out a functional model or to export one, rather than to compute.

    No public name says so. The module in which `Layer` stands knows, but for exports of some lines (2.9, 2.10), whose
    traces have names of their own.
    """
    if IS_KERAS_3:
        return importlib.import_module(tf.keras.Model.__module__.split(".models")[0] + ".backend").in_stateless_scope()
    context = sys.modules[tf.keras.layers.Layer.__module__].base_layer_utils.call_context()
    if getattr(context, "saving", False) or getattr(context, "in_keras_graph", False):
        return True
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if "_layer_call_" in getattr(graph, "name", ""):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


# ----------------------------------------------------------------------------------------------------------------
# Strategies


def _strategy_classes(name):
    """Every class that goes by `name`: of TF 1 and TF 2, before and after it left `experimental`."""
    spaces = [tf.distribute, tf.compat.v1.distribute]
    spaces += [space.experimental for space in spaces if hasattr(space, "experimental")]
    return tuple({getattr(space, name) for space in spaces if hasattr(space, name)})


_CENTRAL_STORAGE = _strategy_classes("CentralStorageStrategy")
_PARAMETER_SERVER = _strategy_classes("ParameterServerStrategy")


def is_central_storage(strategy):
    return isinstance(strategy, _CENTRAL_STORAGE)


def is_parameter_server(strategy):
    return isinstance(strategy, _PARAMETER_SERVER)


# ----------------------------------------------------------------------------------------------------------------
# Variables


def native(var):
    """The `tf.Variable` of a `keras.Variable`, which Keras 3 has; anything else itself."""
    return var.value if IS_KERAS_3 and isinstance(var, tf.keras.Variable) else var


def is_overwritten(var):
    """Whether a variable takes its gradient as its value, as Keras 3 has it for scales of float8."""
    return bool(getattr(var, "overwrite_with_gradient", False))


def path_of(var):
    """The whole name of a variable, with those of what it is in, without the number of an output."""
    return getattr(var, "path", var.name).split(":")[0]


def variable_key(var):
    """What identifies a variable for as long as it lives, also one copy of a mirrored one."""
    var = native(var)
    if hasattr(var, "_distributed_container"):  # a replica's own copy; the container has no public name
        var = var._distributed_container() or var
    return id(var)


def at_least_float32(dtype):
    """`dtype`, or float32 in the place of one of 16 bits."""
    return tf.float32 if dtype.size < 4 else dtype


def known_value(value):
    """The value of a scalar that is known now, as a float; None for a tensor that is computed later."""
    known = tf.get_static_value(value) if isinstance(value, tf.Tensor) else value
    return float(known) if isinstance(known, (int, float, np.number, np.ndarray)) and np.ndim(known) == 0 else None


@functools.lru_cache(maxsize=1)
def per_replica_maker(strategy):
    """A function that makes one value of a tuple of those of the replicas; its class has no public name."""
    with tf.Graph().as_default():
        one = strategy.extended.call_for_each_replica(lambda: tf.zeros([]))
    if hasattr(one, "device_map"):  # dies with 1.15
        return functools.partial(type(one), one.device_map)
    return type(one)


def _has_metal():
    """Whether TensorFlow has one of Apple's GPUs: on macOS it knows no others."""
    return platform.system() == "Darwin" and bool(tf.config.experimental.list_physical_devices("GPU"))


@contextlib.contextmanager
def on_host():
    """Put the counters made within, and what is computed of them, on the host where the GPU lacks int64: Apple's.

    Elsewhere they stand where TensorFlow puts them, as Keras' `iterations` does: XLA compiles no function for one
    device that uses a variable of another. Strategies and static graphs place everything by themselves.
    """
    if not _has_metal() or tf.distribute.has_strategy() or in_static_graph():
        yield
        return
    with tf.device("/device:CPU:0"):
        yield


def new_keras_variable(optimizer, name, initial_value, per_replica):
    """A variable that belongs to a Keras optimizer and is no weight of it.

    Keras in graph mode initialises only what was made through it, and only legacy optimizers work there; so those
    make it through `add_weight`. A per-replica variable is summed where it is read.
    """
    initial_value = tf.convert_to_tensor(initial_value)
    kind = tf.VariableSynchronization, tf.VariableAggregation
    synchronization = kind[0].ON_READ if per_replica else kind[0].AUTO
    aggregation = kind[1].SUM if per_replica else kind[1].ONLY_FIRST_REPLICA
    if is_legacy_optimizer(optimizer) and in_static_graph():
        return optimizer.add_weight(
            name,
            shape=initial_value.shape,
            dtype=initial_value.dtype,
            initializer=tf.compat.v1.constant_initializer(tf.get_static_value(initial_value)),
            trainable=False,
            synchronization=synchronization,
            aggregation=aggregation,
        )
    made = tf.Variable(
        initial_value, trainable=False, name=name, synchronization=synchronization, aggregation=aggregation
    )
    if per_replica and VERSION < (2, 4):
        _restore_over_all_workers(made)
    return made


def _restore_over_all_workers(var):
    """Split a restored sum over the replicas of all workers: TF 2.2 and 2.3 see those of one. Dies with 2.3."""
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy() or len(strategy.extended.worker_devices) == strategy.num_replicas_in_sync:
        return
    share = len(strategy.extended.worker_devices) / strategy.num_replicas_in_sync
    gather = var._gather_saveables_for_checkpoint

    def shared(factory, **kwargs):
        saveable = factory(**kwargs)
        restore = saveable.restore
        saveable.restore = lambda restored_tensors, restored_shapes: restore(
            [tensor * share for tensor in restored_tensors], restored_shapes
        )
        return saveable

    var._gather_saveables_for_checkpoint = lambda: {
        name: functools.partial(shared, factory) for name, factory in gather().items()
    }


def new_statistic(name, shape, dtype):
    """A variable of zeros that belongs to one replica, and is read and saved as the mean over them, as Keras' own."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def set_variable(var, value):
    """Assign to a scalar variable from Python, also in a static graph that Keras holds the session of."""
    if in_static_graph():
        tf.compat.v1.keras.backend.set_value(var, value)
    else:
        var.assign(tf.cast(value, var.dtype))


def values_of(variables):
    """The values of Keras' variables as arrays, also in a static graph that Keras holds the session of."""
    if in_static_graph():
        return tf.compat.v1.keras.backend.batch_get_value(variables)
    return [np.asarray(var.numpy() if hasattr(var, "numpy") else var) for var in variables]


# ----------------------------------------------------------------------------------------------------------------
# Graphs


def in_static_graph():
    """Whether ops are being added to a `tf.compat.v1` graph rather than run, or traced for a `tf.function`."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def is_tracing():
    """Whether a `tf.function` is being traced or a static graph built."""
    return not tf.executing_eagerly()


def is_ref_variable(var):
    """Whether a variable is one of TF 1's, whose value is a mutable tensor of the graph. Dies with `tf.compat.v1`."""
    return isinstance(var, tf.Variable) and not hasattr(var, "handle")


def is_of_a_cluster(var):
    """Whether a variable's device names a job, such as that of a parameter server. Dies with `tf.compat.v1`."""
    return tf.compat.v1.DeviceSpec.from_string(var.device or "").job not in (None, "localhost")


@contextlib.contextmanager
def control_flow_for(variables):
    """Build conditionals that can hold `variables`: those of TF 2 are functions, which no ref variable can enter.

    On some lines (2.10) neither can one of a parameter server, beside the ops of a worker. There is no switch but the
    process-wide one; it is set back at once. Dies with `tf.compat.v1`.
    """
    needs_old = any(is_ref_variable(var) or is_of_a_cluster(var) for var in variables)
    must_switch = needs_old and tf.compat.v1.control_flow_v2_enabled()
    if must_switch:
        tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if must_switch:
            tf.compat.v1.enable_control_flow_v2()


@contextlib.contextmanager
def no_record_of_locks():
    """Drop what a `tf.CriticalSection` notes in its graph: no MetaGraph can hold it, and each `Saver` would warn so."""
    records = tf.compat.v1.get_collection_ref("critical_section_executions")
    before = list(records)
    try:
        yield
    finally:
        records[:] = before


untouched_by_autograph = tf.autograph.experimental.do_not_convert
