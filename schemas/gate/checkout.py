"""The schemas as files of a checkout: read them, read what git remembers of the lock file, write a new version."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.document import NoDocument, parsed
from schemas.gate.additions import Addition
from schemas.gate.catalogue import Catalogue, Entry, golden_name
from schemas.gate.drafts import Removal
from schemas.gate.findings import Finding
from schemas.gate.text_files import PART, Unreadable, read_text, write_text
from schemas.gate.turns import turn
from schemas.lockfile import LOCK_FILE

_GIT_WITHIN_S = 30.0


class HistoryUnreadable(RuntimeError):
    """There is a repository and git does not tell what is in it, or what was asked for; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Lock files of the past, newest first, each with its commit; `note` says when they cannot be all of them."""

    locks: tuple[tuple[str, tuple[Entry, ...]], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """The folder that holds `schemas/`; by default the one this code runs from."""

    root: Path = field(default_factory=lambda: Path(__file__).resolve().parents[2])

    @property
    def is_source(self) -> bool:
        """Whether this is a checkout, and not an installed wheel."""
        return (self.root / "pyproject.toml").is_file() and (self.root / "docs").is_dir()

    @property
    def page(self) -> Path:
        """The page that is generated from the schemas."""
        return self.root / "docs" / "events.md"

    def other_than_here(self, here: Path) -> Path | None:
        """The checkout of inferlog that a folder lies in, when that is another one than this."""
        for folder in (here, *here.parents):
            if (folder / "schemas" / LOCK_FILE).is_file() and Checkout(root=folder).is_source:
                return None if folder.samefile(self.root) else folder
        return None

    def catalogue(self) -> Catalogue:
        """Everything published, as it lies there."""
        texts: dict[str, str] = {}
        refused: dict[str, str] = {}
        paths = [self._schemas / LOCK_FILE]
        for folder, ending in (("avro", ".avsc"), ("golden", ".json")):
            paths += sorted((self._schemas / folder).glob(f"*{ending}"))
        for path in paths:
            name = path.relative_to(self._schemas).as_posix()
            try:
                texts[name] = read_text(path)
            except Unreadable as error:
                texts[name], refused[name] = "", str(error)
        return Catalogue(
            lock=texts.pop(LOCK_FILE),
            avro={n.removeprefix("avro/"): t for n, t in texts.items() if n.startswith("avro/")},
            golden={n.removeprefix("golden/"): t for n, t in texts.items() if n.startswith("golden/")},
            refused=refused,
        )

    def turn(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """Work on what is published without others who change it; see `turns.turn`. Raises Busy."""
        return turn(self._schemas, shared=shared)

    def page_text(self) -> str:
        """The page as it lies there; empty when there is none that can be read."""
        try:
            return read_text(self.page)
        except Unreadable:
            return ""

    def leftovers(self) -> tuple[Finding, ...]:
        """Files that a command was writing when it was ended."""
        folders = (self._schemas, self._schemas / "avro", self._schemas / "golden", self.page.parent)
        return tuple(
            Finding(
                record=part.relative_to(self.root).as_posix(),
                path="",
                rule="file",
                problem="The file was being written when its command was ended; nothing reads it.",
                remedy="delete it.",
            )
            for folder in folders
            for part in sorted(folder.glob(f"*{PART}"))
        )

    def remembered(self, against: str | None = None) -> Remembered:
        """Every lock file on the way to this commit, or the one at `against`. Raises HistoryUnreadable."""
        lock = f"schemas/{LOCK_FILE}"
        try:
            head = self._git("rev-parse", "--verify", "--quiet", f"{against or 'HEAD'}^{{commit}}")
        except FileNotFoundError:
            return Remembered(note="git is not installed, so the lock file was not compared with its past")
        if head.returncode:
            if against is not None:
                raise HistoryUnreadable(f"--against {against}: git knows no such commit {_said(head)}".strip())
            if (self.root / ".git").exists() and head.stderr.strip():
                raise HistoryUnreadable(f"the lock file's past cannot be read: git says {_said(head)}")
            return Remembered(note="there is no git history here, so the lock file was not compared with its past")
        commits = (
            [against] if against else self._must("log", "--full-history", "--format=%h", "HEAD", "--", lock).split()
        )
        shown = [(c, self._git("show", f"{c}:./{lock}")) for c in commits]
        found = [(c, _entries(done.stdout)) for c, done in shown if done.returncode == 0]
        notes = []
        if self._must("rev-parse", "--is-shallow-repository").strip() == "true" and against is None:
            notes.append("this clone is shallow, so only part of the lock file's past was seen")
        if broken := [c for c, entries in found if entries is None]:
            if against is not None:
                raise HistoryUnreadable(f"--against {against}: {lock} is no list of entries there; name another commit")
            # What a commit breaks stays broken in its history: the commits around it are what can be held to it.
            notes.append(
                f"{lock} is no list of entries in {', '.join(broken)} (conflict markers?), so those were passed over"
            )
        if against is not None and not found:
            notes.append(f"there is no {lock} at {against}, so there was nothing to compare with")
        locks = tuple((c, entries) for c, entries in found if entries is not None)
        return Remembered(locks=locks, note="; ".join(notes))

    def write(self, added: Addition, page: str) -> None:
        """Write a new version's files.

        1. the schema   dying after it: a file without an entry, which the gate names; the same command goes on
        2. the golden   the same
        3. the lock     published; dying after it: the page is stale, which the tests name; make docs
        4. the page

        Each file is written beside its place and then put there, so dying never leaves half of one.
        """
        file, golden = str(added.entry["file"]), golden_name(added.entry)
        write_text(self._schemas / "avro" / file, added.catalogue.avro[file])
        write_text(self._schemas / "golden" / golden, added.catalogue.golden[golden])
        write_text(self._schemas / LOCK_FILE, added.catalogue.lock)
        write_text(self.page, page)

    def drop(self, dropped: Removal) -> None:
        """Remove a draft's files; the page is made after it.

        1. the lock     dying after it: files without an entry, which the gate names; delete them
        2. the golden   the same
        3. the schema   dying after it: the page is stale, which the gate names; make docs
        """
        write_text(self._schemas / LOCK_FILE, dropped.catalogue.lock)
        (self._schemas / "golden" / golden_name(dropped.entry)).unlink(missing_ok=True)
        if not dropped.edited:
            (self._schemas / "avro" / str(dropped.entry["file"])).unlink(missing_ok=True)

    def write_page(self, page: str) -> None:
        """Write the page alone."""
        write_text(self.page, page)

    def write_golden(self, name: str, text: str, page: str) -> None:
        """Write a golden file and the page that shows it; dying in between leaves a stale page (make docs)."""
        write_text(self._schemas / "golden" / name, text)
        write_text(self.page, page)

    @property
    def _schemas(self) -> Path:
        return self.root / "schemas"

    def _git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["git", "-C", str(self.root), *arguments],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
                timeout=_GIT_WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            raise HistoryUnreadable(
                f"the lock file's past cannot be read: git {arguments[0]} gave no answer in {_GIT_WITHIN_S:.0f} s; "
                "see whether another git holds the repository, and run this again"
            ) from None

    def _must(self, *arguments: str) -> str:
        done = self._git(*arguments)
        if done.returncode:
            raise HistoryUnreadable(f"the lock file's past cannot be read: git says {_said(done)}")
        return done.stdout


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())[:300]


def _entries(text: str) -> tuple[Entry, ...] | None:
    """The entries of a lock file as it was once committed; None when that was none."""
    try:
        found: Any = parsed(text)
    except NoDocument:
        return None
    return tuple(found) if isinstance(found, list) and all(isinstance(one, dict) for one in found) else None
