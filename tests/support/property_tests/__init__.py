"""Property tests of the laws: Hypothesis draws the cases, and the full batch is the oracle.

    fed_cases -> cycles -> fed        gradients are fed to an optimizer; NumPy computes the steps of the full batch,
                                      and the plain optimizer makes them
    model_cases -> models -> trained  a Keras model is trained (accumulated); plain Keras trains it at the full batch
                                      (plain)
    static_cases -> static_models -> static_trained
                                      a network is trained in a static graph, and plainly at the full batch

A case is a dict of plain values, so a failure can be printed as a script. `project/random_cases.py` draws
thousands of them; test_property_tests.py runs a few at every merge.
"""
