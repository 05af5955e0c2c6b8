"""optax.MultiSteps."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax

from property_tests.peers import base, cases

NAMES = {
    "sgd": lambda rate: optax.sgd(rate),
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "nesterov": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    "adam": lambda rate: optax.adam(rate),
    "amsgrad": lambda rate: optax.amsgrad(rate),
    "rmsprop": lambda rate: optax.rmsprop(rate),
    "centered": lambda rate: optax.rmsprop(rate, centered=True, momentum=0.5),
    "adagrad": lambda rate: optax.adagrad(rate),
    "adadelta": lambda rate: optax.adadelta(rate),
    "adamax": lambda rate: optax.adamax(rate),
    "nadam": lambda rate: optax.nadam(rate),
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.01),
    "lion": lambda rate: optax.lion(rate),
    "adafactor": lambda rate: optax.adafactor(rate),
}
CLIPPING = {"clipvalue": optax.clip, "global_clipnorm": optax.clip_by_global_norm}


def make(case):
    rate, transforms = cases.RATE, []
    for name, value in case["arguments"].items():
        if name == "inverse_time":
            rate = lambda count, by=value: cases.RATE / (1 + by * count)
        else:
            transforms.append(CLIPPING[name](value))
    return optax.chain(*transforms, NAMES[case["optimizer"]](rate))


class MultiSteps(base.Peer):
    title = "optax.MultiSteps"
    packages = ("optax", "jax")
    optimizers = tuple(NAMES)
    arguments = ("clipvalue", "global_clipnorm", "inverse_time")
    not_offered = {"L5": True, "L6": False}
    cannot_occur = ("L8", "L13")

    def __init__(self, case, initial, optimizer):
        self.case, self._optimizer, self._values = case, optimizer, [jnp.asarray(value) for value in initial]
        self.state = optimizer.init(self._values)
        self._update = jax.jit(self._updated)

    @classmethod
    def start(cls, case, initial):
        skips = {"should_skip_update_fn": optax.skip_not_finite} if case["nonfinite"] == "skip_micro" else {}
        is_mean = case["reduction"] == "mean"
        return cls(case, initial, optax.MultiSteps(make(case), case["accum_steps"], use_grad_mean=is_mean, **skips))

    @classmethod
    def plain(cls, case, initial):
        return cls(case, initial, make(case))

    def _updated(self, grads, state, values):
        updates, state = self._optimizer.update(grads, state, values)
        return optax.apply_updates(values, updates), state

    def apply(self, grads):
        self._values, self.state = self._update([jnp.asarray(grad) for grad in grads], self.state, self._values)

    def take(self, grads, weight):
        self.apply(grads)

    def weights(self):
        return [np.array(value) for value in self._values]

    def set_weights(self, values):
        self._values = [jnp.asarray(value) for value in values]

    def step_count(self):
        return int(self.state.gradient_step)

    def slots(self):
        return [np.array(leaf) for leaf in jax.tree.leaves(self.state.inner_opt_state)]

    def resumed(self, folder):
        """The state is a tree of arrays, which users save as they like."""
        other = self.start(self.case, self.weights())
        other.state = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, self.state)))
        return other
