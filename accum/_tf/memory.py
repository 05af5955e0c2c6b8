"""How much memory the present process, or its GPUs, have used at most, and how much they may use."""

import ctypes
import os
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

from accum._tf.version import tf

SHARE = 0.9
"""Of the memory that there is, the share that is used unless a user says otherwise. Peaks vary from step to step."""


class Gauge:
    """Measures the peak of one kind of memory, in bytes.

    Attributes:
      name: what it is, for messages.
      limit: how much of it may be used, in bytes.
      spread: by how much more than was first measured training uses later, beyond what it used before: memory that
        TensorFlow's allocator on the CPU has cut into pieces (measured by benchmarks/auto_size.py).
    """

    name = ""
    spread = 1.0

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def now(self) -> int:
        """Return what is in use."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin to measure. Where that is not possible, `peak` is that of the process so far, which only rises."""

    def peak(self) -> int:
        """Return the most that was in use since `begin`."""
        raise NotImplementedError

    def is_blind(self, earlier: int) -> bool:
        """Whether a peak from before hides how much of the limit is used: it is above the limit, and did not rise.

        Args:
          earlier: the peak when `begin` was called, in bytes.
        """
        return self.now() <= self.limit < self.peak() == earlier


class ResidentMemory(Gauge):
    """The resident memory of this process, on Linux."""

    name = "memory"
    spread = 1.2

    def now(self) -> int:
        return _status()["VmRSS"]

    def begin(self) -> None:
        try:
            with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
                file.write("5")
        except OSError:  # a read-only /proc
            pass

    def peak(self) -> int:
        return _status()["VmHWM"]


class AddressSpace(Gauge):
    """The virtual memory of this process, on Linux, which `ulimit -v` and `ulimit -d` count."""

    name = "address space"
    spread = 2.0  # glibc reserves 64 MiB at a time for threads that allocate at once, in some steps more than in others

    def now(self) -> int:
        return _status()["VmSize"]

    def peak(self) -> int:
        return _status()["VmPeak"]


class LargestResidentMemory(Gauge):
    """The largest resident memory of this process so far, on macOS."""

    name = "memory"
    spread = 1.2

    def now(self) -> int:
        return self.peak()

    def peak(self) -> int:
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def is_blind(self, earlier: int) -> bool:
        return self.limit < self.peak() == earlier


class DeviceMemory(Gauge):
    """The memory that TensorFlow has allocated on the GPU that uses most, from TensorFlow 2.7 on."""

    name = "GPU memory"

    def __init__(self, limit: int, devices: List[str]) -> None:
        super().__init__(limit)
        self._devices = devices

    def now(self) -> int:
        return max(tf.config.experimental.get_memory_info(device)["current"] for device in self._devices)

    def begin(self) -> None:
        for device in self._devices:
            tf.config.experimental.reset_memory_stats(device)

    def peak(self) -> int:
        return max(tf.config.experimental.get_memory_info(device)["peak"] for device in self._devices)


def gauges(memory_limit: Optional[int]) -> List[Gauge]:
    """Return what measures the memory in which a model trains; none where it can't be measured, or has no known limit.

    Args:
      memory_limit: bytes that may be used: of each GPU if there is one, otherwise of the process. None: `SHARE` of the
        limits of the device, or of the process, its cgroup and the machine.
    """
    if tf.config.experimental.list_logical_devices("GPU"):
        return _of_devices(memory_limit)
    if sys.platform == "darwin":
        limit = int(SHARE * _physical()) if memory_limit is None else memory_limit
        return [LargestResidentMemory(limit)]
    used = _status() if sys.platform.startswith("linux") else {}  # Wine has a /proc too
    if not {"VmRSS", "VmHWM"} <= set(used):  # another system, or a sandbox
        return []
    limit = int(SHARE * _available()) if memory_limit is None else memory_limit
    readers: List[Gauge] = [ResidentMemory(limit)] if limit else []
    space = _address_space()
    if space is not None:
        libraries = used["VmSize"]  # mostly libraries, whose size does not vary
        readers.append(AddressSpace(libraries + int(SHARE * (space - libraries))))
    return readers


# ----------------------------------------------------------------------------------------------------------------------
# GPUs


