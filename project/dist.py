"""Build the files of a release, and check them as users get them. Run by `tox run -e dist`.

twine and check-wheel-contents check an sdist and the wheel built from it. Then each is installed with TensorFlow in an
environment of its own, and used from outside the checkout.

    python project/dist.py FOLDER       the folder is made anew
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONSTRAINTS = os.path.join(ROOT, "constraints", "tf2.15.txt")
TYPED_USE = os.path.join("tests", "support", "typed_use.py")
# TensorFlow itself has no types in most versions.
CHECK_TYPES = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--disable-error-code=import-untyped"]
USE = """
import os, sys
import numpy as np
import tensorflow as tf
import accum
import accum.compat.v1

checkout, version = sys.argv[1:]
for module in (accum, accum.compat.v1):
    assert not os.path.abspath(module.__file__).startswith(checkout + os.sep), module.__file__
assert accum.__version__ == version, accum.__version__

inputs = tf.keras.Input((2,))
outputs = tf.keras.layers.Dense(1, kernel_initializer="ones")(inputs)
model = accum.GradientAccumulateModel(accum_steps=2, inputs=inputs, outputs=outputs)
full = tf.keras.Model(inputs, tf.keras.layers.Dense(1, kernel_initializer="ones")(inputs))
x, y = np.arange(16.0).reshape(8, 2) / 16, np.ones((8, 1))
for one, size in ((model, 2), (full, 4)):
    one.compile("sgd", loss="mse")
    one.fit(x, y, batch_size=size, shuffle=False, verbose=0)
for one, other in zip(model.get_weights(), full.get_weights()):
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)

tf1 = tf.compat.v1
with tf.Graph().as_default(), tf1.Session() as session:
    weight = tf1.get_variable("w", initializer=1.0)
    step = tf1.train.get_or_create_global_step()
    optimizer = accum.compat.v1.AccumOptimizer(tf1.train.GradientDescentOptimizer(0.5), accum_steps=2)
    train = optimizer.minimize(weight * weight, step)
    session.run(tf1.global_variables_initializer())
    session.run(train)
    assert session.run([weight, step]) == [1.0, 0]
    session.run(train)
    assert session.run([weight, step]) == [0.0, 1]
print("accum", accum.__version__, "on TensorFlow", tf.__version__, "from", os.path.dirname(accum.__file__))
"""


def run(*command, **options):
    print("$", *[part if len(part) < 100 else "…" for part in command], flush=True)
    subprocess.run(command, check=True, **options)


def build(folder):
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    made = sorted(glob.glob(os.path.join(folder, "*")))
    if [os.path.splitext(path)[1] for path in made] != [".whl", ".gz"]:
        raise SystemExit(f"Expected an sdist and a wheel. Received: {made}")
    return made


def version_of(path):
    return re.match(r"tf_accum-([^-]+?)(-|\.tar)", os.path.basename(path)).group(1)


def check(made):
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    run("check-wheel-contents", made[0])
    versions = {version_of(path) for path in made}
    tag = os.environ.get("RELEASE_TAG")
    if len(versions) != 1 or (tag and tag != "v" + min(versions)):
        raise SystemExit(f"The tag is {tag}, but the version built is {sorted(versions)}")
    return min(versions)


def use(path, version):
    """Install `path` in an empty environment, and use it as a user would."""
    with tempfile.TemporaryDirectory() as outside:
        environment = os.path.join(outside, "environment")
        python = os.path.join(environment, "Scripts" if os.name == "nt" else "bin", "python")
        constraints = CONSTRAINTS
        tensorflow = "tensorflow-cpu" if sys.platform.startswith("linux") else "tensorflow"
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        clean["TF_CPP_MIN_LOG_LEVEL"] = "3"
        run("uv", "venv", "--quiet", "--python", sys.executable, environment, env=clean)
        run("uv", "pip", "install", "--quiet", "--python", python, "-c", constraints, path, tensorflow, env=clean)
        run(python, "-W", "ignore", "-c", USE, ROOT, version, cwd=outside, env=clean)
        run(*CHECK_TYPES, "--python-executable", python, os.path.join(ROOT, TYPED_USE), cwd=outside, env=clean)
        run(python, "-m", "accum", "demo", "--epochs", "1", cwd=outside, env=clean)


def main():
    made = build(os.path.abspath(sys.argv[1]))
    version = check(made)
    for path in made:
        use(path, version)


if __name__ == "__main__":
    main()
