"""`python -m accum convert`: convert a checkpoint file into another.

`accum.convert` does the conversion.
"""
