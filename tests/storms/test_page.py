"""The page that says which test shows what names tests that there are."""

from __future__ import annotations

import re

from tests.processes import ROOT


def test_the_ledgers_page_names_tests_that_there_are() -> None:
    named = set(re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")))
    assert len(named) > 10
    for path, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test
