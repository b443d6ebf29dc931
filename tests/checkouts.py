"""A copy of what `inferlog schemas` works on, to be broken, with a git history of its own where a test wants one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from schemas.gate.checkout import Checkout
from schemas.gate.commands import schemas
from tests.processes import ROOT

USAGE = "schemas/avro/usage_recorded.avsc"
REGION = {"name": "region", "type": ["null", "string"], "default": None, "doc": "Where it ran; null before."}


def copy_checkout(root: Path) -> Path:
    """What the command reads and writes; no git repository."""
    for folder in ("avro", "golden"):
        shutil.copytree(ROOT / "schemas" / folder, root / "schemas" / folder)
    shutil.copy(ROOT / "schemas" / "schemas.lock.json", root / "schemas")
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "events.md", root / "docs")
    (root / "pyproject.toml").touch()
    return root


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", root, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def commit(root: Path, words: str) -> None:
    """Everything as it lies there."""
    if not (root / ".git").exists():
        git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", words)


def call(root: Path, *arguments: str) -> Result:
    """`inferlog schemas` on that checkout."""
    return CliRunner().invoke(schemas, list(arguments), obj=Checkout(root=root))


def files(root: Path) -> dict[str, bytes]:
    """What lies there, without git's own."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and ".git" not in p.parts}


def edit_lock(root: Path, place: int, **changes: Any) -> None:
    """Change an entry of the lock file."""
    path = root / "schemas" / "schemas.lock.json"
    entries = json.loads(path.read_text())
    entries[place].update(changes)
    path.write_text(json.dumps(entries))


def copy_of(root: Path, file: str, *fields: dict[str, Any], **changes: Any) -> Path:
    """An edited copy of a schema file, with these fields at its end and other attributes."""
    definition = json.loads((root / "schemas" / "avro" / file).read_text())
    definition["fields"] += fields
    path = root / "next.avsc"
    path.write_text(json.dumps({**definition, **changes}, indent=2))
    return path


def next_usage(root: Path, **changes: Any) -> Path:
    """A next version of UsageRecorded with one more field."""
    return copy_of(root, "usage_recorded.avsc", {**REGION, **changes})
