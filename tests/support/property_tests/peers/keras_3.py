"""`gradient_accumulation_steps` of Keras 3's optimizers."""

import numpy as np

from property_tests.peers import keras_plain


class Keras3(keras_plain.KerasPeer):
    title = "Keras 3"
    packages = ("keras", "tensorflow")
    not_offered = {
        "L3 schedule": True,
        "L4": True,
        "L5": True,
        "L6": False,
        "L9 skip": False,
        "L13": True,
        "L14": False,
    }

    @classmethod
    def start(cls, case, initial):
        return cls(case, initial, keras_plain.make(case, gradient_accumulation_steps=case["accum_steps"]))

    def slots(self):
        mine = [var for var in self.optimizer.variables[1:] if "gradient_accumulator" not in var.name]
        return [np.asarray(var.numpy()) for var in mine]

    def resumed(self, folder):
        """By what Keras writes into its `.keras` and `.weights.h5` files."""
        other, store = self.start(self.case, self.weights()), {}
        self.optimizer.save_own_variables(store)
        other.optimizer.load_own_variables(store)
        return other
