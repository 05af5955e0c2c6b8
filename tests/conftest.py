"""What every test file shares: two logical CPUs, no drawing, and the table of what an environment cannot do."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import exceptions
import pytest
from replicas import look_often_for_the_end_of_replicas, make_cpus

collect_ignore = [os.path.join("support", "small_library")]  # a project of its own, which is not installed here


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow` too, as naming their file does")


def pytest_configure(config):
    config.addinivalue_line("markers", "law(name): the law of the semantics that the test holds")
    config.addinivalue_line("markers", "keras_api: needs Keras' `train_step`, which TF 1.15 never calls")
    config.addinivalue_line("markers", "slow: starts processes, or takes seconds")
    for name in ("per_version", "weekly"):
        config.addinivalue_line("markers", f"{name}: older names of `slow`")
    config.addinivalue_line("markers", "every_merge: not slow, in a file that is")
    gc.set_threshold(50000, 20, 20)  # graphs are many objects: by Python's own, a fifth of the time goes into looking
    make_cpus()
    look_often_for_the_end_of_replicas()


def leaves_out_slow(config):
    """Whether whole folders are run, and nobody asked for the slow tests."""
    are_folders = all(os.path.isdir(argument) for argument in config.args)
    return are_folders and not config.option.slow and not config.option.markexpr


def is_slow(item):
    if item.get_closest_marker("every_merge"):
        return item.get_closest_marker("slow") is not None
    return any(item.get_closest_marker(name) for name in ("slow", "per_version", "weekly"))


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` leave out any
def pytest_collection_modifyitems(config, items):
    config.collected = [item.nodeid for item in items]
    for item in items:
        for reason, runs in exceptions.reasons(item):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True, run=runs))
        for reason in exceptions.lacks(item):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("keras_api") and not exceptions.HAS_KERAS_API:
            item.add_marker(pytest.mark.skip(reason="TF 1.15 never calls an overridden `train_step`: no Keras API"))

    if leaves_out_slow(config):
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item)])
        items[:] = [item for item in items if not is_slow(item)]
