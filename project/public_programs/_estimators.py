"""Run a program through its `model_fn` and an `Estimator` or a `TPUEstimator`, on full batches and accumulating."""

import contextlib
import os
import shutil
import signal
import tempfile
import warnings

import numpy as np

from accum.testing import order_updates
from accum.testing._order import unordered_variables
from public_programs import PROGRAMS
from public_programs._program import MICRO, STEPS, K, tf1
from public_programs._trees import furthest, imported_from, messages_of, only, summed_rows

DATA = {}  # by program: made-up data, drawn once
KILLED = K * STEPS // 2 + 1


class Losses(tf1.train.SessionRunHook):
    """Keeps the loss of each run."""

    def __init__(self, tensors):
        self.values = []
        self._tensors = tensors

    def before_run(self, _):
        return tf1.train.SessionRunArgs(self._tensors[-1])

    def after_run(self, _, values):
        self.values.append(values.results)


class Killer(tf1.train.SessionRunHook):
    def __init__(self):
        self._runs = 0

    def after_run(self, *_):
        self._runs += 1
        if self._runs == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


class Program:
    """A program's estimator in a folder of its own.

    Args:
      name: the program.
      tree: from which it is imported.
      accum_steps: 1 for full batches.
      is_ordered: whether the updates of its train op are ordered, and rows of embeddings summed before they are
        clipped.
      start: path of the checkpoint to start from.
      folder: where checkpoints are; made if left out.
    """

    def __init__(self, name, tree, accum_steps, is_ordered=False, start=None, folder=None):
        self.folder = folder or tempfile.mkdtemp()
        if start is not None:
            copy_checkpoint(start, self.folder)
        self._losses, self.unordered, self.warned = [], [], []
        if name not in DATA:
            with imported_from(tree):
                DATA[name] = PROGRAMS[name].run()[0]
        self.data = DATA[name]

        def model_fn(features, labels, mode, params):
            with contextlib.ExitStack() as stack:
                stack.enter_context(imported_from(tree))
                if is_ordered:
                    stack.enter_context(summed_rows())
                caught = stack.enter_context(warnings.catch_warnings(record=True))
                warnings.simplefilter("always", UserWarning)
                spec = PROGRAMS[name].run()[1](accum_steps)(features, labels, mode, params)
            self.warned += messages_of(caught)
            if mode == tf1.estimator.ModeKeys.TRAIN:
                self._losses.append(spec.loss)
                if accum_steps == 1:
                    self.unordered = unordered_variables(spec.train_op)
                    if is_ordered:
                        order_updates(spec.train_op)
            return spec

        self._size = K * MICRO // accum_steps
        options = {"model_dir": self.folder, "tf_random_seed": 0, "save_checkpoints_steps": 1}
        options.update(keep_checkpoint_max=None, log_step_count_steps=None)
        params = {"folder": self.folder}
        if PROGRAMS[name].estimator == "TPUEstimator":
            tpu, sizes = tf1.estimator.tpu, ("train_batch_size", "eval_batch_size", "predict_batch_size")
            self._estimator = tpu.TPUEstimator(
                model_fn, config=tpu.RunConfig(**options), params=params, use_tpu=False, **dict.fromkeys(sizes, 1)
            )
        else:
            self._estimator = tf1.estimator.Estimator(
                model_fn, config=tf1.estimator.RunConfig(**options), params=params
            )

    def _input(self, skipped=0, only_first=False):
        def input_fn(params=None):
            data = tf1.data.Dataset.from_tensor_slices(self.data)
            if only_first:  # a micro-batch of each full batch
                return data.batch(K * MICRO).map(lambda batch: {name: batch[name][:MICRO] for name in batch})
            return data.skip(skipped).batch(self._size)

        return input_fn

    def train(self, steps=STEPS, hooks=(), only_first=False):
        """Train up to a step, from the last checkpoint on. Returns the values after each step, and losses of runs."""
        losses = Losses(self._losses)
        self._estimator.train(self._input(self.skipped(), only_first), max_steps=steps, hooks=[losses, *hooks])
        saved = [f"{self.folder}/model.ckpt-{step}" for step in range(1, steps + 1)]
        return [values_in(path) if os.path.exists(path + ".index") else None for path in saved], losses.values

    def skipped(self):
        """Return how many examples a run that goes on from the last checkpoint has seen already."""
        latest = tf1.train.latest_checkpoint(self.folder)
        values = {"global_step": 0} if latest is None else values_in(latest)
        return int(K * MICRO * values["global_step"] + self._size * values.get("AccumOptimizer/micro_step", 0))

    def path(self, step=STEPS):
        return os.path.join(self.folder, f"model.ckpt-{step}")

    def evaluate(self, path):
        """Return metrics and predictions from a checkpoint."""
        metrics = self._estimator.evaluate(self._input(), steps=STEPS, checkpoint_path=path)
        predicted = list(self._estimator.predict(self._input(), checkpoint_path=path))
        predicted = [one if isinstance(one, dict) else {"output": one} for one in predicted]
        stacked = {name: np.stack([one[name] for one in predicted]) for name in predicted[0]}
        return {**{name: value for name, value in metrics.items() if name != "global_step"}, **stacked}

    def exports(self, path, expected):
        """Whether a SavedModel that the estimator exports from a checkpoint predicts what it does itself."""

        def receiver():
            fed = {name: tf1.placeholder(array.dtype, [None, *array.shape[1:]]) for name, array in self.data.items()}
            return tf1.estimator.export.ServingInputReceiver(fed, fed)

        folder = self._estimator.export_saved_model(tempfile.mkdtemp(), receiver, checkpoint_path=path)
        with tf1.Graph().as_default(), tf1.Session() as session:
            signature = tf1.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
            feed = {signature.inputs[name].name: array for name, array in self.data.items()}
            found = session.run({name: info.name for name, info in signature.outputs.items()}, feed)
        return all(np.allclose(found[name], expected[name], rtol=0, atol=1e-6) for name in found)


