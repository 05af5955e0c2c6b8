"""`python -m accum demo`: train with full batches and with split ones, and compare.

command    the arguments, checked before anything is trained
settings   the settings, and the runs that follow from them
data       the digits, split and ordered by a seed
network    the network, with initial weights drawn by NumPy
apis       the training, through each API of the library
runs       one process per run, and its measurements
report     the table
plot       the loss curves
"""
