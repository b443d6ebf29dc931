"""`inferlog schemas` for people who are on the way: drafts taken back, races lost, mistakes that look like others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from schemas.gate import commands
from schemas.gate.checkout import Checkout
from schemas.lockfile import parse_lock
from tests.checkouts import REGION, call, commit, copy_checkout, copy_of, files, git, next_usage

DRAFT = "schemas/avro/usage_recorded.v2.avsc"
LOCK = "schemas/schemas.lock.json"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone in which what is published is committed; the current folder, too."""
    (tmp_path / "clone").mkdir()
    root = copy_checkout(tmp_path / "clone")
    commit(root, "published")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def draft(root: Path) -> Path:
    """Version 2 of UsageRecorded, added and not committed."""
    path = next_usage(root)
    assert call(root, "add", str(path)).exit_code == 0
    path.unlink()
    return root / DRAFT


@pytest.mark.parametrize("name", ["UsageRecorded", "inferlog.usage.v1.UsageRecorded", "usage_recorded.v2.avsc", DRAFT])
def test_a_draft_is_taken_back_without_a_trace(root: Path, draft: Path, name: str) -> None:
    assert git(root, "status", "--porcelain").count("\n") == 4
    document = json.loads(call(root, "drop", name, "--json").output)
    assert (document["dropped"]["version"], document["kept"]) == (2, False)
    assert git(root, "status", "--porcelain") == ""
    assert call(root, "check").exit_code == 0


def test_a_typo_in_a_draft_is_corrected_by_what_check_advises(root: Path, draft: Path) -> None:
    draft.write_text(draft.read_text().replace("Where it ran", "In which region it ran"))
    done = call(root, "check")
    assert "Instead: it is not committed yet: inferlog schemas drop usage_recorded.v2.avsc" in done.output
    assert "git checkout" not in done.output
    done = call(root, "drop", "usage_recorded.v2.avsc")
    assert done.exit_code == 0, done.output
    assert f"it was edited since and is kept; add it again, or delete it:  inferlog schemas add {DRAFT}" in done.output
    done = call(root, "add", DRAFT)
    assert done.exit_code == 0, done.output
    assert "In which region it ran" in (root / "docs" / "events.md").read_text()


def test_who_adds_a_corrected_copy_of_a_draft_is_told_of_drop(root: Path, draft: Path) -> None:
    done = call(root, "add", str(next_usage(root, name="area")))
    assert done.exit_code == 1
    assert "Version 2, which this would follow, is not committed yet." in done.output
    assert "inferlog schemas drop usage_recorded.v2.avsc" in done.output


def test_check_sends_nobody_to_git_for_files_that_git_does_not_have(root: Path, draft: Path) -> None:
    golden = root / "schemas" / "golden" / "usage_recorded.v2.json"
    good = golden.read_text(), draft.read_text()
    for path, text in ((draft, None), (draft, "{"), (golden, None), (golden, "{"), (golden, '{"hex": "00"}')):
        golden.write_text(good[0])
        draft.write_text(good[1])
        path.unlink() if text is None else path.write_text(text)
        done = call(root, "check")
        assert done.exit_code == 1
        assert "inferlog schemas drop usage_recorded.v2.avsc" in done.output
        assert "git checkout" not in done.output
    assert call(root, "drop", "UsageRecorded").exit_code == 0
    assert git(root, "status", "--porcelain") == ""


def test_what_is_committed_is_not_taken_back(root: Path, draft: Path) -> None:
    commit(root, "version 2")
    before = files(root)
    done = call(root, "drop", "UsageRecorded")
    assert done.exit_code == 1
    assert "is in commit" in done.output
    assert "nothing was changed" in done.output
    draft.write_text(draft.read_text().replace("Where it ran", "Where"))
    assert f"git checkout -- {DRAFT}" in call(root, "check").output
    git(root, "checkout", "--", ".")
    assert files(root) == before


