"""Tell a reader that has gone, such as `| head`, from other errors of the system."""

import errno
import sys


def is_reader_gone(error: OSError) -> bool:
    """Whether output could not be written because its pipe is closed. Windows says EINVAL, of no file."""
    on_windows = sys.platform == "win32" and error.errno == errno.EINVAL and error.filename is None
    return isinstance(error, BrokenPipeError) or on_windows
