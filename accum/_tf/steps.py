"""The objects that a Keras train, test or predict step reads and calls, so that it can run on one micro-batch."""

import contextlib
import functools
import importlib
from typing import Any, Callable, Iterator, List, Sequence

from accum._tf import patches
from accum._tf.graphs import called_as_in_fit, run_as_written
from accum._tf.models import layers_of
from accum._tf.version import IS_KERAS_3, VERSION, tf


def is_compiled_by_xla(model: tf.keras.Model) -> bool:
    """Whether XLA compiles the steps of a model."""
    if IS_KERAS_3:
        return bool(model.jit_compile) and not model.run_eagerly
    compiled = getattr(model, "_jit_compile", None)  # has no public name before 2.13; came with 2.5
    return bool(compiled) and not getattr(model, "_run_eagerly", False)


XLA_IS_ASKED_FOR = not IS_KERAS_3
"""Whether a model that XLA compiles was compiled with `jit_compile=True`; in Keras 3, this is the default on a GPU."""


def compile_no_step(model: tf.keras.Model, is_asked_for: bool) -> None:
    """Let Keras trace the steps of a model without XLA, whatever it was compiled with.

    Args:
      model: the model.
      is_asked_for: whether `jit_compile` is True, and not a default of Keras. A saved model says so, too.
    """
    if IS_KERAS_3:
        model.jit_compile = False
        config = getattr(model, "_compile_config", None)
        if config is not None and not is_asked_for:
            config.config["jit_compile"] = "auto"
    else:
        model._jit_compile = False


def local_result(metric: tf.keras.metrics.Metric) -> Callable[[], Any]:
    """Return a function that computes the result of a metric from this replica's state alone.

    In Keras 2, `metric.result` of a replica among others enters the cross-replica context, which no loop may do.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return metric.result
    return lambda: type(metric).result(metric)


@contextlib.contextmanager
def when_built(container: Any, then: Callable[[], Any]) -> Iterator[None]:
    """Call `then()` in this context once a container of compiled losses or metrics is built: now, or by its first call.

    That call matches targets with outputs first, by rules that Keras changes from release to release.
    """
    if container.built if IS_KERAS_3 else container._built:
        then()
        yield
        return
    name = "_build" if VERSION < (2, 3) else "build"
    build = getattr(container, name)

    def build_and_go_on(*args: Any, **kwargs: Any) -> None:
        build(*args, **kwargs)
        then()

    with patches.CONTAINERS.on(container, **{name: build_and_go_on}):
        yield


def containers_of(model: tf.keras.Model) -> List[Any]:
    """Return Keras' containers of the losses and metrics that a model was compiled with, which have no public names."""
    names = ("_compile_loss", "_compile_metrics") if IS_KERAS_3 else ("compiled_loss", "compiled_metrics")
    containers = [getattr(model, name, None) for name in names]
    containers = [getattr(container, "container", container) for container in containers]  # in a wrapper of ours
    return [container for container in containers if hasattr(container, "built" if IS_KERAS_3 else "_built")]


def is_mean(metric: Any) -> bool:
    """Whether a metric is updated by the method of a mean of Keras."""
    means = [getattr(tf.keras.metrics, name) for name in ("Mean", "MeanTensor") if hasattr(tf.keras.metrics, name)]
    own = type(metric).update_state
    return any(type(metric) is mean or (isinstance(metric, mean) and own is mean.update_state) for mean in means)


