"""All differences between versions of TensorFlow and Keras, named after their meaning.

Callers name the module: `_tf.graphs.in_static_graph()`. What every file needs stands here.

No other part of the package looks at a version or probes TensorFlow. Supporting a new TensorFlow version means editing
these files. A comment at each branch says with which version it dies.
"""

from accum._tf import (
    batch_norm,
    definitions,
    frames,
    gradient_changes,
    graph_losses,
    graph_parts,
    graphs,
    inner_optimizer,
    layer_calls,
    layers,
    losses,
    memory,
    models,
    op_walks,
    optimizer_state,
    optimizers,
    patches,
    python_state,
    random_ops,
    steps,
    strategies,
    tracking,
    types,
    variables,
    version,
    watching,
)
from accum._tf.memory import Gauge
from accum._tf.types import (
    Data,
    Gradient,
    GradsAndVars,
    Leaf,
    Logs,
    Nested,
    Options,
    PerReplica,
    Scalar,
    Transform,
    Wait,
)
from accum._tf.version import tf
