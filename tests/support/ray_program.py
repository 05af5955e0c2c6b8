"""A program for Ray Train: two workers, a report of each update, and a checkpoint after each epoch.

`make_trainer(epochs=3, storage_path="/shared/runs").fit()` starts it. Every worker runs `train_on_worker`. After a
failure, Ray starts all of them again, and they continue from the last checkpoint, also in the middle of a cycle. All
workers must report equally often, as they do here: each has the rows of all workers at the end of each epoch.
"""

import tempfile

import tensorflow as tf
from ray import train
from ray.train.tensorflow import TensorflowTrainer

import accum


def make_model():  # as for one machine
    inputs = tf.keras.Input((5,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    model = accum.GradientAccumulateModel.from_model(model, accum_steps=4)
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    return model


def make_dataset():  # batches of all workers together
    x, y = tf.random.stateless_normal([96, 5], [1, 2]), tf.random.stateless_normal([96, 1], [3, 4])
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(12)


class ReportEpoch(tf.keras.callbacks.Callback):
    """Hands what training needs to go on to Ray after each epoch. All workers write; Ray keeps the first one's."""

    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint = checkpoint

    def on_epoch_end(self, epoch, logs=None):
        self.checkpoint.epoch.assign(epoch + 1)
        with tempfile.TemporaryDirectory() as folder:
            self.checkpoint.write(folder + "/state")
            is_first = train.get_context().get_world_rank() == 0
            kept = train.Checkpoint.from_directory(folder) if is_first else None
            train.report({"epoch": epoch + 1}, checkpoint=kept)


def train_on_worker(config):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow; Ray has set TF_CONFIG
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = make_dataset().with_options(options)
    with strategy.scope():
        model = make_model()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, epoch=tf.Variable(0))
    if train.get_checkpoint():
        with train.get_checkpoint().as_directory() as folder:
            checkpoint.restore(folder + "/state")
    logger = accum.StepLogger(on_step=train.report, verbose=0)
    begin = int(checkpoint.epoch.numpy())
    model.fit(dataset, initial_epoch=begin, epochs=config["epochs"], callbacks=[logger, ReportEpoch(checkpoint)])


def make_trainer(epochs, storage_path):
    return TensorflowTrainer(
        train_on_worker,
        train_loop_config={"epochs": epochs},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=storage_path, failure_config=train.FailureConfig(max_failures=1)),
    )
