"""Find the uses of classes and functions that accumulate in another file of the program."""

import os
from typing import Any, Dict

from accum._migrate import files

REASON = "it adds gradients up by hand, in {}. Migrate it together with that file"


class Definitions:
    """The classes and functions that accumulate in the files of a run."""

    def __init__(self):
        self._paths: Dict[Any, Any] = {}

    def add(self, name, path):
        """Add a class or function `name` of the file `path`."""
        self._paths.setdefault(name, []).append(path)

    def may_be_in(self, content):
        """Whether the bytes of a file contain any of the names."""
        return any(name.encode() in content for name in self._paths)

    def path_of(self, full_name, user):
        """Return the file that defines an imported name, or None if no other file of the run does.

        Args:
          full_name: such as "package.trainers.Trainer", or ".trainers.Trainer".
          user: path of the file that imports it.
        """
        module, _, name = full_name.rpartition(".")
        paths = [path for path in self._paths.get(name, ()) if path != user and _may_be(module, path, user)]
        return files.nearest(user, paths) if paths else None


def _may_be(module, path, user):
    """Whether a module may hold a file's names: it is the file, or a package around it."""
    parts = os.path.splitext(os.path.realpath(path))[0].split(os.sep)
    last = module.rpartition(".")[2]
    return (
        last in parts if last else bool(module) and os.path.basename(os.path.dirname(os.path.realpath(user))) in parts
    )
