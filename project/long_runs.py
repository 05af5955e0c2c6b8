"""Train for 100,000 micro steps, make and drop 200 models, count beyond 2^31: memory and time stay as they were.

    python project/long_runs.py run --of session loop fit models counters
    python project/long_runs.py page

`run` needs an environment with TensorFlow, on Linux, and writes records/long-runs.json; `page` writes
pages/long-runs.md. TensorFlow 1.15 has `session` and `counters` alone.
"""

import argparse
import datetime
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
RECORD, PAGE = os.path.join(HERE, "records", "long-runs.json"), os.path.join(HERE, "pages", "long-runs.md")
BEGIN, END = "<!-- long runs -->\n", "<!-- end of long runs -->\n"
WORDS = {
    "session": "train op in a `Session`",
    "loop": "`GradientAccumulateOptimizer` in a loop",
    "fit": "`GradientAccumulateModel` in `fit`, `accum_steps`",
    "split": "`GradientAccumulateModel` in `fit`, `micro_batch_size`",
    "models": "models made, trained and dropped",
    "counters": "steps on both sides of step 2^31",
}
K = 4
GROWTH, SLOWER = 16.0, 1.5
"""What may be added between a tenth and the end of a run: MiB, and the factor by which a micro step may take longer."""
LIMIT = 2**31


