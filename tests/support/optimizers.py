"""Find every optimizer class in the installed TensorFlow, with the variants worth testing."""

import re

import numpy as np
import pytest
import tensorflow as tf
from versions import IS_KERAS_3, TF_VERSION

tf1 = tf.compat.v1

KERAS_VARIANTS = {
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "Adam": [{"amsgrad": True}],
}
GRAPH_ARGUMENTS = {
    "MomentumOptimizer": [{"momentum": 0.9}, {"momentum": 0.9, "use_nesterov": True}],
    "RMSPropOptimizer": [{}, {"centered": True, "momentum": 0.5}],
}
KERAS = tuple(int(part) for part in re.findall(r"\d+", getattr(tf.keras, "__version__", "2"))[:2])
NOT_ALONE = ("SyncReplicasOptimizer", "Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")


EAGER_AND_TRACED = [pytest.param(False, id="eager"), pytest.param(True, id="function")]
"""pytest parameters: whether a micro step is a `tf.function`."""

MAINLY_EAGER = [pytest.param(False, id="eager"), pytest.param(True, id="function", marks=pytest.mark.slow)]
"""The same where the trace is not the subject: it takes several times as long."""


def _keras_modules():
    modules = {"keras": tf.keras.optimizers}
    for name in () if IS_KERAS_3 else ("legacy", "experimental"):
        module = getattr(tf.keras.optimizers, name, None)
        if module is not None:
            modules[name] = module
    return modules


def _classes(module):
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if isinstance(value, type) and name not in NOT_ALONE:
            yield name, value


def legacy_family():
    """Return the module of the optimizers that keep slots, or None in Keras 3."""
    return None if IS_KERAS_3 else getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)


def new_family():
    """Return the module of the optimizers that are built from a list of variables, or None before TF 2.9."""
    for module in (tf.keras.optimizers, getattr(tf.keras.optimizers, "experimental", None)):
        if hasattr(getattr(module, "SGD", None), "update_step"):
            return module
    return None


def families(pick=lambda module: module):
    """Return pytest parameters: `pick(module)` for the modules of Keras' optimizers and of separate legacy ones."""
    modules = {"keras": tf.keras.optimizers}
    if TF_VERSION >= (2, 11) and not IS_KERAS_3:
        modules["legacy"] = tf.keras.optimizers.legacy
    return [pytest.param(pick(module), id=name) for name, module in modules.items()]


def decays():
    """Makers of optimizers with decoupled weight decay, of this TensorFlow and of no other."""
    new, made = new_family(), []
    if new is not None and hasattr(new, "AdamW"):
        made.append(pytest.param(lambda: new.AdamW(0.1, weight_decay=0.2), id="AdamW"))
    if new is not None and "weight_decay" in new.SGD(0.1).get_config():
        made.append(pytest.param(lambda: new.SGD(0.1, momentum=0.9, weight_decay=0.2), id="SGD"))
    return made or [pytest.param(None, id="none")]  # which its tests skip


def slot_families():
    """Return pytest parameters: the modules of the optimizers that keep slots and of those built from a list."""
    families = {"legacy": legacy_family(), "new": new_family()}
    return [pytest.param(module, id=name) for name, module in families.items() if module is not None]


def mainly(parameters, *chosen):
    """Return pytest parameters, marked `slow` except those whose id, or value if they have none, is `chosen`."""
    chosen_parameters = []
    for parameter in parameters:
        if not hasattr(parameter, "marks"):
            parameter = pytest.param(*parameter) if isinstance(parameter, tuple) else pytest.param(parameter)
        name = parameter.id or (parameter.values if len(parameter.values) > 1 else parameter.values[0])
        marks = list(parameter.marks) + ([] if name in chosen else [pytest.mark.slow])
        chosen_parameters.append(pytest.param(*parameter.values, id=parameter.id, marks=marks))
    return chosen_parameters


def _label(*parts):
    return "-".join(str(part) for part in parts)


def keras_optimizers(but=()):
    """Return pytest parameters: functions that make an optimizer. A class with several names is included once."""
    seen, optimizers = set(), []
    for family, module in _keras_modules().items():
        for name, cls in _classes(module):
            if cls in seen or name in but or (name == "Muon" and KERAS < (3, 15)):  # earlier, Muon itself fails
                continue
            seen.add(cls)
            for arguments in [{}] + KERAS_VARIANTS.get(name, []):
                make = lambda cls=cls, arguments=arguments: cls(learning_rate=0.05, **arguments)
                marks = pytest.mark.slow if arguments else ()
                optimizers.append(pytest.param(make, id=_label(family, name, *sorted(arguments)), marks=marks))
    return optimizers


def graph_optimizers():
    """Return pytest parameters: functions of a global step that make a `tf.compat.v1.train` optimizer."""
    optimizers = []
    for name, cls in _classes(tf1.train):
        if not name.endswith("Optimizer") or name in NOT_ALONE:
            continue
        for arguments in GRAPH_ARGUMENTS.get(name, [{}]):

            def make(step, cls=cls, arguments=arguments):
                accepted = dict(arguments, global_step=step) if "AdagradDA" in cls.__name__ else arguments
                return cls(0.05, **accepted)

            optimizers.append(pytest.param(make, id=_label(name, *sorted(arguments))))
    return optimizers


def random_gradients(count, shapes, seed=0):
    """Return `count` lists of float32 gradients of the given shapes."""
    random = np.random.RandomState(seed)
    return [[random.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(count)]


def keras_weights(values):
    """Create the variables of a custom loop. Keras 3 has its own class, whose names some optimizers use."""
    if IS_KERAS_3:
        return [tf.keras.Variable(value, name=f"weight_{index}") for index, value in enumerate(values)]
    return [tf.Variable(value) for value in values]


def built(optimizer, variables):
    """Return `optimizer`, in Keras 3 built before anything is traced; some of its optimizers can't be built later."""
    if IS_KERAS_3:
        optimizer.build(variables)
    return optimizer


def float32_mean(grads):
    """Return the float32 mean, added in order, which both sides of a bit-equal comparison receive."""
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total / np.float32(len(grads))
