"""The five packages have general names; these tests keep them ours and keep the layout true."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("api", "gpu_worker", "infra", "schemas", "streams")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_provides_the_name(package: str) -> None:
    others = set(packages_distributions().get(package, [])) - {"inferlog"}
    assert not others


def test_import_rules_hold() -> None:
    done = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_stay_small(package: str) -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in (ROOT / package).rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 300
    }
    assert not long, f"split these: {long}"


def test_there_is_no_attic() -> None:
    names = {p.stem for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert not names & {"utils", "util", "common", "helpers", "misc", "core"}


def test_packages_define_nothing_in_their_init() -> None:
    for package in PACKAGES:
        for init in (ROOT / package).rglob("__init__.py"):
            code = init.read_text()
            assert "def " not in code and "class " not in code, init
