"""A file is whole or not there; text is safe in spreadsheets; row groups stay small however large the records are."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import fastavro
import pyarrow.parquet
import pytest

from infra.output import Output, whole_file
from schemas.lockfile import latest
from schemas.records import DeadLetter, UsageRecorded
from streams.log import LogRecord
from streams.replay import parquet_file
from streams.replay.export import Format, writer_for
from streams.replay.rows import Row, marked
from tests.factories import NOON, usage
from tests.processes import ROOT


def row(record: UsageRecorded | DeadLetter, offset: int = 0) -> Row:
    entry = LogRecord(topic="inference.some.v1", partition=1, offset=offset, time=NOON, key=None, value=b"")
    return Row(entry, record)


def letter(value: bytes) -> DeadLetter:
    return DeadLetter(
        event_id=usage().event_id,
        occurred_at=NOON,
        topic="inference.usage.v1",
        partition=0,
        offset=1,
        value=value,
        reason="none",
        attempts=1,
    )


class Pipe(BytesIO):
    """It has no position and cannot go back."""

    def tell(self) -> int:
        raise OSError("Illegal seek")

    def seekable(self) -> bool:
        return False

    def seek(self, *_where: int) -> int:
        raise OSError("Illegal seek")


@pytest.mark.parametrize("form", Format)
def test_every_format_goes_through_a_pipe(form: Format) -> None:
    pipe = Pipe()
    out = Output(pipe)
    writer = writer_for(form)(out, UsageRecorded)
    writer.write([row(usage(), n) for n in range(3)])
    writer.finish()
    assert len(pipe.getvalue()) == out.size_bytes > 0


@pytest.mark.parametrize("form", Format)
def test_a_topic_without_records_is_a_file_without_rows(form: Format) -> None:
    out = BytesIO()
    writer = writer_for(form)(Output(out), UsageRecorded)
    writer.write([])
    writer.finish()
    data = out.getvalue()
    if form is Format.PARQUET:
        assert pyarrow.parquet.read_table(BytesIO(data)).num_rows == 0
    elif form is Format.AVRO:
        assert list(fastavro.reader(BytesIO(data))) == []
    else:
        assert data.count(b"\n") == (1 if form is Format.CSV else 0)


@pytest.mark.parametrize("form", [Format.AVRO, Format.PARQUET])
def test_the_schema_and_its_docs_travel_in_the_file(form: Format) -> None:
    out = BytesIO()
    writer = writer_for(form)(Output(out), UsageRecorded)
    writer.finish()
    out.seek(0)
    own = latest(UsageRecorded.SCHEMA).definition()["fields"]
    if form is Format.AVRO:
        schema = json.loads(fastavro.reader(out).metadata["avro.schema"])
    else:
        found = pyarrow.parquet.read_schema(out)
        assert found.field("quantities").metadata[b"doc"].decode() == own[-1]["doc"]
        assert found.metadata[b"inferlog.schema_id"] == str(latest(UsageRecorded.SCHEMA).id).encode()
        schema = json.loads(found.metadata[b"inferlog.schema"])
    assert [f["doc"] for f in schema["fields"][:-4]] == [f["doc"] for f in own]
    assert [f["name"] for f in schema["fields"][-4:]] == ["_topic", "_partition", "_offset", "_timestamp"]


def test_a_row_group_ends_at_its_rows_or_at_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_GROUP_ROWS", 4)
    monkeypatch.setattr(parquet_file, "_GROUP_BYTES", 10_000)

    def groups(values: list[bytes]) -> list[int]:
        out = BytesIO()
        writer = writer_for(Format.PARQUET)(Output(out), DeadLetter)
        for value in values:
            writer.write([row(letter(value))])
        writer.finish()
        found = pyarrow.parquet.ParquetFile(BytesIO(out.getvalue())).metadata
        return [found.row_group(n).num_rows for n in range(found.num_row_groups)]

    assert groups([b"x"] * 10) == [4, 4, 2]
    assert groups([b"x" * 6000] * 5) == [2, 2, 1]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\tx", "\r=1", "\n=1", "'=1", "'", '=HYPERLINK("a","b")'])
def test_text_that_a_spreadsheet_could_run_is_marked_and_comes_back(text: str) -> None:
    cell = marked(text)
    inner = cell[1:-1].replace('""', '"')
    assert inner[0] == "'"
    assert inner.removeprefix("'") == text


def test_null_and_empty_text_differ_in_csv_and_numbers_are_never_marked() -> None:
    out = BytesIO()
    writer = writer_for(Format.CSV)(Output(out), DeadLetter)
    writer.write([row(letter(b"\xfb"))])  # base64 that begins with a plus sign
    writer.write([row(letter(b""))])
    header, *lines = (line.split(",") for line in out.getvalue().decode().splitlines())
    key, value = header.index("key"), header.index("value")
    assert [(line[key], line[value]) for line in lines] == [("", '"\'+w=="'), ("", '""')]


def test_a_file_that_exists_stays_unless_it_may_go(tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    path.write_text("old")
    with pytest.raises(FileExistsError, match="--overwrite"), whole_file(path, overwrite=False) as out:
        out.write(b"new")
    assert path.read_text() == "old"
    with whole_file(path, overwrite=True) as out:
        out.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def unwritable(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each kind of thing that is no regular file, and its name in words."""
    os.mkfifo(folder / "pipe")
    yield folder / "pipe", "a pipe"
    (folder / "folder").mkdir()
    yield folder / "folder", "a folder"
    yield Path("/dev/null"), "a device"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        yield folder / "socket", "a socket"
    (folder / "theirs").write_text("theirs")
    (folder / "link").symlink_to("theirs")
    yield folder / "link", "a link to theirs"
    (folder / "dangling").symlink_to("nowhere")
    yield folder / "dangling", "a link to nowhere"


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_regular_file_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name has little room
    for path, words in unwritable(Path()):
        before = path.lstat()
        with pytest.raises(FileExistsError, match=f"{path.name} is {words}"), whole_file(path, overwrite=overwrite):
            pass
        assert path.lstat() == before
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not list(tmp_path.glob(".*"))


def test_what_stops_being_a_file_meanwhile_is_not_replaced_either(tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    path.write_text("old")
    writing = whole_file(path, overwrite=True)
    writing.__enter__().write(b"new")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="a pipe"):
        writing.__exit__(None, None, None)
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_as_long_as_may_be_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".csv")
    with whole_file(path, overwrite=False) as out:
        out.write(b"x")
    assert path.read_bytes() == b"x"


def test_a_file_that_somebody_writes_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    writing = whole_file(path, overwrite=False)
    writing.__enter__().write(b"mine")
    path.write_text("theirs")
    with pytest.raises(FileExistsError, match="meanwhile"):
        writing.__exit__(None, None, None)
    assert path.read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    writing = whole_file(tmp_path / "usage.csv", overwrite=False)
    writing.__enter__().write(b"half")
    assert writing.__exit__(RuntimeError, RuntimeError(), None) is False
    assert not list(tmp_path.iterdir())


def test_the_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with whole_file(tmp_path / "usage.csv", overwrite=False) as out:
        out.write(b"x")
    assert (tmp_path / "usage.csv").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_killed_process_leaves_no_half_file_under_the_name(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from infra.output import whole_file
with whole_file(Path({str(tmp_path / "usage.csv")!r}), overwrite=False) as out:
    out.write(b"half" * 100_000)
    out.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".usage.csv.")
    assert left.suffix == ".part"
