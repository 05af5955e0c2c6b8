"""`data`: the module accum/_cli/doctor/matrix.py, without its package, which would import TensorFlow."""

import importlib.util
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _load(path):
    spec = importlib.util.spec_from_file_location("accum_matrix", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = _load(os.path.join(ROOT, "accum", "_cli", "doctor", "matrix.py"))
