"""Text files of a checkout, read and written whole: whoever looks at one sees what it was or what it is to be.

What a path leads to may be anything (a folder, a pipe, a disk image), and none of it may hold a command up.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

#: Far above any schema, golden record, page or lock file.
MAX_BYTES = 4 * 1024 * 1024
#: How the name of a file that is being written ends.
PART = ".part"


class Unreadable(ValueError):
    """What lies there is no text file; the message says what was found, without the path."""


def read_text(path: Path, *, most_bytes: int = MAX_BYTES) -> str:
    """The text of a regular file of at most `most_bytes`. Raises Unreadable for anything else."""
    try:
        # Opening a pipe would wait for somebody who writes to it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Unreadable(f"it cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(f"it is {_kind(found.st_mode)}, expected a file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from error
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise Unreadable(f"it has {max(found.st_size, len(data))} bytes, expected at most {most_bytes}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8: {error.reason} at byte {error.start}") from None


def write_text(path: Path, text: str) -> None:
    """Put the text in the place of what the file holds. Dying leaves the old file, and perhaps one that ends in PART.

    It is on the disk before it has its name, so that a machine that loses power does not keep an empty file.
    """
    with NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f"{path.name}.", suffix=PART, delete=False
    ) as part:
        try:
            part.write(text)
            part.flush()
            os.fsync(part.fileno())
            Path(part.name).chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
            os.replace(part.name, path)  # noqa: PTH105
        except BaseException:
            with suppress(FileNotFoundError):
                Path(part.name).unlink()
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device"}
    return next((words for is_kind, words in kinds.items() if is_kind(mode)), "no regular file")
