"""What a `.pt2` archive would run while it loads: refused before torch loads it, as far as it is known here.

torch calls its loader unsafe for files from strangers, and this is no sandbox: it closes the ways to run Python that
torch 2.15 offers (pickles, shared libraries, sources, and strings of the program that are evaluated), and neither
bugs in torch's native code nor a model that uses up time and memory. Who may publish must be trusted all the same.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Protocol

from gpu_worker.errors import ModelError
from gpu_worker.programs import require_plain_program

# What the sample inputs of a plain export consist of; anything else could run code when unpickled.
_HARMLESS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
}
_CHECKED = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
)
_SAMPLES = "data/sample_inputs/model.pt"
#: Everything a plain export consists of. Anything else is code (`.so`, pickles, another format's entries) or useless.
_ENTRY = re.compile(
    r"models/model\.json|data/weights/(model_weights_config\.json|weight_[0-9]+)"
    r"|data/constants/(model_constants_config\.json|tensor_[0-9]+)|data/sample_inputs/model\.pt"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)|extra/[A-Za-z0-9_.-]+"
)


class Reader(Protocol):
    """The archive as the loader itself reads it (torch's PT2ArchiveReader fits), because two readers of one crafted
    zip may see different entries.
    """

    def get_file_names(self) -> list[str]:
        """Names of the entries, without the folder they are all in."""

    def read_bytes(self, name: str) -> bytes:
        """One entry whole."""


def require_plain(path: Path, reader: Reader) -> None:
    """Raise ModelError unless the archive is a plain export: raw weights, tensors as samples, a checked program."""
    names = _entry_names(path)
    if sorted(reader.get_file_names()) != sorted(names):
        raise ModelError(f"{path.name}: its entries differ by how it is read")
    for name in names:
        if not _ENTRY.fullmatch(name):
            raise ModelError(f"{path.name}: holds {name!r}, which a plain export does not, and which might run as code")
    for name in _CHECKED:
        if name not in names:
            raise ModelError(f"{path.name}: {name} is missing")
        try:
            document = json.loads(reader.read_bytes(name))
            require_plain_program(name, document)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path.name}: {name} is not JSON that an export holds: {error}") from error
    if _SAMPLES in names:
        _check_samples(f"{path.name}: {_SAMPLES}", reader.read_bytes(_SAMPLES))


def _entry_names(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path.name}: not a .pt2 archive: {error}") from error
    whole = [entry.filename for entry in entries]
    if len({name.lower() for name in whole}) != len(whole) or whole != [entry.orig_filename for entry in entries]:
        raise ModelError(f"{path.name}: an entry is there twice")
    roots = {name.partition("/")[0] for name in whole}
    if len(roots) != 1:
        raise ModelError(f"{path.name}: not a .pt2 archive: expected one folder, found {len(roots)}")
    return [name.partition("/")[2] for name in whole]


def _check_samples(where: str, data: bytes) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as samples:
            names = samples.namelist()
            if len({name.lower() for name in names}) != len(names):
                raise ModelError(f"{where}: an entry is there twice")
            for name in names:
                if name.lower().endswith(".pkl"):
                    _check_opcodes(f"{where}: {name}", samples.read(name))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{where}: not what torch writes: {error}") from error


def _check_opcodes(where: str, data: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            if (module, attribute) not in _HARMLESS and not (module == "torch" and attribute.endswith("Storage")):
                raise ModelError(f"{where}: names {module}.{attribute}; sample inputs must be plain tensors")
        elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            raise ModelError(f"{where}: opcode {opcode.name} is not what torch writes for tensors")
