"""One worker of a `MultiWorkerMirroredStrategy`, run by test_workers.py: `worker.py {task as JSON}`.

It prints one line of JSON: the weights and the number of steps made.
"""

import json
import os
import signal
import sys
from unittest import mock

import numpy as np
import tensorflow as tf
from replicas import look_often_for_the_end_of_replicas
from versions import IS_KERAS_3
from worker_problems import (
    CYCLES,
    normalised_network,
    outcome,
    problem,
    products_before_sums,
    sharded,
    tall_network,
    trained_tall,
    trained_with_validation,
)

import accum

TASK = json.loads(sys.argv[1])
INDEX, WORKERS = TASK["index"], len(TASK["addresses"])
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": TASK["addresses"]}, "task": {"type": "worker", "index": INDEX}}
)

RUN = "run" if hasattr(tf.distribute.Strategy, "run") else "experimental_run_v2"
STRATEGY = getattr(tf.distribute, "MultiWorkerMirroredStrategy", None) or (
    tf.distribute.experimental.MultiWorkerMirroredStrategy
)
BACKUP = getattr(tf.keras.callbacks, "BackupAndRestore", None) or (  # since 2.3
    getattr(getattr(tf.keras.callbacks, "experimental", None), "BackupAndRestore", None)
)
K = 3


def shares(count):
    """Return the number of examples that each worker gets of a micro-batch of 12."""
    return {2: [9, 3], 3: [5, 7, 0]}[count]


def folder_of(name):
    """Return the path where this worker saves: all workers must save, but only the first one's files are used."""
    return os.path.join(TASK["folder"], name if INDEX == 0 else f"{name}-{INDEX}")


def die_at(micro_step):
    if TASK.get("dies_at") == micro_step:
        os.kill(os.getpid(), signal.SIGKILL)


def loop_saved_each(strategy):
    return loop(strategy, saved_every=1)


def loop(strategy, saved_every=2):
    """Run a custom loop, weighted by examples, with a checkpoint after every two micro steps, or each."""
    x, y, first = problem()
    with strategy.scope():
        weights = tf.Variable(first)
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.Adam(0.1), accum_steps=K)
        at = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(weights=weights, optimizer=optimizer, at=at)
        latest = tf.train.latest_checkpoint(os.path.join(TASK["folder"], "at"))
        if latest:
            checkpoint.restore(latest)
    manager = tf.train.CheckpointManager(checkpoint, folder_of("at"), max_to_keep=2)

    def micro_step(x_now, y_now):
        count = tf.shape(x_now)[0]
        with tf.GradientTape() as tape:
            # Each replica's mean is scaled by 1 / replicas, as in Keras.
            loss = tf.reduce_sum((x_now @ weights - y_now) ** 2) / tf.cast(tf.maximum(count, 1), tf.float32) / WORKERS
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)], weight=count)

    spec = tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1])
    run = tf.function(lambda a, b: getattr(strategy, RUN)(micro_step, args=(a, b)), input_signature=spec)
    before = sum(shares(WORKERS)[:INDEX])
    for number in range(int(at.numpy()), 6):
        die_at(number + 0.5)
        start = 12 * number + before
        part = slice(start, start + shares(WORKERS)[INDEX])
        run(x[part], y[part])
        at.assign(number + 1)
        die_at(number + 1)
        if not (number + 1) % saved_every:
            manager.save()
    return weights, optimizer


def fit(strategy, last_cycle="carry"):
    """Run `fit` of the model, with backups. Cycles of 3 continue after the end of an epoch of 4 micro-batches."""
    x, y, first = problem()
    x, y = x[:24], y[:24]
    with strategy.scope():
        inputs = tf.keras.Input((5,))
        outputs = tf.keras.layers.Dense(1, use_bias=False)(inputs)
        model = accum.GradientAccumulateModel(K, inputs=inputs, outputs=outputs, last_cycle=last_cycle)
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        model.set_weights([first])
    data = sharded(tf.data.Dataset.from_tensor_slices((x, y)).batch(6).repeat())
    made = []
    die = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: (made.append(1), die_at(len(made))))
    # With Keras 3, each worker writes a backup.
    backup = folder_of("backup") if IS_KERAS_3 else os.path.join(TASK["folder"], "backup")
    callbacks = [BACKUP(backup), die]
    model.fit(data, epochs=3, steps_per_epoch=4, verbose=0, callbacks=callbacks)
    return model.weights[0], model.optimizer


def epochs(strategy):
    """Run the same with cycles that end with each epoch."""
    return fit(strategy, "flush")


