"""Describe the machine by what matters for timing, without its name."""

import datetime
import os
import platform
import subprocess


def described():
    """A dict that describes the machine; `versions` are those of the environment, from a worker."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "cores allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _cpu():
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    if platform.system() == "Darwin":
        return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"]).decode().strip()
    return platform.processor() or "unknown"


def _memory_gib():
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None


def versions():
    """Versions of TensorFlow and related packages, and the devices. Imports TensorFlow."""
    import numpy as np
    import tensorflow as tf

    import accum

    found = {"tensorflow": tf.__version__, "numpy": np.__version__, "accum": accum.__version__}
    if str(getattr(tf.keras, "__version__", "2")).startswith("3"):
        found["keras"] = tf.keras.__version__
    found["gpus"] = [device.name for device in tf.config.experimental.list_physical_devices("GPU")]
    threads = tf.config.threading
    found["threads"] = [threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads()]
    return found
