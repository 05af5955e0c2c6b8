"""Train in a process whose address space is limited: `limited.py plain|auto MIB FILE` writes the weights and logs.

MIB is what may be used beyond the built model; 0: no limit but that of the cgroup.
"""

import resource
import sys
import warnings

import numpy as np
import tensorflow as tf

import accum

MIB = 2**20
JIT = {"jit_compile": False} if str(getattr(tf.keras, "__version__", "2")).startswith("3") else {}
EXAMPLES, SIDE = 768, 64
layers = tf.keras.layers


def network():
    inputs = x = tf.keras.Input((SIDE, SIDE, 3))
    for _ in range(6):
        x = layers.Conv2D(16, 3, padding="same", activation="tanh")(x)
    return tf.keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))


def limit_address_space(extra):
    with open("/proc/self/status") as file:
        size = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + extra * MIB,) * 2)


def main(kind, extra, path):
    random = np.random.RandomState(0)
    x = random.normal(size=(EXAMPLES, SIDE, SIDE, 3)).astype("float32")
    y = random.normal(size=(EXAMPLES, 2)).astype("float32")
    model = network()
    model.set_weights([0.3 * random.normal(size=np.shape(weight)) for weight in model.get_weights()])
    if kind == "auto":
        model = accum.GradientAccumulateModel.from_model(model, micro_batch_size="auto")
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], **JIT)
    if extra:
        limit_address_space(extra)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = model.fit(x, y, batch_size=EXAMPLES, epochs=2, shuffle=False, verbose=0).history
    size = model.micro_batch_size if kind == "auto" else EXAMPLES
    np.savez(
        path,
        *model.get_weights(),
        loss=logs["loss"],
        mae=logs["mae"],
        size=size,
        said="\n".join(str(one.message) for one in caught),
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