def micro_batches(strategy):
    """Run `fit` with `micro_batch_size="auto"`, where only the last worker has too little memory."""
    x, y, first = problem()

    def allocate(count):
        if int(count) > (7 if INDEX == WORKERS - 1 else 100):
            raise MemoryError("injected")
        return np.int32(count)

    def guarded(tensor):
        with tf.control_dependencies([tf.py_function(allocate, [tf.shape(tensor)[0]], tf.int32)]):
            return tf.ensure_shape(tf.identity(tensor), [None, 5])

    with strategy.scope():
        inputs = tf.keras.Input((5,))
        outputs = tf.keras.layers.Dense(1, use_bias=False)(tf.keras.layers.Lambda(guarded)(inputs))
        model = accum.GradientAccumulateModel(micro_batch_size="auto", inputs=inputs, outputs=outputs)
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        model.set_weights([first])
    data = sharded(tf.data.Dataset.from_tensor_slices((x, y)).batch(36).repeat())
    model.fit(data, epochs=1, steps_per_epoch=2, verbose=0)
    assert model.micro_batch_size == 4, model.micro_batch_size  # of the 18 of each worker, on all of them
    return model.weights[0], model.optimizer


def unequal_parts(strategy):
    """Run `fit` with `micro_batch_size="auto"`, where only the first worker's part of the second batch is larger."""
    x, y, first = problem()
    with strategy.scope():
        inputs = tf.keras.Input((5,))
        outputs = tf.keras.layers.Dense(1, use_bias=False)(inputs)
        model = accum.GradientAccumulateModel(micro_batch_size="auto", inputs=inputs, outputs=outputs)
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        model.set_weights([first])
    for batch in (slice(0, 7), slice(7, 16), slice(16, 26), slice(26, 37)):
        part = sharded(tf.data.Dataset.from_tensor_slices((x[batch], y[batch])).batch(batch.stop - batch.start))
        model.fit(part, epochs=1, steps_per_epoch=1, verbose=0)
    assert model.micro_batch_size == "auto", model.micro_batch_size
    return model.weights[0], model.optimizer


def whole_batch(strategy):
    """Run `fit` with the batch normalisation of the whole batch of all workers, and validation."""
    with strategy.scope():
        net = normalised_network()
        model = accum.GradientAccumulateModel.from_model(net, micro_batch_size=4, whole_batch="all")
        model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return tf.constant(outcome(model, trained_with_validation(model))), model.optimizer


def overlapped(strategy):
    """Run `fit` while gradients are summed over workers as they are computed. Returns the weights of each way."""
    outcomes = []
    for make_network, accum_steps, is_static in CYCLES.values():
        with strategy.scope():
            model = accum.GradientAccumulateModel.from_model(
                make_network(), accum_steps, micro_batch_size=4, last_cycle="flush"
            )
            model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        outcomes.append(trained_tall(model, is_static))
    return tf.concat(outcomes, 0), model.optimizer


def sums_of_packs(strategy):
    """Trace a step of `fit` for packs of one gradient each. Returns how many products each sum waits for."""
    with strategy.scope():
        model = accum.GradientAccumulateModel.from_model(tall_network(), micro_batch_size=4)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", **({"jit_compile": False} if IS_KERAS_3 else {}))
    x, y, _ = problem()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(24, drop_remainder=True).repeat()
    step = tf.function(lambda batch: getattr(strategy, RUN)(model.train_step, args=(batch,)))
    batch = next(iter(strategy.experimental_distribute_dataset(sharded(data))))
    step(batch)  # which creates all variables
    counts = []
    for size in (1, 0):  # 0: TensorFlow's own, one pack
        with mock.patch("accum._tf.strategies.PACK_BYTES", size):
            counts.append(products_before_sums(tf.function(step.python_function), batch))
    return tf.constant(counts[:1] + [counts[1] + [-1] * (len(counts[0]) - len(counts[1]))]), model.optimizer


def logged(strategy):
    """Run `fit` under a `StepLogger`, whose rows the job returns instead of weights."""
    x, y, first = problem()
    with strategy.scope():
        inputs = tf.keras.Input((5,))
        outputs = tf.keras.layers.Dense(1, use_bias=False)(inputs)
        model = accum.GradientAccumulateModel(K, micro_batch_size=2, inputs=inputs, outputs=outputs)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
        model.set_weights([first])
    rows = []
    logger = accum.StepLogger(os.path.join(TASK["folder"], "steps.csv"), verbose=0, on_step=rows.append)
    data = sharded(tf.data.Dataset.from_tensor_slices((x, y)).batch(12).repeat())
    model.fit(data, epochs=2, steps_per_epoch=6, verbose=0, callbacks=[logger])
    assert rows == [dict(zip(logger.history, values)) for values in zip(*logger.history.values())]
    return tf.constant([list(row.values()) for row in rows]), model.optimizer


if __name__ == "__main__":
    look_often_for_the_end_of_replicas()
    jobs = {
        "loop": loop,
        "loop_saved_each": loop_saved_each,
        "fit": fit,
        "epochs": epochs,
        "micro_batches": micro_batches,
        "unequal_parts": unequal_parts,
        "whole_batch": whole_batch,
    }
    jobs.update({"logged": logged, "overlapped": overlapped, "sums_of_packs": sums_of_packs})
    weights, optimizer = jobs[TASK["what"]](STRATEGY())
    print(json.dumps([np.ravel(weights.numpy()).tolist(), int(optimizer.iterations.numpy())]), flush=True)
