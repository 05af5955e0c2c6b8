"""A memory cgroup in which child processes run: beyond its limit, the kernel kills them."""

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

import pytest

IN_GROUP = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class Version(NamedTuple):
    """The files of one version of cgroups.

    Attributes:
      root: where it is mounted.
      limit: the file of the limit of memory, in bytes.
      swap: the file of the limit that counts swap, and its value for `limit` bytes.
      kills: the file that counts killed processes, in a line "oom_kill N".
    """

    root: str
    limit: str
    swap: str
    kills: str


V1 = Version("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control")
V2 = [
    Version(root, "memory.max", "memory.swap.max", "memory.events")
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
]


class Cgroup:
    """A cgroup that exists.

    Args:
      version: a `Version`.
      folder: the path of the cgroup.
    """

    def __init__(self, version, folder):
        self._version = version
        self._folder = folder

    def limit(self, size):
        """Limit the memory, and together with swap too where swap is counted."""
        self._write(self._version.limit, size)
        if os.path.exists(os.path.join(self._folder, self._version.swap)):
            self._write(self._version.swap, size if self._version is V1 else 0)

    def run(self, command):
        """Run a command in the cgroup. Returns its exit status, which is -9 if it was killed."""
        entering = ["/bin/sh", "-c", IN_GROUP, self._folder]
        return subprocess.run(entering + command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode

    def kills(self):
        """Return how many processes the kernel has killed here because memory ran out."""
        with open(os.path.join(self._folder, self._version.kills)) as file:
            counts = dict(line.split() for line in file)
        return int(counts.get("oom_kill", 0))

    def _write(self, name, value):
        with open(os.path.join(self._folder, name), "w") as file:
            file.write(str(value))


@contextlib.contextmanager
def memory_cgroup(size):
    """Make a cgroup of `size` bytes in this context; skip the test, with the reason, where that is not possible."""
    version = _usable_version()
    try:
        folder = tempfile.mkdtemp(prefix="accum-test-", dir=version.root)
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {version.root}: {error.strerror}")
    try:
        cgroup = Cgroup(version, folder)
        try:
            cgroup.limit(size)
        except OSError as error:
            pytest.skip(f"memory can't be limited in a cgroup in {version.root}: {error.strerror}")
        yield cgroup
    finally:
        os.rmdir(folder)


def _usable_version():
    """Return the `Version` that can limit memory here, or skip the test."""
    if not sys.platform.startswith("linux"):
        pytest.skip("cgroups are those of Linux")
    if os.geteuid() != 0:
        pytest.skip("only root may make cgroups")
    if os.path.exists(os.path.join(V1.root, "cgroup.procs")):
        return V1
    for version in V2:
        if _has_memory_controller(version.root):
            return version
    pytest.skip("cgroups that limit memory are not mounted, or their root does not hand the controller on")


def _has_memory_controller(root):
    """Whether cgroups below the root of version 2 limit memory."""
    try:
        with open(os.path.join(root, "cgroup.subtree_control")) as file:
            return "memory" in file.read().split()
    except OSError:
        return False
