"""Measure what is saved between workers: `python benchmarks/distributed.py [--workers 2 4] [--overlap]`.

Workers are processes on this machine under a `MultiWorkerMirroredStrategy`. Two implementations take turns, cycle by
cycle, in the same processes, and make the same steps with the same engine:

  once a step         each worker accumulates locally; the sum is exchanged when the cycle ends
  every micro step    the gradients of each micro-batch are exchanged, and then accumulated

With `--overlap`, the step is that of a model with `micro_batch_size`, and the implementations are

  overlapped          gradients are exchanged in packs while the last micro-batch computes others
  after the last      all of them are exchanged in one pack after the last micro-batch

The loopback device is faster than a network. To limit it, as root in a network namespace of its own:

  unshare -n sh -c "ip link set lo up && tc qdisc add dev lo root tbf rate 4gbit burst 4mb latency 100ms &&
    python benchmarks/distributed.py --overlap"

The output shows medians over the cycles: the bytes that crossed the loopback device (which counts each byte once; read
from the kernel, so on Linux only), the micro steps per cycle that exchanged gradients, and examples per second.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

K = 8
BATCH = 16  # examples a worker and micro step
SIZES = [784, 2048, 2048, 2048, 10]  # 10 million parameters
CONTENDERS = {False: ["once a step", "every micro step"], True: ["overlapped", "after the last"]}  # with --overlap?


def bytes_sent():
    """Bytes that have crossed the loopback device since the machine started."""
    with open("/proc/net/dev") as file:
        (line,) = [line for line in file if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


# --------------------------------------------------------------------------------------------------------------------
# A worker


def implementation(strategy, name):
    """Returns a function that makes a micro step with a micro-batch, and one that waits until it has finished."""
    import tensorflow as tf

    import accum

    random = np.random.RandomState(0)
    with strategy.scope():
        shapes = list(zip(SIZES[:-1], SIZES[1:]))
        weights = [tf.Variable((random.normal(size=shape) / shape[0] ** 0.5).astype("float32")) for shape in shapes]
        optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(0.01), K)

    def micro_step(x, y):
        with tf.GradientTape() as tape:
            for weight in weights[:-1]:
                x = tf.nn.relu(tf.matmul(x, weight))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=tf.matmul(x, weights[-1]))
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        grads = tape.gradient(loss, weights)
        if name == "every micro step":
            grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, grads)
            optimizer.apply_gradients(zip(grads, weights), experimental_aggregate_gradients=False)
        else:
            optimizer.apply_gradients(zip(grads, weights))

    run = tf.function(lambda x, y: strategy.run(micro_step, args=(x, y)))
    return run, lambda: weights[0].numpy()[0, 0]


def waiting(seconds):
    """Returns a layer that passes its input on, but takes `seconds` forwards and twice that backwards, as if an
    accelerator computed: without processor time."""
    import tensorflow as tf

    def passed_on(values, seconds):
        def wait(values):
            time.sleep(seconds)
            return values

        # Not tf.py_function, which has state: the outputs of a branch wait for all of its operations that have.
        later = tf.numpy_function(wait, [values], values.dtype, stateful=False)
        later.set_shape(values.shape)
        return later

    @tf.custom_gradient
    def call(values):
        return passed_on(values, seconds), lambda grads: passed_on(grads, 2 * seconds)

    return tf.keras.layers.Lambda(call)


def step_of_model(strategy, name, micro_batches, is_static, seconds):
    """Returns a function that makes a step of a model with a batch, and one that waits until it has finished."""
    from unittest import mock

    import tensorflow as tf

    import accum
    from accum._engine import _replicas

    with strategy.scope():
        layers = [tf.keras.layers.Dense(size, activation="relu") for size in SIZES[1:-1]]
        layers.append(tf.keras.layers.Dense(SIZES[-1]))
        if seconds:
            layers = [one for layer in layers for one in (layer, waiting(seconds))]
        net = tf.keras.Sequential([tf.keras.Input((SIZES[0],))] + layers)
        model = accum.GradientAccumulateModel.from_model(net, micro_batch_size=BATCH * K // micro_batches)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        options = {"jit_compile": False} if hasattr(model, "jit_compile") else {}
        model.compile(tf.keras.optimizers.SGD(0.01), loss, **options)
    count = BATCH * K if is_static else None
    specs = tf.TensorSpec([count, SIZES[0]]), tf.TensorSpec([count], tf.int64)
    run = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)), input_signature=specs)
    with contextlib.ExitStack() as stack:
        if name == "after the last":
            stack.enter_context(mock.patch.object(_replicas, "overlap", lambda: False))
            stack.enter_context(mock.patch("accum._tf.strategies.PACK_BYTES", 0))
        run.get_concrete_function()
    return run, lambda: model.optimizer.iterations.numpy()


def worker(task):
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": task["addresses"]}, "task": {"type": "worker", "index": task["index"]}}
    )
    import tensorflow as tf

    family = getattr(tf.distribute, "MultiWorkerMirroredStrategy", None)
    strategy = (family or tf.distribute.experimental.MultiWorkerMirroredStrategy)()
    random = np.random.RandomState(task["index"])
    names, calls = CONTENDERS[task["overlap"]], 1 if task["overlap"] else K
    x = tf.constant(random.normal(size=(BATCH * K // calls, SIZES[0])).astype("float32"))
    y = tf.constant(random.randint(SIZES[-1], size=BATCH * K // calls))
    if task["overlap"]:
        arguments = task["micro_batches"], task["static"], task["seconds"]
        made = {name: step_of_model(strategy, name, *arguments) for name in names}
    else:
        made = {name: implementation(strategy, name) for name in names}
    results = {name: {"seconds": [], "bytes": [], "exchanges": []} for name in names}
    for cycle in range(2 + task["cycles"]):  # two to warm up; then each kind in turn
        for name, (run, wait) in made.items():
            before, start = bytes_sent(), time.perf_counter()
            for _ in range(calls):
                run(x, y)
            wait()
            seconds = time.perf_counter() - start
            if cycle >= 2:
                results[name]["seconds"].append(seconds)
                results[name]["bytes"].append(bytes_sent() - before)
    for name, (run, wait) in made.items():  # not timed: all wait until traffic has settled after each micro step
        sent = [bytes_sent()]
        for _ in range(calls):
            run(x, y)
            wait()
            time.sleep(task["pause"])
            sent.append(bytes_sent())
        size = 4 * sum(a * b for a, b in zip(SIZES[:-1], SIZES[1:]))
        results[name]["exchanges"] = sum(new - old > size / 2 for old, new in zip(sent, sent[1:]))
    if task["index"] == 0:
        print(json.dumps(dict(results, tensorflow=tf.__version__)), flush=True)


# --------------------------------------------------------------------------------------------------------------------
# The command


def measured(workers, arguments):
    sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "support"))
    from addresses import free_addresses

    addresses, processes = free_addresses(workers), []
    for index in range(workers):
        task = {"addresses": addresses, "index": index, "cycles": arguments.cycles, "pause": 0.5}
        task.update(overlap=arguments.overlap, static=arguments.static, micro_batches=arguments.micro_batches)
        task.update(seconds=arguments.seconds)
        command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--worker", json.dumps(task)]
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
    outputs = [process.communicate()[0].decode() for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a worker failed")
    return json.loads(outputs[0].splitlines()[-1])


def report(workers, result, names, calls):
    ratios = [a / b for a, b in zip(result[names[0]]["seconds"], result[names[1]]["seconds"])]
    for name in names:
        seconds = statistics.median(result[name]["seconds"])
        print(
            f"{workers:>7}  {name:<17}  {statistics.median(result[name]['bytes']) / 1000000.0:>10.1f}  "
            f"{result[name]['exchanges']:>9} of {calls}  {workers * BATCH * K / seconds:>14.0f}"
        )
    print(f"{workers:>7}  time {names[0]} / {names[1]}: {statistics.median(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cycles", type=int, default=9)
    parser.add_argument("--overlap", action="store_true", help="compare the exchange during and after the last one")
    parser.add_argument("--micro-batches", type=int, default=2, help=f"of {BATCH * K} examples, with --overlap")
    parser.add_argument("--static", action="store_true", help="with --overlap, for a number of examples that is known")
    parser.add_argument("--seconds", type=float, default=0, help="each layer also waits so long, twice that backwards")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("workers  exchange           MB a cycle  exchanges     examples / s")
    for workers in arguments.workers:
        result = measured(workers, arguments)
        report(workers, result, CONTENDERS[arguments.overlap], 1 if arguments.overlap else K)
    what = (
        f"{arguments.micro_batches} micro-batches of {BATCH * K} examples" if arguments.overlap else f"K = {K}, {BATCH}"
    )
    print(f"TensorFlow {result['tensorflow']}, {what} a worker, 10 million parameters")


if __name__ == "__main__":
    main()
