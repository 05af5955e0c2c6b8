"""Read and write checkpoints of `tf.compat.v1.train.Saver`, using the names that v1 optimizers and accum give."""

import fnmatch
import os
import re
from typing import Any, Dict

import numpy as np
from google.protobuf.message import DecodeError

from accum import _tf
from accum._tf import tf
from accum.convert._report import ConversionError
from accum.convert._rules import RULES

COUNTERS = ("iterations", "beta1_power", "beta2_power")
"""The counters that `names` may contain besides the model's variables."""

UNREADABLE = (tf.errors.OpError, ValueError, RuntimeError, IndexError, OSError)
"""The errors that TensorFlow raises, depending on the version, for truncated checkpoints and for other files."""

AVERAGE = "ExponentialMovingAverage"
"""The name of a weight's shadow variable, unless the average was given another name."""

OF_OPTIMIZERS = [rule.v1_name for rule in RULES.values() if rule.v1_name]
OF_OPTIMIZERS += ["Adadelta", "Ftrl", AVERAGE]


def of_variables(names):
    """Return `names` without the counters."""
    if not isinstance(names, dict):
        return names
    return {name: other for name, other in names.items() if name not in COUNTERS}


class V1File:
    """The variables of a checkpoint, by name.

    Args:
      path: its prefix, as returned by `Saver.save`, or a folder, whose latest checkpoint is read.

    Raises:
      ConversionError: there is no checkpoint, it can't be read, or `tf.train.Checkpoint` wrote it.
    """

    def __init__(self, path):
        path = str(path)
        self.path = (tf.train.latest_checkpoint(path) if os.path.isdir(path) else path) or path
        try:
            self._reader = tf.train.load_checkpoint(self.path)
            self.shapes = {name: tuple(shape) for name, shape in self._reader.get_variable_to_shape_map().items()}
        except UNREADABLE as error:
            raise ConversionError(f"No checkpoint can be read from {path}: {error}") from None
        if "_CHECKPOINTABLE_OBJECT_GRAPH" in self.shapes:
            raise ConversionError(
                f"{path} was written by `tf.train.Checkpoint`, not by a `Saver`. Restore it into the model and the "
                "optimizer; `to_v1` converts from them."
            )

    def creation_order(self, names):
        """Return `names` in the order in which the graph created them, or None if no `.meta` file tells all of them."""
        try:
            with open(self.path + ".meta", "rb") as file:
                graph = tf.compat.v1.MetaGraphDef.FromString(file.read()).graph_def
        except (OSError, DecodeError):
            return None
        order = list(dict.fromkeys(node.name for node in graph.node if node.name in names))
        return order if len(order) == len(names) else None

    def dtype(self, name):
        return np.dtype(self._reader.get_variable_to_dtype_map()[name].as_numpy_dtype)

    def value(self, name):
        try:
            return np.asarray(self._reader.get_tensor(name))
        except UNREADABLE as error:
            raise ConversionError(f"{name} can't be read from {self.path}: {error}") from None