def test_drop_refuses_what_it_cannot_be_sure_of(root: Path, draft: Path, tmp_path: Path) -> None:
    before = files(root)
    for name, words in (
        ("nothing", "No version of a record has this name"),
        ("usage_recorded.avsc", "version 2 came after it"),
        ("DeadLetter", "is in commit"),
    ):
        done = call(root, "drop", name)
        assert done.exit_code == 1
        assert words in done.output
    (root / ".git").rename(tmp_path / "git")
    done = call(root, "drop", "UsageRecorded")
    assert done.exit_code == 1
    assert "no git history" in done.output
    assert files(root) == before


def test_a_draft_is_dropped_although_another_one_is_broken(root: Path, draft: Path) -> None:
    path = root / "schemas" / "avro" / "dead_letter.v3.avsc"
    copy_of(root, "dead_letter.v2.avsc", REGION).rename(path)
    assert call(root, "add", str(path)).exit_code == 0
    for file in (path, draft):
        file.write_text(file.read_text().replace("Where it ran", "Where"))
    assert "more is broken" in call(root, "drop", "DeadLetter").output
    path.unlink()
    assert "more is broken" not in call(root, "drop", "UsageRecorded").output
    draft.unlink()
    assert git(root, "status", "--porcelain") == ""


def test_the_id_can_be_chosen_above_all_others(root: Path) -> None:
    newest = parse_lock((root / LOCK).read_text())[-1].id
    path = next_usage(root)
    for taken in (newest, 1, 2**31):
        done = call(root, "add", str(path), "--id", str(taken))
        assert done.exit_code == 1
        assert f"take one from {newest + 1}" in done.output
    done = call(root, "add", str(path), "--id", str(newest + 6))
    assert done.exit_code == 0, done.output
    assert parse_lock((root / LOCK).read_text())[-1].id == newest + 6
    golden = json.loads((root / "schemas" / "golden" / "usage_recorded.v2.json").read_text())
    assert golden["schema_id"] == newest + 6
    assert golden["hex"].startswith(f"00{newest + 6:08x}")


def test_the_record_that_teaches_schemas_gets_no_second_version(root: Path) -> None:
    before = files(root)
    done = call(root, "add", str(copy_of(root, "schema_published.avsc", REGION)))
    assert done.exit_code == 1
    assert "[never-changes]" in done.output
    assert "could not read the record that would teach it" in done.output
    (root / "next.avsc").unlink()
    assert files(root) == before


@pytest.mark.parametrize("command", [["add", "next.avsc"], ["golden", "x.json"], ["drop", "x"], ["check"], ["list"]])
def test_another_clone_than_the_one_people_stand_in_is_left_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "other").mkdir()
    other = copy_checkout(tmp_path / "other")
    next_usage(other)
    before = files(root), files(other)
    monkeypatch.chdir(other / "docs" if command[0] != "add" else other)
    done = call(root, *command)
    assert done.exit_code == 1
    assert f"this program is that of {root} and the current folder lies in another checkout, {other};" in done.output
    assert (files(root), files(other)) == before


