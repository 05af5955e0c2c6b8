"""The accumulation engine: cycles, sums of gradients, replicas and moments.

It calls an optimizer only through an `OptimizerAdapter`, and depends neither on Keras nor on TensorFlow versions.
"""