class Layout:
    """Identifies the variables of a static graph.

    Args:
      shapes: dict {name: shape}, of all of them.
      names: dict that may name "iterations", "beta1_power" and "beta2_power", or None.
      optimizer_name: the `name` of the v1 optimizer, if it was given one.
      accum_name: the `name` of the `AccumOptimizer`, needed if there are several.
      ignore: a name, scope or pattern, or a list of them, of variables that need no counterpart.
    """

    def __init__(self, shapes, names=None, optimizer_name=None, accum_name=None, ignore=()):
        self.shapes = shapes
        self._ignore = [ignore] if isinstance(ignore, str) else list(ignore)
        self._by_leaf: Dict[Any, Any] = {}
        for name in shapes:
            self._by_leaf.setdefault(name.rpartition("/")[2], []).append(name)
        self._said = {key: names[key] for key in COUNTERS if key in names} if isinstance(names, dict) else {}
        self._optimizer_name = optimizer_name
        self.accum_name = self._find_accum(accum_name)
        self.taken = set()
        self._check_said()

    def _check_said(self):
        missing = sorted(name for name in self._said.values() if name not in self.shapes)
        if missing:
            raise ConversionError(f"`names` has {missing}, which the static graph does not have.")

    def _find_accum(self, accum_name):
        scopes = [name[: -len("/micro_step")] for name in self.shapes if name.endswith("/micro_step")]
        scopes = sorted(name for name in scopes if name + "/weight_sum" in self.shapes)
        if accum_name is not None:
            if accum_name not in scopes:
                raise ConversionError(
                    f"The checkpoint has no `AccumOptimizer` called {accum_name!r}. It has: {scopes}."
                )
            return accum_name
        if len(scopes) > 1:
            raise ConversionError(
                f"The checkpoint has several `AccumOptimizer`s. Pass the model's as `accum_name`, one of {scopes}."
            )
        return scopes[0] if scopes else None

    def weights(self):
        """Return {name: shape} of possible weights: all variables except slots, sums and counters."""
        stems = "|".join(re.escape(name) for name in OF_OPTIMIZERS + [self._optimizer_name or "Adam"])
        of_optimizers = re.compile(r"/({})(_\d+)?$".format(stems))
        own = f"/{self.accum_name}/"
        return {
            name: shape
            for name, shape in self.shapes.items()
            if not of_optimizers.search(name)
            and not re.search(f"/{AVERAGE}/(biased|local_step)$", name)
            and own not in "/" + name
            and name not in self._said.values()
            and not re.search(r"(^|/)(global_step|beta[12]_power(_\d+)?)$", name)
        }

    def take(self, name):
        self.taken.add(name)
        return name

    # ------------------------------------------------------------------------------------------------------------
    # Variables that belong to a weight

    def belonging(self, weight, suffix):
        """Return the name of the variable that belongs to `weight` and ends in `suffix`, in any scope, or None."""
        ends = "/" + weight + "/" + suffix
        names = [name for name in self._by_leaf.get(suffix.rpartition("/")[2], ()) if ("/" + name).endswith(ends)]
        # `net/w/Adam` belongs to `net/w`, not to `w`.
        same_leaf = self._by_leaf.get(weight.rpartition("/")[2], ()) if names else ()
        longer = [other for other in same_leaf if other.endswith("/" + weight)]
        names = [
            name for name in names if not any(("/" + name).endswith("/" + other + "/" + suffix) for other in longer)
        ]
        if len(names) > 1:
            direct = [name for name in names if name == weight + "/" + suffix]
            if not direct:
                raise ConversionError(f"The {suffix} of {weight} is ambiguous. Found: {sorted(names)}.")
            names = direct
        return names[0] if names else None

    def slots(self, weight, slot_name):
        """Return the names of a weight's slots, in the order of creation."""
        names = []
        for number in range(len(self.shapes)):
            name = self.belonging(weight, slot_name if not number else f"{slot_name}_{number}")
            if name is None:
                break
            names.append(name)
        return names

    def slot_name(self, rule, weights):
        """Return the name of the slots of `rule`: as given, or v1's default, or the one that all `weights` share."""
        if self._optimizer_name is not None or rule.v1_name is None:
            return self._optimizer_name
        if any(self.belonging(weight, rule.v1_name) for weight in weights):
            return rule.v1_name
        of_optimizers = set(OF_OPTIMIZERS)
        beside = [self._suffixes(weight) - of_optimizers for weight in weights]
        common = sorted(set.intersection(*beside)) if beside else []
        return common[0] if len(common) == 1 else rule.v1_name

    def _suffixes(self, weight):
        ends = re.compile(r"(^|/){}/([^/]+?)(_\d+)?$".format(re.escape(weight)))
        return {match.group(2) for match in map(ends.search, self.shapes) if match}

    # ------------------------------------------------------------------------------------------------------------
    # Counters

    def counter(self, name):
        """Return the name of a counter of the graph: as given, or the only one with that ending; or None."""
        if name in self._said:
            return self._said[name]
        ending = "global_step" if name == "iterations" else name
        if ending in self.shapes:
            return ending
        names = [other for other in self.shapes if re.search(r"/{}(_\d+)?$".format(ending), other)]
        if len(names) > 1:
            raise ConversionError(
                f"The model's {ending} is ambiguous. Pass `names={{{name!r}: …}}`, one of {sorted(names)}."
            )
        return names[0] if names else None

    def of_cycle(self, name):
        """Return the name of `micro_step` or `weight_sum` of the cycle, or None if nothing accumulates."""
        return None if self.accum_name is None else f"{self.accum_name}/{name}"

    def left(self):
        """Return the names without a counterpart, except those that are ignored."""
        return self.not_ignored(set(self.shapes) - self.taken)

    def not_ignored(self, names):
        """Return those of `names`, sorted, that match no name, scope or pattern in `ignore`."""
        patterns = [pattern for part in self._ignore for pattern in (part, part + "/*")]
        kept = [name for name in sorted(names) if name not in self._ignore]
        return [name for name in kept if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def check_target(path, overwrite):
    """Check that a checkpoint can be written to `path`. Returns (folder, name)."""
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not name:
        raise ConversionError(f"The checkpoint to write must have a name in an existing folder. Received: {path}.")
    if os.path.exists(os.path.join(folder, name + ".index")) and not overwrite:
        raise ConversionError(
            f"{path} exists already. Choose another path, or pass `overwrite=True` (--overwrite on the command line)."
        )
    return folder, name


def write(path, values):
    """Write `values`, {name: array}, as a `Saver` does: beside the target first, and then move them into place."""
    folder, name = os.path.split(os.path.abspath(path))
    begun = os.path.join(folder, f".{name}.{os.getpid()}")
    _tf.optimizer_state.write_bundle(begun, values)
    for ending in (".data-00000-of-00001", ".index"):
        os.replace(begun + ending, os.path.join(folder, name + ending))
    _tell_checkpoint_state(folder, name)


def _tell_checkpoint_state(folder, name):
    """Make the written checkpoint the latest in its folder, so that a session finds it."""
    state = tf.train.get_checkpoint_state(folder)
    paths = state.all_model_checkpoint_paths if state else ()
    before = [path for path in paths if os.path.basename(path) != name]
    told = tf.compat.v1.train.generate_checkpoint_state_proto(folder, name, before + [name])
    begun = os.path.join(folder, f".checkpoint.{os.getpid()}")
    with open(begun, "w", encoding="utf-8") as file:
        file.write(str(told))
    os.replace(begun, os.path.join(folder, "checkpoint"))
