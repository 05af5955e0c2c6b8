"""Workers that train networks with batch normalisation which people use: memory, time, and where a step ends.

A run is one way to make the step of a batch: plain Keras, plain splitting, or `whole_batch="all"`. It trains on random
images with SGD without momentum, so that setting the weights back sets everything back.
"""

import gc
import random
import time

import numpy as np
import tensorflow as tf

from measuring import machine

FULL, MICRO, SPLIT = "full batch", "one micro-batch", "plain splitting"
ALL, KEPT, DEFAULT = '"all"', '"all", recompute=False', "default"
EXACT = {DEFAULT: {}, ALL: {"whole_batch": "all"}, KEPT: {"whole_batch": "all", "recompute": False}}
MIB = 2**20
IS_KERAS_3 = str(getattr(tf.keras, "__version__", "2")).startswith("3")


# ----------------------------------------------------------------------------------------------------------------------
# Networks and data


def network(name, side):
    """A U-Net or a network of `keras.applications` for images [side, side, 3], or one for texts of `side` words."""
    if name in TEXT_NETWORKS:
        return TEXT_NETWORKS[name](side)
    if name in ("U-Net", "tiny"):
        return unet(side, (2,), 1) if name == "tiny" else unet(side, (16, 32, 64, 128))
    made = getattr(tf.keras.applications, name)
    net = made(weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None)
    for layer in net.layers:  # runs that draw other numbers can't be compared
        if isinstance(layer, tf.keras.layers.Dropout):
            layer.rate = 0.0
    return net


def unet(side, widths, depth=2):
    """A U-Net that says for each pixel which of 10 classes it shows; `depth` batch normalisation layers in a block."""
    layers = tf.keras.layers

    def block(x, filters):
        for _ in range(depth):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        return x

    inputs = x = tf.keras.Input((side, side, 3))
    skips = []
    for filters in widths[:-1]:
        x = block(x, filters)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, widths[-1])
    for filters, skip in zip(reversed(widths[:-1]), reversed(skips)):
        x = block(layers.Concatenate()([layers.UpSampling2D()(x), skip]), filters)
    return tf.keras.Model(inputs, layers.Conv2D(10, 1)(x))


def lstm(length):
    """A network for texts with one LSTM."""
    layers = tf.keras.layers
    stack = [tf.keras.Input((length,), dtype="int32"), layers.Embedding(WORDS, 128), layers.LSTM(256)]
    return tf.keras.Sequential(stack + [layers.Dense(10)])


def bert(length, depth=4, width=256):
    """An encoder like that of BERT, without dropout."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((length,), dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(WORDS, width)(inputs))
    for _ in range(depth):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, width // 4)(x, x))
        inner = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        x = layers.LayerNormalization()(x + inner)
    return tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


TEXT_NETWORKS, WORDS = {"LSTM": lstm, "BERT": bert}, 8000


def images_and_labels(task, count, seed=0):
    """Random images or texts, and a label for each of them or, for a U-Net, each pixel."""
    chance, side = np.random.RandomState(seed), task["side"]
    if task["network"] in TEXT_NETWORKS:
        return chance.randint(WORDS, size=(count, side)).astype("int32"), chance.randint(10, size=count).astype("int32")
    x = chance.standard_normal((count, side, side, 3)).astype("float32")
    shape = (count, side, side) if task["network"] in ("U-Net", "tiny") else (count,)
    return x, chance.randint(10, size=shape).astype("int32")


def compiled(task, run, net, **options):
    """The model of a run, compiled, with the layers of `net`."""
    import accum

    if run == SPLIT or run in EXACT:
        options = dict({"micro_batch_size": task["micro"]}, **options)
        own = EXACT.get(run, {"whole_batch": ()})
        net = accum.GradientAccumulateModel.from_model(net, **dict(own, **options))
    elif options:
        net = accum.GradientAccumulateModel.from_model(net, **options)
    return with_loss(net, task)


def with_loss(model, task, optimizer=None):
    more = {"jit_compile": False} if IS_KERAS_3 else {}
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or tf.keras.optimizers.SGD(0.05), loss, run_eagerly=bool(task.get("eager")), **more)
    return model


# ----------------------------------------------------------------------------------------------------------------------
# What is measured


def on_one_device(limit_mib=None):
    """Use only the first GPU, if there is one, and perhaps not all of its memory. Returns its name, or the CPU's."""
    gpus = tf.config.experimental.list_physical_devices("GPU")
    if not gpus:
        return "CPU:0"
    tf.config.experimental.set_visible_devices(gpus[:1], "GPU")
    if limit_mib:
        made = tf.config.experimental.VirtualDeviceConfiguration(memory_limit=int(limit_mib))
        tf.config.experimental.set_virtual_device_configuration(gpus[0], [made])
    return "GPU:0"