def test_paths_are_whole_for_somebody_outside(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next_usage(root)
    monkeypatch.chdir(tmp_path)
    assert f"({root / DRAFT})" in call(root, "add", str(path)).output
    golden = root / "schemas" / "golden" / "usage_recorded.v2.json"
    assert f"{golden} and docs/events.md" in call(root, "golden", golden.name).output


def test_a_schema_under_another_name_is_not_taken_for_a_draft(root: Path) -> None:
    done = call(root, "add", str(copy_of(root, "usage_recorded.avsc", REGION, namespace="inferlog.usage.v2")))
    assert done.exit_code == 1
    assert "is the published schema of inferlog.usage.v1.UsageRecorded" in done.output
    assert "keep its name and namespace" in done.output
    assert "delete" not in done.output


def test_a_copy_of_an_old_version_is_called_that(root: Path) -> None:
    needed = {"name": "region", "type": ["null", "string"], "default": None, "doc": "Where."}
    done = call(root, "add", str(copy_of(root, "dead_letter.avsc", {**needed, "name": "digest"})))
    assert done.exit_code == 1
    assert "seems to be of version 1: it lacks value_sha256, value_size_bytes" in done.output
    assert "take schemas/avro/dead_letter.v2.avsc" in done.output
    assert "[rename]" not in done.output


def test_a_copy_of_an_old_version_that_may_be_published_is_asked_about(root: Path) -> None:
    flag = {"name": "loud", "type": "boolean", "default": False, "doc": "Whether it was loud."}
    done = call(root, "add", str(copy_of(root, "dead_letter.avsc", flag)), "--json")
    assert "see whether you copied version 1 by mistake" in json.loads(done.output)["next"][0]


def test_what_is_missing_is_told_at_once(root: Path) -> None:
    field = {"name": "region", "type": "string"}
    done = call(root, "add", str(copy_of(root, "usage_recorded.avsc", field)), "--json")
    found = [(f["path"], f["rule"]) for f in json.loads(done.output)["findings"]]
    assert found == [("region", "doc"), ("region", "field-added")]


def test_a_field_twice_is_told_in_words(root: Path) -> None:
    done = call(root, "add", str(copy_of(root, "usage_recorded.avsc", REGION, REGION)))
    assert "UsageRecorded has the field region twice" in done.output
    assert "Exception" not in done.output


def test_only_new_fields_need_values(root: Path) -> None:
    path = copy_of(root, "usage_recorded.avsc", doc="What one request is billed for, said better.")
    assert not any("telling values" in s for s in json.loads(call(root, "add", str(path), "--json").output)["next"])
    path = next_usage(root, default="", type="string")
    git(root, "checkout", "--", ".")
    git(root, "clean", "-fdq", "schemas")
    steps = json.loads(call(root, "add", str(path), "--json").output)["next"]
    assert sum("telling values" in s for s in steps) == 1
    assert any('region: str = ""' in s for s in steps), "as the house format has it"


def test_an_edited_golden_record_is_led_to_the_command_that_finishes_it(root: Path, draft: Path) -> None:
    for name in ("usage_recorded.v2.json", "usage_recorded.json"):
        path = root / "schemas" / "golden" / name
        path.write_text(path.read_text().replace('"items": 1', '"items": 2'))
        assert f"make its bytes anew: inferlog schemas golden {name}" in call(root, "check").output
        assert call(root, "golden", name).exit_code == 0
        git(root, "checkout", "--", "schemas/golden")


def test_an_edited_page_is_found(root: Path) -> None:
    path = root / "docs" / "events.md"
    for text in (path.read_text() + "\nBy hand.\n", None):
        path.unlink() if text is None else path.write_text(text)
        done = call(root, "check")
        assert done.exit_code == 1
        assert "docs/events.md is not what the schemas make" in done.output
        assert "Instead: make docs" in done.output


def test_a_broken_lock_file_is_one_error_everywhere(root: Path) -> None:
    lock = root / LOCK
    lock.write_text(lock.read_text().rstrip().removesuffix("]"))
    (finding,) = json.loads(call(root, "check", "--json").output)["findings"]
    assert "not JSON" in finding["problem"]
    assert "line" in finding["problem"]
    for command in (["list"], ["list", "--json"], ["golden", "x.json"], ["drop", "x"], ["add", str(next_usage(root))]):
        done = call(root, *command)
        assert done.exit_code == 1, command
        assert "not JSON" in done.output


def test_the_command_works_on_its_own_checkout_by_default(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    own = Checkout().root
    done = CliRunner().invoke(commands.schemas, ["list"])
    assert done.exit_code == 1
    assert f"that of {own}" in done.output
    monkeypatch.chdir(own / "docs")
    assert CliRunner().invoke(commands.schemas, ["list"]).exit_code == 0
