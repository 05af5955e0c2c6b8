"""Prove the laws on cases that nobody thought of: Hypothesis draws them, and the full batch is the oracle.

    fed_cases -> cycles -> fed        gradients are fed to an optimizer; NumPy computes the steps of the full batch,
                                      and the plain optimizer makes them
    model_cases -> models -> trained  a Keras model is trained; plain Keras trains it at the full batch

A case is a dict of plain values, so a failure can be printed as a script. `scripts/dev/prove.py` draws thousands of
them; test_prover.py runs a few at every merge.
"""
