"""What every test file shares: two logical CPUs, no drawing, and the marks `slow` and `tf`."""

import gc
import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import tensorflow as tf
import versions
from replicas import look_often_for_the_end_of_replicas, make_cpus

tf1 = tf.compat.v1

collect_ignore = [os.path.join("support", "small_library")]  # a project of its own, which is not installed here


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow` too, as naming their file does")


def pytest_configure(config):
    config.addinivalue_line("markers", "law(names): the laws of the semantics that the test holds")
    config.addinivalue_line("markers", "slow: starts processes, takes a second, or varies what a quick test shows")
    config.addinivalue_line("markers", "tf(min, max, keras, because): the TensorFlow and Keras that the test needs")
    config.addinivalue_line("markers", "rule_fails: a rule that reads a user's program ends by an error of its own")
    gc.set_threshold(50000, 20, 20)  # graphs are many objects: by Python's own, a fifth of the time goes into looking
    make_cpus()
    look_often_for_the_end_of_replicas()


def leaves_out_slow(config):
    """Whether whole folders are run, and nobody asked for the slow tests."""
    are_folders = all(os.path.isdir(argument) for argument in config.args)
    return are_folders and not config.option.slow and not config.option.markexpr


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` leave out any
def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers("tf"):
            reason = versions.missing(*mark.args, **mark.kwargs)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
    if leaves_out_slow(config):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


class _FailedRules(logging.Handler):
    """Keeps what is logged of rules that end by an error of their own, and so warn of nothing."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage() + "\n" + logging.Formatter().formatException(record.exc_info))


@pytest.fixture(autouse=True)
def rules_end_without_an_error(request):
    """Users don't see an error of a rule: here, it fails the test, unless that is marked `rule_fails`."""
    handler, logger = _FailedRules(), logging.getLogger("accum")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    logger.setLevel(level)
    assert request.node.get_closest_marker("rule_fails") or not handler.texts, handler.texts[0]


OF_TF_1 = versions.TF_VERSION < (2, 8)  # what programs are likely to have; the other way is for slow tests


@pytest.fixture(
    params=[
        pytest.param(1, id="tf1-control-flow", marks=[] if OF_TF_1 else pytest.mark.slow),
        pytest.param(2, id="tf2-control-flow", marks=pytest.mark.slow if OF_TF_1 else []),
    ]
)
def control_flow(request):
    """Loops and conditionals as TensorFlow 1 builds them, and as TensorFlow 2 does."""
    yield from built_as_by(request.param)


@pytest.fixture
def control_flow_of_tf_1():
    yield from built_as_by(1)


@pytest.fixture
def control_flow_of_tf_2():
    yield from built_as_by(2)


def built_as_by(version):
    before = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if version == 2 else tf1.disable_control_flow_v2)()
    yield
    (tf1.enable_control_flow_v2 if before else tf1.disable_control_flow_v2)()