def intercepting_loss_scale(optimizer: Any, take: Callable[[List[Any], Callable[[List[Any]], Any]], None]) -> Any:
    """Return a context in which a `LossScaleOptimizer` hands over its gradients instead of applying them.

    Args:
      optimizer: a `LossScaleOptimizer`.
      take: function of a list of (gradient, variable), and of a function that applies such a list for real.
    """
    if IS_KERAS_3:  # `apply_gradients` calls `apply`, which unscales

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            take(list(zip(grads, variables)), lambda pairs: optimizer.apply(*map(list, zip(*pairs))))

        return patches.LOSS_SCALES.on(optimizer, apply=apply)

    def apply_gradients(grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        take(list(grads_and_vars), lambda pairs: optimizer.apply_gradients(pairs, *args, **kwargs))
        return tf.no_op() if not tf.executing_eagerly() else None

    return patches.LOSS_SCALES.on(optimizer, apply_gradients=apply_gradients)


@functools.lru_cache(maxsize=None)
def metrics_apply_masks() -> bool:
    """Whether metrics leave out what the mask of an output leaves out, when no weights are passed.

    In Keras 2, weights are passed then. The first releases of Keras 3 ignore the mask.
    """
    if not IS_KERAS_3:
        return False
    with tf.init_scope():
        metric, outputs = tf.keras.metrics.MeanAbsoluteError(), tf.constant([[[1.0], [3.0]]])
        outputs._keras_mask = tf.constant([[True, False]])
        metric.update_state(tf.zeros([1, 2, 1]), outputs)
        return float(metric.result()) < 1.5


def averages_time_first(metric: Any) -> bool:
    """Whether a metric averages values and weights over the time steps of each example before it adds them up.

    The means of Keras 3 do.
    """
    return IS_KERAS_3 and isinstance(metric, tf.keras.metrics.Mean)


def is_step_of_keras(step: Callable[..., Any], name: str) -> bool:
    """Whether a "train_step", "test_step" or "predict_step" is that of `tf.keras.Model`."""
    return getattr(step, "__func__", step) is getattr(tf.keras.Model, name)


def is_built_functional(model: tf.keras.Model) -> bool:
    """Whether the outputs of a model and all its variables are known."""
    return bool(model.built) and _symbolic_outputs(model) is not None


def _symbolic_outputs(model: tf.keras.Model) -> Any:
    if IS_KERAS_3:
        return getattr(getattr(model, "_functional", model), "_outputs_struct", None)
    return getattr(model, "_nested_outputs", None)


def create_metrics(model: tf.keras.Model, targets: Any) -> None:
    """Let Keras create the metrics of a compiled functional model, as its first step would.

    Args:
      model: a model for which `is_built_functional` is true.
      targets: `tf.TensorSpec`s of a batch of them, in the structure that `fit` receives; or None.
    """
    outputs = _symbolic_outputs(model)
    for name in ("_compile_loss", "_compile_metrics") if IS_KERAS_3 else ("compiled_loss", "compiled_metrics"):
        container = getattr(model, name, None)
        if container is None or getattr(container, "built", getattr(container, "_built", False)):
            continue
        if IS_KERAS_3:
            if _are_alike(outputs, targets):  # otherwise, Keras first rearranges the targets
                container.build(targets, outputs)
            continue
        build = container.build if hasattr(container, "build") else container._build  # dies with 2.2
        is_loss = name == "compiled_loss"
        build(outputs, *[] if is_loss else [container._conform_to_outputs(outputs, targets)])


def _are_alike(outputs: Any, targets: Any) -> bool:
    try:
        tf.nest.assert_same_structure(outputs, targets)
    except (TypeError, ValueError):
        return False
    return True


def must_not_be_in_loop(model: tf.keras.Model) -> bool:
    """Whether Keras 2 refuses to run the layers of a model in a loop: those that regularize their activity."""
    return not IS_KERAS_3 and any(getattr(layer, "activity_regularizer", None) for layer in layers_of(model))


@functools.lru_cache(maxsize=None)
def sums_activities() -> bool:
    """Whether the installed Keras adds up activity regularization over examples, as Keras 3 does before 3.13.

    Keras 2 and newer releases divide it by the number of examples.
    """
    if not IS_KERAS_3:
        return False
    with tf.init_scope():
        layer = tf.keras.layers.Activation(
            "linear", activity_regularizer=tf.reduce_sum, dtype="float32", name="accum_probe"
        )
        layer(tf.ones([2, 1]))
        return float(layer.losses[0]) > 1.5


LOGS_COUNT_EXAMPLES = IS_KERAS_3
"""Whether the log of the loss weights a replica by the examples in its inputs; in Keras 2, by those in its outputs."""


def loss_trackers(model: tf.keras.Model) -> List[Any]:
    """Return the metrics that track the compiled losses of a model."""
    if IS_KERAS_3:
        own = [getattr(model, "_loss_tracker", None)]
        return [metric for metric in own if metric is not None] + list(getattr(model._compile_loss, "metrics", ()))
    return list(getattr(getattr(model, "compiled_loss", None), "metrics", ()))


def compiled_unless_eager(model: tf.keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` traced and compiled as Keras would its train function, or itself if the model runs eagerly."""
    if model.run_eagerly:
        return function
    options: Any = {"reduce_retracing": True} if VERSION >= (2, 9) else {"experimental_relax_shapes": True}
    if is_compiled_by_xla(model):
        options["jit_compile"] = True

    @run_as_written
    def call(*args: Any) -> Any:
        return called_as_in_fit(run_as_written(function), *args)

    return tf.function(call, **options)


def steps_per_execution(model: tf.keras.Model) -> int:
    """The number of batches that one call of the train function takes."""
    if IS_KERAS_3:
        return int(model.steps_per_execution)
    steps = getattr(model, "_steps_per_execution", None)  # a variable; None on 2.2 and before `compile`
    return 1 if steps is None else int(steps.numpy())


def without_optionals(data: Any) -> Any:
    """Return the data of an iterator with None for what is missing, which Keras 3 wraps in an empty `Optional`."""
    if not IS_KERAS_3:
        return data
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)


def reduced_logs(model: tf.keras.Model, values: Sequence[Any]) -> Any:
    """Return one value of the logs for those of all replicas of this worker, as Keras' train function does."""
    if len(values) == 1:
        return values[0]
    if IS_KERAS_3:
        return tf.reduce_mean(tf.stack(values), axis=0)
    method = getattr(model, "distribute_reduction_method", "first")  # came with 2.11
    return tf.add_n(values) if method in ("auto", "sum") else values[0]


def count_batch(model: tf.keras.Model, name: str, waits: Any) -> None:
    """Advance a counter of batches that Keras 2 keeps since 2.4, after `waits`."""
    counter = getattr(model, name, None)
    if counter is not None and not IS_KERAS_3:
        with tf.control_dependencies([wait for wait in tf.nest.flatten(waits) if tf.is_tensor(wait)]):
            counter.assign_add(1)


def seeds_of(model: tf.keras.Model) -> List[Any]:
    """Return the variables of a model that seed random numbers, in Keras 3."""
    return [var for var in model.variables if "seed_generator" in getattr(var, "path", "")] if IS_KERAS_3 else []


HAS_SEED_WITHOUT_MODEL = IS_KERAS_3
"""Whether Keras has a variable from which it seeds what is drawn without a seed."""


def seeds_without_model() -> List[Any]:
    """Return that variable, if anything has been drawn so."""
    if not HAS_SEED_WITHOUT_MODEL:
        return []
    state = importlib.import_module("keras.src.backend.common.global_state")
    generator = state.get_global_attribute("global_seed_generator")
    return [] if generator is None else [generator.state]


def may_draw(model: tf.keras.Model) -> bool:
    """Whether a model has layers of Keras that draw random numbers in training."""
    rates = ("rate", "dropout", "recurrent_dropout", "stddev")
    return bool(seeds_of(model)) or any(getattr(layer, name, None) for layer in layers_of(model) for name in rates)


def state_of(model: tf.keras.Model) -> List[Any]:
    """Return the variables that a forward pass in training may change: statistics, metrics, the state of randomness."""
    variables = list(model.non_trainable_variables)
    variables += [var for metric in model.metrics for var in metric.variables]
    return variables + generators_of(model)


def generators_of(model: tf.keras.Model) -> List[Any]:
    """Return the states of the random generators of layers in Keras 2: of augmentation and recurrent dropout."""
    if IS_KERAS_3:
        return []
    layers = layers_of(model)
    generators = [getattr(getattr(layer, "_random_generator", None), "_generator", None) for layer in layers]
    generators += [getattr(layer, "_rng", None) for layer in layers]  # dies with 2.7
    return [generator.state for generator in generators if generator is not None]


def metrics_of_layers(model: tf.keras.Model) -> List[Any]:
    """Return the metrics that a model and its layers keep, as attributes or by `add_metric`."""
    listed = [metric for layer in [model] + layers_of(model) for metric in getattr(layer, "_metrics", None) or ()]
    return list({id(metric): metric for metric in listed}.values())


def added_losses(model: tf.keras.Model) -> List[Any]:
    """Return the losses that layers have added in their latest calls: all but the regularization of weights."""
    layers = [model] + layers_of(model)
    if IS_KERAS_3:
        return [loss for layer in layers for loss in layer._get_own_losses()]
    return [loss for layer in layers for loss in getattr(layer, "_eager_losses", ())]


@contextlib.contextmanager
def setting_back_layers(model: tf.keras.Model) -> Iterator[None]:
    """Let layers have the losses and seeds again, after this context, that Python code has changed in it."""
    layers = [model] + layers_of(model)
    losses = [(layer, list(layer._eager_losses)) for layer in layers if hasattr(layer, "_eager_losses")]
    held: List[Any] = [getattr(layer, "_random_generator", None) for layer in layers]  # has no public name
    seeds = [(one, one._seed) for one in held if hasattr(one, "_seed")]
    try:
        with keeping_added_losses(model):
            yield
    finally:
        for layer, before in losses:
            layer._eager_losses[:] = before
        for generator, seed in seeds:
            generator._seed = seed


@contextlib.contextmanager
def keeping_added_losses(model: tf.keras.Model) -> Iterator[None]:
    """Let layers have the losses again, after this context, that this replica has added before it.

    Where a replica waits for others, those run, each in a thread of its own. In Keras 3, the threads share a list of
    the losses of a layer, and a call clears it; in Keras 2, each has its own.
    """
    layers = [model] + layers_of(model) if IS_KERAS_3 else []
    before = [(layer, layer._get_own_losses()) for layer in layers]
    yield
    for layer, losses in before:
        layer._losses.clear()
        layer._losses.extend(losses)


def is_summed(loss: Any) -> bool:
    """Whether Keras adds up a loss that a layer has added, which may have one entry for each example."""
    return tf.TensorShape(getattr(loss, "shape", ())).rank != 0
