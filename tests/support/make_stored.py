"""Store a run in each kind of file that accum writes or adds to, for every later version to read (test_stored.py).

    python tests/support/make_stored.py FOLDER      such as tests/support/stored/2.15; it must not exist

The folder holds what the TensorFlow that runs this can write, and `run.json`: the numbers that the run was given, and
those with which it ends by NumPy on full batches. A file is written within the second cycle, unless its format
leaves out an unfinished cycle. Readers take everything but the code from the folder, so the numbers of a new folder may
be others.
"""

import contextlib
import json
import os
import shutil
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from make_golden import gradients, make_problem
from optimizers import legacy_family, new_family
from replicas import RUN, make_cpus, mirrored
from versions import HAS_KERAS_API, IS_KERAS_3, TF_VERSION

import accum
import accum.compat.v1
import accum.testing

tf1 = tf.compat.v1

K, STEPS, STOP = 3, 3, 5  # micro steps per cycle, steps, micro steps before the file: 2 of the second cycle
SIZE = 4  # examples per micro-batch of the model: K of them are half of the 24 examples
ADAM = {"learning_rate": 0.02, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-3}
OPTIONS = {"reduction": "mean", "nonfinite": "skip_micro", "last_cycle": "carry"}


# ----------------------------------------------------------------------------------------------------------------
# The oracle: full batches, in NumPy and float64


class Adam:
    """Kingma and Ba 2015, in the form given at the end of section 2 (epsilon hat)."""

    def __init__(self, weights):
        self.weights, self._t = weights, 0
        self._m, self._v = ([np.zeros_like(w) for w in weights] for _ in range(2))

    def step(self, grads):
        self._t += 1
        rate = ADAM["learning_rate"] * np.sqrt(1.0 - ADAM["beta_2"] ** self._t) / (1.0 - ADAM["beta_1"] ** self._t)
        self._m = [ADAM["beta_1"] * m + (1.0 - ADAM["beta_1"]) * g for m, g in zip(self._m, grads)]
        self._v = [ADAM["beta_2"] * v + (1.0 - ADAM["beta_2"]) * g**2 for v, g in zip(self._v, grads)]
        moved = [rate * m / (np.sqrt(v) + ADAM["epsilon"]) for m, v in zip(self._m, self._v)]
        self.weights = [w - d for w, d in zip(self.weights, moved)]


def make_run():
    """Make the numbers of a run: what it is given, and what it ends with."""
    random, problem = np.random.RandomState(34), make_problem()
    decimals = lambda *shape: np.round(random.normal(size=shape), 3).tolist()
    run = {"tensorflow": tf.__version__, "accum": accum.__version__, "accum_steps": K, "stop": STOP, "adam": ADAM}
    run["options"] = OPTIONS
    run["fed"] = {
        "start": [decimals(3, 2), decimals(5, 2)],
        # two rows of the second variable in each micro step; the second cycle begins with the first one's row 0 alone
        "dense": [decimals(3, 2) for _ in range(K * STEPS)],
        "rows": [[0, 1], [1, 3], [3, 3], [0, 0], [2, 4], [4, 0], [1, 2], [1, 2], [3, 4]],
        "values": [decimals(2, 2) for _ in range(K * STEPS)],
    }
    run["model"] = {"start": problem["weights"], "x": problem["x"], "y": problem["y"]}
    run["fed"]["steps"] = _steps_of_fed(run["fed"])
    run["model"]["steps"] = _steps_of_model(run["model"])
    return run


def _steps_of_fed(fed):
    oracle, steps = Adam([np.array(w) for w in fed["start"]]), []
    for first in range(0, K * STEPS, K):
        table = np.zeros((5, 2))
        for rows, values in zip(fed["rows"][first:][:K], fed["values"][first:][:K]):
            np.add.at(table, rows, np.array(values))
        oracle.step([np.mean(fed["dense"][first:][:K], axis=0), table / K])
        steps.append([w.tolist() for w in oracle.weights])
    return steps


def _steps_of_model(model):
    oracle, steps = Adam([np.array(w) for w in model["start"]]), []
    x, y = np.array(model["x"]), np.array(model["y"])
    for step in range(STEPS):
        batch = slice(K * SIZE * (step % 2), K * SIZE * (step % 2 + 1))
        oracle.step(gradients(oracle.weights, x[batch], y[batch]))
        steps.append([w.tolist() for w in oracle.weights])
    return steps


