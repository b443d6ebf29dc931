"""Where an export goes: a file that appears under its name only when it is whole, or standard output."""

from __future__ import annotations

import os
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

    Raises FileExistsError when there is one and `overwrite` is not set, FileNotFoundError when its folder is none. A
    killed process leaves a file beside it whose name ends in `.part`.
    """
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give another name, or --overwrite to replace it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; make it, or give another name")
    # 1 write beside it: dying here leaves the old file, or none, and a .part that nobody takes for an export
    # 2 fsync: without it the name could survive a power cut that the bytes do not
    # 3 rename: the old file or the new one, never a half
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False) as part:
        try:
            yield Output(part)  # type: ignore[arg-type]  # it has all of BinaryIO that is used
            part.flush()
            os.fsync(part.fileno())
            _readable_as_any_new_file(part.fileno())
            if overwrite:
                Path(part.name).replace(path)
            else:
                _link(Path(part.name), path)
        finally:
            with suppress(FileNotFoundError):
                Path(part.name).unlink()


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
