"""Check, before any work is done, that a plot can be drawn."""

import importlib.util
import os

REMEDY = "Install it with `pip install matplotlib`."


def is_possible():
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check(parser, path):
    """Exit with an error, before any work is done, if the plot cannot be written to `path`."""
    if not path.lower().endswith(".png"):
        parser.error(f"--plot must name a .png file. Received: {path}")
    folder = os.path.dirname(path) or "."
    can_be_written = os.access(path if os.path.exists(path) else folder, os.W_OK)
    if not can_be_written or not os.path.isdir(folder) or os.path.isdir(path):
        parser.error(f"--plot must name a writable file in an existing folder. Received: {path}")
    if not is_possible():
        parser.error("--plot needs matplotlib. " + REMEDY)
