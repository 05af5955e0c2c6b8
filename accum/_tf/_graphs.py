"""Static graphs and traces."""

import contextlib

from accum._tf._line import tf


def in_static_graph():
    """Whether ops are being added to a `tf.compat.v1` graph rather than run, or traced for a `tf.function`."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def is_tracing():
    """Whether a `tf.function` is being traced or a static graph built."""
    return not tf.executing_eagerly()


def is_ref_variable(var):
    """Whether a variable is one of TF 1's, whose value is a mutable tensor of the graph. Dies with `tf.compat.v1`."""
    return isinstance(var, tf.Variable) and not hasattr(var, "handle")


def is_of_a_cluster(var):
    """Whether a variable's device names a job, such as that of a parameter server. Dies with `tf.compat.v1`."""
    return tf.compat.v1.DeviceSpec.from_string(var.device or "").job not in (None, "localhost")


@contextlib.contextmanager
def control_flow_for(variables):
    """Build conditionals that can hold `variables`: those of TF 2 are functions, which no ref variable can enter.

    On some lines (2.10) neither can one of a parameter server, beside the ops of a worker. There is no switch but the
    process-wide one; it is set back at once. Dies with `tf.compat.v1`.
    """
    needs_old = any(is_ref_variable(var) or is_of_a_cluster(var) for var in variables)
    must_switch = needs_old and tf.compat.v1.control_flow_v2_enabled()
    if must_switch:
        tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if must_switch:
            tf.compat.v1.enable_control_flow_v2()


@contextlib.contextmanager
def no_record_of_locks():
    """Drop what a `tf.CriticalSection` notes in its graph: no MetaGraph can hold it, and each `Saver` would warn so."""
    records = tf.compat.v1.get_collection_ref("critical_section_executions")
    before = list(records)
    try:
        yield
    finally:
        records[:] = before


untouched_by_autograph = tf.autograph.experimental.do_not_convert
