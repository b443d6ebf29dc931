"""`inferlog schemas` on a checkout of its own, with a git history of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.lockfile import parse_lock
from tests.checkouts import USAGE, call, commit, copy_checkout, edit_lock, files, git, next_usage
from tests.processes import ROOT


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the command reads, which is no git repository; the current folder, too."""
    monkeypatch.chdir(tmp_path)
    return copy_checkout(tmp_path)


def test_list_shows_every_entry(root: Path) -> None:
    listed = json.loads(call(root, "list", "--json").output)["schemas"]
    assert [e["id"] for e in listed] == [e.id for e in parse_lock((root / "schemas/schemas.lock.json").read_text())]
    assert "inferlog.usage.v1.UsageRecorded" in call(root, "list").output


def test_check_says_that_there_is_no_history_to_compare_with(root: Path) -> None:
    done = call(root, "check")
    assert done.exit_code == 0, done.output
    assert "note: there is no git history here" in done.output


def test_check_compares_with_every_lock_file_of_the_past(root: Path) -> None:
    git(root, "init", "--quiet")
    commit(root, "first")
    edit_lock(root, 13, subject="inference.other.v1-value")
    commit(root, "an entry changed")
    document = json.loads(call(root, "check", "--json").output)
    assert document["past_lock_files"] == 2
    assert [f["rule"] for f in document["findings"]] == ["append-only"]
    # Against the newest commit alone nothing has changed.
    document = json.loads(call(root, "check", "--against", "HEAD", "--json").output)
    assert [f["rule"] for f in document["findings"]] == ["page"], "which shows the subject"
    done = call(root, "check", "--against", "HEAD~1")
    assert done.exit_code == 1
    assert "subject was 'inference.schemas.v1-value' in HEAD~1" in done.output
    assert "Instead: restore the entry" in done.output


def test_check_refuses_a_reference_that_does_not_exist(root: Path) -> None:
    git(root, "init", "--quiet")
    commit(root, "first")
    done = call(root, "check", "--against", "nowhere")
    assert done.exit_code == 1
    assert "--against nowhere: git knows no such commit" in done.output


def test_check_does_not_pass_when_git_refuses_to_tell(root: Path) -> None:
    git(root, "init", "--quiet")
    commit(root, "first")
    (root / ".git" / "config").write_text("no such file\n")
    done = call(root, "check")
    assert done.exit_code == 1
    assert "the lock file's past cannot be read: git says" in done.output


def test_check_passes_over_a_lock_file_that_was_committed_broken_and_says_so(root: Path) -> None:
    git(root, "init", "--quiet")
    commit(root, "first")
    lock = root / "schemas" / "schemas.lock.json"
    good = lock.read_bytes()
    broken = []
    for text in (b"<<<<<<< ours\n" + good + b"=======\n", b'{"id": 1}', b"[1]", b"\xff"):
        lock.write_bytes(text)
        commit(root, "broken")
        broken.append(git(root, "log", "-1", "--format=%h").strip())
    lock.write_bytes(good)
    edit_lock(root, 13, subject="inference.other.v1-value")
    commit(root, "mended, and an entry changed")
    document = json.loads(call(root, "check", "--json").output)
    assert document["past_lock_files"] == 2, "the others are still compared"
    assert [f["rule"] for f in document["findings"]] == ["append-only"]
    assert f"no list of entries in {', '.join(reversed(broken))}" in document["note"]
    assert "note: schemas/schemas.lock.json is no list" in call(root, "check").output
    done = call(root, "check", "--against", broken[0])
    assert done.exit_code == 1
    assert f"--against {broken[0]}: schemas/schemas.lock.json is no list of entries there" in done.output


