"""Find Python files, read them without loss, and replace them."""

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
    """The text of a file, with its encoding, so that the same bytes can be written again. Line ends are kept."""

    path: str
    code: str
    encoding: str
    bom: bytes


class Unreadable(Exception):
    """Raised if a file or folder can't be read, decoded, parsed or written. The message names it and the reason.

    Args:
      text: the message.
      written: paths of the files that have been replaced nevertheless.
    """

    def __init__(self, text, written=()):
        super().__init__(text)
        self.written = written


def find(paths):
    """Return the files in `paths` and the `*.py` files in its folders, in order and each once.

    In folders, hidden files, virtual environments and symbolic links are skipped. The target of a link is either in
    the folders too, or was not asked for.

    Raises:
      Unreadable: a path does not exist, or is neither a file nor a folder.
    """
    paths_by_real_path: Dict[Any, Any] = {}
    for path in paths:
        if not os.path.exists(path):
            raise Unreadable("{}: no such file or folder".format(path or "''"))
        if not (os.path.isfile(path) or os.path.isdir(path)):  # reading a pipe may block forever
            raise Unreadable(f"{path}: neither a file nor a folder")
        for file in _walk(path) if os.path.isdir(path) else [path]:
            paths_by_real_path.setdefault(os.path.realpath(file), file)
    return list(paths_by_real_path.values())


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
    """Return the files in which each of `words` occurs: {word: [paths]}. Files that can't be read are skipped."""
    paths_by_word: Dict[Any, Any] = {}
    for path in paths:
        with contextlib.suppress(Unreadable):
            read = content(path)
            for word in words:
                if re.search(rb"\b%s\b" % word.encode(), read):
                    paths_by_word.setdefault(word, []).append(path)
    return paths_by_word


REQUIREMENTS = re.compile(
    r"(requirements|constraints|dev|test).*\.(txt|in)|setup\.(py|cfg)|pyproject\.toml|environment.*\.ya?ml|Pipfile"
)
"""Names of files that name the packages of a program."""

NOT_REQUIRED = re.compile(r"#|import |from |(name|version|packages|py_modules|url)\s*=")
"""How lines begin that do not say what is required, such as a package's own name."""


def requirements(paths, packages):
    """Return the lines that require one of `packages`: [(path, line number, package)].

    They are searched for in the folders among `paths`, and beside the files among them.
    """
    word = "|".join(re.escape(package).replace(r"\-", "[-_.]") for package in packages)
    required = re.compile(rf"""(?:^|["'\s])({word})(?=\s*(?:[=<>!~;,"'\[#]|$))""", re.IGNORECASE)
    requirements = []
    for path in sorted(_requirement_files(paths)):
        with contextlib.suppress(Unreadable):
            for number, line in enumerate(content(path).decode("utf-8", "replace").splitlines(), 1):
                match = required.search(line)
                if match and not NOT_REQUIRED.match(line.lstrip()):
                    requirements.append((path, number, re.sub("[_.]", "-", match.group(1).lower())))
    return requirements


def _requirement_files(paths):
    tops = {path if os.path.isdir(path) else os.path.dirname(path) or "." for path in paths}
    for top in tops:
        for folder, folders, names in os.walk(top):
            folders[:] = [name for name in folders if _is_ours(folder, name)] if top in paths else []
            yield from (os.path.join(folder, name) for name in names if REQUIREMENTS.fullmatch(name))


def nearest(path, others):
    """Return the path among `others` that shares the most folders with `path`."""
    folders = os.path.realpath(path).split(os.sep)
    shared = lambda other: len(os.path.commonprefix([folders, os.path.realpath(other).split(os.sep)]))
    return max(others, key=shared)


def content(path):
    """Return the bytes of a file.

    Raises:
      Unreadable: the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None


def text(path, content):
    """Decode the bytes of a file to a `Text`.

    Raises:
      Unreadable: they are not in the encoding that they declare.
    """
    bom = BOM if content.startswith(BOM) else b""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        text = Text(path, content[len(bom) :].decode(encoding), encoding, bom)
        is_kept = bom + text.code.encode(encoding) == content
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise Unreadable(f"{path}: {error}") from None
    if not is_kept:
        raise Unreadable(f"{path}: decoding and encoding it as {encoding} would change its bytes")
    return text


def require_writable(path):
    """Raise `Unreadable` unless `write` may replace the file. A read-only file is never replaced."""
    path = os.path.realpath(path)
    if not (os.access(path, os.W_OK) and os.access(os.path.dirname(path), os.W_OK)):
        raise Unreadable(f"{path}: not writable")


def write(texts):
    """Replace the content of files.

    Each file is replaced atomically, so a reader sees either the old or the new content. All new files are on the disk
    before the first one takes its place, so nothing is lost if the disk is full. For a symbolic link, its target is
    replaced. Permissions do not change.

    Args:
      texts: list of (`Text` of a file, new code).

    Raises:
      Unreadable: a file can't be replaced. It is unchanged, and the message lists the files that were replaced before.
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
    """Write the new content to a file beside the old one, with the same permissions. Returns its path."""
    path = os.path.realpath(text.path)
    with _named(text):
        handle, temporary = tempfile.mkstemp(prefix=".accum-migrate-", dir=os.path.dirname(path))
        try:
            _fill(handle, text.bom + code.encode(text.encoding))
            _keep_owner(path, temporary)
            shutil.copymode(path, temporary)
        except BaseException:
            os.unlink(temporary)
            raise
    return temporary


def _fill(handle, content):
    try:
        file = os.fdopen(handle, "wb")
    except BaseException:
        os.close(handle)  # Windows removes no file that is open
        raise
    with file:
        file.write(content)


def _keep_owner(path, temporary):
    """Keep the owner and group of another user's file, or at least its group, if the system allows it."""
    before, now = os.stat(path), os.stat(temporary)
    if not hasattr(os, "chown") or (before.st_uid, before.st_gid) == (now.st_uid, now.st_gid):
        return
    for owner in (before.st_uid, -1):
        # Only root may change the owner; some containers and file systems do not support it at all.
        with contextlib.suppress(OSError):
            os.chown(temporary, owner, before.st_gid)
            return
