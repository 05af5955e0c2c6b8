"""Adaptive gradient clipping: the mathematics, and a `transform` for accumulating optimizers.

Used by both the Keras and the static-graph optimizer.
"""
