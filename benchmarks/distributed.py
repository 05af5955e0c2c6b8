"""Measure what local accumulation saves between workers: `python benchmarks/distributed.py [--workers 2 4]`.

Workers are processes on this machine under a `MultiWorkerMirroredStrategy`. Two contenders take turns, cycle by cycle,
in the same processes, and make the same steps with the same engine:

  once a step         each worker accumulates locally; the sum is exchanged when the cycle ends
  every micro step    the gradients of each micro-batch are exchanged, and then accumulated

The output shows medians over the cycles: the bytes that crossed the loopback device (which counts each byte once; read
from the kernel, so on Linux only), the micro steps per cycle that exchanged gradients, and examples per second.
"""

import argparse
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
CONTENDERS = ["once a step", "every micro step"]


def bytes_sent():
    """Bytes that have crossed the loopback device since the machine started."""
    with open("/proc/net/dev") as file:
        (line,) = [line for line in file if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


# --------------------------------------------------------------------------------------------------------------------
# A worker


def contender(strategy, name):
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


def worker(task):
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": task["addresses"]}, "task": {"type": "worker", "index": task["index"]}}
    )
    import tensorflow as tf

    family = getattr(tf.distribute, "MultiWorkerMirroredStrategy", None)
    strategy = (family or tf.distribute.experimental.MultiWorkerMirroredStrategy)()
    random = np.random.RandomState(task["index"])
    x = tf.constant(random.normal(size=(BATCH, SIZES[0])).astype("float32"))
    y = tf.constant(random.randint(SIZES[-1], size=BATCH))
    made = {name: contender(strategy, name) for name in CONTENDERS}
    results = {name: {"seconds": [], "bytes": [], "exchanges": []} for name in CONTENDERS}
    for cycle in range(2 + task["cycles"]):  # two to warm up; then each kind in turn
        for name, (run, wait) in made.items():
            before, start = bytes_sent(), time.perf_counter()
            for _ in range(K):
                run(x, y)
            wait()
            seconds = time.perf_counter() - start
            if cycle >= 2:
                results[name]["seconds"].append(seconds)
                results[name]["bytes"].append(bytes_sent() - before)
    for name, (run, wait) in made.items():  # not timed: all wait until traffic has settled after each micro step
        sent = [bytes_sent()]
        for _ in range(K):
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


def measured(workers, cycles):
    sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "support"))
    from addresses import free_addresses

    addresses, processes = free_addresses(workers), []
    for index in range(workers):
        task = {"addresses": addresses, "index": index, "cycles": cycles, "pause": 0.5}
        command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--worker", json.dumps(task)]
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
    outputs = [process.communicate()[0].decode() for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a worker failed")
    return json.loads(outputs[0].splitlines()[-1])


def report(workers, result):
    ratios = [a / b for a, b in zip(result[CONTENDERS[1]]["seconds"], result[CONTENDERS[0]]["seconds"])]
    for name in CONTENDERS:
        seconds = statistics.median(result[name]["seconds"])
        print(
            f"{workers:>7}  {name:<17}  {statistics.median(result[name]['bytes']) / 1000000.0:>10.1f}  "
            f"{result[name]['exchanges']:>9} of {K}  {workers * BATCH * K / seconds:>14.0f}"
        )
    print(f"{workers:>7}  throughput once a step / every micro step: {statistics.median(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cycles", type=int, default=9)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("workers  exchange           MB a cycle  exchanges     examples / s")
    for workers in arguments.workers:
        result = measured(workers, arguments.cycles)
        report(workers, result)
    print(f"TensorFlow {result['tensorflow']}, K = {K}, batches of {BATCH} a worker, 10 million parameters")


if __name__ == "__main__":
    main()
