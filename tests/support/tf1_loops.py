"""TF 1 loops with the behaviour of TF 2 switched off; test_graph_loops.py runs this in its own process."""

import json
import logging
import os
import sys

import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_v2_behavior()
sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "graph"))

import test_graph_loops as loops  # noqa: E402
import tf_slim as slim  # noqa: E402
from tensorflow.python.training import training_util  # noqa: E402

FOLDER = sys.argv[1]


class Record(logging.Handler):
    """Keeps the log messages of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.lines = []
        tf1.logging.set_verbosity(tf1.logging.INFO)
        tf.get_logger().addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def count(self, text):
        return sum(text in line for line in self.lines)


def train_by_slim():
    record = Record()
    with tf.Graph().as_default():
        tf1.train.get_or_create_global_step()
        x, y = tf1.data.make_one_shot_iterator(loops.micro_batches()).get_next()
        _, loss = loops.squares(x, y)
        train_op = slim.learning.create_train_op(loss, loops.wrapped())
        slim.learning.train(train_op, FOLDER + "/slim", number_of_steps=4, log_every_n_steps=1)
    reader = tf1.train.load_checkpoint(FOLDER + "/slim")
    names = ("w", "global_step", "AccumOptimizer/micro_step")
    return dict({name: reader.get_tensor(name).tolist() for name in names}, logged=record.count("global step"))


def warnings_of_a_cycle(folder, optimizer, **options):
    """Count the warnings of `MonitoredTrainingSession` in one long cycle that the global step has not increased."""
    record = Record()
    with tf.Graph().as_default():
        tf1.train.get_or_create_global_step()
        read = training_util._get_or_create_global_step_read()
        with tf.control_dependencies([read]):  # or the hook would read the step beside the op that moves it
            _, _, train_op = loops.graph(optimizer)
        with tf1.train.MonitoredTrainingSession(checkpoint_dir=FOLDER + folder, **options) as session:
            for _ in range(60):
                session.run(train_op)
    return record.count("has not been increased")


results = {"slim": train_by_slim()}
results["warned"] = {  # TensorFlow limits the warnings per process, so the run that has to warn comes last
    "count_micro_steps": warnings_of_a_cycle("/counting", loops.wrapped(64, count_micro_steps=True)),
    "log_step_count_steps=None": warnings_of_a_cycle("/silent", loops.wrapped(64), log_step_count_steps=None),
    "as it comes": warnings_of_a_cycle("/plain", loops.wrapped(64)),
}
print(json.dumps(results))
