from __future__ import annotations

from collections.abc import Callable

import pytest

from api.admission.deadlines import Queues
from api.admission.gate import Gate, Inputs
from api.admission.keys import Keys, mint
from api.admission.limits import Limiter
from api.admission.versions import Deployment, Versions
from api.errors import ApiError, BadInput
from infra.lag import Queue
from schemas.keys import RedisKeys
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
        self.waiting = 0
        self.authorization: str | None = f"Bearer {self.key.secret}"
        self.model = "digits"
        self.bad_input: BadInput | None = None

    async def target(self) -> tuple[str, str | None]:
        self.asked.append("target")
        return self.model, None

    async def inputs(self, deployment: Deployment) -> Inputs:
        self.asked.append("inputs")
        if self.bad_input:
            raise self.bad_input
        return Inputs(tensors=(floats("pixels", *[0.0] * 64),), item_count=1)

    async def queue(self, waiting: int) -> None:
        class Reader:
            async def read(self, groups: object) -> dict[str, Queue]:
                return {"inference.requests.default.v1": Queue(partitions=8, waiting=waiting, done=0)}

        await self.queues.measure(Reader(), ["default"])

    async def gate(self) -> Gate:
        versions = Versions(self.registry)
        await versions.refresh()
        return Gate(
            keys=Keys(self.keys, environment="test"),
            versions=versions,
            queues=self.queues,
            limiter=Limiter(self.script, RedisKeys()),
            waiting=lambda: self.waiting,
            max_in_flight=100,
        )


async def refusal(world: World) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await (await world.gate()).admit(world)
    return refused.value


async def test_a_call_that_passes_carries_every_decision() -> None:
    world = World()
    admission = await (await world.gate()).admit(world)
    assert admission.caller.key_id == world.key.key_id
    assert admission.deployment.model == "digits"
    assert admission.inputs.item_count == 1
    assert [b.bucket for b in admission.charge.buckets] == [f"key:{world.key.key_id}", "customer:cust_a"]


def stranger(world: World) -> None:
    world.authorization = f"Bearer {mint('test').secret}"


def unknown_model(world: World) -> None:
    world.model = "nope"


def wrong_input(world: World) -> None:
    world.bad_input = BadInput("wrong")


def full_gateway(world: World) -> None:
    world.waiting = 100


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


async def test_a_stranger_cannot_make_the_gateway_read_a_body() -> None:
    world = World()
    stranger(world)
    await refusal(world)
    assert world.asked == []
