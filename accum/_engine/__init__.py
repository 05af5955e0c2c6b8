"""What accumulates: cycles, sums, replicas and moments, behind the adapter of an optimizer.

Knows neither Keras nor versions of TensorFlow.
"""
