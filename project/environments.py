"""The environments of tox.ini, as the data that `python -m accum doctor` brings lists them: `environments.data`."""

import importlib.util
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENV_NAME = re.compile(r"py3(\d+)-tf(\d+)\.(\d+)(-keras2)?$")


def _load(path):
    """A module without its package, which would import TensorFlow."""
    spec = importlib.util.spec_from_file_location("accum_matrix", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = _load(os.path.join(ROOT, "accum", "_cli", "doctor", "matrix.py"))


def parts(env_name):
    """The sort key of an environment: (TensorFlow version, whether it uses Keras 2 beside Keras 3, minor of Python)."""
    minor, major, tf_minor, keras_2 = ENV_NAME.match(env_name).groups()
    return (int(major), int(tf_minor)), bool(keras_2), int(minor)


def env_names(system):
    """The environments that exist on a system, by TensorFlow version and Python."""
    return sorted((env_name for env_name, _, _, _ in data.environments(system)), key=parts)
