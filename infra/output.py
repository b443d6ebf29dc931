"""Where an export goes: a file that appears under its name only when it is whole, or standard output."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO


class Output(BufferedIOBase):
    """Bytes written one after the other, and how many; it cannot go back, so that a pipe will do."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.size_bytes = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer is taken, and taken whole
        """Write all of it."""
        self._out.write(data)
        self.size_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes written up to here."""
        return self.size_bytes

    def flush(self) -> None:
        """Hand over what is buffered; the file below stays open when this object is closed."""
        if not self._out.closed:
            self._out.flush()


@contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[Output]:
    """A file that is there under `path` once the block has ended well, and not before; an error leaves nothing.

    Raises FileExistsError when there is one and `overwrite` is not set, or when what is there is no regular file and so
    is never replaced; FileNotFoundError when its folder is none. A killed process leaves a file beside it whose name
    ends in `.part`.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it, or give another name")
    _require_replaceable(path, overwrite=overwrite)
    # 1 write beside it: dying here leaves the old file, or none, and a .part that nobody takes for an export
    # 2 fsync: without it the name could survive a power cut that the bytes do not
    # 3 rename: the old file or the new one, never a half
    beside = f".{path.name[:50]}."
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=beside, suffix=".part", delete=False) as part:
        try:
            yield Output(part)  # type: ignore[arg-type]  # it has all of BinaryIO that is used
            part.flush()
            os.fsync(part.fileno())
            _readable_as_any_new_file(part.fileno())
            if overwrite:
                _require_replaceable(path, overwrite=True)  # it may have taken hours to get here
                Path(part.name).replace(path)
            else:
                _link(Path(part.name), path)
        finally:
            with suppress(FileNotFoundError):
                Path(part.name).unlink()


def _require_replaceable(path: Path, *, overwrite: bool) -> None:
    """Raises FileExistsError unless nothing is there, or a regular file that may go.

    A link is neither followed nor replaced: one would write where the name does not say, the other would cut off
    whoever relies on it.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise FileExistsError(f"{path} is a link to {path.readlink()}; give the name of the file itself")
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise FileExistsError(
            f"{path} is {kind}, expected a regular file or none; give another name, or no --output and a redirection"
        )
    if not overwrite:
        raise FileExistsError(f"{path} exists; give another name, or --overwrite to replace it")


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def _link(part: Path, path: Path) -> None:
    """Give the file its name unless somebody has taken it meanwhile; the temporary name goes afterwards."""
    try:
        path.hardlink_to(part)
    except FileExistsError:
        raise FileExistsError(f"{path} was written by somebody else meanwhile; nothing was replaced") from None
    except OSError:  # a file system without links
        part.replace(path)


def _readable_as_any_new_file(fd: int) -> None:
    """Temporary files are their owner's alone; an export has the rights of any new file."""
    mask = os.umask(0)
    os.umask(mask)
    os.fchmod(fd, 0o666 & ~mask)
