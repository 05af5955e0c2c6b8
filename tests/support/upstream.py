"""A plugin of pytest that runs the optimizer tests of Keras 3 and of tf-slim on accumulating optimizers.

    ACCUM_UPSTREAM=1 python -m pytest -p upstream …/keras/src/optimizers

The tests shipped with these packages construct optimizers. Here they get them wrapped: with ACCUM_UPSTREAM=1 with
`accum_steps=1`; with 2 with `accum_steps=2`, where each call is made twice, with the same gradients, so that their mean
is the gradient itself. With 0 they get their own.
"""

import os
import types

STEPS = int(os.environ.get("ACCUM_UPSTREAM", "0"))
CALLS = {}
"""How often an optimizer of a class was wrapped."""


def pytest_collection_modifyitems(items):
    if not STEPS:
        return
    for module in {item.module for item in items}:
        if module.__name__.split(".")[-1] in ("optimizers_test", "training_test"):
            _wrap_in_slim(module)
        else:
            _wrap_in_keras(module)


def pytest_sessionfinish(session):
    if STEPS and not CALLS:
        session.exitstatus = 99  # nothing was wrapped


# ----------------------------------------------------------------------------------------------------------------
# Keras 3


def _wrap_in_keras(module):
    """Let the classes and functions that a test module reads make wrapped optimizers."""
    from keras.src import optimizers

    import accum

    if STEPS == 2 and accum.GradientAccumulateOptimizer.apply_gradients.__name__ != "twice":
        _call_twice(accum.GradientAccumulateOptimizer)
    only = [optimizers.MultiOptimizer] if module.__name__.endswith("multi_optimizer_test") else None
    for name, value in list(vars(module).items()):
        if value is optimizers:
            setattr(module, name, _namespace(optimizers, only))
        elif _is_optimizer(value, only):
            setattr(module, name, _stand_in(value))


def _is_optimizer(value, only):
    from keras.src import optimizers

    if not (isinstance(value, type) and issubclass(value, optimizers.Optimizer)):
        return False
    # The one is a base class; the other has to be outermost, around what is wrapped.
    return value in only if only else value not in (optimizers.Optimizer, optimizers.LossScaleOptimizer)


def _namespace(optimizers, only):
    made = types.SimpleNamespace(**vars(optimizers))
    for name, value in list(vars(made).items()):
        if _is_optimizer(value, only):
            setattr(made, name, _stand_in(value))
    if not only:
        made.get = lambda identifier: identifier if identifier is None else _wrapped(optimizers.get(identifier))
    return made


class _StandIn(type):
    """The class of classes that make wrapped instances of another."""

    def __call__(cls, *args, **kwargs):
        return _wrapped(cls.original(*args, **kwargs))

    def __instancecheck__(cls, instance):
        return isinstance(getattr(instance, "optimizer", instance), cls.original)

    def __getattr__(cls, name):
        return getattr(cls.__dict__["original"], name)


def _stand_in(original):
    return _StandIn(original.__name__, (), {"original": original})


def _wrapped(optimizer):
    import accum

    CALLS[type(optimizer)] = CALLS.get(type(optimizer), 0) + 1
    return accum.GradientAccumulateOptimizer(optimizer, accum_steps=STEPS)


def _call_twice(cls):
    """Let every call of `apply_gradients` of an accumulating optimizer be two, with the same gradients."""
    once = cls.apply_gradients

    def twice(self, grads_and_vars, *args, **kwargs):
        grads_and_vars = list(grads_and_vars)
        once(self, grads_and_vars, *args, **kwargs)
        return once(self, grads_and_vars, *args, **kwargs)

    cls.apply_gradients = twice


# ----------------------------------------------------------------------------------------------------------------
# tf-slim


def _wrap_in_slim(module):
    module.gradient_descent = types.SimpleNamespace(
        GradientDescentOptimizer=_graph_stand_in(module.gradient_descent.GradientDescentOptimizer)
    )
    if hasattr(module, "optimizers_lib"):
        names = module.optimizers_lib.OPTIMIZER_CLS_NAMES
        names.update({name: _graph_stand_in(original) for name, original in names.items()})


def _graph_stand_in(original):
    import tensorflow as tf

    import accum.compat.v1

    class Twice(accum.compat.v1.AccumOptimizer):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            grads_and_vars = list(grads_and_vars)
            first = super().apply_gradients(grads_and_vars, *args, **kwargs)
            with tf.control_dependencies([first]):
                return super().apply_gradients(grads_and_vars, *args, **kwargs)

    def make(*args, **kwargs):
        CALLS[original] = CALLS.get(original, 0) + 1
        optimizer = original(*args, **kwargs)
        return accum.compat.v1.AccumOptimizer(optimizer, 1) if STEPS == 1 else Twice(optimizer, 2)

    return make
