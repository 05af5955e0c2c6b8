"""`python -m accum` runs without TensorFlow: a command that needs it imports it later."""

import importlib
import os
import sys
import warnings

from accum._cli.error_text import one_line
from accum._migrate.pipes import is_reader_gone as is_reader_gone


def without_tensorflow():
    """Import TensorFlow and all of `accum`. Returns None, or the reason why that is impossible."""
    if "accum._public" in sys.modules:
        return None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes and warnings of its libraries
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other packages, which the user can do nothing about
            importlib.import_module("accum._public")
    except Exception as error:  # whatever a broken installation of TensorFlow raises
        words = str(error) if str(error).startswith("accum needs ") else one_line(error)
        return words if "accum doctor" in words else f"{words.rstrip('.')}: run `python -m accum doctor` for details."
    return None


def discard_output():
    """Redirect a closed standard output to nowhere, because Python flushes it once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