# ----------------------------------------------------------------------------------------------------------------
# Gradients that are fed, one dense and one sparse: a Session, an optimizer of Keras, a recording


def _share(dense, values, replicas):
    """What a replica gives: its share of the dense gradient, and one of two rows."""
    if replicas == 1:
        return dense, slice(None)
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    number = tf.cast(number, tf.int32)
    return dense * tf.cast(number + 1, tf.float32) / 3.0, slice(number, number + 1)


def session(run, restore=None, save=None, replicas=1):
    """Run the half before or after the file in a static graph, with its `Saver`. Returns the weights."""
    fed, strategy = run["fed"], mirrored() if replicas > 1 else None
    config = tf1.ConfigProto(device_count={"CPU": 2})
    with tf.Graph().as_default(), tf1.Session(config=config) as session:
        placeholders = [
            tf1.placeholder(tf.float32),
            tf1.placeholder(tf.int32, [2]),
            tf1.placeholder(tf.float32, [2, 2]),
        ]
        with strategy.scope() if strategy else contextlib.ExitStack():
            first = [np.full_like(w, 7.0) if restore else np.array(w) for w in fed["start"]]
            make = lambda name, value: tf1.get_variable(
                name, initializer=value.astype("float32"), use_resource=replicas > 1
            )
            variables = [make(name, value) for name, value in zip(["dense", "table"], first)]
            step = tf1.train.get_or_create_global_step()
            inner = tf1.train.AdamOptimizer(*map(run["adam"].get, ["learning_rate", "beta_1", "beta_2", "epsilon"]))
            optimizer = accum.compat.v1.AccumOptimizer(inner, run["accum_steps"])

        def micro_step():
            dense, part = _share(tf.reshape(placeholders[0], [3, 2]), placeholders[2], replicas)
            sparse = tf.IndexedSlices(placeholders[2][part], placeholders[1][part], tf.constant([5, 2]))
            return optimizer.apply_gradients([(dense, variables[0]), (sparse, variables[1])], step)

        done = getattr(strategy, RUN)(micro_step) if strategy else micro_step()
        train_op = tf.group(*strategy.experimental_local_results(done)) if strategy else done
        saver = tf1.train.Saver()
        session.run(tf1.global_variables_initializer())
        if restore:
            saver.restore(session, restore)
        for number in after(run) if restore else before(run):
            session.run(train_op, dict(zip(placeholders, [fed[name][number] for name in ("dense", "rows", "values")])))
        if save:
            saver.save(session, save, write_meta_graph=False, write_state=False)
        return session.run(variables)


def before(run):
    """The numbers of the micro steps before the file was written."""
    return range(run["stop"])


def after(run):
    """The numbers of the micro steps after the file was written."""
    return range(run["stop"], len(run["fed"]["rows"]))


def everything(run):
    return range(len(run["fed"]["rows"]))


def variable(value, name):
    """Create a variable. Keras 3 only gives its own class a name that it can be found by."""
    if IS_KERAS_3:
        return tf.keras.Variable(value, dtype="float32", name=name)
    return tf.Variable(value, dtype=tf.float32, name=name)


class OptimizerRun:
    """Two variables, their optimizer of Keras, and the object-based checkpoint of both.

    Args:
      run: the numbers.
      make: a function that returns the accumulating optimizer; None: one with the Adam of `module`.
      is_new: whether the variables have the values with which the run starts, rather than some that it never has.
    """

    def __init__(self, run, module=None, replicas=1, make=None, is_new=True):
        self._fed, self._replicas = run["fed"], replicas
        self._strategy = strategy = mirrored() if replicas > 1 else None
        with strategy.scope() if strategy else contextlib.ExitStack():
            first = [np.array(w) if is_new else np.full_like(w, 7.0) for w in run["fed"]["start"]]
            self.variables = [variable(value, name) for value, name in zip(first, ["dense", "table"])]
            self.optimizer = make() if make else accumulating(run, module)
        self.checkpoint = tf.train.Checkpoint(variables=self.variables, optimizer=self.optimizer)
        on_replicas = lambda *args: strategy.run(self._micro_step, args=args)
        self._take = tf.function(on_replicas) if strategy else self._micro_step

    def _micro_step(self, gradient, rows, values):
        gradient, part = _share(gradient, values, self._replicas)
        sparse = tf.IndexedSlices(values[part], rows[part], tf.constant([5, 2]))
        self.optimizer.apply_gradients(list(zip([gradient, sparse], self.variables)))

    def restore(self, path):
        with self._strategy.scope() if self._strategy else contextlib.ExitStack():
            self.checkpoint.restore(path)
        return self

    def feed(self, numbers):
        for number in numbers:
            self._take(*[tf.constant(self._fed[name][number]) for name in ("dense", "rows", "values")])
        return self

    def values(self):
        return [var.numpy() for var in self.variables]


