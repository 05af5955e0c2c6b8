"""Ask the package index what each environment of the matrix would install on each platform, without downloading wheels.

For each environment, `uv pip compile` resolves the dependencies in tox.ini, and all that they require, as if it ran on
that platform and Python. The result, or the fact that there is none, is kept in records/wheels.json with the date.

    python scripts/release/wheels.py                        ask for all environments, and write the record
    python scripts/release/wheels.py windows py38-tf2.13    ask for one environment and print it

Needs `tox` and `uv` (`pip install tox tox-uv`).
"""

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys

import _siblings  # noqa: F401
import environments

CONSTRAINTS = os.path.join(environments.ROOT, "constraints")
RECORD = os.path.join(environments.ROOT, "records", "wheels.json")
TAGS = {
    "linux": "x86_64-manylinux_2_31",  # of the oldest container that the workflow uses
    "linux-arm64": "aarch64-manylinux_2_31",
    "windows": "x86_64-pc-windows-msvc",
    "macos-intel": "x86_64-apple-darwin",
    "macos-arm": "aarch64-apple-darwin",
    "metal": "aarch64-apple-darwin",
}
# What takes a compiler to build: of these a wheel has to be there. A few small ones come as sources only.
WHEELS = [
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-intel",
    "tensorflow-macos",
    "tensorflow-metal",
    "tensorflow-io-gcs-filesystem",
    "tensorflow-addons",
    "tensorboard",
    "numpy",
    "scipy",
    "h5py",
    "grpcio",
    "protobuf",
    "jax",
    "jaxlib",
    "ml-dtypes",
    "libclang",
    "matplotlib",
    "optree",
    "tokenizers",
    "safetensors",
]
PATCH = 8
"""The patch release that is asked for: one that every Python of the matrix has. Packages exclude some earlier ones."""
TOLD = re.compile(r"(tensorflow(-(cpu|intel|macos|metal))?|keras|tf-keras|numpy|protobuf)==")


def constraints_digest():
    """A digest of what constraints/ pin: a record holds for the pins that it was asked with."""
    digest = hashlib.sha256()
    for name in sorted(os.listdir(CONSTRAINTS)):
        if name.endswith(".txt"):
            with open(os.path.join(CONSTRAINTS, name), encoding="utf-8") as file:
                pins = [line for line in file if not line.startswith("#")]
            digest.update(f"{name}\n{''.join(pins)}".encode("utf-8"))
    return digest.hexdigest()[:16]


def dependencies(names):
    """{environment: its dependencies, as tox.ini gives them}."""
    command = ["tox", "config", "-q", "-e", ",".join(names), "-k", "deps", "--format", "json"]
    done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, check=True, universal_newlines=True)
    return {name: said["deps"] for name, said in json.loads(done.stdout)["env"].items()}


def resolve(platform, env_name, deps):
    """({"package": "version"}, None), or (None, why nothing fits). Under "built": what has no wheel there."""
    built = []
    while True:
        pins, reason = _resolved(platform, env_name, deps, built)
        missing = without_wheel(reason or "")
        if missing is None or missing in built:
            break
        built.append(missing)
    if pins is not None and not any(name.startswith("tensorflow") for name in pins):
        return None, "no TensorFlow in it"
    if pins is not None and built:
        pins["built"] = " ".join(sorted(built))
    return pins, reason


def without_wheel(reason):
    """The package that uv had to leave out because it has no wheel; None if that is TensorFlow, or not the reason."""
    match = re.search(r"Wheels are required for `([^`]+)`|([\w-]+)==\S+ has no usable wheels", reason)
    name = match and (match.group(1) or match.group(2))
    return None if not name or name.startswith("tensorflow") else name


def _resolved(platform, env_name, deps, built):
    constraints = [dep.split()[1] for dep in deps if dep.startswith("-c ")]
    wanted = "\n".join(dep for dep in deps if not dep.startswith("-c ")) + "\n"
    minor = environments.parts(env_name)[1]
    command = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-platform", TAGS[platform], "--python-version", f"3.{minor}.{PATCH}"]
    for name in WHEELS:
        if name not in built:
            command += ["--only-binary", name]
    for path in constraints:
        command += ["--constraints", path]
    done = subprocess.run(
        command,
        cwd=environments.ROOT,
        input=wanted,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    if done.returncode:
        return None, " ".join(done.stderr.split())
    pins = [line.split(";")[0].strip() for line in done.stdout.splitlines() if "==" in line]
    return dict(pin.split("==") for pin in pins if TOLD.match(pin)), None


def ask(platforms, only):
    """{platform: {environment: what it installs, or None}}, and {(platform, environment): why nothing fits}."""
    names_of_label = environments.labels()
    every = sorted(
        {env_name for label in environments.LABELS for env_name in names_of_label[label]}, key=environments.parts
    )
    deps = dependencies(every)
    asked = [(p, c) for p in platforms for c in every if (c.endswith("-metal")) == (p == "metal")]
    asked = [(p, c) for p, c in asked if not only or c in only]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda pair: resolve(pair[0], pair[1], deps[pair[1]]), asked))
    pins_of_platform, reasons = {platform: {} for platform in platforms}, {}
    for (platform, env_name), (pins, reason) in zip(asked, answers):
        pins_of_platform[platform][env_name] = pins
        if pins is None:
            reasons[platform, env_name] = reason
    return pins_of_platform, reasons


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", nargs="?", choices=list(TAGS))
    parser.add_argument("env_name", nargs="*", help="these only, printed and not written")
    arguments = parser.parse_args()
    platforms = [arguments.platform] if arguments.platform else list(TAGS)
    answers, reasons = ask(platforms, arguments.env_name)
    wrong = 0
    for platform in platforms:
        said = set(environments.env_names(platform))
        for env_name, pins in answers[platform].items():
            if (pins is not None) != (env_name in said):
                wrong += 1
                outcome = reasons.get((platform, env_name), "resolves, but is not listed")
                print(f"{platform} {env_name}: {outcome}", file=sys.stderr)
        resolved = sum(pins is not None for pins in answers[platform].values())
        print(f"{platform}: {resolved} of {len(answers[platform])} environments resolve")
    if arguments.platform:
        print(json.dumps(answers, indent=1))
    else:
        version = subprocess.run(["uv", "--version"], stdout=subprocess.PIPE, universal_newlines=True).stdout.split()[1]
        record = {"asked": datetime.date.today().isoformat(), "with": "uv " + version, "tags": TAGS}
        record.update(constraints=constraints_digest(), cells=answers)
        with open(RECORD, "w", encoding="utf-8") as file:
            file.write(_written(record))
    return 1 if wrong else 0


def _written(record):
    """JSON with one line per environment, which gives readable diffs."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\{\n {4}([^{}]*?)\n {3}\}", lambda match: "{" + " ".join(match.group(1).split()) + "}", text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
