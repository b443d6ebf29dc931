"""What the README tells a newcomer to type, typed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from infra.local.stack import Stack
from tests.processes import ROOT


def _block(text: str) -> str:
    """The commands of the README's console block; its environment is taken as made, not made again from the copy."""
    (block,) = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
    lines = (line.removeprefix("$ ") for line in block.splitlines())
    return "\n".join(re.sub(r"^make ", "make -o .venv/.ready ", line) for line in lines)


def test_the_commands_of_the_readme_work_as_written(tmp_path: Path) -> None:
    """They run in a copy of the checkout that shares the packages, so that no state of the checkout is touched."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in (ROOT / ".git" / "..").resolve().iterdir():
        if name.name not in (".git", ".inferlog", ".hypothesis"):
            (copy / name.name).symlink_to(name)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("INFERLOG_")}
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", _block((ROOT / "README.md").read_text(encoding="utf-8"))],
            cwd=copy,
            env={**clean, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert '"logits"' in done.stdout
        assert '"totals":{"items":1,"requests":1}' in done.stdout.replace(" ", "")
    finally:
        Stack(copy / ".inferlog").down(wipe=True)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/settings.md",
        "docs/analysts.md",
        "docs/dead-letters.md",
        "docs/routes.md",
        "docs/usage.md",
    ],
)
def test_every_make_target_and_link_on_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {word for line in re.findall(r"`make ([a-z -]+)", text) for word in line.split()}
    assert named <= targets
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert ((ROOT / page).parent / link).exists(), link
