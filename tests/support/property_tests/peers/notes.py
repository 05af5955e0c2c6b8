"""What the scorecard's page says about each library where a cell is not "all passed", from its documentation and code.

Keys are adapters, then a law or a law and a kind. `project/scorecard.py` refuses to write a page where one is
missing.
"""

ALIKE = "micro-batches count alike, whatever their size"
NO_SKIP = "There is no such option."
LAYER = "The layer is not told about the cycle: its moving statistics move on every micro-batch."

NOTES = {
    "keras3": {
        "L2 use_ema": (
            "The moving averages of `use_ema` are updated on every micro-batch. Where they have caught up with "
            "the weights, nothing moves, and the case passes."
        ),
        "L3 schedule": "Documented: schedules are given the number of micro-batches. Multiply their lengths by K.",
        "L4": "Documented: gradients are averaged.",
        "L5": "Documented: the average of the gradients since the last update; " + ALIKE + ".",
        "L6": "There is no method for it: the cycle continues in the next epoch.",
        "L8 none": (
            "What a variable has accumulated is discarded if it has no gradient in the last micro-batch of the "
            "cycle, because variables without a gradient are filtered out before sums are added and cleared."
        ),
        "L9 skip": NO_SKIP,
        "L13": LAYER,
        "L14": "By design, values below 2 raise an error. Leave the argument out.",
    },
    "hand-sum": {
        "": (
            "As guides teach it, in a loop around `tf.GradientTape`. Gradients are added to variables; after K "
            "micro-batches their sum is divided by K, applied and cleared."
        ),
        "L5": "Guides divide by K; " + ALIKE + ".",
        "L6": "Such a loop leaves the rest for the next epoch.",
        "L8 none": "`assign_add(None)` raises an error. A loop can check for it.",
        "L9 skip": "Guides do not treat it.",
        "L12": "Guides do not save sums and the count.",
        "L13": LAYER,
    },
    "hand-loss": {
        "": "The same loop, which divides each loss by K and also makes a step at the end of an epoch.",
        "L5": "Guides divide each loss by K; " + ALIKE + ".",
        "L6 flush": "Fewer micro-batches are divided by K all the same, so the step is too small.",
        "L6 drop": "Such a loop makes a step instead.",
        "L8 none": "`assign_add(None)` raises an error. A loop can check for it.",
        "L9 skip": "Guides do not treat it.",
        "L12": "Guides do not save sums and the count.",
        "L13": LAYER,
    },
    "ga-optimizer": {
        "": (
            "Its documentation has called this wrapper very experimental, with results other than the model "
            "wrapper's (examples, distributed training). `fit`, traced and eager, was seen to give the same "
            "numbers as these loops."
        ),
        "L1": (
            "The inner optimizer is also called between steps, with zeros, so momentum and moments decay. Nadam "
            "raises an `AttributeError`, because state that it prepares in `apply_gradients` is missing."
        ),
        "L2": "As in the first row: slots decay.",
        "L3 counter": "`iterations` counts every micro-batch, and each step once more.",
        "L3 schedule": "`iterations`, which schedules are given, counts every micro-batch, and each step once more.",
        "L4": "`reduction` is accepted and stored, but not used.",
        "L5": "Not part of its interface; " + ALIKE + ".",
        "L6 flush": "There is no method for it: the cycle continues in the next epoch.",
        "L6 drop": "`reset()` clears the sums, as documented, but not the count of micro-batches.",
        "L7": (
            "The inner optimizer's clipping is not called. `clipnorm` and `clipvalue` of the wrapper itself act "
            "on each micro-batch."
        ),
        "L8 none": "A variable without a gradient in the last micro-batch of a cycle gets no step; its sum stays.",
        "L8 rows": "The sums of a micro-batch's rows are applied on that micro-batch, not at the end of the cycle.",
        "L9 restore": "The sum is cleared where it equals what was applied. NaN equals nothing, so it stays; Inf goes.",
        "L9 skip": NO_SKIP,
        "L12": "A checkpoint of the wrapper holds sums and count, not the inner optimizer's slots and step counter.",
        "L13": (
            "`AccumBatchNormalization`: the mean is that of the full batch. The variance is the mean of the "
            "micro-batches' variances, without the variance between their means."
        ),
        "L14": "Even with K = 1, each step counts twice in `iterations`, so Adam's bias correction differs.",
    },
    "ga-model": {
        "L4": "Documented: each gradient is scaled by 1 / K.",
        "L5": "Documented: each gradient is scaled by 1 / K; " + ALIKE + ".",
        "L6": "There is no method for it: the cycle continues in the next epoch.",
        "L8 none": "A variable without a gradient in a whole cycle is given zeros, so its momentum moves it on.",
        "L8 rows": (
            "Sums are dense, so optimizers that update only the rows of a batch (here momentum and Nesterov) "
            "update all rows."
        ),
        "L9 skip": NO_SKIP,
        "L12": (
            "A checkpoint holds the sums, and restores them, but the first call of a new model clears them again."
            " The count of micro-batches stays. A model that was called before it is restored keeps both."
        ),
        "L13": "`AccumBatchNormalization`, as above.",
    },
    "runai": {
        "": (
            "In Keras 2.3 itself, with and without Run:AI, optimizers read `iterations` while another op advances"
            " it. For these cases it is read first on both sides."
        ),
        "L4": "Gradients are averaged.",
        "L5": "Not part of its interface; " + ALIKE + ".",
        "L6": "There is no method for it: the cycle continues in the next epoch.",
        "L7": "Keras clips where it computes gradients, so each micro-batch is clipped.",
        "L8 rows": (
            "The gradient of an embedding is `tf.IndexedSlices` in one branch of a condition and a tensor in the other."
        ),
        "L9 skip": NO_SKIP,
        "L12": (
            "With a `tf.train.Saver` of all variables. Keras' `model.save` keeps the inner optimizer's state, not"
            " the cycle."
        ),
        "L13": LAYER,
    },
    "optax": {
        "": "By design, the mean is a running one (Welford's), which suits low precision.",
        "L5": "Documented: gradients are averaged or summed; " + ALIKE + ".",
        "L6": "There is no method for it: the cycle continues in the next epoch.",
        "L9 restore": (
            "The mean is cleared by a multiplication with zero, which leaves NaN. The documented remedy is "
            "`should_skip_update_fn=skip_not_finite`, as in the next row."
        ),
    },
}
