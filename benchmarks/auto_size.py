"""Compare the peak of memory that `micro_batch_size="auto"` predicts with the one that training has.

    python benchmarks/auto_size.py run [--network U-Net LSTM] [--smoke]

Each network trains three times, each time in a process of its own: plainly at the full batch, for what that needs, with
`memory_limit` at `--share` of it, and with the size that was chosen. Memory is the resident memory of the process, on a
CPU with Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 2**20
# network -> (examples in a batch, side of an image or length of a sequence)
SIZES = {
    "U-Net": (64, 96),
    "ResNet50": (64, 96),
    "MobileNetV2": (64, 96),
    "EfficientNetB0": (64, 96),
    "DenseNet121": (64, 96),
    "VGG16": (64, 96),
    "InceptionV3": (64, 96),
    "Xception": (64, 96),
    "LSTM": (512, 128),
    "transformer": (256, 128),
}
SMOKE = {"tiny": (8, 8)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "work"])
    parser.add_argument("task", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--network", nargs="*", default=None, choices=list(SIZES), help="networks (default: all)")
    parser.add_argument("--share", type=float, default=0.7, help="memory_limit, as a share of the full batch's peak")
    parser.add_argument("--smoke", action="store_true", help="run anywhere, with a tiny network")
    arguments = parser.parse_args()
    if arguments.command == "work":
        print(json.dumps(work_here(json.loads(arguments.task))))
        return
    sizes = SMOKE if arguments.smoke else {name: SIZES[name] for name in arguments.network or SIZES}
    print(
        "| network | batch | full batch, MiB | limit | size | predicted | measured | off | used | cost, steps "
        "| first fit, s | with that size |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, (batch, side) in sizes.items():
        print(row_of({"network": name, "batch": batch, "side": side}, arguments.share), flush=True)


def row_of(task, share):
    """A row of the table."""
    full = work(dict(task, limit=None, size=None))
    if "failed" in full:
        return f"| {task['network']} | failed: {full['failed'][-200:]} |"
    limit = int(share * full["peak"])
    auto = work(dict(task, limit=limit, size=None))
    if "failed" in auto:
        return f"| {task['network']} | failed: {auto['failed'][-200:]} |"
    fixed = work(dict(task, limit=None, size=auto["size"]))
    if "failed" in fixed:
        return f"| {task['network']} | failed: {fixed['failed'][-200:]} |"
    off = 100 * (auto["predicted"] / auto["peak"] - 1) if auto["predicted"] else 0.0
    mib = ["" if value is None else f"{value / MIB:,.0f}" for value in (full["peak"], limit)]
    mib_auto = ["" if value is None else f"{value / MIB:,.0f}" for value in (auto["predicted"], auto["peak"])]
    used = f"{100 * auto['peak'] / limit:.0f} %"
    cells = [task["network"], task["batch"]] + mib + [auto["size"]] + mib_auto + [f"{off:+.0f} %", used]
    times = [f"{auto['cost']:.1f}", f"{auto['first']:.1f}", f"{fixed['first']:.1f}"]
    return "| " + " | ".join(map(str, cells + times)) + " |"


def work(task):
    """Do `task` in a separate process. Returns its result, or {"failed": why}."""
    command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "work", json.dumps(task)]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    if done.returncode:
        return {"failed": done.stderr.decode().strip().replace("\n", " ") or f"exit status {done.returncode}"}
    return json.loads(done.stdout.decode().splitlines()[-1])


def work_here(task):
    """Train, and return the peak; with a limit also what was predicted, and the cost of measuring in steps."""
    from measuring.networks import IS_KERAS_3, host_peak_mib

    import accum
    from accum._keras._steps import _out_of_memory
    from accum._tf import tf

    model, x, y = network_and_data(task)
    noted = {"peaks": None, "seconds": []}
    attempt, choose = _out_of_memory.AutoSizedSteps._attempt, _out_of_memory.chosen_size

    def timed(*args):
        start = time.perf_counter()
        result = attempt(*args)
        noted["seconds"].append(time.perf_counter() - start)
        return result

    def chosen(peaks, count):
        noted["peaks"] = peaks[0]
        return choose(peaks, count)

    _out_of_memory.AutoSizedSteps._attempt, _out_of_memory.chosen_size = timed, chosen
    if task["limit"] or task["size"]:
        options = {"micro_batch_size": task["size"] or "auto", "memory_limit": task["limit"]}
        model = accum.GradientAccumulateModel.from_model(model, **options)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    more = {"jit_compile": False} if IS_KERAS_3 else {}
    model.compile(tf.keras.optimizers.SGD(0.01, momentum=0.9), loss, **more)
    start = time.perf_counter()
    model.fit(x, y, batch_size=task["batch"], verbose=0)
    first = time.perf_counter() - start
    start = time.perf_counter()
    model.fit(x, y, batch_size=task["batch"], epochs=2, verbose=0)
    step = (time.perf_counter() - start) / 2
    size = model.micro_batch_size if task["limit"] else task["batch"]
    size = task["batch"] if size == "auto" else size
    return {
        "peak": host_peak_mib() * MIB,
        "predicted": noted["peaks"].expected(size) if noted["peaks"] else None,
        "size": size,
        "cost": sum(noted["seconds"][1:])
        / step,  # TensorFlow prepares the graph in the first one, as in any first step
        "first": first,
    }


def network_and_data(task):
    """A network, and one batch of random data."""
    import numpy as np
    from measuring.networks import images_and_labels, network

    from accum._tf import tf

    if task["network"] not in ("LSTM", "transformer"):
        return (network(task["network"], task["side"]),) + images_and_labels(task, task["batch"])
    layers = tf.keras.layers
    inputs = tf.keras.Input((task["side"],), dtype="int32")
    hidden = layers.Embedding(1000, 128)(inputs)
    if task["network"] == "LSTM":
        hidden = layers.LSTM(128)(layers.LSTM(128, return_sequences=True)(hidden))
    else:
        for _ in range(2):
            hidden = layers.LayerNormalization()(layers.Add()([hidden, attention(layers, hidden)]))
            more = layers.Dense(128)(layers.Dense(512, activation="relu")(hidden))
            hidden = layers.LayerNormalization()(layers.Add()([hidden, more]))
        hidden = layers.GlobalAveragePooling1D()(hidden)
    random = np.random.RandomState(0)
    x = random.randint(1000, size=(task["batch"], task["side"])).astype("int32")
    return tf.keras.Model(inputs, layers.Dense(10)(hidden)), x, random.randint(10, size=(task["batch"],))


def attention(layers, hidden):
    return layers.MultiHeadAttention(4, 32)(hidden, hidden)


if __name__ == "__main__":
    sys.path.insert(0, HERE)
    main()
