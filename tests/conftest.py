"""What every test file shares: two logical CPUs, no drawing, and the table of what a cell cannot do."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import exceptions
import pytest
from replicas import look_often_for_the_end_of_replicas, make_cpus


def pytest_configure(config):
    config.addinivalue_line("markers", "law(name): the law of the semantics that the test holds")
    config.addinivalue_line("markers", "keras_face: needs Keras' `train_step`, which TF 1.15 never calls")
    config.addinivalue_line(
        "markers",
        "slow: starts processes, exports models, or differs little between lines; runs on a subset of the cells",
    )
    config.addinivalue_line("markers", "line: differs between lines of TensorFlow alone; runs on one Python of each")
    gc.set_threshold(50000, 20, 20)  # graphs are many objects: by Python's own, a fifth of the time goes into looking
    make_cpus()
    look_often_for_the_end_of_replicas()


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` leave out any
def pytest_collection_modifyitems(config, items):
    config.collected = [item.nodeid for item in items]
    for item in items:
        for reason, runs in exceptions.reasons(item):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=runs))
        for reason in exceptions.lacks(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("keras_face") and not exceptions.HAS_KERAS_FACE:
            item.add_marker(pytest.mark.skip(reason="TF 1.15 never calls an overridden `train_step`: no Keras face"))
