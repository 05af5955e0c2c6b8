"""`python -m accum migrate`: code that accumulates by another library, rewritten for this one.

`files` finds, reads and writes; `uses` tells which names are whose; `rules` knows the other libraries, one file each;
`rewrite` puts the three together for one file; `command` is what is typed. Nothing here imports TensorFlow, and only
`arguments`, `uses`, `rewrite` and `rules` import LibCST, which is an extra.
"""
