"""Print which share of the operations of networks has a rule that says where the examples lie (`accum/_rows`).

    python project/rows.py [NAME ...]      # all networks that this TensorFlow has, or those of these names

Each line: the operations that depend on the batch, how many of them keep examples apart, reduce them or let them meet,
and the types without a rule. The share over all is at the end; tests/keras/test_row_networks.py holds the bar.
"""

import collections
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests", "support")]

import row_networks as networks  # noqa: E402
import tensorflow as tf  # noqa: E402

from accum._rows import Rows, analyse  # noqa: E402


def builders():
    """Return {name: function that returns (graph, batch, what is computed)}."""
    found = {function.__name__: lambda function=function: static(function) for function in networks.STATIC}
    if networks.HAS_CELLS:
        found.update(
            {function.__name__: lambda function=function: static(function) for function in networks.WITH_CELLS}
        )
        found["both_ways"] = lambda: static(lambda: networks.recurrent(both=True))
    if networks.VERSION >= (2, 4):
        names = [name for name in networks.APPLICATIONS.split() if hasattr(tf.keras.applications, name)]
        found.update({name: lambda name=name: networks.application(name) for name in names})
        found.update({f"keras_{name}": lambda name=name: networks.of_keras(name) for name in networks.OF_KERAS})
    return found


def static(function):
    """Return (graph, batch, what is computed) of a network in a static graph, with the loops of TF 1."""
    with tf.Graph().as_default() as graph:
        batch, computed = function()
    return graph, batch, computed


def main(names):
    counted, total = 0, 0
    for name, build in builders().items():
        if names and name not in names:
            continue
        graph, batch, computed = build()
        start = time.time()
        analysis = analyse(
            graph, [getattr(one, "op", one).name for one in computed], {x.name: Rows(0, 1) for x in batch}
        )
        seconds = time.time() - start
        verdicts = [analysis.verdict(op.name) for op in graph.get_operations()]
        kinds = collections.Counter(verdict.kind for verdict in verdicts if verdict is not None)
        count, without = sum(kinds.values()), len(analysis.unruled)
        counted, total = counted + count - without, total + count
        print(f"{name:20} {len(verdicts):6} ops {count:6} of the batch {seconds:5.1f} s  {dict(kinds)}")
        for op in analysis.meets[:5]:
            print(f"    {graph.get_operation_by_name(op).type} {op}: {analysis.verdict(op).how}")
        if without:
            print(f"    no rule: {dict(collections.Counter(analysis.unruled))}")
        sys.stdout.flush()
    print(f"{100 * counted / max(total, 1):.2f} % of {total} operations have a rule; TensorFlow {tf.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
