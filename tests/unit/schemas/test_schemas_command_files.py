"""`inferlog schemas` beside others and on files that are anything: told what is wrong, and never half done."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from schemas.announcement import MAX_TEXT_BYTES
from schemas.gate import text_files, turns
from schemas.lockfile import parse_lock
from tests.checkouts import USAGE, call, commit, copy_checkout, copy_of, files, next_usage
from tests.processes import ROOT

Put = Callable[[Path], object]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the command reads, which is no git repository; the current folder, too."""
    monkeypatch.chdir(tmp_path)
    return copy_checkout(tmp_path)


def sparse(path: Path) -> None:
    """A file of a gigabyte that takes no room."""
    with path.open("wb") as file:
        file.truncate(2**30)


BROKEN: dict[str, tuple[Put, str]] = {
    "not UTF-8": (lambda p: p.write_bytes(b'{"doc": "\xff"}'), "not UTF-8: invalid start byte at byte 9"),
    "many brackets": (lambda p: p.write_text("[" * 200_000), "inside one another more than 64 deep"),
    "many objects": (lambda p: p.write_text('{"a":' * 500 + "1" + "}" * 500), "inside one another more than 64 deep"),
    "half a pair": (lambda p: p.write_text('{"doc": "\\ud800"}'), "half a surrogate pair"),
    "half a pair as a key": (lambda p: p.write_text('{"\\udfff": 1}'), "half a surrogate pair"),
    "empty": (lambda p: p.write_text(""), "it is not JSON"),
    "a long number": (lambda p: p.write_text("1" * 100_000), "JSON"),
    "infinity": (lambda p: p.write_text('{"a": 1e999}'), "no double holds"),
    "NaN": (lambda p: p.write_text('{"a": NaN}'), "NaN is no JSON"),
    "a key twice": (lambda p: p.write_text('{"a": 1, "a": 2}'), "the key 'a' twice"),
    "a gigabyte": (sparse, "1073741824 bytes, expected at most"),
    "a pipe": (os.mkfifo, "a pipe, expected a file"),
    "a folder": (Path.mkdir, "a folder, expected a file|is a directory"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), "a device, expected a file"),
    "a link to itself": (lambda p: p.symlink_to(p), "cannot be opened|does not exist"),
    "a byte order mark": (lambda p: p.write_bytes(b"\xef\xbb\xbf{}"), "not JSON"),
}


