"""`make fuzz`: coverage-guided fuzzing of the decoder (atheris) with libFuzzer's own flags.

Coverage cannot be seen inside fastavro's compiled reader, so each input also goes through its reader in Python, which
is the same code.
"""

from __future__ import annotations

import sys
from io import BytesIO

import atheris

with atheris.instrument_imports(include=["schemas", "tests.fuzz.target", "fastavro._read_py", "fastavro.io"]):
    from fastavro import _read_py

    from tests.fuzz import target
from schemas.lockfile import locked_schemas

_SCHEMAS = {s.id: s.definition() for s in locked_schemas()}


def one_input(data: bytes) -> None:
    """Show the bytes to the Python reader for its branches, then check the promise."""
    schema = _SCHEMAS.get(int.from_bytes(data[2:6], "big"))
    if schema is not None:
        try:
            _read_py.schemaless_reader(BytesIO(data[6:]), schema, None)
        except Exception:  # noqa: BLE001 (of no interest: the promise is about what we make of it)
            schema = None
    target.check(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
