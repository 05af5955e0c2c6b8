"""`python -m accum migrate`: rewrite code that accumulates with another library to use accum.

files      find, read and write files
uses       resolve imported names
rules      the other libraries, one file each
values     which expressions may be None
mentions   arguments that accumulate but reach no known call
by_hand    gradients that are added up without a library
lines      keep lines short
rewrite    all of it together, for one file

`accum._cli.migrate` is the command. Nothing here imports TensorFlow; all but `files` import LibCST, an extra.
"""
