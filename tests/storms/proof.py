"""I1 as `inferlog verify` proves it: from the log and the tables alone, nothing asked of the generator."""

from __future__ import annotations

from collections.abc import Callable

from infra.settings import ReplaySettings
from streams.replay import verify as verifying


async def prove(settings: ReplaySettings, say: Callable[[str], None]) -> bool:
    """Whether every usage record on the log is billed once."""
    verifying.SETTLE_S = 0.0  # there is usage without results here, and none need be awaited
    i1 = (await verifying.verify(settings)).verdicts[0]
    say(f"{i1.name} {'holds' if i1.holds else 'DOES NOT HOLD'}: {dict(i1.figures)}")
    for finding in i1.findings:
        say(f"WRONG {finding.what}, {finding.count} times: {', '.join(finding.examples)}")
    return i1.holds is True
