"""What is billed of a month never passes the cap, whatever comes late, is looked at late, or is forgotten."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from api.errors import ApiError
from api.spend.spend import Account, Spend, month_of
from schemas.ids import EPOCH
from tests.gcra import Model, Money
from tests.spending import STANDARD, FakeLedger, Time, capped, items, spend

ITEM = STANDARD.amounts_micros["items"]
CAP_ITEMS = 20
#: The month ends in the middle of every story.
ENDS_S = 19.5 * 86400 + 43_200 - 40


def seconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(seconds=1)


@dataclass
class World:
    """Gateways with views of their own, one limiter, and a ledger that counts each request when its usage comes."""

    time: Time = field(default_factory=Time)
    gateways: list[Spend] = field(default_factory=list)
    limiter: Model = field(default_factory=Model)
    #: Usage on its way: when it was admitted, its items, and when it is counted; none comes of some.
    open: list[tuple[datetime, int, float]] = field(default_factory=list)
    admitted: int = 0

    def __post_init__(self) -> None:
        self.ledger = FakeLedger(self.time)
        self.gateways = [spend(self.time, self.ledger) for _ in range(2)]
        self.time.s = ENDS_S
        self.look(0.0)
        self.limiter.since_s = seconds(self.time.now()) - 60

    def account(self, moment: datetime) -> Account:
        return Account(customer_id="cust_a", currency="usd", since=month_of(moment))

    def pass_time(self, seconds: float) -> None:
        self.time.s += seconds
        for admitted_at, used, at_s in [o for o in self.open if o[2] <= self.time.s]:
            self.open.remove((admitted_at, used, at_s))
            self.ledger.spent[self.account(admitted_at)] += used * ITEM

    def look(self, less_s: float) -> None:
        """The ledger tells how far it is: never past a request that is not counted, and forward only."""
        settled = min([self.time.now(), *(o[0] for o in self.open)]) - timedelta(seconds=less_s)
        self.ledger.says(max(settled, self.ledger.settled_at or settled))

    async def call(self, gateway: int, asked: int, used: int, late_s: float, waits_s: float) -> bool:
        """One call, admitted a little before the limiter is asked; it comes to at most what it asked for."""
        admitted_at = self.time.now()
        self.pass_time(waits_s)
        try:
            spending = await self.gateways[gateway].spending(
                capped(CAP_ITEMS * ITEM), "standard-v1", items(asked), admitted_at
            )
        except ApiError:
            return False
        assert spending is not None
        now = self.time.now()
        money = Money(spending.left_micros, seconds(spending.settled_at), seconds(now), spending.cost_micros)
        if self.limiter.take([], (now - EPOCH) // timedelta(microseconds=1), money=money)[0] != 1:
            return False
        self.open.append((admitted_at, min(asked, used), self.time.s + late_s))
        self.admitted += 1
        return True

    async def read(self, gateway: int) -> None:
        """A pass of the gateway's loop."""
        accounts = list(self.gateways[gateway]._entries)
        if accounts:
            await self.gateways[gateway]._read(accounts, within_s=1)

    def settle(self) -> None:
        """All usage arrives."""
        self.pass_time(max([0.0, *(o[2] - self.time.s for o in self.open)]))


def story_of(seed: int, steps: int) -> list[tuple[object, ...]]:
    """Mostly calls: lists drawn one by one hold too few of them to come near a cap."""
    rng, story = random.Random(seed), list[tuple[object, ...]]()
    late_s = rng.choice([2.0, 30.0, 300.0])
    for what in rng.choices(["call", "pass", "look", "read", "flush"], [40, 20, 15, 24, rng.choice([0, 1])], k=steps):
        match what:
            case "call":
                late = rng.choice([0.0, late_s, late_s * rng.random()])
                waits = rng.choice([0.0, 0.0, 0.0, 0.4])
                story.append((what, rng.randrange(2), rng.randint(1, 9), rng.choice([0, 9, 9]), late, waits))
            case "pass":
                story.append((what, rng.choice([0.5, 1.0, 3.0, 20.0])))
            case "look":
                story.append((what, rng.choice([0.0, 0.0, 10.0, 200.0])))
            case "read":
                story.append((what, rng.randrange(2)))
            case "flush":
                story.append((what,))
    return story


seeds = st.integers(0, 2**32)


async def told(story: list[tuple[object, ...]]) -> World:
    world = World()
    for what, *how in story:
        match what:
            case "call":
                await world.call(*how)
            case "pass":
                world.pass_time(*how)
            case "look":
                world.look(*how)
            case "read":
                await world.read(*how)
            case "flush":
                world.limiter = Model()
    return world


@settings(max_examples=300)
@given(seeds)
def test_no_month_comes_to_more_than_the_cap(seed: int) -> None:
    world = asyncio.run(told(story_of(seed, 120)))
    world.settle()
    assert all(spent <= CAP_ITEMS * ITEM for spent in world.ledger.spent.values()), world.ledger.spent


@given(seeds, st.integers(1, 9))
def test_what_is_settled_can_be_spent_up_to_less_than_one_call(seed: int, asked: int) -> None:
    async def run() -> None:
        world = await told(story_of(seed, 30))
        refused = 0
        for _ in range(CAP_ITEMS + 2):
            world.settle()
            world.pass_time(2.0)
            world.look(0.0)
            await world.read(0)
            world.pass_time(2.0)
            world.look(0.0)
            await world.read(0)
            refused += not await world.call(0, asked, asked, 0.0, 0.0)
            if refused == 2:  # the first one after a loss of memory only begins to remember
                break
        world.settle()
        spent = world.ledger.spent[world.account(world.time.now())]
        assert (CAP_ITEMS - asked) * ITEM < spent <= CAP_ITEMS * ITEM

    asyncio.run(run())
