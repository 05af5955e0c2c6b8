"""Functions that users name on the command line: `package.module:function` or `file.py:function`."""

import importlib
import importlib.util
import os
import sys
from typing import Any

from accum._cli.error_text import one_line

METAVAR = "MODULE:FUNCTION"
HELP = "MODULE:FUNCTION is package.module:function or path/to/file.py:function"


class Unusable(Exception):
    """Raised if a command can't work with the function that the user named."""


def check(named):
    """Check the spelling of a name, and that its file exists, without importing anything. Returns an error or None."""
    where, _, name = named.rpartition(":")
    problem = f"{METAVAR} must name a module and a function, such as `package.module:function` or `file.py:function`"
    if where.endswith(".py"):
        if name and not os.path.isfile(where):
            return f"{problem}. There is no file {where}."
    elif "/" in where or "\\" in where:
        return f"{problem}. Received: {named}."
    return None if where and name else f"{problem}. Received: {named}."


def split(named):
    """Return (module or file, function) of a name that `check` accepts."""
    where, _, name = named.rpartition(":")
    return where, name


def called(named):
    """Call the function of a name that `check` accepts. Returns what it returns.

    Raises:
      Unusable: it can't be imported, or fails.
    """
    where, name = split(named)
    try:
        function = getattr(module_of(where), name, None)
    except (Exception, SystemExit) as error:  # if a script calls `sys.exit`, its status must not become the command's
        raise Unusable(f"{where} could not be imported: {one_line(error)}.") from error
    if not callable(function):
        raise Unusable(f"{where} has no function {name}.")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Unusable(f"{named} failed: {one_line(error)}.") from error


def module_of(where):
    """Import a module or a file. Modules beside the file, or in the working directory, can be imported too."""
    is_file = where.endswith(".py")
    folder = os.path.dirname(os.path.abspath(where)) if is_file else os.getcwd()
    if folder not in sys.path and (is_file or "" not in sys.path):
        sys.path.insert(0, folder)  # `python -m` adds the working directory; an installed script does not
    if not is_file:
        return importlib.import_module(where)
    name = os.path.splitext(os.path.basename(where))[0]
    loaded = sys.modules.get(name)
    if loaded is not None and os.path.abspath(getattr(loaded, "__file__", None) or "") == os.path.abspath(where):
        return loaded
    if loaded is not None:  # another module, such as `numbers`, has this name
        name = "accum_user_file"
    spec: Any = importlib.util.spec_from_file_location(name, where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as for any import: classes are found by it, and processes can be started
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
