"""What every test file shares: two logical CPUs, no drawing, and the table of what a cell cannot do."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import exceptions
import pytest
import turns
from replicas import look_often_for_the_end_of_replicas, make_cpus

collect_ignore = [os.path.join("support", "small_library")]  # a project of its own, which is not installed here


def pytest_configure(config):
    config.addinivalue_line("markers", "law(name): the law of the semantics that the test holds")
    config.addinivalue_line("markers", "keras_face: needs Keras' `train_step`, which TF 1.15 never calls")
    config.addinivalue_line(
        "markers",
        "slow: starts processes, exports models, or differs little between lines; runs on a subset of the cells",
    )
    config.addinivalue_line("markers", "line: differs between lines of TensorFlow alone; runs on one Python of each")
    config.addinivalue_line("markers", "turns: `.ci/run` runs it on one of the lines of Keras 2 that run all tests")
    config.addinivalue_line("markers", "every_landing: takes no turns: its parameters differ between lines")
    for half in ("odd", "even"):
        config.addinivalue_line("markers", f"{half}: given to half of the tests that take turns")
    gc.set_threshold(50000, 20, 20)  # graphs are many objects: by Python's own, a fifth of the time goes into looking
    make_cpus()
    look_often_for_the_end_of_replicas()


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` leave out any
def pytest_collection_modifyitems(config, items):
    config.collected = [item.nodeid for item in items]
    config.in_turns = [item for item in items if turns.takes_turns(item)]
    for item in config.in_turns:
        item.add_marker(turns.half(item))
    for item in items:
        for reason, runs in exceptions.reasons(item):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=runs))
        for reason in exceptions.lacks(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("keras_face") and not exceptions.HAS_KERAS_API:
            item.add_marker(pytest.mark.skip(reason="TF 1.15 never calls an overridden `train_step`: no Keras API"))


@pytest.fixture(scope="session", autouse=True)
def say_which_tests_take_turns(request, record_testsuite_property):
    """In the report of the cell, where scripts/dev/turn.py compares them with those of the other line."""
    record_testsuite_property("turns", turns.digests(request.config.in_turns))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that takes turns and is skipped on one line may be left out on the other. Wine takes no turns."""
    report = (yield).get_result()
    takes_turns = exceptions.LINE in turns.LINES and not exceptions.IS_WINE
    if report.skipped and takes_turns and item.get_closest_marker(turns.half(item)):
        report.outcome = "failed"
        report.longrepr = "It is skipped on this line, so it can't take turns: mark it `every_landing`."