def _of_devices(memory_limit: Optional[int]) -> List[Gauge]:
    if not hasattr(tf.config.experimental, "reset_memory_stats"):  # dies with 2.6
        return []
    limit = memory_limit
    if limit is None:
        total = _device_total()
        limit = None if total is None else int(SHARE * total)
    names = _own_gpus()
    return [] if limit is None or not names else [DeviceMemory(limit, names)]


def _own_gpus() -> List[str]:
    """Return the names of the GPUs of this process, such as "GPU:0"; other workers of a cluster have theirs."""
    with tf.device("CPU:0"):
        own = tf.DeviceSpec.from_string(tf.zeros(()).device)
    return own_gpus([device.name for device in tf.config.experimental.list_logical_devices("GPU")], own.job, own.task)


def own_gpus(names: Sequence[str], job: Optional[str], task: Optional[int]) -> List[str]:
    """Return those of all GPUs that belong to a task, without the name of that task.

    Args:
      names: of devices, such as "/device:GPU:0", or "/job:worker/replica:0/task:1/device:GPU:0".
      job: the kind of this task, such as "worker".
      task: the number of this task.
    """
    specs = [tf.DeviceSpec.from_string(name) for name in names]
    return [f"GPU:{spec.device_index}" for spec in specs if spec.job is None or (spec.job, spec.task) == (job, task)]


def _device_total() -> Optional[int]:
    """Return the bytes of the smallest GPU: as the user has configured them, or as the driver of NVIDIA tells."""
    sizes = []
    for gpu in tf.config.list_physical_devices("GPU"):
        configured = tf.config.get_logical_device_configuration(gpu) or []
        sizes += [one.memory_limit * 2**20 for one in configured if one.memory_limit]
    if sizes:
        return min(sizes)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count, total, device = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return None
        for number in range(count.value):
            if driver.cuDeviceGet(ctypes.byref(device), number):
                return None
            if driver.cuDeviceTotalMem_v2(ctypes.byref(total), device):
                return None
            sizes.append(int(total.value))
    except (AttributeError, OSError):  # no such driver
        return None
    return min(sizes) if sizes else None


# ----------------------------------------------------------------------------------------------------------------------
# The process


def _status() -> Dict[str, int]:
    """Return the entries of /proc/self/status in bytes, as far as they are sizes; none on other systems."""
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            words = [line.split() for line in file if line.startswith(("Vm", "Rss"))]
    except OSError:
        return {}
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in words}


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available() -> int:
    """Return the bytes of resident memory that this process could have: of the machine and of its cgroups."""
    own = _status().get("VmRSS", 0)
    limits = [_physical()]
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
        limits.append(free + own)
    except (OSError, StopIteration):
        pass
    return min(limits + [limit - _of_others(folder) for folder, limit in _cgroup_limits()])


def _cgroup_limits() -> List[Tuple[str, int]]:
    """Return the folder and the limit in bytes of each cgroup that contains this process and limits its memory."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    limits = []
    for _, controllers, path in entries:
        if controllers and "memory" not in controllers.split(","):
            continue
        roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if not controllers else ("/sys/fs/cgroup/memory",)
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for root in roots:
            parts = [part for part in path.split("/") if part and part != ".."]
            for length in range(len(parts), -1, -1):  # in a container, only the root may be visible
                folder = os.path.join(root, *parts[:length])
                limit = _number_in(os.path.join(folder, name))
                if limit is not None and limit < _physical():
                    limits.append((folder, limit))
    return limits


def _of_others(folder: str) -> int:
    """Return the bytes that other processes of a cgroup use, without files, which the system can drop."""
    try:
        with open(os.path.join(folder, "memory.stat"), encoding="utf-8") as file:
            entries = dict(line.split()[:2] for line in file)
    except (OSError, ValueError):
        return 0
    used = int(entries.get("anon", entries.get("total_rss", 0)))
    return max(0, used - _status().get("RssAnon", used))


def _number_in(path: str) -> Optional[int]:
    """Return the number in a file, None if it says "max" or there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _address_space() -> Optional[int]:
    """Return the bytes of virtual memory to which `ulimit` limits this process, or None."""
    import resource  # not on Windows

    unlimited: Any = resource.RLIM_INFINITY
    space, data = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    status = _status()
    if not {"VmSize", "VmPeak", "VmData"} <= set(status):
        return None
    others = status["VmSize"] - status["VmData"]  # libraries and files, which `ulimit -d` does not count
    limits = ([] if space == unlimited else [space]) + ([] if data == unlimited else [data + others])
    return min(limits) if limits else None
