"""`python -m accum demo`: the same training with full batches, accumulated ones and micro-batches.

command    the arguments, checked before anything is trained
settings   what was asked for, and the three runs that follow from it
data       the digits, as a seed splits and orders them
network    the network, from weights that NumPy draws
faces      the training, by each face of the library
runs       one process a run, and what is measured there
report     the table
plot       the loss curves
"""