def accumulating(run, module, **options):
    return accum.GradientAccumulateOptimizer(module.Adam(**run["adam"]), run["accum_steps"], **options)


def record(path, steps):
    """Record those steps in a file."""
    with accum.testing.record(path) as recorder:
        for weights in steps:
            weights = [np.array(w, "float32") for w in weights]
            recorder.step(loss=np.mean(weights[0]), variables=dict(zip(["dense", "table"], weights)))


# ----------------------------------------------------------------------------------------------------------------
# A model: checkpoints, whole files and configs


def make_model(run, module=None):
    """Make the model of the golden trajectories, accumulating and compiled."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((5,), name="inputs")
    hidden = layers.Dense(4, "tanh", name="hidden")(inputs)
    plain = tf.keras.Model(inputs, layers.Dense(3, name="outputs")(hidden), name="model")
    return compiled(run, accum.GradientAccumulateModel.from_model(plain, run["accum_steps"], **OPTIONS), module)


def compiled(run, model, module=None):
    """Compile `model` with an optimizer of `module`, or of the default module."""
    optimizer = (module or tf.keras.optimizers).Adam(**run["adam"])
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(run, model, numbers):
    """Give the model those micro-batches. Returns its weights."""
    x, y = np.array(run["model"]["x"], "float32"), np.array(run["model"]["y"])
    for number in numbers:
        part = slice(number * SIZE % len(x), number * SIZE % len(x) + SIZE)
        model.train_on_batch(x[part], y[part])
    return [np.array(w) for w in model.get_weights()]


def started(run, module=None):
    """Make the model, with the weights with which the run starts."""
    model = make_model(run, module)
    model.set_weights([np.array(w) for w in run["model"]["start"]])
    return model


def pack(path):
    """Replace a file or folder by a ZIP file: those of a whole model are large."""
    folder, name = os.path.split(path)
    shutil.make_archive(path, "zip", folder, name)
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


# ----------------------------------------------------------------------------------------------------------------


def families():
    """Return {name of a kind of checkpoints: the module of this version's optimizers that have it}."""
    families = {"keras-3": tf.keras.optimizers} if IS_KERAS_3 else {"legacy": legacy_family(), "new": new_family()}
    return {name: module for name, module in families.items() if module is not None and HAS_KERAS_API}


def store(folder):
    os.makedirs(folder)
    run, at = make_run(), lambda name: os.path.join(folder, name)
    with open(at("run.json"), "w") as file:
        file.write(json.dumps(run) + "\n")
    record(at("recording.json"), run["fed"]["steps"])
    session(run, save=at("session"))
    session(run, save=at("session-replicas"), replicas=2)
    for name, module in families().items():
        for replicas, ending in ((1, ""), (2, "-replicas")):
            of_optimizer = OptimizerRun(run, module, replicas).feed(before(run))
            of_optimizer.checkpoint.write(at("optimizer-" + name + ending))
        model = started(run, module)
        train(run, model, before(run))
        tf.train.Checkpoint(model=model).write(at("model-" + name))
    if HAS_KERAS_API:
        store_models(run, at)


def store_models(run, at):
    model = started(run)
    train(run, model, range(K))
    optimizer = accumulating(run, tf.keras.optimizers, reduction="mean", nonfinite="skip_micro", name="mine")
    for name, config in (("optimizer", tf.keras.optimizers.serialize(optimizer)), ("model", model.get_config())):
        with open(at(name + "-config.json"), "w") as file:
            file.write(json.dumps(config, default=float, indent=1) + "\n")
    names = []
    if not IS_KERAS_3:  # Keras 3 exports inference alone, and does not read an optimizer's state from H5
        names += ["model.h5", "saved-model"]
    if TF_VERSION >= (2, 13):  # 2.12 writes H5 under that name
        names += ["model.keras"]
    for name in names:
        model.save(at(name))
        pack(at(name))


if __name__ == "__main__":
    make_cpus()
    warnings.simplefilter("ignore")
    store(sys.argv[1])
