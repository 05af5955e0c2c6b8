"""Feed the gradients of a case to an accumulating optimizer, and those of the full batch to the plain one."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from optimizers import built, keras_weights
from versions import TF_VERSION

import accum
import accum.compat.v1
from property_tests import cycles
from property_tests.fed_cases import FAMILIES

tf1 = tf.compat.v1

TOLERANCE = 2e-6
ROUNDING = 8.0
"""How many times the distance between sums in float32 and in float64 ours may be away from them."""


class Deviation(AssertionError):
    """The library did not do what the law says."""


def check(case):
    """Raise `Deviation` unless the steps are those of the full batch."""
    micro_batches = micro_batches_of(case)
    steps = cycles.steps_of(case, micro_batches)
    case = case if _is_resumed_exactly(case, micro_batches, steps) else dict(case, resume=None)
    run = _run_optimizer if case["api"] == "optimizer" else _run_graph
    with tempfile.TemporaryDirectory() as folder:  # Keras restores slots when it creates them
        seen, step_count = run(case, micro_batches, folder)
    exact = _plain(case, [step and step.grads for step in steps])
    rounded = _plain(case, [step and step.rounded for step in steps])
    made = sum(step is not None for step in steps)
    if step_count != made:
        raise Deviation(f"law L3: {step_count} steps were counted, not {made}")
    before = cycles.initial(case)
    for index, (ours, true, other) in enumerate(zip(seen, exact, rounded)):
        if steps[index] is None and not all(map(_same, ours, before)):
            raise Deviation(f"law L2: micro-batch {index} makes no step, but variables have changed")
        for number, (mine, whole, near) in enumerate(zip(ours, true, other)):
            with np.errstate(invalid="ignore"):
                allowed = TOLERANCE * np.maximum(1.0, np.abs(whole)) + ROUNDING * np.abs(whole - near)
                is_near = (np.abs(mine - whole) <= allowed) | alike(mine, whole)
            if not is_near.all():
                off = np.abs(mine - whole).max()
                raise Deviation(f"law L1: after micro-batch {index}, variable {number} is {off:.2e} off")
        before = ours


def _is_resumed_exactly(case, micro_batches, steps):
    """Whether no variable of a resumed cycle lacks a gradient that it had before: it would get zeros, as documented."""
    last = case["resume"]
    following = [step for step in steps[last + 1 :] if step is not None] if last is not None else []
    if not following or steps[last] is not None or case["api"] != "optimizer":
        return True
    before = [micro_batch["grads"] for micro_batch in micro_batches[: last + 1]]
    return all(grad is not None or not any(seen) for grad, *seen in zip(following[0].grads, *_are_given(before)))


def _are_given(lists):
    return [[grad is not None for grad in grads] for grads in lists]


def alike(one, other):
    """Where two arrays are the same, or both not finite."""
    return (one == other) | (~np.isfinite(one) & ~np.isfinite(other))


def _same(one, other):
    return one.tobytes() == other.tobytes()


def micro_batches_of(case):
    """Return the micro-batches with their values, as `cycles` reads them."""
    random = np.random.RandomState(case["seed"] + 1)
    micro_batches = []
    for index, drawn in enumerate(case["micro_batches"]):
        grads = []
        for variable, kind in zip(case["variables"], drawn["grads"]):
            shape = list(variable["shape"])
            if isinstance(kind, list):
                values = random.normal(size=[len(kind)] + shape[1:]).astype("float32")
                grads.append(cycles.Rows(np.array(kind), values))
            else:
                values = np.asarray(random.normal(size=shape), "float32")
                grads.append(None if kind is None else values)
        number, what = case["bad"].get(index, (0, None))
        if what is not None and grads[number] is not None:
            values = grads[number].values if isinstance(grads[number], cycles.Rows) else grads[number]
            values[(0,) * values.ndim] = float(what)
        micro_batches.append(dict(drawn, grads=grads))
    return micro_batches


# --------------------------------------------------------------------------------------------------------------------
# Full batch


def make_plain(case):
    """Return the inner optimizer."""
    return getattr(FAMILIES[case["family"]], case["optimizer"])(0.1, **case["arguments"])


def _plain(case, steps):
    """Return the variables after each micro-batch, when the plain optimizer is given the gradients of the steps."""
    return _plain_keras(case, steps) if case["api"] == "optimizer" else _plain_graph(case, steps)


def _plain_keras(case, steps):
    variables = keras_weights(cycles.initial(case))
    optimizer = make_plain(case)
    if case["family"] == "new":
        optimizer.build(variables)  # for all that will ever have a gradient
    seen = []
    for grads in steps:
        if grads is not None:
            tensors = [_tensor(case, grad) for grad in _clipped(case, grads)]
            optimizer.apply_gradients(zip(tensors, variables))
        seen.append([var.numpy() for var in variables])
    return seen


def _clipped(case, grads):
    """Before TF 2.4, `apply_gradients` of the plain optimizer does not clip; `minimize` does."""
    if TF_VERSION >= (2, 4):
        return grads
    norm, value = (case["arguments"].get(name) for name in ("clipnorm", "clipvalue"))

    def clipped(values):
        if norm is not None:
            length = np.sqrt((values.astype(float) ** 2).sum())
            values = values * np.float32(np.minimum(1.0, norm / np.maximum(length, 1e-30)))
        return values if value is None else np.clip(values, np.float32(-value), np.float32(value)).astype("float32")

    return [
        (
            grad._replace(values=clipped(grad.values))
            if isinstance(grad, cycles.Rows)
            else (None if grad is None else clipped(grad))
        )
        for grad in grads
    ]


def _tensor(case, grad):
    if not isinstance(grad, cycles.Rows):
        return None if grad is None else tf.constant(grad)
    shape = next(variable["shape"] for variable in case["variables"] if variable["is_sparse"])
    return tf.IndexedSlices(tf.constant(grad.values), tf.constant(grad.indices, tf.int64), tf.constant(shape, tf.int64))


# --------------------------------------------------------------------------------------------------------------------
# Ours, with a Keras optimizer


def _wrapped(case):
    return accum.GradientAccumulateOptimizer(
        make_plain(case), case["accum_steps"], case["reduction"], nonfinite=case["nonfinite"]
    )


def _run_optimizer(case, micro_batches, folder):
    variables = keras_weights(cycles.initial(case))
    optimizer = built(_wrapped(case), variables)
    seen = []
    for index, micro_batch in enumerate(micro_batches):
        pairs = [(_tensor(case, grad), var) for grad, var in zip(micro_batch["grads"], variables)]
        weight = micro_batch["weight"]
        optimizer.apply_gradients(pairs, **({} if weight is None else {"weight": weight}))
        if micro_batch["then"]:
            getattr(optimizer, micro_batch["then"])()
        seen.append([var.numpy() for var in variables])
        if case["resume"] == index:
            variables, optimizer = _resumed(case, variables, optimizer, folder)
    return seen, int(optimizer.iterations)


def _resumed(case, variables, optimizer, folder):
    """Return other objects, restored from a checkpoint."""
    path = tf.train.Checkpoint(variables=list(variables), optimizer=optimizer).save(os.path.join(folder, "run"))
    variables = keras_weights([np.zeros_like(var.numpy()) for var in variables])
    optimizer = built(_wrapped(case), variables)
    tf.train.Checkpoint(variables=list(variables), optimizer=optimizer).restore(path)
    return variables, optimizer


# --------------------------------------------------------------------------------------------------------------------
# Ours, and the plain optimizer, in a static graph


class _Fed:
    """Placeholders for the gradients of a micro-batch."""

    def __init__(self, case):
        self.variables = [
            tf1.get_variable(f"v{index}", initializer=value, use_resource=case["resource"])
            for index, value in enumerate(cycles.initial(case))
        ]
        self._placeholders = []
        self.pairs = []
        for variable, var in zip(case["variables"], self.variables):
            if variable["is_sparse"]:
                placeholder = (
                    tf1.placeholder(tf.float32, [None] + variable["shape"][1:]),
                    tf1.placeholder(tf.int64, [None]),
                )
                grad = tf.IndexedSlices(placeholder[0], placeholder[1], tf.constant(variable["shape"], tf.int64))
            else:
                placeholder = grad = tf1.placeholder(tf.float32, variable["shape"])
            self._placeholders.append(placeholder)
            self.pairs.append((grad, var))
        self.weight = tf1.placeholder(tf.float32, [])

    def of(self, grads, weight=None):
        """Return a feed dict."""
        feeds = {self.weight: 1.0 if weight is None else weight}
        for placeholder, grad in zip(self._placeholders, grads):
            if isinstance(grad, cycles.Rows):
                feeds.update({placeholder[0]: grad.values, placeholder[1]: grad.indices})
            else:
                feeds[placeholder] = grad
        return feeds


def _plain_graph(case, steps):
    with tf.Graph().as_default(), tf1.Session() as session:
        fed = _Fed(case)
        train_op = make_plain(case).apply_gradients(fed.pairs)
        session.run(tf1.global_variables_initializer())
        seen = []
        for grads in steps:
            if grads is not None:
                session.run(train_op, fed.of(grads))
            seen.append(session.run(fed.variables))
        return seen


def _run_graph(case, micro_batches, folder):
    seen, path, step_count, taken = [], None, 0, 0
    parts = [micro_batches]
    if case["resume"] is not None:
        parts = [micro_batches[: case["resume"] + 1], micro_batches[case["resume"] + 1 :]]
    for part in parts:
        with tf.Graph().as_default(), tf1.Session() as session:
            run = _GraphRun(case, session, taken)
            session.run(tf1.global_variables_initializer())
            saver = tf1.train.Saver()
            if path is not None:
                saver.restore(session, path)
            seen += [run.take(micro_batch) for micro_batch in part]
            step_count, taken = run.step_count(), run.taken
            path = saver.save(session, os.path.join(folder, "run"))
    return seen, step_count


class _GraphRun:
    """The ops of one graph, and how a micro-batch is run."""

    def __init__(self, case, session, taken):
        self._case, self._session, self.taken = case, session, taken
        self._fed = _Fed(case)
        self._step = tf1.train.get_or_create_global_step()
        optimizer = accum.compat.v1.AccumOptimizer(
            make_plain(case), case["accum_steps"], case["reduction"], nonfinite=case["nonfinite"]
        )
        weight = self._fed.weight if case["micro_batches"][0]["weight"] is not None else None
        self._ops = self._train_op = None
        if case["api"] == "explicit":
            self._ops = optimizer.accumulation_ops(
                grads_and_vars=self._fed.pairs, global_step=self._step, weight=weight
            )
            self._calls = {"flush": self._ops.apply, "reset": self._ops.zero}
        else:
            self._train_op = optimizer.apply_gradients(self._fed.pairs, global_step=self._step, weight=weight)
            self._calls = {"flush": optimizer.flush(), "reset": optimizer.reset()}

    def take(self, micro_batch):
        """Run a micro-batch, and return the variables after it."""
        feed = self._fed.of(micro_batch["grads"], micro_batch["weight"])
        self.taken += 1
        if self._ops is None:
            self._session.run(self._train_op, feed)
        else:
            self._session.run(self._ops.accumulate, feed)
            if self.taken == self._case["accum_steps"]:
                self._session.run(self._ops.apply)
                self.taken = 0
        if micro_batch["then"]:
            self._session.run(self._calls[micro_batch["then"]])
            self.taken = 0
        return self._session.run(self._fed.variables)

    def step_count(self):
        return int(self._session.run(self._step))
