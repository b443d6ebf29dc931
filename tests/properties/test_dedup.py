"""However records are read, read again and repeated while rows are let go of: billed once, or set aside, never both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from schemas.records import UsageRecorded
from streams.ledger.delivery import Delivery
from streams.replay.proofs import LedgerProof
from tests.conftest import run_apart
from tests.unit.streams.ledger.fake_ledger import FakeLedger
from tests.unit.streams.usage_samples import NOON, raw, usage

HOUR = timedelta(hours=1)
#: Of event time, either side of what the ledger takes for now.
HOURS = 3
#: An id of the last kind has no time.
KINDS = ("timed", "timed", "timed", "untimed")


def request_id(number: int, hour: int, kind: str) -> UUID:
    ms = int((NOON + hour * HOUR).timestamp() * 1000)
    return UUID(int=ms << 80 | 0x7 << 76 | 0b10 << 62 | number) if kind == "timed" else UUID(int=number + 1)


@dataclass
class Request:
    """What the log says of a request: its record, and how often a record of it with any content was written."""

    record: UsageRecorded
    places: list[int] = field(default_factory=list)


class Pruning(RuleBasedStateMachine):
    """A log that grows, a reader that goes on, back and again, a clock, and a horizon that moves and is acted upon."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = FakeLedger()
        self.ledger.bounds = replace(self.ledger.bounds, now=NOON)
        self.delivery = Delivery(self.ledger, give_up_s=1, ahead=HOUR)
        self.log: list[UsageRecorded] = []
        self.requests: list[Request] = []

    def _append(self, request: Request, record: UsageRecorded) -> None:
        request.places.append(len(self.log))
        self.log.append(record)

    @rule(hour=st.integers(-HOURS, HOURS), kind=st.sampled_from(KINDS))
    def write(self, hour: int, kind: str) -> None:
        number = len(self.requests)
        own = request_id(number, hour, kind)
        # Its meter is its own, so that sums tell how often it was billed.
        record = replace(usage(number, minutes=60 * hour, quantities={f"m{number}": 1}), request_id=own)
        self.requests.append(Request(record=record))
        self._append(self.requests[-1], record)

    @rule(data=st.data(), hours=st.sampled_from([0, 0, -2, 2, None]))
    def repeat(self, data: st.DataObject, hours: int | None) -> None:
        """A second record of a request: the same, or one that says another time, such as the first that is taken."""
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            said = request.record.occurred_at
            forged = self.ledger.bounds.counts_from or said
            self._append(request, replace(request.record, occurred_at=forged if hours is None else said + hours * HOUR))

    @rule(size=st.sampled_from([1, 3, 50]), back=st.sampled_from([0, 0, 0, 1, 4, 1000]))
    def read(self, size: int, back: int) -> None:
        begin = max(0, self.ledger.positions.get(0, 0) - back)
        batch = [raw(self.log[n], n) for n in range(begin, min(begin + size, len(self.log)))]
        if batch:
            run_apart(self.delivery.deliver(batch))

    @rule(hours=st.integers(1, 3))
    def wait(self, hours: int) -> None:
        self.ledger.bounds = replace(self.ledger.bounds, now=self.ledger.bounds.now + hours * HOUR)

    @rule(hour=st.integers(-HOURS, HOURS))
    def move_horizon(self, hour: int) -> None:
        self.ledger.move_horizon(NOON + hour * HOUR)

    @rule()
    def prune(self) -> None:
        self.ledger.prune()

    @rule(hour=st.integers(-HOURS, HOURS))
    def let_go(self, hour: int) -> None:
        """Both at once, once all is read."""
        self.read(1000, 0)
        self.ledger.move_horizon(NOON + hour * HOUR)
        self.ledger.prune()

    @invariant()
    def billed_once_or_set_aside(self) -> None:
        read = self.ledger.positions.get(0, 0)
        billed: Counter[str] = Counter()
        for key, quantity in self.ledger.sums.items():
            billed[str(key[5])] += quantity
        for number, request in enumerate(self.requests):
            places = [n for n in request.places if n < read]
            aside = [n for n in places if (0, n) in self.ledger.dead]
            assert billed[f"m{number}"] <= 1, "no request is billed twice"
            assert billed[f"m{number}"] == 1 or aside == places, "and none is left out without a letter"
            assert not places or billed[f"m{number}"] == 1 or aside

    @invariant()
    def verify_agrees(self) -> None:
        read = self.ledger.positions.get(0, 0)
        proof = LedgerProof(next_offsets={0: read}, dead=self.ledger.dead.keys(), first_id=self.ledger.bounds.first_id)
        for offset, record in enumerate(self.log):
            proof.add(0, offset, record)
        verdict = proof.finish(
            rows=self.ledger.sums,  # type: ignore[arg-type]
            processed=self.ledger.processed,
            aside_billed=proof.aside & self.ledger.processed.keys(),
        )
        assert {f.what for f in verdict.findings} <= {"set aside and never billed"}


TestPruning = Pruning.TestCase
TestPruning.settings = settings(deadline=None, max_examples=100, stateful_step_count=30)
