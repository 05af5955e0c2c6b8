"""Train a small network with batch normalisation on real data, with whole batches and in micro-batches.

    python benchmarks/convergence.py run [--seeds 8] [--epochs 10] [--json FILE]
    python benchmarks/convergence.py figure [FILE]      # docs/convergence.png; needs matplotlib

The data are the 1,797 handwritten digits of `python -m accum demo`. For each seed, all runs start from the same weights
and make the same batches of 64. Evaluation uses the moving statistics, as always.
"""

import argparse
import json
import os
import sys
import warnings

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.path.join(os.path.dirname(HERE), "project", "records", "benchmarks", "convergence.json")
FIGURE = os.path.join(os.path.dirname(HERE), "docs", "convergence.png")
BATCH, RATE, MOMENTUM = 64, 0.05, 0.9
# name -> (examples in a micro-batch, `whole_batch`); None: plain Keras
RUNS = {
    "batch 64": (None, None),
    "batch 64, examples reversed": (None, None),
    "2 x 32": (32, ()),
    "8 x 8": (8, ()),
    "16 x 4": (4, ()),
    "32 x 2": (2, ()),
    "8 x 8, whole_batch": (8, "all"),
    "32 x 2, whole_batch": (2, "all"),
}


def network(tf):
    """Two convolutions and a dense layer, each with batch normalisation."""
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((8, 8, 1))
    for filters, stride in ((16, 1), (32, 2)):
        x = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False)(x)
        x = layers.Activation("tanh")(layers.BatchNormalization(momentum=MOMENTUM)(x))
    x = layers.Dense(64, use_bias=False)(layers.Flatten()(x))
    x = layers.Activation("tanh")(layers.BatchNormalization(momentum=MOMENTUM)(x))
    return tf.keras.Model(inputs, layers.Dense(10)(x))


def drawn_weights(tf, seed):
    """Kernels drawn by NumPy; all else as Keras starts."""
    random, weights = np.random.RandomState(seed), network(tf).get_weights()
    return [
        random.normal(size=w.shape) * np.prod(w.shape[:-1]) ** -0.5 if w.ndim > 1 and w.any() else w for w in weights
    ]


