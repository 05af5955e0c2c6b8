"""Install locks offline, from a folder of wheels, with hashes enforced.

    python scripts/release/wheelhouse.py NAME ...

For each lock, such as py39-tf2.10-cpu, on this machine's Python of that version:

1. make an environment, and upgrade its pip as docs/pins.md says (pip.txt of the locks);
2. download what the lock names;
3. install it without an index, and train with plain TensorFlow (scripts/release/smoke.py);
4. change one byte of a wheel, and expect pip to refuse it.

Takes about a gigabyte and some minutes for each; nothing is left behind. Needs the Pythons on PATH as python3.x.
"""

import argparse
import glob
import os
import re
import subprocess
import sys
import tempfile
import time

import _siblings  # noqa: F401
import write_locks

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(*command):
    started = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    words = " ".join(os.path.basename(part) for part in command[:6])
    print(f"  {words}: status {done.returncode}, {time.time() - started:.0f} s", flush=True)
    return done


def require(done):
    if done.returncode:
        raise SystemExit(done.stdout[-3000:])
    return done


def size(folder):
    return sum(os.path.getsize(path) for path in glob.glob(os.path.join(folder, "*")))


def check(name, folder):
    written = os.path.join(folder, "locks")
    write_locks.write(write_locks.data.read(), written)
    lock = os.path.join(written, name + ".txt")
    wheels = os.path.join(folder, "wheelhouse")
    python = os.path.join(folder, "environment", "bin", "python")
    minor = re.match(r"py3(\d+)-", name).group(1)
    require(run(f"python3.{minor}", "-m", "venv", os.path.join(folder, "environment")))
    print("  comes with", run(python, "-m", "pip", "--version").stdout.split(" from")[0])
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if int(minor) < 10:
        require(run(*pip, "install", "--require-hashes", "-r", os.path.join(written, "pip.txt")))
    require(run(*pip, "download", "--no-deps", "--require-hashes", "-d", wheels, "-r", lock))
    print(f"  {len(os.listdir(wheels))} files, {size(wheels) / 1e6:.0f} MB")
    offline = ["--no-index", "--find-links", wheels, "--no-cache-dir", "--no-deps", "--require-hashes", "-r", lock]
    if any(not file.endswith(".whl") for file in os.listdir(wheels)):
        # what is built from its sources is built with the setuptools and wheel of the lock
        offline.insert(0, "--no-build-isolation")
        require(run(*pip, "install", "--no-index", "--find-links", wheels, *_builders(lock)))
    require(run(*pip, "install", *offline))
    require(run(*pip, "check"))
    require(run(python, "-I", os.path.join(ROOT, "scripts", "release", "smoke.py")))
    changed = max(glob.glob(os.path.join(wheels, "tensorflow*.whl")), key=os.path.getsize)
    with open(changed, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    refused = run(*pip, "install", "--force-reinstall", *offline)
    if refused.returncode == 0 or "DO NOT MATCH THE HASHES" not in refused.stdout:
        raise SystemExit(f"{name}: a changed byte was installed.\n" + refused.stdout[-3000:])
    print(f"  one byte of {os.path.basename(changed)} changed: refused")


def _builders(lock):
    with open(lock, encoding="utf-8") as file:
        return re.findall(r"(?m)^((?:setuptools|wheel)==\S+)", file.read())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    for name in parser.parse_args().names:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            check(name, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