def host_peak_mib():
    """The peak of this process's resident memory."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):  # not on Linux
        from accum._cli.demo.memory import peak_mib

        return peak_mib()


def device_mib(device, kind):
    """Of the tensors; `kind` is "current" or "peak". None where TensorFlow can't say, as before 2.5."""
    try:
        return tf.config.experimental.get_memory_info(device)[kind] / MIB
    except (AttributeError, ValueError):
        return None


class Clock:
    """Wall and processor seconds of what runs within it."""

    def __enter__(self):
        gc.collect()
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error):
        now = time.perf_counter(), time.process_time()
        self.wall, self.processor = (end - start for end, start in zip(now, self._start))


# ----------------------------------------------------------------------------------------------------------------------
# Workers


def measure_memory(task):
    """The peak beyond that of the built model, of the host and of the device, in a process that makes only one run."""
    device, run = on_one_device(), task["run"]
    count = task["micro"] if run == MICRO else task["batch"]
    data = images_and_labels(task, count)
    model = compiled(task, run, network(task["network"], task["side"]))
    built, on_device = host_peak_mib(), device_mib(device, "current")
    row = {"run": run, "clocks": []}
    try:
        for _ in range(task["steps"]):
            with Clock() as clock:
                loss = float(np.ravel(model.train_on_batch(*data))[0])
            row["clocks"].append([clock.wall, clock.processor])
    except tf.errors.ResourceExhaustedError:
        return {"rows": [dict(row, failed="out of memory")], "versions": machine.versions()}
    if not np.isfinite(loss):
        raise AssertionError(f"The loss is no number: {loss}.")
    row.update(host_mib=host_peak_mib() - built, built_mib=built)
    if on_device is not None:
        row["device_mib"] = device_mib(device, "peak") - on_device
    return {"rows": [row], "versions": machine.versions()}


def time_steps(task):
    """Seconds of the first step of each run, and of later ones, which take turns; where the first one ends."""
    on_one_device()
    with_loss(network("tiny", 8), task).train_on_batch(*images_and_labels({"network": "tiny", "side": 8}, 2))
    x, y = images_and_labels(task, task["batch"])
    order, models, nets, rows, initial = random.Random(task["seed"]), {}, {}, {}, None
    names = list(task["runs"])
    order.shuffle(names)
    for name in names:
        nets[name] = network(task["network"], task["side"])
        initial = initial or nets[name].get_weights()
        nets[name].set_weights(initial)
        rows[name] = {"run": name, "first": None, "later": []}
        try:
            models[name] = compiled(task, name, nets[name])
            with Clock() as clock:
                models[name].train_on_batch(x, y)
        except tf.errors.ResourceExhaustedError:
            rows[name]["failed"] = "out of memory"
            del models[name]
            continue
        rows[name].update(first=[clock.wall, clock.processor], ends=nets[name].get_weights())
    _compare(rows, models, nets, initial, (x, y))
    for _ in range(task["rounds"]):
        order.shuffle(names)
        for name in names:
            if name in models:
                with Clock() as clock:
                    models[name].train_on_batch(x, y)
                rows[name]["later"].append([clock.wall, clock.processor])
    return {"rows": list(rows.values()), "versions": machine.versions()}


def _compare(rows, models, nets, initial, data):
    """Add to each row how far it ends from plain Keras; as a measure of rounding, add plain Keras on reversed data."""
    goal = rows[FULL].pop("ends", None) if FULL in rows else None
    ends = {name: row.pop("ends", None) for name, row in rows.items()}
    if goal is None:
        return
    nets[FULL].set_weights(initial)
    models[FULL].train_on_batch(*(part[::-1] for part in data))
    ends[FULL] = nets[FULL].get_weights()
    is_statistic = [_is_statistic(var) for var in nets[FULL].weights]
    for name, found in ends.items():
        if found is not None:
            rows[name]["apart"] = apart(found, goal, initial, is_statistic)


def _is_statistic(var):
    return "moving_" in getattr(var, "path", var.name)