def memory():
    """The memory of this process, in MiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Course:
    """Memory and time of a run, looked at a hundred times.

    Args:
      count: how many micro steps, or models, there are.
    """

    def __init__(self, count):
        self._count, self._made, self._every = count, 0, max(1, count // 100)
        self._memory, self._seconds = [], []
        self._since = time.process_time()  # the machine may have other work

    def advance(self):
        self._made += 1
        if self._made % self._every == 0:
            self._seconds.append((time.process_time() - self._since) / self._every)
            self._memory.append(memory())
            self._since = time.process_time()

    def result(self):
        """Memory at a tenth and at the end, and the microseconds for one in the second tenth and in the last."""
        tenth = len(self._memory) // 10
        early, late = (
            1e6 * sorted(part)[len(part) // 2] for part in (self._seconds[tenth : 2 * tenth], self._seconds[-tenth:])
        )
        return {
            "count": self._made,
            "mib": [round(self._memory[tenth - 1], 1), round(self._memory[-1], 1)],
            "microseconds": [round(early), round(late)],
        }


def check(what, is_right):
    if not is_right:
        raise AssertionError(what)


# ----------------------------------------------------------------------------------------------------------------------


def run_session(count):
    import numpy as np
    import tensorflow as tf

    import accum.compat.v1

    tf1 = tf.compat.v1
    course = Course(count)
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        weights = tf1.get_variable("w", initializer=np.ones(5, "float32"))
        fed = tf1.placeholder(tf.float32, [5])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1e-4), K)
        train_op = optimizer.apply_gradients([(fed, weights)], step)
        session.run(tf1.global_variables_initializer())
        tf1.get_default_graph().finalize()
        for index in range(count):
            session.run(train_op, {fed: np.full(5, index % 2, "float32")})
            course.advance()
        check("the number of steps", session.run(step) == count // K)
        check("the weights", np.allclose(session.run(weights), 1.0 - 0.5e-4 * (count // K), atol=1e-2))
    return course.result()


def run_loop(count):
    import numpy as np
    import tensorflow as tf

    import accum

    course = Course(count)
    var = tf.Variable(np.ones(5, "float32"))
    optimizer = accum.GradientAccumulateOptimizer(tf.keras.optimizers.SGD(1e-4), accum_steps=K)

    @tf.function
    def micro_step(grad):
        optimizer.apply_gradients([(grad, var)])

    for index in range(count):
        micro_step(tf.constant(np.full(5, index % 2, "float32")))
        course.advance()
    check("the number of steps", int(optimizer.iterations) == count // K)
    check("the weights", np.allclose(var.numpy(), 1.0 - 0.5e-4 * (count // K), atol=1e-2))
    return course.result()


def _fit(count, **options):
    import numpy as np
    import tensorflow as tf

    import accum

    course = Course(count)

    class Advance(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            course.advance()

    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat(count)
    model = accum.GradientAccumulateModel.from_model(_network(), **options)
    model.compile(tf.keras.optimizers.SGD(1e-4), "mse")
    model.fit(data, epochs=1, verbose=0, callbacks=[Advance()])
    check("the number of steps", int(model.optimizer.iterations) == count // options.get("accum_steps", 1))
    return course.result()


def run_fit(count):
    return _fit(count, accum_steps=K)


def run_split(count):
    return _fit(count, micro_batch_size=1)


def _network():
    import tensorflow as tf

    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))


def run_models(count):
    """Make, train and drop models: by the default count, 200."""
    import numpy as np
    import tensorflow as tf

    import accum

    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    course, references = Course(count), []
    for number in range(count):
        options = {"accum_steps": 2} if number % 2 else {"micro_batch_size": 2}
        model = accum.GradientAccumulateModel.from_model(_network(), **options)
        model.compile(tf.keras.optimizers.SGD(0.1), "mse", run_eagerly=number % 4 > 1)
        model.fit(x, y, batch_size=2, verbose=0)
        references += [weakref.ref(part) for part in [model] + model.layers]
        del model
        tf.keras.backend.clear_session()
        course.advance()
    gc.collect()
    left = [reference() for reference in references if reference() is not None]
    check(f"{len(left)} models or layers are left", not left)
    return course.result()


def run_counters(count):
    """Make steps on both sides of step 2^31, which is read from a checkpoint: `count` is not used."""
    del count
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        made = [_session_counters(folder)]
        if int(tf.__version__.split(".")[0]) > 1:
            made.append(_keras_counters(folder))
    return {"count": sum(made)}


def _session_counters(folder):
    import tensorflow as tf

    import accum.compat.v1

    tf1 = tf.compat.v1
    schedule = {0: 2, LIMIT: 3}  # which changes at the limit
    with tf.Graph().as_default(), tf1.Session() as session:
        step = tf1.train.get_or_create_global_step()
        weights = tf1.get_variable("w", initializer=[0.0])
        optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(1.0), schedule)
        train_op = optimizer.apply_gradients([(tf.constant([1.0]), weights)], step)
        session.run(tf1.global_variables_initializer())
        session.run(step.assign(LIMIT - 2))
        saver = tf1.train.Saver()
        path = saver.save(session, os.path.join(folder, "session"))
        session.run(tf1.global_variables_initializer())
        saver.restore(session, path)
        seen = []
        for _ in range(2 + 2 + 3 + 3):
            session.run(train_op)
            seen.append(int(session.run(step)) - LIMIT)
        check(f"global_step around 2^31: {seen}", seen == [-2, -1, -1, 0, 0, 0, 1, 1, 1, 2])
        check("the weights", session.run(weights)[0] == -4.0)
    return len(seen)


def _keras_counters(folder):
    import tensorflow as tf

    import accum

    seen = []
    var = tf.Variable([0.0])
    inner = tf.keras.optimizers.SGD(1.0)
    optimizer = accum.GradientAccumulateOptimizer(inner, accum_steps={0: 2, LIMIT: 3})

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.constant([1.0]), var)])

    if hasattr(optimizer, "build"):
        optimizer.build([var])
    inner.iterations.assign(LIMIT - 2)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, var=var)
    path = checkpoint.save(os.path.join(folder, "keras"))
    inner.iterations.assign(0)
    checkpoint.restore(path)
    for _ in range(2 + 2 + 3 + 3):
        step()
        seen.append(int(optimizer.iterations) - LIMIT)
    check(f"iterations around 2^31: {seen}", seen == [-2, -1, -1, 0, 0, 0, 1, 1, 1, 2])
    check("the weights", var.numpy()[0] == -4.0)
    return len(seen)


# ----------------------------------------------------------------------------------------------------------------------


def run(arguments):
    sys.path[:1] = [ROOT]  # in place of this script's folder, where numbers.py would hide Python's own
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    commit = subprocess.check_output(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT).decode().strip()
    failed = 0
    for kind in arguments.of:
        count = arguments.count or (200 if kind == "models" else 100000)
        begin = time.time()
        result = globals()["run_" + kind](count)
        text = json.dumps(result)
        print(f"TensorFlow {tf.__version__}, {kind}: {text} in {time.time() - begin:.0f} s", flush=True)
        if "mib" in result:
            (before, after), (early, late) = result["mib"], result["microseconds"]
            if after - before > GROWTH or late > SLOWER * early:
                print(f"{kind}: it grew, or slowed down", flush=True)
                failed += 1
                continue
        if not arguments.count:
            add(dict(result, kind=kind, tensorflow=tf.__version__, commit=commit, date=str(datetime.date.today())))
    return failed


def read_record():
    if not os.path.exists(RECORD):
        return []
    with open(RECORD, encoding="utf-8") as file:
        return json.load(file)


def add(result):
    kept = {(result["kind"], result["tensorflow"]): result for result in read_record()}
    kept[result["kind"], result["tensorflow"]] = result
    ordered = sorted(kept.values(), key=lambda result: (list(WORDS).index(result["kind"]), _version(result)))
    with open(RECORD, "w", encoding="utf-8", newline="\n") as file:
        file.write("[\n" + ",\n".join(" " + json.dumps(result, sort_keys=True) for result in ordered) + "\n]\n")


def _version(result):
    return [int(part) for part in result["tensorflow"].split(".")[:2]]


def section(results):
    """The table, in Markdown."""
    text = "\n| what | TensorFlow | how many | MiB at a tenth, at the end | processor µs each, early, late | date |\n"
    text += "|---|---|---:|---:|---:|---|\n"
    for row in results:
        cells = [" ".join(f"{number:,.0f}" for number in row.get(name, ())) for name in ("mib", "microseconds")]
        text += f"| {WORDS[row['kind']]} | {row['tensorflow']} | {row['count']:,} | {cells[0].replace(' ', ', ')} | "
        text += f"{cells[1].replace(' ', ', ')} | {row['date']} |\n"
    return text + "\n"


def page():
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    with open(PAGE, "w", encoding="utf-8", newline="\n") as file:
        file.write(text[:begin] + section(read_record()) + text[end:])
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", metavar="run | page")
    runs = commands.add_parser("run", help="run, and write records/long-runs.json")
    runs.add_argument("--of", nargs="+", choices=list(WORDS), required=True, metavar="KIND", help=", ".join(WORDS))
    runs.add_argument("--count", type=int, help="fewer, for a trial that is not recorded")
    commands.add_parser("page", help="write pages/long-runs.md")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    return page() if arguments.command == "page" else run(arguments)


if __name__ == "__main__":
    sys.exit(main())
