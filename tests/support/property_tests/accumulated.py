"""Train the model of a case with accumulation."""

import gc
import os
import tempfile
import warnings
import weakref
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
import tensorflow as tf
from replicas import mirrored
from versions import IS_KERAS_3

import accum
from property_tests import models, plain


class Seen(NamedTuple):
    """What accumulation does.

    Attributes:
      states: (number of steps, weights) after each batch.
      logs: of each batch, or with `fit` of each epoch.
      evaluated: what `evaluate` returns after that.
      predicted: the outputs that `predict` returns.
      references: weak references to the models, their optimizers and weights.
      warned: the messages of warnings.
    """

    states: List[Tuple[int, List[Any]]]
    logs: List[Dict[str, float]]
    evaluated: Dict[str, float]
    predicted: Any
    references: List[Any]
    warned: List[str]


def run(case, batches) -> Seen:
    """Train, evaluate and predict."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = _Training(case)
        with tempfile.TemporaryDirectory() as folder:  # Keras restores slots when it creates them
            path = os.path.join(folder, "run")
            states, logs = training.fit(batches, path) if case["how"] == "fit" else training.train(batches, path)
            outlook = outlook_of(case, training.model, batches)
        references = training.references + _references(training.model)
    warned = [str(warning.message) for warning in caught if "accum" in str(warning.category) + warning.filename]
    return Seen(states, logs, outlook[0], outlook[1], references, warned)


def outlook_of(case, model, batches):
    """Return what `evaluate` and `predict` of a model return for the batches, from the first states on."""
    filled = [batch for batch, size in zip(batches, case["sizes"]) if size]
    if not filled:
        return {}, np.zeros(0)
    evaluated, predicted = {}, np.zeros(0)
    if "evaluate" in case["then"]:
        _set_states(model, None)
        evaluated = model.evaluate(dataset_of(case, filled), verbose=0, return_dict=True)
    if "predict" in case["then"]:
        _set_states(model, None)
        predicted = model.predict(dataset_of(case, filled).map(lambda x, *others: (x,)), verbose=0)
    return evaluated, predicted


def left_alive(references):
    """Return what is not freed although it was dropped."""
    gc.collect()
    return sorted({type(reference()).__name__ for reference in references if reference() is not None})


def _references(model):
    return [weakref.ref(part) for part in [model, model.optimizer] + list(model.layers)]


class _Training:
    """A model in training, which may be saved and go on in new objects."""

    def __init__(self, case):
        self._case, self.references = case, []
        self.model = self._new()

    def _new(self):
        case = self._case
        self._strategy = _strategy(case["strategy"])
        with self._strategy.scope():
            model = accum.GradientAccumulateModel.from_model(models.model_of(case), **case["options"])
            return plain.compiled(case, model, case["is_traced"])

    def _resume(self, path):
        """Save the run, and go on in new objects. Keras does not save the states of layers, so they are copied."""
        path = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer).save(path)
        states = [[var.numpy() for var in layer.states] for layer in _stateful(self.model)]
        self.references += _references(self.model)
        self.model = self._new()
        self.model.set_weights([np.zeros_like(weight) for weight in self.model.get_weights()])
        with self._strategy.scope():
            tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer).restore(path)
        _set_states(self.model, states)

    def train(self, batches, path):
        states, logs = [], []
        for number, batch in enumerate(batches):
            x, y, weights = models.tensors(batch)
            options = {} if weights is None else {"sample_weight": weights}
            self.model.reset_metrics()
            logs.append(self.model.train_on_batch(x, y, return_dict=True, **options))
            if self._case["resume"] == number:
                self._resume(path)
            states.append(state_of(self.model))
        return states, logs

    def fit(self, batches, path):
        case, states, logs = self._case, [], []
        runs = [1, 1] if case["resume"] is not None else [case["epochs"]]
        for number, epochs in enumerate(runs):
            if number:
                self._resume(path)
            after = _AfterBatches()
            self.model.fit(dataset_of(case, batches), epochs=epochs, verbose=0, callbacks=[after])
            states, logs = states + after.states, logs + after.logs
        return states, logs


def _strategy(name):
    if name is None:
        return tf.distribute.get_strategy()
    return mirrored() if name == "mirrored" else tf.distribute.OneDeviceStrategy("CPU:1")


def _stateful(model):
    return [layer for layer in model.layers if getattr(layer, "stateful", False)]


def _set_states(model, states):
    for number, layer in enumerate(_stateful(model)):
        for index, var in enumerate(layer.states):
            var.assign(np.zeros_like(var.numpy()) if states is None else states[number][index])


def state_of(model):
    """Return the number of steps, and the weights."""
    optimizer = model.optimizer
    if IS_KERAS_3:  # up to Keras 3.8, a `LossScaleOptimizer` does not count
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return int(optimizer.iterations.numpy()), model.get_weights()


class _AfterBatches(tf.keras.callbacks.Callback):
    """Keeps the state after each batch; that after the last of an epoch includes what its end does."""

    def __init__(self):
        super().__init__()
        self.states, self.logs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.states.append(state_of(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.states[-1] = state_of(self.model)
        self.logs.append(dict(logs or {}))


def dataset_of(case, batches):
    """Return a dataset of batches."""
    if case["is_ragged"] or len({size for size in case["sizes"] if size}) == 1:
        whole = models.tensors(_as_tuples(models.joined(batches)))
        return tf.data.Dataset.from_tensor_slices(whole).batch(max(case["sizes"]), drop_remainder=case["is_stateful"])
    tensors = [_as_tuples(batch) for batch in batches]
    types = tf.nest.map_structure(lambda leaf: tf.as_dtype(leaf.dtype), tensors[0])
    shapes = tf.nest.map_structure(lambda leaf: tf.TensorShape((None,) + leaf.shape[1:]), tensors[0])
    return tf.data.Dataset.from_generator(lambda: iter(tensors), types, shapes)


def _as_tuples(batch):
    x, y, weights = [tuple(part) if isinstance(part, list) else part for part in batch]
    return (x, y) if weights is None else (x, y, weights)
