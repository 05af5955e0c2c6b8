"""One process of a Horovod job, run by on_horovod.py: `horovodrun ... python horovod_worker.py {job}`.

The first process prints one line of JSON: what the job returns. Each process has every second micro-batch.
"""

import json
import os
import re
import signal
import sys

import numpy as np
import tensorflow as tf

if hasattr(tf, "optimizers"):
    import horovod.tensorflow.keras as hvd_keras
import horovod.tensorflow as hvd

tf1 = tf.compat.v1
GUIDE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "docs", "devices.md")
K, STEPS, SIZE, ROWS = 3, 4, 4, 7


def problem():
    """Return rows of a table to look up, [n], what they should be, [n, 2], and the table at the start, [7, 2]."""
    random = np.random.RandomState(0)
    ids = random.randint(0, ROWS, size=[STEPS * K * 2 * SIZE]).astype("int32")
    return ids, random.normal(size=[len(ids), 2]).astype("float32"), random.normal(size=[ROWS, 2]).astype("float32")


def own_micro_batches():
    """Yield the micro-batches of this process."""
    ids, targets, _ = problem()
    for number in range(hvd.rank(), len(ids) // SIZE, hvd.size()):
        part = slice(number * SIZE, (number + 1) * SIZE)
        yield ids[part], targets[part]


def of_guide():
    """Return the names that the guide defines, with Horovod's reduction in it."""
    with open(GUIDE, encoding="utf-8") as file:
        (block,) = [code for code in re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL) if "allreduce" in code]
    names = {}
    if not hasattr(tf, "optimizers"):
        block = block.split("optimizer = ")[0]  # the rest is for Keras
    exec(compile(block, GUIDE, "exec"), names)
    names["allreduce"] = hvd.allreduce
    return names


def loop(make_optimizer, sparse=True):
    """Train a table in a loop of one's own. Returns its values."""
    table = tf.Variable(problem()[2])
    optimizer = make_optimizer()
    hvd.broadcast_variables([table], root_rank=0)

    def micro_step(ids, targets):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids) if sparse else tf.one_hot(ids, ROWS) @ table
            loss = tf.reduce_mean((rows - targets) ** 2)
        grad = tape.gradient(loss, table)
        assert isinstance(grad, tf.IndexedSlices) == sparse
        optimizer.apply_gradients([(grad, table)])

    run = tf.function(micro_step)
    for ids, targets in own_micro_batches():
        run(tf.constant(ids), tf.constant(targets))
    return table.numpy()


def ours(sparse=True):
    import accum

    names = of_guide()

    def make():
        return accum.GradientAccumulateOptimizer(
            tf.keras.optimizers.SGD(0.1, momentum=0.9), K, reduction="sum", transform=names["average_over_workers"]
        )

    return loop(make, sparse)


def theirs():
    """Horovod's own accumulation, which acts in `fit`, on dense gradients."""
    inputs = tf.keras.Input((), dtype="int32")
    rows = tf.keras.layers.Lambda(lambda ids: tf.one_hot(ids, ROWS))(inputs)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2, use_bias=False, weights=[problem()[2]])(rows))
    inner = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    return fitted(model, hvd_keras.DistributedOptimizer(inner, backward_passes_per_step=K))


def fitted(model, optimizer):
    """Train a model in `fit`. Returns its table."""
    model.compile(optimizer, "mse")
    ids, targets = map(np.concatenate, zip(*own_micro_batches()))
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(ids, targets, batch_size=SIZE, shuffle=False, verbose=0, callbacks=[callback])
    return model.get_weights()[0]


def fit():
    """Train in `fit` of a model that splits each batch too, with the mean over micro-batches."""
    import accum

    names = of_guide()
    inputs = tf.keras.Input((), dtype="int32")
    model = tf.keras.Model(inputs, tf.keras.layers.Embedding(ROWS, 2, weights=[problem()[2]])(inputs))
    model = accum.GradientAccumulateModel.from_model(
        model, accum_steps=K, micro_batch_size=SIZE // 2, transform=names["average_over_workers"]
    )
    return fitted(model, tf.keras.optimizers.SGD(0.1, momentum=0.9))


def elastic():
    """Train a table while one of two processes dies in mid-cycle; the other goes on, and makes the same steps."""
    import horovod.tensorflow.elastic as hvd_elastic

    import accum

    ids, targets, first = problem()
    table, total = tf.Variable(first), 2 * K
    optimizer = accum.GradientAccumulateOptimizer(
        tf.keras.optimizers.SGD(0.1, momentum=0.9), total // hvd.size(), transform=of_guide()["average_over_workers"]
    )
    optimizer.build([table])
    state = hvd_elastic.TensorFlowState(variables=[table] + list(optimizer.optimizer.variables()), step=0)

    def after_change():
        optimizer.reset()
        optimizer.accum_steps = total // hvd.size()

    def micro_step(ids_now, targets_now):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, ids_now) - targets_now) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    run = tf.function(micro_step)
    state.register_reset_callbacks([after_change])

    @hvd_elastic.run
    def train(state):
        while state.step < STEPS:
            for number in range(hvd.rank(), total, hvd.size()):
                if state.step == 1 and number == 3 and hvd.size() == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                begin = (state.step * total + number) * SIZE
                run(tf.constant(ids[begin : begin + SIZE]), tf.constant(targets[begin : begin + SIZE]))
            state.step += 1
            state.commit()

    train(state)
    assert hvd.size() == 1
    return table.numpy()


def session(use_ours=True):
    """Train in a Session, with a static train op."""
    import accum.compat.v1

    names = of_guide()
    with tf1.Graph().as_default(), tf1.Session() as sess:
        table = tf1.get_variable("table", initializer=problem()[2], use_resource=True)
        ids, targets = tf1.placeholder(tf.int32, [None]), tf1.placeholder(tf.float32, [None, 2])
        rows = tf.gather(table, ids) if use_ours else tf.matmul(tf.one_hot(ids, ROWS), table)
        loss = tf.reduce_mean((rows - targets) ** 2)
        inner = tf1.train.MomentumOptimizer(0.1, 0.9)
        if use_ours:
            optimizer = accum.compat.v1.AccumOptimizer(
                inner, K, reduction="sum", transform=names["average_over_workers"]
            )
        else:
            optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=K)
        train_op = optimizer.minimize(loss)
        sess.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])  # Horovod's sums are local
        sess.run(hvd.broadcast_global_variables(0))
        for ids_now, targets_now in own_micro_batches():
            sess.run(train_op, {ids: ids_now, targets: targets_now})
        return sess.run(table)


JOBS = {
    "loop": ours,
    "dense": lambda: ours(sparse=False),
    "theirs": theirs,
    "fit": fit,
    "elastic": elastic,
    "session": session,
    "session_theirs": lambda: session(use_ours=False),
}


if __name__ == "__main__":
    hvd.init()
    assert hvd.size() == 2
    result = JOBS[sys.argv[1]]()
    if hvd.rank() == 0:
        print("\nRESULT " + json.dumps(np.asarray(result, "float64").tolist()), flush=True)
