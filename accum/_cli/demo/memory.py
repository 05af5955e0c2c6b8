"""The peak memory of this process, as the operating system reports it."""

import sys

MIB = 2**20


def peak_mib():
    """The largest resident memory of this process so far, in MiB; None if the system does not report it."""
    if sys.platform == "win32":
        return _peak_on_windows()
    try:
        import resource  # POSIX only
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak * 1024 / MIB  # bytes on macOS, KiB elsewhere


def _peak_on_windows():
    import ctypes
    from ctypes import wintypes

    sizes = (
        "PeakWorkingSetSize",
        "WorkingSetSize",
        "QuotaPeakPagedPoolUsage",
        "QuotaPagedPoolUsage",
        "QuotaPeakNonPagedPoolUsage",
        "QuotaNonPagedPoolUsage",
        "PagefileUsage",
        "PeakPagefileUsage",
    )

    class ProcessMemoryCounters(ctypes.Structure):
        _fields_ = [("cb", wintypes.DWORD), ("PageFaultCount", wintypes.DWORD)]
        _fields_ += [(name, ctypes.c_size_t) for name in sizes]

    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    kernel.K32GetProcessMemoryInfo.argtypes = (wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD)
    counters = ProcessMemoryCounters(cb=ctypes.sizeof(ProcessMemoryCounters))
    is_read = kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
    return counters.PeakWorkingSetSize / MIB if is_read else None
