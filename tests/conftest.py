"""What every test file shares: two logical CPUs, no drawing, and the table of what an environment cannot do."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import exceptions
import pytest
from replicas import look_often_for_the_end_of_replicas, make_cpus

collect_ignore = [os.path.join("support", "small_library")]  # a project of its own, which is not installed here


def pytest_configure(config):
    config.addinivalue_line("markers", "law(name): the law of the semantics that the test holds")
    config.addinivalue_line("markers", "keras_api: needs Keras' `train_step`, which TF 1.15 never calls")
    config.addinivalue_line(
        "markers",
        "slow: starts processes, exports models, or differs little between versions; runs in some environments",
    )
    config.addinivalue_line(
        "markers", "per_version: differs between versions of TensorFlow alone; runs on one Python of each"
    )
    config.addinivalue_line(
        "markers", "weekly: with `per_version` or `slow`: `.ci/run` runs it on TensorFlow 1.15 only"
    )
    config.addinivalue_line("markers", "every_merge: not `weekly`, because its parameters differ between versions")
    config.addinivalue_line("markers", "deferred: set on what is `weekly`, after all exceptions")
    gc.set_threshold(50000, 20, 20)  # graphs are many objects: by Python's own, a fifth of the time goes into looking
    make_cpus()
    look_often_for_the_end_of_replicas()


def is_deferred(item):
    """Return whether a test is left to the weekly run, because it gives the same on TensorFlow 2.2, 2.15 and 2.21.

    In a file that is `weekly`, that is not so for a test with conditions of its own, unless it is marked itself.
    """
    marks = {mark.name for mark in item.iter_markers()}
    is_alike = is_weekly_itself(item) or not marks & {"every_merge", "skip", "skipif", "xfail"}
    is_listed = any(part in item.nodeid for part in exceptions.parts())
    return "weekly" in marks and bool(marks & {"per_version", "slow"}) and is_alike and not is_listed


def is_weekly_itself(item):
    """Return whether a test is marked as `weekly`, and not its file."""
    return "weekly" in {mark.name for mark in item.own_markers}


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` leave out any
def pytest_collection_modifyitems(config, items):
    config.collected = [item.nodeid for item in items]
    for item in filter(is_deferred, items):
        item.add_marker(pytest.mark.deferred)
    for item in items:
        for reason, runs in exceptions.reasons(item):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=runs))
        for reason in exceptions.lacks(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("keras_api") and not exceptions.HAS_KERAS_API:
            item.add_marker(pytest.mark.skip(reason="TF 1.15 never calls an overridden `train_step`: no Keras API"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """What is skipped on the version that stands for the others is an error. Wine runs less."""
    report = (yield).get_result()
    if (
        report.skipped
        and exceptions.TF_VERSION == (2, 15)
        and not exceptions.IS_WINE
        and item.get_closest_marker("deferred")
        and not is_weekly_itself(item)
    ):
        report.outcome = "failed"
        report.longrepr = "It is skipped on TensorFlow 2.15, so it differs between versions: mark it `every_merge`."
