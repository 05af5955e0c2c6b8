"""The measurements of `benchmarks/speed.py`. The library imports nothing from here."""
