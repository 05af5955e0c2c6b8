"""The command line, `python -m accum`: demo, doctor, verify, compare, convert and migrate.

A command imports TensorFlow when it runs, so that `--help` works without.
"""
