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


def environments(system="linux"):
    """The environments of a system as (name, version, python, whether it uses Keras 2 where Keras 3 is the default)."""
    return [
        (data.env_name(python, version, keras_2), version, python, keras_2)
        for version in data.VERSIONS
        for keras_2 in ((False, True) if data.has_keras_3(version) else (False,))
        for python in data.pythons(version, system)
    ]


def env_names(system):
    """The environments that exist on a system, by TensorFlow version and Python."""
    return sorted((env_name for env_name, _, _, _ in environments(system)), key=parts)
