"""All locks stand in one list, where two with one number are refused as it is read."""

from __future__ import annotations

import re
from pathlib import Path

from tests.processes import ROOT

NUMBER = re.compile(r"0x1F_E0_10_[0-9A-F]+")


def test_no_number_of_a_turn_stands_elsewhere() -> None:
    modules = [p for package in ("api", "gpu_worker", "infra", "streams") for p in (ROOT / package).rglob("*.py")]
    holders = {p.relative_to(ROOT) for p in modules if NUMBER.search(p.read_text(encoding="utf-8"))}
    assert holders == {Path("infra/turns.py")}