def train(tf, accum, name, seed, epochs):
    """Returns for each epoch the loss and accuracy on the test data, and the trainable weights in one array."""
    from accum._cli.demo.data import load

    training, test = load(seed)
    micro, whole_batch = RUNS[name]
    net = network(tf)
    net.set_weights(drawn_weights(tf, seed))
    model = net
    if micro:
        model = accum.GradientAccumulateModel.from_model(net, micro_batch_size=micro, whole_batch=whole_batch)
    rate = tf.keras.optimizers.schedules.CosineDecay(RATE, len(training.labels) // BATCH * epochs)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(rate, momentum=0.9), loss=loss)
    predict = tf.function(lambda images: net(images, training=False))
    random, found = np.random.RandomState(seed), []
    for _ in range(epochs):
        order = random.permutation(len(training.labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            batch = batch[::-1] if name.endswith("reversed") else batch
            model.train_on_batch(training.images[batch], training.labels[batch])
        logits = predict(tf.constant(test.images))
        accuracy = float(np.mean(logits.numpy().argmax(axis=1) == test.labels))
        found.append((float(loss(test.labels, logits)), accuracy, _flat(net)))
    return found


def _flat(net):
    return np.concatenate([np.ravel(np.asarray(var)) for var in net.trainable_variables])


def run(arguments):
    import tensorflow as tf
    from measuring import machine

    import accum

    warnings.simplefilter("ignore")  # batch normalisation in micro-batches warns, which is the subject here
    tf.config.threading.set_intra_op_parallelism_threads(1)
    result = {"machine": machine.described(), "versions": machine.versions(), "runs": []}
    for seed in range(arguments.seeds):
        reference = None
        for name in RUNS:
            found = train(tf, accum, name, seed, arguments.epochs)
            reference = reference or [weights for *_, weights in found]
            pairs = zip([weights for *_, weights in found], reference)
            apart = [float(np.linalg.norm(one - other) / np.linalg.norm(other)) for one, other in pairs]
            losses, accuracies, _ = zip(*found)
            row = {"name": name, "seed": seed, "loss": losses, "accuracy": accuracies, "apart": apart}
            result["runs"].append(row)
            print(f"{seed} {name}: {losses[-1]:.4f} {accuracies[-1]:.4f} {apart[-1]:.1e}", file=sys.stderr)
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1, sort_keys=True)
        file.write("\n")
    print("\n".join(table(result)))


def values(result, name, what):
    """An array [seeds, epochs]."""
    return np.array([row[what] for row in result["runs"] if row["name"] == name])


def table(result):
    """Medians over the seeds after the last epoch, and their range."""
    lines = ["| | accuracy | loss | weights from batch 64 |", "|---|---|---|---|"]
    for name in RUNS:
        last = {what: values(result, name, what)[:, -1] for what in ("accuracy", "loss", "apart")}
        shown = [
            form.format(np.median(last[what]), last[what].min(), last[what].max())
            for what, form in (("accuracy", "{:.1%} ({:.1%}–{:.1%})"), ("loss", "{:.3f} ({:.3f}–{:.3f})"))
        ]
        apart = np.median(last["apart"])
        lines.append(f"| {name} | {shown[0]} | {shown[1]} | {f'{apart:.0e}' if apart else 0} |")
    return lines


# Okabe and Ito's colours, which colour-blind readers can tell apart; widths, dashes and marks say it once more.
LOOKS = {
    "batch 64": {"color": "#000000", "lw": 5, "alpha": 0.3},
    "8 x 8, whole_batch": {"color": "#0072B2", "lw": 1.8, "ls": (0, (3, 1.5))},
    "8 x 8": {"color": "#009E73", "lw": 1.8, "marker": "o", "ms": 4},
    "32 x 2": {"color": "#D55E00", "lw": 1.8, "marker": "s", "ms": 4},
}
NOISE = {"color": "#000000", "lw": 1, "ls": ":"}


def figure(arguments):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(arguments.file, encoding="utf-8") as file:
        result = json.load(file)
    drawn, (left, right) = pyplot.subplots(1, 2, figsize=(7, 3.6))
    for name, look in LOOKS.items():
        _draw(left, values(result, name, "loss"), look, name != "8 x 8, whole_batch")
        if name != "batch 64":
            _draw(right, values(result, name, "apart"), look)
    _draw(right, values(result, "batch 64, examples reversed", "apart"), NOISE)
    left.set(title="Loss on the test data", yscale="log", ylim=(0.035, 0.7))
    right.set(title="Weights: distance from batch 64", yscale="log", ylim=(2e-8, 4))
    left.set_yticks([0.05, 0.1, 0.2, 0.5], ["0.05", "0.1", "0.2", "0.5"])
    right.set_yticks([1e-7, 1e-5, 1e-3, 1e-1])
    _label(left, 10, 0.3, "32 × 2, plain", "32 x 2")
    _label(left, 10, 0.152, "batch 64", "batch 64")
    _label(left, 10, 0.112, "8 × 8, whole_batch", "8 x 8, whole_batch")
    _label(left, 10, 0.058, "8 × 8, plain", "8 x 8")
    _label(right, 10, 1.3, "32 × 2, plain", "32 x 2")
    _label(right, 10, 2.5e-2, "8 × 8, plain", "8 x 8")
    _label(right, 10, 5e-7, "8 × 8, whole_batch", "8 x 8, whole_batch")
    right.text(10, 4.5e-8, "batch 64, examples reversed (rounding)", ha="right", fontsize=8.5)
    for axis in (left, right):
        axis.set_xlabel("epoch")
        axis.set_xticks([1, 4, 7, 10])
        axis.minorticks_off()
        axis.title.set_fontsize(11)
        axis.grid(color="#dddddd", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    drawn.tight_layout()
    drawn.savefig(arguments.output, dpi=200, metadata={"Software": None})
    print(os.path.abspath(arguments.output))


def _draw(axis, found, look, has_band=True):
    """The median over the seeds, and their range as a band."""
    epochs = np.arange(1, found.shape[1] + 1)
    if has_band:
        axis.fill_between(epochs, found.min(axis=0), found.max(axis=0), color=look["color"], alpha=0.12, lw=0)
    axis.plot(epochs, np.median(found, axis=0), **look)


def _label(axis, x, y, text, name):
    axis.text(x, y, text, ha="right", fontsize=10, color=LOOKS[name]["color"], fontweight="bold")


def parser():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command")
    commands.required = True
    running = commands.add_parser("run", help="train, and print a table")
    running.add_argument("--seeds", type=int, default=8)
    running.add_argument("--epochs", type=int, default=10)
    running.add_argument("--json", metavar="FILE", default=RESULTS, help="file for the results")
    drawing = commands.add_parser("figure", help="draw loss and distance over the epochs")
    drawing.add_argument("file", nargs="?", default=RESULTS)
    drawing.add_argument("--output", default=FIGURE)
    return made


if __name__ == "__main__":
    taken = parser().parse_args()
    {"run": run, "figure": figure}[taken.command](taken)
