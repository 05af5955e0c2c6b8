"""`python -m accum compare`: its arguments and its plot.

`accum.testing` compares the recordings.
"""
