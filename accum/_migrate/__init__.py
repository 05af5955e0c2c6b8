"""`python -m accum migrate`: code that accumulates by another library, rewritten for this one.

`files` finds, reads and writes; `uses` tells which names are whose; `rules` knows the other libraries, one file each;
`values` tells what may be None, `mentions` what goes past the rules; `rewrite` puts all of it together for one file;
`command` is what is typed. Nothing here imports TensorFlow, and all but `files` and `command` import LibCST, an extra.
"""
