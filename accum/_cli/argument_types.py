"""Types of arguments on the command line."""

import argparse


def at_least_one(text):
    """Return an int >= 1, or raise the error that argparse prints."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an int >= 1. Received: {text}")
    return value


at_least_one.__name__ = "int"  # argparse uses the name in "invalid int value"
