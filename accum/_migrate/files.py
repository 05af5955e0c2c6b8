"""Python files: which there are, their text to the byte, and how they are replaced."""

import contextlib
import io
import os
import shutil
import tempfile
import tokenize
from typing import NamedTuple

BOM = b"\xef\xbb\xbf"
NOT_OURS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}

Text = NamedTuple("Text", [("path", str), ("code", str), ("encoding", str), ("bom", bytes)])
Text.__doc__ = (
    """The text of a file, with what it takes to make the same bytes of it again: line ends are as they are."""
)


class Unreadable(Exception):
    """A file or folder that can't be read, decoded, parsed or written; the text says which and why.

    Args:
      text: the text.
      written: paths of files that are replaced all the same.
    """

    def __init__(self, text, written=()):
        super().__init__(text)
        self.written = written


def find(paths):
    """The files that `paths` name, and the `*.py` in the folders that they name, in order and each once.

    In folders, what is hidden, belongs to a virtual environment or is a symbolic link is left out: what a link points
    at either is found by itself or was not asked for.

    Raises:
      Unreadable: a path that does not exist, or is neither a file nor a folder.
    """
    found = {}
    for path in paths:
        if not os.path.exists(path):
            raise Unreadable("{}: no such file or folder".format(path or "''"))
        if not (os.path.isfile(path) or os.path.isdir(path)):  # to read a pipe may wait for ever
            raise Unreadable("{}: neither a file nor a folder".format(path))
        for file in _walk(path) if os.path.isdir(path) else [path]:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _walk(top):
    for folder, folders, files in os.walk(top, onerror=_raise):
        folders[:] = sorted(name for name in folders if _is_ours(folder, name))
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.endswith(".py") and not name.startswith(".") and not os.path.islink(path):
                yield path


def _is_ours(folder, name):
    is_environment = os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
    return not (name.startswith(".") or name in NOT_OURS or is_environment)


def _raise(error):
    raise Unreadable("{}: {}".format(error.filename, error.strerror))


def read(path, words):
    """The `Text` of a file, or None if none of `words` is in it: then nothing about it has to be known.

    Raises:
      Unreadable: the file can't be read, or is not in the encoding that it declares.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise Unreadable("{}: {}".format(path, error.strerror)) from None
    if not any(word.encode() in content for word in words):
        return None
    bom = BOM if content.startswith(BOM) else b""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        text = Text(path, content[len(bom) :].decode(encoding), encoding, bom)
        is_kept = bom + text.code.encode(encoding) == content
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise Unreadable("{}: {}".format(path, error)) from None
    if not is_kept:
        raise Unreadable("{}: {} does not give the same bytes again".format(path, encoding))
    return text


def require_writable(path):
    """Raise `Unreadable` unless `write` may replace the file: a read-only file is meant to be read only."""
    path = os.path.realpath(path)
    if not (os.access(path, os.W_OK) and os.access(os.path.dirname(path), os.W_OK)):
        raise Unreadable("{}: not writable".format(path))


def write(texts):
    """Replace files: `texts` is a list of (their `Text`, new code).

    Each is replaced in one go: whoever reads it meanwhile sees the old or the new, never a half. All the new ones are
    on the disk before the first takes its place, so that a full disk loses nothing. A symbolic link stays one, and the
    file it points at is replaced; permissions stay as they are.

    Raises:
      Unreadable: a file can't be replaced; it is then as it was, and the text says which others are not.
    """
    ready, done = [], []
    try:
        for text, code in texts:
            ready.append((text, _prepared(text, code)))
        for text, temporary in ready:
            with _named(text):
                os.replace(temporary, os.path.realpath(text.path))
            done.append(text.path)
    except Unreadable as error:
        raise Unreadable("{}; {}".format(error, _told(done)), done) from None
    finally:
        for _, temporary in ready[len(done) :]:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def _named(text):
    try:
        yield
    except OSError as error:
        raise Unreadable("{}: {}".format(text.path, error.strerror)) from None


def _told(done):
    return "written already: {}".format(", ".join(done)) if done else "nothing is written"


def _prepared(text, code):
    """Path of a new file beside the old one, with its mode: a rename takes it over, within one file system."""
    path = os.path.realpath(text.path)
    with _named(text):
        handle, temporary = tempfile.mkstemp(prefix=".accum-migrate-", dir=os.path.dirname(path))
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.bom + code.encode(text.encoding))
            _keep_owner(path, temporary)
            shutil.copymode(path, temporary)
        except BaseException:
            os.unlink(temporary)
            raise
    return temporary


def _keep_owner(path, temporary):
    """Where another's file is rewritten, by root say, it stays theirs; or its group's, or else becomes one's own."""
    before, now = os.stat(path), os.stat(temporary)
    if not hasattr(os, "chown") or (before.st_uid, before.st_gid) == (now.st_uid, now.st_gid):
        return
    for owner in (before.st_uid, -1):
        # refused to all but root, and not to be done at all in some containers and on some mounts
        with contextlib.suppress(OSError):
            os.chown(temporary, owner, before.st_gid)
            return
