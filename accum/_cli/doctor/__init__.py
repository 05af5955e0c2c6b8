"""`python -m accum doctor`: check this environment against the matrix of supported ones."""
