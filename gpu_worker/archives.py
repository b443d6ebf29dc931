"""What a `.pt2` archive would run while it loads: read as a plain zip, before torch sees it.

torch's loader unpickles some entries freely; a model is a program, but its archive must not be one that runs on load.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from pathlib import Path
from typing import Any

from gpu_worker.errors import ModelError

# What the sample inputs of a plain export consist of; anything else could run code when unpickled.
_HARMLESS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
}


def require_no_pickle(path: Path) -> None:
    """Raise ModelError unless the archive loads without free unpickling.

    Its weights and constants must be stored raw (`use_pickle` false), and the sample inputs must name nothing but
    tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("_config.json"):
                    _check_config(name, json.loads(archive.read(name)))
                elif "/sample_inputs/" in name and name.endswith(".pt"):
                    with archive.open(name) as inner, zipfile.ZipFile(inner) as samples:
                        for part in samples.namelist():
                            if part.endswith(".pkl"):
                                _check_opcodes(f"{name}/{part}", samples.read(part))
                elif name.endswith((".pt", ".pkl", ".so", ".py")):
                    raise ModelError(f"{path.name}: holds {name}, which would run as code")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{path.name}: not a .pt2 archive: {error}") from error


def _check_config(name: str, value: Any) -> None:
    if isinstance(value, dict):
        if value.get("use_pickle"):
            raise ModelError(f"{name}: {value.get('path_name', 'an entry')} needs pickle; export plain tensors instead")
        for inner in value.values():
            _check_config(name, inner)
    elif isinstance(value, list):
        for inner in value:
            _check_config(name, inner)


def _check_opcodes(name: str, data: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            if (module, attribute) not in _HARMLESS and not (module == "torch" and attribute.endswith("Storage")):
                raise ModelError(f"{name}: names {module}.{attribute}; sample inputs must be plain tensors")
        elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            raise ModelError(f"{name}: opcode {opcode.name} is not what torch writes for tensors")
