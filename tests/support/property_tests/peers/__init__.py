"""The scorecard's cases, and adapters that run them with other ways to accumulate, for `project/scorecard.py`.

    cases     a fixed set of small cases for each law, in NumPy
    judge     one case against one adapter: the oracle is the full batch with the plain optimizer of the same library
    notes     what the page says about a library, with its source
    others    one adapter a file, each imported only where its library is installed

Nothing here imports Hypothesis, so that the environments need nothing but the library itself.
"""

ADAPTERS = {
    "accum": "ours:Accum",
    "accum-graph": "ours_graph:AccumGraph",
    "keras3": "keras_3:Keras3",
    "ga-optimizer": "gradient_accumulator_0_5:OptimizerWrapper",
    "ga-model": "gradient_accumulator_0_5:ModelWrapper",
    "runai": "run_ai:RunAI",
    "hand-sum": "by_hand:DividedSum",
    "hand-loss": "by_hand:DividedLosses",
    "optax": "optax_multi_steps:MultiSteps",
}
"""The adapters, by the names of the command line: "module:class"."""