def test_check_says_that_git_gave_no_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(root, "init", "--quiet")
    commit(root, "first")

    def never(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr("schemas.gate.checkout.subprocess.run", never)
    done = call(root, "check")
    assert done.exit_code == 1
    assert "Error: the lock file's past cannot be read: git rev-parse gave no answer in 30 s" in done.output


def test_check_works_without_git(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = call(root, "check")
    assert done.exit_code == 0
    assert "git is not installed" in done.output


def test_check_explains_an_edited_schema_that_the_codec_would_not_even_load(root: Path) -> None:
    path = root / USAGE
    path.write_text(path.read_text().replace("Who is billed.", "Who pays."))
    done = call(root, "check")
    assert done.exit_code == 1
    assert "edited after it was published" in done.output
    assert "inferlog schemas add COPY.avsc" in done.output


def test_the_command_loads_without_the_codec_which_would_refuse_to() -> None:
    code = "import sys, schemas.gate.commands; print('schemas.codec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_add_publishes_a_version_and_says_what_is_left_to_do(root: Path) -> None:
    before = files(root)
    done = call(root, "add", str(next_usage(root)), "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    new = document["added"]
    assert (new["version"], new["file"], new["subject"]) == (2, "usage_recorded.v2.avsc", "inference.usage.v1-value")
    assert new["id"] == 1 + max(e.id for e in parse_lock(before["schemas/schemas.lock.json"].decode()))
    assert "region: str | None = None" in document["next"][0]
    assert "schemas/records.py" in document["next"][0]
    after = files(root)
    assert {n for n in after if after[n] != before.get(n)} == {
        "docs/events.md",
        "next.avsc",
        "schemas/avro/usage_recorded.v2.avsc",
        "schemas/golden/usage_recorded.v2.json",
        "schemas/schemas.lock.json",
    }
    golden = json.loads(after["schemas/golden/usage_recorded.v2.json"])
    old = json.loads(before["schemas/golden/usage_recorded.json"])
    assert golden["record"] == {**old["record"], "region": "a region"}
    assert "Where it ran; null before. Since version 2." in after["docs/events.md"].decode()
    # What is left to do is what the gate finds now, and nothing else.
    findings = json.loads(call(root, "check", "--json").output)["findings"]
    assert [(f["rule"], f["path"]) for f in findings] == [("typed-class", "region")]
    assert findings[0]["remedy"] == document["next"][0]


def test_the_sample_values_of_a_golden_record_can_be_replaced(root: Path) -> None:
    assert call(root, "add", str(next_usage(root))).exit_code == 0
    path = root / "schemas" / "golden" / "usage_recorded.v2.json"
    path.write_text(path.read_text().replace("a region", "eu-west"))
    assert "[golden]" in call(root, "check").output
    assert call(root, "golden", "usage_recorded.v2.json", "--json").exit_code == 0
    assert "[golden]" not in call(root, "check").output
    assert "eu-west" in (root / "docs" / "events.md").read_text()
    good = path.read_text()
    for was, edited in (('"items": 1', '"items": "many"'), ('"items": 1', f'"items": {2**70}'), ("2026-03-02T", "x")):
        path.write_text(good.replace(was, edited))
        done = call(root, "golden", "usage_recorded.v2.json")
        assert done.exit_code == 1, done.output
        assert "a value is not one of its field" in done.output
    assert call(root, "golden", "nothing.json").exit_code == 1


def test_golden_records_that_are_edited_together_are_finished_one_by_one(root: Path) -> None:
    assert call(root, "add", str(next_usage(root))).exit_code == 0
    folder = root / "schemas" / "golden"
    edited = ["usage_recorded.v2.json", *sorted(p.name for p in folder.glob("*.v2.json"))[:1]]
    newest = folder / "usage_recorded.v2.json"
    newest.write_text(newest.read_text().replace("a region", "eu-west"))
    other = folder / edited[1]
    whole = other.read_text()
    other.write_text(whole.replace("2026-03-02", "2026-03-03"))  # published long ago: it must not change, and is told
    assert call(root, "golden", edited[0]).exit_code == 0
    findings = json.loads(call(root, "check", "--json").output)["findings"]
    assert {f["rule"] for f in findings} >= {"golden"} and edited[0] not in str(findings)


def test_add_takes_a_file_that_lies_in_its_place_already(root: Path) -> None:
    path = root / "schemas" / "avro" / "usage_recorded.v2.avsc"
    next_usage(root).rename(path)
    assert call(root, "add", str(path)).exit_code == 0


def test_add_goes_on_where_it_died_before_the_lock_was_written(root: Path) -> None:
    path = next_usage(root)
    lock = (root / "schemas" / "schemas.lock.json").read_text()
    assert call(root, "add", str(path)).exit_code == 0
    done = files(root)
    (root / "schemas" / "schemas.lock.json").write_text(lock)
    assert call(root, "check").exit_code == 1
    assert call(root, "add", str(path)).exit_code == 0
    assert files(root) == done


def test_add_refuses_with_the_reason_and_changes_nothing(root: Path) -> None:
    path = next_usage(root, type="double", default=0.5)
    before = files(root)
    done = call(root, "add", str(path))
    assert done.exit_code == 1
    assert "inferlog.usage.v1.UsageRecorded: region  [no-float]" in done.output
    assert "Instead: use long in the smallest unit" in done.output
    assert "nothing was changed" in done.output
    document = json.loads(call(root, "add", str(path), "--json").output)
    assert document["added"] is None
    assert [f["rule"] for f in document["findings"]] == ["no-float"]
    assert files(root) == before


def new_record(root: Path) -> Path:
    definition = json.loads((root / USAGE).read_text())
    definition.update(name="DoorOpened", namespace="inferlog.doors.v1", doc="A door was opened.")
    path = root / "door.avsc"
    path.write_text(json.dumps(definition))
    return path


def test_the_first_version_of_a_new_record_needs_a_topic(root: Path) -> None:
    path = new_record(root)
    done = call(root, "add", str(path))
    assert done.exit_code == 1
    assert "say which: --topic" in done.output
    done = call(root, "add", str(path), "--topic", "inference.usage.v1")
    assert done.exit_code == 1
    assert "The topic inference.usage.v1 carries inferlog.usage.v1.UsageRecorded" in done.output
    done = call(root, "add", str(path), "--topic", "inference.doors.v1")
    assert done.exit_code == 0, done.output
    assert "add a frozen dataclass" in done.output
    assert "declare the topic inference.doors.v1 in schemas/topics.py" in done.output
    assert (root / "schemas" / "avro" / "door_opened.avsc").exists()
    assert "inference.doors.v1" in (root / "docs" / "events.md").read_text()


def test_add_does_not_move_a_record_to_another_topic(root: Path) -> None:
    done = call(root, "add", str(next_usage(root)), "--topic", "inference.other.v1")
    assert done.exit_code == 1
    assert "written to inference.usage.v1, not to inference.other.v1" in done.output


def test_add_leaves_a_waiting_file_of_another_schema_alone(root: Path) -> None:
    path = root / "schemas" / "avro" / "usage_recorded.v2.avsc"
    for draft in ("{}", "{"):
        path.write_text(draft)
        done = call(root, "add", str(next_usage(root)))
        assert done.exit_code == 1
        assert "usage_recorded.v2.avsc is there already" in done.output
        assert path.read_text() == draft


@pytest.mark.parametrize("text", ["{", "[]", '"int"', '{"type": "record"}', '{"type": "record", "fields": 5}'])
def test_add_refuses_what_is_no_schema(root: Path, text: str) -> None:
    path = root / "x.avsc"
    path.write_text(text)
    done = call(root, "add", str(path))
    assert done.exit_code == 1
    assert "Instead: " in done.output


def test_add_refuses_while_what_is_published_is_broken(root: Path) -> None:
    edit_lock(root, 2, fingerprint="0" * 16)
    done = call(root, "add", str(next_usage(root)))
    assert done.exit_code == 1
    assert "[published]" in done.output


def test_add_says_that_an_installed_package_is_no_checkout(root: Path) -> None:
    (root / "pyproject.toml").unlink()
    done = call(root, "add", str(next_usage(root)))
    assert done.exit_code == 1
    assert "is no checkout of inferlog" in done.output
