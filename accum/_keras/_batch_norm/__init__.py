"""Batch normalisation: the layer, its moving statistics, and its place in a whole batch."""