def apart(found, goal, start, is_statistic):
    """[of the weights, of the moving statistics]: the distance from where they should be, relative to their way."""
    result = []
    for chosen in (False, True):
        parts = [
            (np.ravel(a) - np.ravel(b), np.ravel(b) - np.ravel(c))
            for a, b, c, flag in zip(found, goal, start, is_statistic)
            if flag == chosen
        ]
        off, way = (
            np.concatenate([np.asarray(part[i], np.float64) for part in parts] or [np.zeros(1)]) for i in (0, 1)
        )
        result.append(float(np.linalg.norm(off) / max(np.linalg.norm(way), 1e-300)))
    return result


def find_size(task):
    """Steps with `micro_batch_size="auto"` under a limit of the device's memory, and where the first one ends.

    Without a GPU, a layer says that memory has run out, unless the micro-batch is small enough. (Asking for too much
    takes 10 s each time: that is for how long TensorFlow's allocator tries again.)
    """
    device = on_one_device(task["limit_mib"])
    data = images_and_labels(task, task["batch"])
    rows = []
    for options in task["options"]:
        net = network(task["network"], task["side"])
        initial, ends, clocks = net.get_weights(), [], []
        run = net if device.startswith("GPU") else _with_hunger(net, task["fits"])
        model = compiled(task, "auto", run, micro_batch_size="auto", **options)
        for _ in range(task["steps"]):
            with Clock() as clock:
                model.train_on_batch(*data)
            clocks.append([clock.wall, clock.processor])
            ends.append(net.get_weights())
        row = {"options": options, "size": model.micro_batch_size, "clocks": clocks, "limit_mib": task["limit_mib"]}
        net.set_weights(initial)
        fixed = row["size"] if isinstance(row["size"], int) else task["micro"]
        compiled(task, "fixed", net, micro_batch_size=fixed, **options).train_on_batch(*data)
        row["apart"] = apart(ends[0], net.get_weights(), initial, [_is_statistic(var) for var in net.weights])
        rows.append(dict(row, device_mib=device_mib(device, "peak")))
    return {"rows": rows, "versions": machine.versions()}


def _with_hunger(net, fits):
    """`net` behind a layer that fits into memory with at most `fits` examples."""

    def allocate(count):
        if int(count) > fits:
            raise MemoryError("injected")

    class Hunger(tf.keras.layers.Layer):
        def call(self, inputs):
            # Nothing is computed from it, so that the network can be split.
            with tf.control_dependencies([tf.py_function(allocate, [tf.shape(inputs)[0]], [])]):
                return tf.identity(inputs)

    inputs = tf.keras.Input(net.input_shape[1:])
    return tf.keras.Model(inputs, net(Hunger()(inputs)))


def time_fit(task):
    """Seconds of epochs of `fit`, which take turns: accum, plain Keras, and Keras 3's own accumulation."""
    import accum
    from measuring.through_fit import untuned

    on_one_device()
    k = task["batch"] // task["micro"]
    x, y = images_and_labels(task, task["batch"] * 2)

    def cycles(net):
        return with_loss(accum.GradientAccumulateModel.from_model(net, accum_steps=k), task)

    def of_keras_3(net):
        return with_loss(net, task, tf.keras.optimizers.SGD(0.05, gradient_accumulation_steps=k))

    whole = {name: lambda net, name=name: compiled(task, name, net) for name in task["runs"]}
    parts = {"plain Keras, a step for each micro-batch": lambda net: with_loss(net, task)}
    parts["accum, accum_steps"] = cycles
    parts.update({"Keras 3, gradient_accumulation_steps": of_keras_3} if IS_KERAS_3 else {})
    runs = {name: (make, task["batch"]) for name, make in whole.items()}
    runs.update({name: (make, task["micro"]) for name, make in parts.items()})
    rows, models, datasets = {}, {}, {}
    for number in range(1 + task["rounds"]):
        names = list(runs)
        random.Random(number).shuffle(names)
        for name in names:
            make, size = runs[name]
            if number == 0:
                rows[name] = {"run": name, "epochs": []}
                models[name] = make(network(task["network"], task["side"]))
                datasets[name] = untuned(tf.data.Dataset.from_tensor_slices((x, y)).batch(size))
            try:
                with Clock() as clock:
                    models[name].fit(datasets[name], verbose=0)
            except tf.errors.ResourceExhaustedError:
                rows[name]["failed"] = "out of memory"
                del runs[name], models[name]
                continue
            rows[name]["epochs" if number else "first"] = rows[name]["epochs"] + [[clock.wall, clock.processor]]
    return {"rows": list(rows.values()), "versions": machine.versions()}


WORKERS = {"memory": measure_memory, "time": time_steps, "auto": find_size, "fit": time_fit}