@pytest.mark.parametrize(("put", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_add_names_a_file_that_is_no_schema(root: Path, put: Put, words: str) -> None:
    before = files(root)
    path = root / "given.avsc"
    put(path)
    for more in ((), ("--json",)):
        done = call(root, "add", str(path), *more)
        assert isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code
        assert "given.avsc" in done.output
        assert any(word in done.output for word in words.split("|")), done.output
    path.rmdir() if path.is_dir() else path.unlink()
    assert files(root) == before


@pytest.mark.parametrize(
    "place", [USAGE, "schemas/golden/usage_recorded.json", "schemas/schemas.lock.json", "schemas/avro/unasked.avsc"]
)
@pytest.mark.parametrize(("put", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_check_and_add_name_a_published_file_that_is_broken(root: Path, place: str, put: Put, words: str) -> None:
    given = next_usage(root)
    path = root / place
    path.unlink(missing_ok=True)
    put(path)
    for command in (
        ("check",),
        ("add", str(given)),
        ("drop", "UsageRecorded"),
        ("list",),
        ("golden", "dead_letter.json"),
    ):
        done = call(root, *command)
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
        if command[0] in ("check", "add"):
            assert done.exit_code == 1
            assert place.removeprefix("schemas/") in done.output
            assert any(word in done.output for word in words.split("|")), done.output


def test_check_says_of_a_broken_page_that_it_is_stale(root: Path) -> None:
    for put, _ in BROKEN.values():
        path = root / "docs" / "events.md"
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        put(path)
        done = call(root, "check")
        assert done.exit_code == 1
        assert "docs/events.md is not what the schemas make" in done.output


ODD: tuple[object, ...] = (None, True, 0, -1, 2**70, 1.5, "x", "\0", "../../x.avsc", [], {"id": 1})


@pytest.mark.parametrize("key", ["id", "subject", "version", "record", "fingerprint", "sha256", "file"])
def test_entries_of_any_kind_are_findings(root: Path, key: str) -> None:
    """Whatever somebody wrote into an entry, or took out of it, each command says what is wrong with it."""
    lock = root / "schemas" / "schemas.lock.json"
    good = json.loads(lock.read_text())
    given = next_usage(root)
    (usage,) = [e for e in good if e["file"] == "usage_recorded.avsc"]
    lesser = {k: v for k, v in usage.items() if k != key}
    for entry in (lesser, *({**usage, key: value} for value in ODD)):
        lock.write_text(json.dumps([entry if e is usage else e for e in good]))
        for command in (
            ("check",),
            ("add", str(given)),
            ("drop", "UsageRecorded"),
            ("golden", "usage_recorded.json"),
            ("list",),
        ):
            done = call(root, *command)
            assert done.exception is None or isinstance(done.exception, SystemExit), (entry, command, done.exception)
            if command[0] in ("check", "add"):
                assert done.exit_code == 1, (entry, command)


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("anything", "not named as a new one is"),
        ("", "not named as a new one is"),
        ("inference.doors.v0", "not named as a new one is"),
        ("prod.inference.doors.v1", "without a namespace"),
        ("inference.a b.v1", "not named as a new one is"),
        ("inference.doors.v1\n", "not named as a new one is"),
        ("inference." + "d" * 200 + ".v1", "not named as a new one is"),
        ("inference.requests.fast.v1", "not named as a new one is"),
        ("inference.usage.v1", "carries inferlog.usage.v1.UsageRecorded"),
    ],
)
def test_a_new_record_gets_a_topic_named_like_ours_and_its_own(root: Path, topic: str, words: str) -> None:
    given = copy_of(root, "usage_recorded.avsc", name="DoorOpened", namespace="inferlog.doors.v1")
    before = files(root)
    done = call(root, "add", str(given), "--topic", topic)
    assert done.exit_code == 1
    assert words in done.output
    assert files(root) == before
    done = call(root, "add", str(given), "--topic", "inference.doors.v1")
    assert done.exit_code == 0, done.output
    assert "declare the topic inference.doors.v1 in schemas/topics.py" in done.output


def test_a_schema_that_running_programs_would_not_learn_is_not_published(root: Path) -> None:
    for field, words in (
        ({"name": "doors", "type": {"type": "array", "items": "boolean"}, "default": []}, "[learnable]"),
        ({"name": "doors", "type": "null", "default": None}, "[learnable]"),
    ):
        done = call(root, "add", str(copy_of(root, "usage_recorded.avsc", {**field, "doc": "x"})))
        assert done.exit_code == 1
        assert words in done.output
    done = call(root, "add", str(next_usage(root, doc="x" * MAX_TEXT_BYTES)))
    assert done.exit_code == 1
    assert f"running programs learn none above {MAX_TEXT_BYTES}" in done.output


@contextmanager
def held(root: Path, how: int) -> Iterator[None]:
    """Another command at work."""
    handle = os.open(root / "schemas", os.O_RDONLY)
    fcntl.flock(handle, how)
    try:
        yield
    finally:
        os.close(handle)


def test_commands_take_turns_and_give_up_with_a_reason(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, before = next_usage(root), files(root)
    clock = iter(range(0, 10**6, 6))  # two askings are past the deadline
    monkeypatch.setattr(turns.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(turns.time, "sleep", lambda _: None)
    with held(root, fcntl.LOCK_EX):
        for command in (
            ("add", str(given)),
            ("drop", "UsageRecorded"),
            ("golden", "key_changed.json"),
            ("check",),
            ("list",),
        ):
            done = call(root, *command)
            assert done.exit_code == 1
            assert "another  inferlog schemas  command has worked on it for 10 s; nothing was done" in done.output
    with held(root, fcntl.LOCK_SH):
        assert call(root, "check").exit_code == 0, "readers go side by side"
        assert call(root, "add", str(given)).exit_code == 1
    assert files(root) == {**before, "next.avsc": given.read_bytes()}
    assert call(root, "add", str(given)).exit_code == 0, "a lock ends with its holder"


def test_of_many_at_once_each_gets_an_id_of_its_own(root: Path) -> None:
    """Real processes on one checkout: each publishes a record of its own."""
    code = (
        "import sys; from pathlib import Path; from schemas.gate.checkout import Checkout; "
        "from schemas.gate.commands import schemas; schemas(sys.argv[2:], obj=Checkout(root=Path(sys.argv[1])))"
    )
    processes = []
    for name in ("One", "Two", "Three", "Four"):
        text = json.loads((root / USAGE).read_text()) | {"name": name, "namespace": f"inferlog.{name.lower()}.v1"}
        given = root / f"{name}.avsc"
        given.write_text(json.dumps(text))
        arguments = ["add", str(given), "--topic", f"inference.{name.lower()}.v1"]
        command = [sys.executable, "-c", code, str(root), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        processes.append(
            subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
    entries = parse_lock((root / "schemas" / "schemas.lock.json").read_text())
    assert [e.id for e in entries] == list(range(1, len(entries) + 1))
    assert {"One", "Two", "Three", "Four"} <= {e.record.rpartition(".")[2] for e in entries}
    assert [f["rule"] for f in json.loads(call(root, "check", "--json").output)["findings"]] == ["typed-class"] * 4


class Died(BaseException):
    """The process ends here."""


@contextmanager
def dying(step: int, *, before: bool) -> Iterator[None]:
    """The process ends at its file of this number: before it has its name, or is gone, or right after."""
    number = 0
    put, unlink = os.replace, Path.unlink

    def counted(act: Callable[[], None]) -> None:
        nonlocal number
        number += 1
        if number == step and before:
            raise Died
        act()
        if number == step:
            raise Died

    def leave(path: Path, missing_ok: bool = False) -> None:
        if not path.name.endswith(text_files.PART):  # nobody is left to tidy those up
            counted(lambda: unlink(path, missing_ok=missing_ok))

    with (
        patch.object(text_files.os, "replace", lambda source, target: counted(lambda: put(source, target))),
        patch.object(Path, "unlink", leave),
    ):
        yield


NO_ENTRY = "has no entry in the lock file"


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("command", "step", "told"),
    [
        ("add", 1, NO_ENTRY),
        ("add", 2, NO_ENTRY),
        ("add", 3, "The class UsageRecorded lacks the field"),
        ("add", 4, "The class UsageRecorded lacks the field"),
        ("drop", 1, NO_ENTRY),
        ("drop", 2, NO_ENTRY),
        ("drop", 3, "docs/events.md is not what the schemas make"),
        ("drop", 4, ""),
    ],
)
def test_wherever_a_command_dies_check_says_what_to_do(
    root: Path, command: str, step: int, told: str, before: bool
) -> None:
    given = next_usage(root)
    commit(root, "first")
    if command == "drop":
        assert call(root, "add", str(given)).exit_code == 0
    start = files(root)
    arguments = (command, str(given) if command == "add" else "UsageRecorded")
    with dying(step, before=before), pytest.raises(Died):
        call(root, *arguments)
    assert all(data for name, data in files(root).items() if name != "pyproject.toml"), "no file is half there"
    parts = list(root.rglob(f"*{text_files.PART}"))
    writes = command == "add" or step in (1, 4)
    assert len(parts) == (1 if before and writes else 0)
    for part in parts:
        assert f"{part.relative_to(root)}  [file]" in call(root, "check").output
        part.unlink()
    if not before:
        done = call(root, "check")
        assert told in done.output
        assert bool(told) == bool(done.exit_code)
    elif step == 1:
        assert files(root) == start, "nothing was done"
    if command == "add" and (step < 3 or (step == 3 and before)):
        assert call(root, *arguments).exit_code == 0, "the same command goes on"


def test_a_file_is_never_seen_half_written(root: Path) -> None:
    """What has its name is whole and on the disk before it gets it."""
    path = root / "docs" / "events.md"
    before = path.read_bytes()
    seen = []

    def look(handle: int) -> None:
        seen.append((path.read_bytes() == before, os.fstat(handle).st_size))

    with patch.object(text_files.os, "fsync", look):
        text_files.write_text(path, "x" * 100_000)
    assert seen == [(True, 100_000)]
    assert path.read_text() == "x" * 100_000
    assert not list(path.parent.glob(f"*{text_files.PART}"))
    mode = path.stat().st_mode
    path.chmod(0o640)
    text_files.write_text(path, "again")
    assert (path.stat().st_mode ^ mode) & 0o777 == 0o640 ^ (mode & 0o777), "it keeps its mode"
