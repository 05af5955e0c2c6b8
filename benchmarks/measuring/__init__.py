"""What `benchmarks/speed.py` measures, and how. Nothing here is imported by the library."""
