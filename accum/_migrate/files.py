"""Find Python files, read them without losing a byte, and replace them."""

import contextlib
import io
import os
import re
import shutil
import tempfile
import tokenize
from typing import Any, Dict, NamedTuple

BOM = b"\xef\xbb\xbf"
NOT_OURS = {"__pycache__", "node_modules", "site-packages", "dist-packages"}


class Text(NamedTuple):
    """The text of a file, with what it takes to make the same bytes of it again: line ends are as they are."""

    path: str
    code: str
    encoding: str
    bom: bytes


class Unreadable(Exception):
    """A file or folder that can't be read, decoded, parsed or written; the message says which and why.

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
    found: Dict[Any, Any] = {}
    for path in paths:
        if not os.path.exists(path):
            raise Unreadable("{}: no such file or folder".format(path or "''"))
        if not (os.path.isfile(path) or os.path.isdir(path)):  # to read a pipe may wait for ever
            raise Unreadable(f"{path}: neither a file nor a folder")
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
    raise Unreadable(f"{error.filename}: {error.strerror}")


def clues(paths, words):
    """Where each of `words` is found: {word: [paths]}. A file that can't be read has none; `content` says why."""
    found: Dict[Any, Any] = {}
    for path in paths:
        with contextlib.suppress(Unreadable):
            read = content(path)
            for word in words:
                if re.search(rb"\b%s\b" % word.encode(), read):
                    found.setdefault(word, []).append(path)
    return found


def nearest(path, others):
    """The one of `others` that shares most folders with `path`."""
    folders = os.path.realpath(path).split(os.sep)
    shared = lambda other: len(os.path.commonprefix([folders, os.path.realpath(other).split(os.sep)]))
    return max(others, key=shared)


def content(path):
    """The bytes of a file.

    Raises:
      Unreadable: the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None


def text(path, content):
    """The `Text` of a file's bytes.

    Raises:
      Unreadable: they are not in the encoding that they declare.
    """
    bom = BOM if content.startswith(BOM) else b""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        found = Text(path, content[len(bom) :].decode(encoding), encoding, bom)
        is_kept = bom + found.code.encode(encoding) == content
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise Unreadable(f"{path}: {error}") from None
    if not is_kept:
        raise Unreadable(f"{path}: decoding and encoding it as {encoding} would change its bytes")
    return found


def require_writable(path):
    """Raise `Unreadable` unless `write` may replace the file: a read-only file is meant to be read only."""
    path = os.path.realpath(path)
    if not (os.access(path, os.W_OK) and os.access(os.path.dirname(path), os.W_OK)):
        raise Unreadable(f"{path}: not writable")


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
        raise Unreadable(f"{error}; {_told(done)}", done) from None
    finally:
        for _, temporary in ready[len(done) :]:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def _named(text):
    try:
        yield
    except OSError as error:
        raise Unreadable(f"{text.path}: {error.strerror}") from None


def _told(done):
    return f"already written: {', '.join(done)}" if done else "nothing was written"


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
