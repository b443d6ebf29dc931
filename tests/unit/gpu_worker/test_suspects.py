"""What is remembered of a lost device outlives the process, and a broken file costs no more than the memory."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from gpu_worker.suspects import _MOST, Suspects


def test_suspects_outlive_their_process_until_they_end(tmp_path: Path) -> None:
    path, ids = tmp_path / "suspects", [uuid4() for _ in range(3)]
    Suspects(path).add(ids[:2])
    second = Suspects(path)
    assert [one in second for one in ids] == [True, True, False]
    Suspects(path).add(ids[2:])
    second.clear(ids[0])
    second.clear(uuid4())
    assert [one in Suspects(path) for one in ids] == [False, True, True], "another process's are kept"
    assert [p.name for p in tmp_path.iterdir()] == ["suspects"]


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path, ids = tmp_path / "suspects", [uuid4() for _ in range(_MOST + 5)]
    Suspects(path).add(ids)
    found = Suspects(path)
    assert ids[-1] in found and ids[0] not in found


@pytest.mark.parametrize("content", [b"not an id\n", b"\xff\xfe", None])
def test_a_file_that_cannot_be_used_is_said_and_survived(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, one = tmp_path / "suspects", uuid4()
    path.mkdir() if content is None else path.write_bytes(content)
    suspects = Suspects(path)
    assert "suspects not read" in caplog.text
    suspects.add([one])
    assert one in suspects
    assert ("suspects not kept" in caplog.text) == (content is None)
