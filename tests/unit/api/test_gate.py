from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from api.access.key_record import Terms, base_rate
from api.access.key_shape import mint
from api.access.keys import Keys
from api.admission.caller import Caller
from api.admission.deadlines import Queues
from api.admission.space import Space
from api.errors import ApiError, BadInput, Unavailable
from api.gate import Gate, Inputs
from api.limits.limiter import Limiter
from api.once.once import Once, Sameness
from api.routing.catalogue import Deployment
from api.routing.versions import Versions
from infra.lag import Queue
from schemas.ids import new_request_id
from schemas.keys import RedisKeys
from tests.claims import MemoryBook
from tests.conditions import eventually
from tests.factories import floats
from tests.fakes import FakeKeys, FakeRegistry, FakeScript, manifest, registered, routed


class World:
    """A gate whose every check can be made to refuse; `asked` keeps the order in which they were reached."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.keys = FakeKeys()
        self.key = self.keys.add()
        self.script = FakeScript()
        self.registry = FakeRegistry()
        self.registry.all_versions = [registered("digits", manifest())]
        self.registry.all_routes = [routed("digits", manifest())]
        self.queues = Queues(namespace="", max_queued=10)
        self.max_in_flight = 100
        self.deadline_s = 10.0
        self.authorization: str | None = f"Bearer {self.key.secret}"
        self.model = "digits"
        self.bad_input: BadInput | None = None
        self.timeout_s: float | None = None
        self.meanwhile: Callable[[], object] = lambda: None  # what happens while the inputs are read
        self.gate_made: Gate
        self.known = Keys(self.keys, environment="test")
        self.once: Once | None = None
        self.said: dict[str, Any] = {"key": None, "retry": None, "digest": b""}

    operation = "infer"

    async def sameness(self, caller: Caller) -> Sameness:
        return Sameness(customer_id=caller.customer_id, key_id=caller.key_id, **self.said)

    def forget(self) -> None:
        self.asked.append("forget")

    async def target(self) -> tuple[str, str | None]:
        self.asked.append("target")
        return self.model, None

    async def inputs(self, deployment: Deployment) -> Inputs:
        self.asked.append("inputs")
        self.meanwhile()
        if self.bad_input:
            raise self.bad_input
        return Inputs(tensors=(floats("pixels", *[0.0] * 64),), item_count=1, timeout_s=self.timeout_s)

    async def queue(self, waiting: int) -> None:
        class Reader:
            async def read(self, groups: object) -> dict[str, Queue]:
                return {"inference.requests.default.v1": Queue(partitions=8, waiting=waiting, done=0)}

        await self.queues.measure(Reader(), ["default"])

    async def gate(self) -> Gate:
        versions = Versions(self.registry)
        await versions.refresh()
        self.gate_made = Gate(
            keys=self.known,
            versions=versions,
            queues=self.queues,
            space=Space(max_in_flight=self.max_in_flight, max_per_customer=self.max_in_flight),
            limiter=Limiter(self.script, RedisKeys()),
            once=self.once,
            money=None,
            deadline_s=self.deadline_s,
        )
        return self.gate_made


def space_of(gate: Gate) -> Space:
    return gate._space


async def refusal(world: World) -> ApiError:
    with pytest.raises(ApiError) as refused:
        async with (await world.gate()).admitted(world, new_request_id()):
            pass
    return refused.value


async def test_a_call_that_passes_carries_every_decision() -> None:
    world = World()
    async with (await world.gate()).admitted(world, new_request_id()) as admission:
        assert admission.caller.key_id == world.key.key_id
        assert admission.deployment.model == "digits"
        assert admission.inputs.item_count == 1
        assert admission.charge is not None
        assert [b.bucket for b in admission.charge.buckets] == [f"key:{world.key.key_id}", "customer:cust_a"]


def stranger(world: World) -> None:
    world.authorization = f"Bearer {mint('test').secret}"


def unknown_model(world: World) -> None:
    world.model = "nope"


def wrong_input(world: World) -> None:
    world.bad_input = BadInput("wrong")


def full_gateway(world: World) -> None:
    world.max_in_flight = 0


def over_the_rate(world: World) -> None:
    world.script.answer = [0, 1, 5, 0, 9, 0, 9]


# In the order of the gate: each refusal wins over all that follow it.
CHECKS: list[tuple[Callable[[World], None], int]] = [
    (stranger, 401),
    (unknown_model, 404),
    (wrong_input, 400),
    (full_gateway, 503),
    (over_the_rate, 429),
]


@pytest.mark.parametrize("first", range(len(CHECKS)))
async def test_the_first_check_that_refuses_decides(first: int) -> None:
    world = World()
    for spoil, _ in CHECKS[first:]:
        spoil(world)
    assert (await refusal(world)).status == CHECKS[first][1]


@pytest.mark.parametrize("check", range(len(CHECKS) - 1))
async def test_a_refused_call_takes_no_tokens(check: int) -> None:
    world = World()
    CHECKS[check][0](world)
    await refusal(world)
    assert world.script.batches == []


async def test_a_long_queue_is_shed_before_tokens_are_taken() -> None:
    world = World()
    await world.queue(waiting=11)
    assert (await refusal(world)).status == 503
    assert world.script.batches == []


async def test_a_route_that_is_switched_while_the_inputs_arrive_holds_for_them() -> None:
    world = World()
    newer = manifest(producer="another")
    world.registry.all_versions.append(registered("digits", newer))
    gate = await world.gate()
    world.registry.all_routes = [routed("digits", newer)]
    switched = Versions(world.registry)
    await switched.refresh()

    def switch() -> None:
        gate._versions = switched

    world.meanwhile = switch
    async with gate.admitted(world, new_request_id()) as admission:
        assert (admission.deployment.version, admission.decisions.version) == (newer.version, newer.version)
    assert world.asked.count("inputs") == 2, "checked against the signature of the one that runs them"


@pytest.mark.parametrize("refused_by", ["limiter", "queue"])
async def test_a_refused_call_lets_its_repetition_be_the_first(refused_by: str) -> None:
    world = World()
    world.once = Once(MemoryBook(), horizon_s=3600.0)
    world.said = {"key": "k", "retry": None, "digest": b"d" * 32}
    if refused_by == "queue":
        await world.queue(waiting=11)
    else:
        over_the_rate(world)
    refused_id, later_id = new_request_id(), new_request_id()
    with pytest.raises(ApiError):
        async with (await world.gate()).admitted(world, refused_id):
            pass
    await world.once._notes.write()
    await world.queue(waiting=0)
    world.script = FakeScript()
    async with (await world.gate()).admitted(world, later_id) as admission:
        assert admission.claim is not None
        # Not the refused call's, taken over after a long wait: that one was never begun.
        assert (admission.claim.is_taken_over, admission.decisions.request_id) == (False, later_id)


async def test_a_call_counts_in_its_queue_from_its_admission_to_its_end_and_a_refused_one_never() -> None:
    world = World()
    own = world.queues._own["default"]
    gate = await world.gate()
    async with gate.admitted(world, new_request_id()):
        assert (own.outstanding, own.let_in, len(own.answers)) == (1, 1, 0)
    assert (own.outstanding, own.let_in, len(own.answers)) == (0, 1, 1)
    with pytest.raises(Unavailable):
        async with gate.admitted(world, new_request_id()):
            raise Unavailable("the log is away")
    assert (own.outstanding, own.let_in, len(own.answers)) == (0, 2, 1)
    over_the_rate(world)
    await refusal(world)
    assert (own.outstanding, own.let_in) == (0, 2)


async def test_a_stranger_cannot_make_the_gateway_read_a_body() -> None:
    world = World()
    stranger(world)
    await refusal(world)
    assert world.asked == []


async def test_calls_that_arrive_at_once_cannot_pass_the_bound_together() -> None:
    world = World()
    world.max_in_flight = 10
    world.script.hold.clear()  # all of them are between the check and their answer
    gate, inside, most, leave = await world.gate(), 0, 0, asyncio.Event()

    async def one() -> int:
        nonlocal inside, most
        try:
            async with gate.admitted(world, new_request_id()):
                inside += 1
                most = max(most, inside)
                await leave.wait()
                inside -= 1
            return 200
        except ApiError as error:
            return error.status

    calls = [asyncio.ensure_future(one()) for _ in range(500)]
    await eventually(lambda: sum(c.done() for c in calls) == 490)
    world.script.hold.set()
    await eventually(lambda: inside == 10)
    leave.set()
    answers = await asyncio.gather(*calls)
    assert (answers.count(200), answers.count(503), most) == (10, 490, 10)
    assert space_of(gate).in_flight == 0


@pytest.mark.parametrize("end", ["refused", "unforeseen", "gone while charged", "gone inside", "failed inside"])
async def test_every_way_out_gives_the_place_back(end: str) -> None:
    world = World()
    gate, reached = await world.gate(), asyncio.Event()
    if end == "refused":
        over_the_rate(world)
    if end == "unforeseen":
        world.script.answer = [7]
    if end == "gone while charged":
        world.script.hold.clear()

    async def one() -> None:
        async with gate.admitted(world, new_request_id()):
            reached.set()
            if end == "failed inside":
                raise Unavailable("the log is away")
            await asyncio.Event().wait()

    call = asyncio.ensure_future(one())
    if end.startswith("gone"):
        await eventually(lambda: space_of(gate).in_flight == 1 and (reached.is_set() or end == "gone while charged"))
        call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() or call.exception() is not None
    assert space_of(gate).in_flight == 0
    world.script.hold.set()


EXPIRED_AT = datetime.now(timezone.utc) - timedelta(seconds=1)
#: What may happen to a key, and the code that its calls are refused with from then on.
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"revoked": True}, "revoked_api_key"),
    ({"expires_at": EXPIRED_AT}, "expired_api_key"),
    ({"terms": Terms(rates=(), operations=frozenset({"usage"}))}, "operation_not_allowed"),
    ({"terms": Terms(rates=(), models=frozenset({"other"}))}, "model_not_allowed"),
]


def changed(world: World, **changes: Any) -> None:
    """The key is changed, and the feed has told this gateway of it."""
    key_id = world.key.key_id
    world.keys.records[key_id] = replace(world.keys.records[key_id], **changes)
    world.known.changed([key_id], [])


async def redis_lost(world: World, gate: Gate) -> None:
    """From now on this gateway decides by its own share of the limits."""
    world.script.away = True
    while gate._limiter.trouble() is None:
        with pytest.raises(ApiError):
            async with gate.admitted(world, new_request_id()):
                pass


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize(("changes", "code"), CHANGES)
async def test_a_key_that_is_changed_while_the_inputs_are_read_counts_as_it_is_then(
    changes: dict[str, Any], code: str, is_alone: bool
) -> None:
    world = World()
    gate = await world.gate()
    if is_alone:
        await redis_lost(world, gate)
    asked = len(world.script.calls)
    book = MemoryBook()
    world.once = gate._once = Once(book, horizon_s=3600.0)
    world.said = {"key": "k", "retry": None, "digest": b"d" * 32}
    world.meanwhile = lambda: changed(world, **changes)
    with pytest.raises(ApiError) as refused:
        async with gate.admitted(world, new_request_id()):
            pass
    assert refused.value.code == code
    assert len(world.script.calls) == asked, "it took no tokens"
    await world.once._notes.write()
    assert book.rows == [], "and its repetition is a first call"


async def test_limits_that_are_changed_while_the_inputs_are_read_hold_for_the_call() -> None:
    world = World()
    gate = await world.gate()
    lower = Terms(rates=(base_rate(requests_per_s=3, burst=1),))
    world.meanwhile = lambda: changed(world, terms=lower)
    async with gate.admitted(world, new_request_id()) as admission:
        assert admission.charge is not None
        assert [b.burst for b in admission.charge.buckets] == [1, 5]
        assert admission.caller.limits[0].burst == 1
    assert world.script.calls[0].start.args[5] == 1


async def test_a_key_that_stays_as_it_is_is_not_looked_up_again() -> None:
    world = World()
    gate = await world.gate()
    for _ in range(3):
        async with gate.admitted(world, new_request_id()):
            pass
    assert world.keys.lookups == 1


@pytest.mark.parametrize("timeout_s", [1e-6, 0.0099])
async def test_a_call_that_asks_for_too_little_time_costs_no_claim(timeout_s: float) -> None:
    world, book = World(), MemoryBook()
    world.once = Once(book, horizon_s=3600.0)
    world.said = {"key": "k", "retry": None, "digest": b"d" * 32}
    world.timeout_s = timeout_s
    error = await refusal(world)
    assert (error.status, error.code) == (400, "timeout_too_short")
    assert (book.asked, world.script.calls) == (0, [])
