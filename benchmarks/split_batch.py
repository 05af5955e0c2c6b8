"""Measure `accum.compat.v1.split_batch` on networks in a Session, beside their own full batch.

    python benchmarks/split_batch.py run [--network LSTM U-Net] [--rounds 5] [--json FILE]
    python benchmarks/split_batch.py table FILES      # print the tables of `--json` files again

The batch has 64 examples, that of ResNet-50 32, and micro-batches have 4. Tensors are the most memory that TensorFlow
allocates at a time in a step, the median of three. Resident memory is the peak beyond that of the built graph with its
variables, in a process that makes two steps. Times are seconds of the processor: the median of steps, and that of
graphs that are built, take turns in one process that has built both before. On a GPU, steps take seconds on the wall.
With `--smoke`, sizes are tiny.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
FULL, SPLIT = "full batch", "split_batch"
RESNET, NORMALIZED = "ResNet-50", "ResNet-50 with batch normalisation"
NETWORKS = (RESNET, NORMALIZED, "U-Net", "BERT", "LSTM", "LSTM with batch normalisation")
BATCH, MICRO = 64, 4
BATCHES = {RESNET: 32, NORMALIZED: 32}


def build(name, is_smoke):
    """Add a network to the current graph. Returns (data, tensors to feed, loss)."""
    import numpy as np
    import tensorflow as tf

    tf1, chance = tf.compat.v1, np.random.RandomState(0)
    count = 8 if is_smoke else BATCHES.get(name, BATCH)

    def fed(*arrays):
        return arrays, [tf1.placeholder(array.dtype, [None, *array.shape[1:]]) for array in arrays]

    def images(side, *labels):
        x = chance.normal(size=(count, side, side, 3)).astype("float32")
        return fed(x, chance.randint(10, size=(count, *labels)).astype("int32"))

    def cross_entropy(labels, logits):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.reduce_mean(losses)

    if name in (RESNET, NORMALIZED):
        data, (x, y) = images(32 if is_smoke else 224)
        return data, [x, y], cross_entropy(y, resnet(tf1, x, name == NORMALIZED))
    if name == "U-Net":
        side, widths = (8, [2, 4]) if is_smoke else (96, [16, 32, 64, 128])
        data, (x, y) = images(side, side, side)
        return data, [x, y], cross_entropy(y, unet(tf1, x, widths))
    if name == "BERT":
        length, width, layers = (4, 8, 1) if is_smoke else (64, 256, 4)
        data, (ids, y) = fed(chance.randint(1000, size=(count, length)), chance.randint(10, size=count))
        return data, [ids, y], cross_entropy(y, encoder(tf, ids, length, width, layers))
    length, width = (4, 8) if is_smoke else (100, 128)
    data, (x, y) = fed(chance.normal(size=(count, length, width)).astype("float32"), chance.randint(10, size=count))
    hidden = x
    if name != "LSTM":
        hidden = tf.nn.relu(tf1.layers.batch_normalization(tf1.layers.dense(x, width), training=True))
    outputs, _ = tf1.nn.dynamic_rnn(tf1.nn.rnn_cell.LSTMCell(width), hidden, dtype=tf.float32)
    return data, [x, y], cross_entropy(y, tf1.layers.dense(outputs[:, -1], 10))


def resnet(tf1, x, is_normalized):
    import tf_slim
    from tf_slim.nets import resnet_v1

    def normalized(inputs):
        return tf1.layers.batch_normalization(inputs, training=True)

    with tf_slim.arg_scope([tf_slim.conv2d], normalizer_fn=normalized if is_normalized else None):
        return resnet_v1.resnet_v1_50(x, 10)[0][:, 0, 0]


def unet(tf1, x, widths):
    def block(x, filters):
        for _ in range(2):
            x = tf1.layers.conv2d(x, filters, 3, padding="same", use_bias=False)
            x = tf1.nn.relu(tf1.layers.batch_normalization(x, training=True))
        return x

    skips = []
    for filters in widths[:-1]:
        x = block(x, filters)
        skips.append(x)
        x = tf1.layers.max_pooling2d(x, 2, 2)
    x = block(x, widths[-1])
    for filters, skip in zip(reversed(widths[:-1]), reversed(skips)):
        larger = tf1.image.resize_nearest_neighbor(x, skip.shape[1:3])
        x = block(tf1.concat([skip, larger], 3), filters)
    return tf1.layers.conv2d(x, 10, 1)


def encoder(tf, ids, length, width, layers):
    """As BERT's: attention with 4 heads and two dense layers, each with a sum and layer normalisation."""
    tf1, heads = tf.compat.v1, 4

    def normalized(x):
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf1.rsqrt(variance + 1e-6)

    x = tf.nn.embedding_lookup(tf1.get_variable("words", [1000, width]), ids)
    x += tf1.get_variable("positions", [length, width])
    for _ in range(layers):
        parts = [tf1.layers.dense(x, width, use_bias=False) for _ in range(3)]
        q, k, v = (tf.transpose(tf.reshape(part, [-1, length, heads, width // heads]), [0, 2, 1, 3]) for part in parts)
        scores = tf.matmul(q, k, transpose_b=True) / (width // heads) ** 0.5
        mixed = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), [0, 2, 1, 3])
        x = normalized(x + tf1.layers.dense(tf.reshape(mixed, [-1, length, width]), width))
        x = normalized(x + tf1.layers.dense(tf.nn.relu(tf1.layers.dense(x, 4 * width)), width))
    return tf1.layers.dense(x[:, 0], 10)


class Program:
    """A network with its train op, in a session of its own."""

    def __init__(self, name, run, is_smoke):
        import tensorflow as tf

        tf1, start = tf.compat.v1, time.process_time()
        with tf.Graph().as_default() as graph:
            tf1.set_random_seed(0)
            data, tensors, self._loss = build(name, is_smoke)
            if run == SPLIT:
                import accum.compat.v1

                self._loss = accum.compat.v1.split_batch(self._loss, tensors, 2 if is_smoke else MICRO)
            with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
                self._train_op = tf1.train.MomentumOptimizer(0.01, 0.9).minimize(self._loss)
            self.build_seconds = time.process_time() - start
            self.graph_mib = graph.as_graph_def().ByteSize() / 2**20
            self._session, self._fed = tf1.Session(), dict(zip(tensors, data))
            self._session.run(tf1.global_variables_initializer())
            self._variables = tf1.trainable_variables()

    def step(self):
        """Make a step. Returns the loss."""
        return float(self._session.run([self._loss, self._train_op], self._fed)[0])

    def tensors_mib(self):
        """The most memory that TensorFlow allocates at a time in a step, on the GPU if there is one."""
        import tensorflow as tf

        options, told = tf.compat.v1.RunOptions(trace_level=3), tf.compat.v1.RunMetadata()
        self._session.run(self._train_op, self._fed, options, told)
        nodes = [node for device in told.step_stats.dev_stats for node in device.node_stats]
        memory = [one for node in nodes for one in node.memory]
        memory = [one for one in memory if one.allocator_name.startswith("GPU")] or memory
        records = [record for one in memory for record in one.allocation_records]
        held = peak = 0
        for record in sorted(records, key=lambda record: record.alloc_micros):
            held += record.alloc_bytes
            peak = max(peak, held)
        return peak / 2**20

    def weights(self):
        return self._session.run(self._variables)

    def begin_with(self, weights):
        with self._session.graph.as_default():
            for var, value in zip(self._variables, weights):
                var.load(value, self._session)


def measure_memory(task):
    from accum._cli.demo.memory import peak_mib

    program = Program(task["network"], task["run"], task["smoke"])
    built = peak_mib()
    for _ in range(2):
        program.step()
    resident = peak_mib() - built
    tensors = statistics.median(program.tensors_mib() for _ in range(3))
    return {"peak_mib": resident, "built_mib": built, "tensors_mib": tensors}


def measure_time(task):
    import numpy as np
    import tensorflow as tf
    from measuring import machine

    clock = time.perf_counter if tf.config.experimental.list_physical_devices("GPU") else time.process_time
    programs = {run: Program(task["network"], run, task["smoke"]) for run in (FULL, SPLIT)}
    programs[SPLIT].begin_with(programs[FULL].weights())
    losses = [programs[run].step() for run in (FULL, SPLIT)]  # which prepares the graph
    ends = [programs[run].weights() for run in (FULL, SPLIT)]
    seconds = {FULL: [], SPLIT: []}
    for number in range(task["rounds"]):
        for run in random.Random(number).sample([FULL, SPLIT], 2):
            start = clock()
            programs[run].step()
            seconds[run].append(clock() - start)
    built = {FULL: [], SPLIT: []}
    for number in range(1 if task["smoke"] else 3):
        for run in random.Random(number).sample([FULL, SPLIT], 2):
            built[run].append(Program(task["network"], run, task["smoke"]).build_seconds)
    return {
        "seconds": seconds,
        "built": {run: [statistics.median(built[run]), program.graph_mib] for run, program in programs.items()},
        "losses": losses,
        "apart": max(float(np.abs(one - other).max()) for one, other in zip(*ends)),
        "versions": machine.versions(),
    }


def work(task):
    """Do `task` in a separate process. Returns its result, or {"failed": why}."""
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "work", json.dumps(task)]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", PYTHONHASHSEED="0")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    if done.returncode:
        return {"failed": done.stderr.decode()[-2000:] or f"exit status {done.returncode}"}
    return json.loads(done.stdout.decode().splitlines()[-1])


def run(arguments):
    from measuring import machine

    known = {"machine": machine.described(), "settings": {"smoke": arguments.smoke}, "results": []}
    for name in arguments.network:
        common = {"network": name, "smoke": arguments.smoke, "rounds": arguments.rounds}
        for task in [dict(common, what="memory", run=run) for run in (FULL, SPLIT)] + [dict(common, what="time")]:
            found = work(task)
            print(name, task["what"], task.get("run", ""), found.get("failed", ""), file=sys.stderr, flush=True)
            known["versions"] = found.pop("versions", known.get("versions"))
            known["results"].append(dict(found, task=task))
            if arguments.json:
                with open(arguments.json, "w", encoding="utf-8") as file:
                    file.write(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print("\n".join(report(known)))
    return 1 if any("failed" in result for result in known["results"]) else 0


HEAD = ["Network", "Tensors, MiB: full", "split", "share", "Resident, MiB: full", "split", "share"]
HEAD += ["Step, s: full", "split", "ratio"]
HEAD += ["Building, s: full", "split", "Graph, MiB: full", "split", "Weights apart"]


def report(known):
    """Lines of Markdown."""
    from measuring.report import environment, table

    rows = []
    for name in dict.fromkeys(result["task"]["network"] for result in known["results"]):
        found = {
            result["task"].get("run", "time"): result
            for result in known["results"]
            if result["task"]["network"] == name and "failed" not in result
        }
        if set(found) == {FULL, SPLIT, "time"}:
            rows.append(row(name, found[FULL], found[SPLIT], found["time"]))
    return [environment(known), "", *table(HEAD, rows)] if rows else ["Nothing was measured."]


def row(name, full, split, timed):
    ours, theirs = (statistics.median(timed["seconds"][run]) for run in (SPLIT, FULL))
    built = [f"{timed['built'][run][at]:.1f}" for at in (0, 1) for run in (FULL, SPLIT)]
    sizes = []
    for kind in ("tensors_mib", "peak_mib"):
        sizes += [f"{full[kind]:.0f}", f"{split[kind]:.0f}", f"{split[kind] / full[kind]:.2f}"]
    return [name, *sizes, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}", *built, f"{timed['apart']:.0e}"]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    running = commands.add_parser("run")
    running.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    running.add_argument("--rounds", type=int, default=5)
    running.add_argument("--json", metavar="FILE")
    running.add_argument("--smoke", action="store_true")
    commands.add_parser("table").add_argument("files", nargs="+", metavar="FILE")
    commands.add_parser("work").add_argument("task")
    arguments = parser.parse_args(argv)
    if arguments.command == "work":
        task = json.loads(arguments.task)
        print(json.dumps((measure_memory if task["what"] == "memory" else measure_time)(task)))
        return 0
    if arguments.command == "table":
        for path in arguments.files:
            with open(path, encoding="utf-8") as file:
                print("\n".join([*report(json.load(file)), ""]))
        return 0
    if arguments.command == "run":
        return run(arguments)
    parser.error("a command is needed: run or table")
    return 2


if __name__ == "__main__":
    sys.exit(main())
