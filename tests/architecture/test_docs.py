"""What the pages say of settings is what the code reads."""

from __future__ import annotations

import re

from tests.processes import ROOT


def test_the_settings_page_lists_every_setting_and_no_other() -> None:
    # Any module of infra may read one; the local stack and the stand-in, in folders of their own, are set by it alone.
    code = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "infra").glob("*.py")))
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(INFERLOG_[A-Z0-9_]+)`", page))
    assert listed == set(re.findall(r'"(INFERLOG_[A-Z0-9_]+)"', code))


def test_the_settings_page_has_the_defaults_of_the_code() -> None:
    code = (ROOT / "infra" / "settings.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1]: line.split("|")[3] for line in page.splitlines() if line.startswith("| `INFERLOG_")}
    for name, default in re.findall(r'(?:number|integer)\("(INFERLOG_\w+)",\s*([\d.]+),', code):
        (cell,) = [cell for names, cell in rows.items() if f"`{name}`" in names]
        shown = f"{float(default):g}"
        assert shown in cell or shown == "0", f"{name}: {default} in the code, {cell.strip()!r} on the page"
