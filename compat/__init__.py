"""Gradient accumulation for older TensorFlow interfaces: `accum.compat.v1` corresponds to `tf.compat.v1`."""

if __name__ != "accum.compat":
    raise ImportError("This package is `accum.compat`: import it under that name. [accum: install]")
