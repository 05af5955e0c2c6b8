"""Gradient accumulation for Keras: optimizer, model, loss, callbacks and batch normalisation.

What every interface shares is in `accum._engine`.
"""