def copy_checkpoint(path, folder):
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(os.path.dirname(path)):
        if name.startswith(os.path.basename(path) + "."):
            shutil.copy(os.path.join(os.path.dirname(path), name), folder)
    with open(os.path.join(folder, "checkpoint"), "w") as file:
        file.write(f'model_checkpoint_path: "{os.path.basename(path)}"\n')


def values_in(path):
    reader = tf1.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def measure(name, trees, killed_and_resumed):
    """What a program that runs through an estimator shows."""
    own = Program(name, trees[0], 1)
    own_runs = [own.train()[0]]
    start = own.path(0)
    own_runs.append(Program(name, trees[0], 1, start=start).train()[0])
    ordered = Program(name, trees[0], 1, is_ordered=True, start=start)
    expected, losses = ordered.train()
    dropped = Program(name, trees[0], 1, is_ordered=True, start=start).train(only_first=True)[0]
    # From a checkpoint without accumulators, by the saver of its scaffold.
    micro = Program(name, trees[1], K, start=start)
    ours, micro_losses = micro.train()
    names = [key for key in expected[0] if "adam" not in key]
    resumed, resumed_from = resumption(name, trees, start, killed_and_resumed)
    again = Program(name, trees[1], K, start=start).train()[0] if furthest([resumed], ours[-1:]) else ours
    full, accumulated, first = (own.evaluate(path) for path in (ordered.path(), micro.path(), start))
    return {
        "own_runs_differ": furthest(only(names, own_runs[1]), only(names, own_runs[0])),
        "unordered": own.unordered,
        "agreement": furthest(only(names, ours), only(names, expected)),
        "mean_loss": float(max(abs(one - other) for one, other in zip(micro_losses[K - 1 :: K], losses))),
        "rows": 0.0,
        "rounded": [],
        "moved": furthest(only(names, expected[-1:]), only(names, [values_in(start)])),
        "unaccumulated": furthest(only(names, dropped), only(names, expected)),
        "warned": sorted(set(micro.warned)),
        "resumes": furthest([resumed], ours[-1:]) <= 10 * furthest(again[-1:], ours[-1:]),
        "resumed_off": furthest([resumed], ours[-1:]),
        "killed_after": KILLED,
        "resumed_from": resumed_from,
        "exports": own.exports(micro.path(), accumulated),
        "evaluated": furthest([accumulated], [full]),
        "evaluation_moved": furthest([full], [first]),
    }


def measure_split(name, trees, splitting, what_is_split, relative):
    """What a program that runs through an estimator shows with `split_batch`."""
    own = Program(name, trees[0], 1)
    by_chance, start = own.train()[0], own.path(0)
    expected, losses = Program(name, trees[0], 1, is_ordered=True, start=start).train()
    with splitting() as splits:
        split = Program(name, trees[1], 1, start=start)
        as_it_is = split.train()[0]
    ordered = Program(name, trees[1], 1, is_ordered=True, start=start)
    ours, split_losses = ordered.train()
    resumed = Program(name, trees[1], 1, is_ordered=True, start=ordered.path(STEPS - 1)).train()[0]
    names = list(expected[0])
    return {
        **what_is_split(splits),
        "said": sorted(set(split.warned)),
        "same_variables": list(ours[0]) == names,
        "agreement": relative(names, ours, expected),
        "as_it_is": relative(names, as_it_is, expected),
        "own_as_it_is": relative(names, by_chance, expected),
        "mean_loss": float(max(abs(one - other) for one, other in zip(split_losses, losses))),
        "resumed_off": relative(names, resumed[-1:], ours[-1:]),
        "moved": furthest(only(names, expected[-1:]), only(names, [values_in(start)])),
        "variables": len(names),
        "rounded": [],
    }


def resumption(name, trees, start, killed_and_resumed):
    """Return how a run ends that was killed and went on, and how many runs of its train op were in the checkpoint."""
    folder = tempfile.mkdtemp()
    copy_checkpoint(start, os.path.join(folder, "model"))
    killed_and_resumed(name, trees, folder)
    with open(os.path.join(folder, "resumed_from")) as file:
        resumed_from = int(file.read())
    return values_in(os.path.join(folder, "model", f"model.ckpt-{STEPS}")), resumed_from


def in_process(what, name, trees, folder):
    """Train until it is killed, or go on from there."""
    micro = Program(name, trees[1], K, folder=os.path.join(folder, "model"))
    if what == "killed":
        micro.train(hooks=[Killer()])
        return
    with open(os.path.join(folder, "resumed_from"), "w") as file:
        file.write(str(micro.skipped() // MICRO))
    micro.train()
