"""Everything one stand-in remembers, and the journal it is rebuilt from.

A change is written to the journal first and then made: dying between the two costs nothing, the next start makes it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.stripe_standin.books import Books, Fact
from infra.stripe_standin.clock import Clock, ClockSetting
from infra.stripe_standin.journal import Journal

KEEP_ANSWER_S = {"v1": 86_400, "v2": 30 * 86_400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`lag_s`: from acceptance of an event to its being counted, on the stand-in's clock. `latency_s`: how long each
    call takes, in real time; a customer and meter are busy that long."""

    lag_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """The first answer to an idempotency key, and the request it belongs to."""

    fingerprint: str
    status: int
    body: dict[str, Any]
    expires_s: float


def mint_id(prefix: str) -> str:
    """A fresh id; random, so that a stand-in started from nothing never repeats an earlier one's."""
    return f"{prefix}_{secrets.token_hex(12)}"


class Account:
    """Books, stored answers, clock and settings of one account; `close` lets another process take the folder.

    Raises what Journal raises when the folder is in use or its journal is damaged.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        wall: Callable[[], float] = time.time,
        mint: Callable[[str], str] = mint_id,
    ) -> None:
        self.clock = Clock(wall)
        self.settings = Settings()
        self.books = Books(mint)
        self._answers: dict[str, StoredAnswer] = {}
        self._journal = Journal(state_dir / "journal.jsonl")
        for entry in self._journal.replay():
            for fact in entry["facts"]:
                self._apply(fact)

    def now_s(self) -> float:
        """The account's time; whatever was due by then has been processed."""
        now_s = self.clock.now_s()
        self.books.advance(now_s)
        return now_s

    def commit(self, *facts: Fact) -> None:
        """Record facts, all or none, and make them true; raises OSError when they could not be written."""
        self._journal.append({"facts": facts})
        for fact in facts:
            self._apply(fact)

    def _apply(self, fact: Fact) -> None:
        if fact["kind"] == "clock":
            self.books.advance(fact["now_s"])
            self.clock.setting = ClockSetting(**fact["setting"])
        elif fact["kind"] == "settings":
            self.books.advance(fact["now_s"])
            self.settings = Settings(**fact["settings"])
        elif fact["kind"] == "answer":
            self._answers[fact["key"]] = StoredAnswer(**fact["answer"])
        else:
            self.books.apply(fact)

    def answer_to(self, key: str, *, now_s: float) -> StoredAnswer | None:
        """The answer first given to this idempotency key, while it is kept."""
        stored = self._answers.get(key)
        return stored if stored is not None and now_s < stored.expires_s else None

    def answer_fact(
        self, key: str, *, fingerprint: str, status: int, body: dict[str, Any], now_s: float, version: str
    ) -> Fact:
        """The fact that an idempotency key was answered; `version` (v1, v2) says for how long it is kept."""
        stored = StoredAnswer(
            fingerprint=fingerprint, status=status, body=body, expires_s=now_s + KEEP_ANSWER_S[version]
        )
        return {"kind": "answer", "now_s": now_s, "key": key, "answer": asdict(stored)}

    def set_clock(self, setting: ClockSetting) -> None:
        """Move, stop or release the clock; survives a restart."""
        self.commit({"kind": "clock", "now_s": self.now_s(), "setting": asdict(setting)})

    def set_settings(self, settings: Settings) -> None:
        """Change lag and latency for the events to come; survives a restart."""
        self.commit({"kind": "settings", "now_s": self.now_s(), "settings": asdict(settings)})

    def close(self) -> None:
        """Release the journal."""
        self._journal.close()
