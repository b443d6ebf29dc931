"""Redriving dead letters on real servers: whoever does it, however often, wherever they die, a request counts once."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from datetime import datetime, timedelta, timezone
from pathlib import Path
from uuid import UUID

import pytest

from infra.actor import Author
from infra.postgres import open_connection
from schemas.codec import encode
from schemas.evidence import VALUE_MAX_BYTES, dead_letter
from schemas.keys import ledger_group
from schemas.records import DeadLetter, UsageRecorded
from schemas.topics import requests_topic
from streams.ledger.dead_letters import Kind
from streams.ledger.raw import RawRecord
from streams.quarantine import shelf
from streams.quarantine.letters import Place, State
from streams.quarantine.settling import Outcome, redrive
from streams.replay.verify import verify
from tests.factories import NOON, encode_unchecked, usage
from tests.integration.ledger_world import Spawn
from tests.integration.quarantine_desk import BECAUSE, PARTITION, UNKNOWN, QuarantineDesk, items
from tests.processes import ROOT


@pytest.fixture
def desk(env: dict[str, str], spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> QuarantineDesk:
    monkeypatch.setattr("streams.replay.verify.SETTLE_S", 0.0)  # results that there are not need not be awaited
    return QuarantineDesk(env, spawn)


async def i1(desk: QuarantineDesk) -> tuple[bool | None, dict[str, int | None]]:
    verdict = (await verify(desk.settings)).verdicts[0]
    return verdict.holds, dict(verdict.figures)


async def test_a_letter_is_counted_and_marked_once_and_verify_agrees(desk: QuarantineDesk) -> None:
    await desk.produce(items(3), partition=PARTITION)
    await desk.count_but({})
    first, second = await desk.set_aside(items(2))
    assert (await i1(desk))[0] is False, "set aside and never billed"

    assert desk.outcomes("redrive", first, "--dry-run") == {"counted": 1}
    assert desk.call("redrive", first).exit_code == 2, "without a reason nothing is changed"
    assert await desk.sums() == {"requests": 3, "items": 12}
    assert desk.outcomes("redrive", first, *BECAUSE, "--actor", "ada") == {"counted": 1}
    assert await desk.sums() == {"requests": 4, "items": 16}
    assert desk.outcomes("redrive", first, *BECAUSE) == {"settled_before": 1}
    refused = desk.said("discard", first, *BECAUSE, exit_code=3)["first"]
    assert "it was redriven, so its usage is counted" in refused[0]["why"]
    assert desk.outcomes("redrive", "--all", *BECAUSE) == {"counted": 1}
    assert desk.outcomes("redrive", "--all", *BECAUSE) == {}
    assert await desk.sums() == {"requests": 5, "items": 20}

    shown = desk.said("show", first)
    assert shown["letter"]["state"] == "redriven"
    assert [(a["actor"], a["outcome"], a["reason"]) for a in shown["actions"]] == [("ada", "counted", BECAUSE[1])]
    holds, figures = await i1(desk)
    assert holds is True
    assert (figures["set_aside"], figures["redriven"]) == (2, 2)
    assert desk.said("show", second)["letter"]["reason"] == UNKNOWN, "the evidence stays as it was"


async def test_what_was_counted_meanwhile_is_told_and_what_is_still_bad_stays(
    desk: QuarantineDesk, tmp_path: Path
) -> None:
    again, otherwise, twice, huge = items(4)
    good = items(1)[0]
    overflowing = usage(quantities={"items": 2**62}, customer_id="cus_9")
    records: list[UsageRecorded | bytes] = [
        again,
        usage(request_id=otherwise.request_id, quantities={"items": 9}),
        twice,
        twice,
        b"not a record",
        encode_unchecked(usage(quantities={"items": -5})),
        usage(customer_id=""),
        usage(customer_id="cus_9", quantities={"items": 2**62}),
        overflowing,
        usage(request_id=overflowing.request_id, quantities={"items": 1}, customer_id="cus_9"),
        good,
        huge,
    ]
    places = await desk.set_aside(records)
    await desk.produce([again, otherwise], partition=PARTITION)  # a producer's second try, which could be read
    await desk.count_but({})
    assert await desk.sums() == {"requests": 2, "items": 8}

    done = desk.said("redrive", "--all", *BECAUSE, exit_code=3)
    counts = {outcome: n for outcome, n in done["counts"].items() if n}
    assert counts == {"counted": 5, "already_counted": 2, "refused": 5}
    why = {x["place"]: x["why"] for x in done["first"]}
    assert set(why) == {places[n] for n in (1, 4, 5, 6, 8)}, "of two that overflow together one is counted"
    assert "differs from the usage record that was counted" in why[places[1]]
    assert "framed by 0x00" in why[places[4]]
    assert "quantities['items']: expected an integer from 0" in why[places[5]]
    assert why[places[6]] == "customer_id: is empty"
    assert "out of range" in why[places[8]]
    assert await desk.states() == {"open": 5, "redriven": 7}
    assert desk.outcomes("redrive", "--all", *BECAUSE, exit_code=3) == {"refused": 5}

    # What nobody can mend is somebody's decision.
    assert (await i1(desk))[0] is False
    assert desk.outcomes("discard", places[6], *BECAUSE) == {"discarded": 1}
    assert desk.outcomes("discard", places[6], *BECAUSE) == {"settled_before": 1}
    assert desk.outcomes("discard", "--all", "--topic", "usage", *BECAUSE) == {"discarded": 4}
    report = await verify(desk.settings)
    assert report.verdicts[0].holds is True
    assert report.verdicts[0].figures["discarded"] == 5
    assert report.open_letters == {}
    # What does not decode and was discarded is no open question for anybody who reads the topic.
    assert report.verdicts[0].figures["undecodable"] == 0
    assert (report.undecodable, report.written_off) == ({}, {desk.topic: 2})
    out = tmp_path / "usage.jsonl"
    done = desk.run("export", "usage", "--output", str(out), "--json")
    assert done.exit_code == 0, done.output
    exported = json.loads(done.stdout.splitlines()[-1])
    assert (exported["undecodable"]["count"], exported["written_off"]) == (0, 2)
    # And is taken back by naming it, not by the way.
    assert desk.outcomes("redrive", "--all", *BECAUSE) == {}
    assert desk.outcomes("redrive", places[6], *BECAUSE, exit_code=3) == {"refused": 1}


COMMAND = ["inferlog", "dead-letters", "redrive", "--all", "--yes", "--json", *BECAUSE]


async def test_killed_between_any_two_steps_a_redrive_leaves_nothing(desk: QuarantineDesk) -> None:
    await desk.set_aside(items(20))
    for table in ("processed_requests", "usage_hourly", "dead_letter_actions"):
        async with desk.held(table):
            killed = desk.spawn(COMMAND, desk.env, name="killed")
            await desk.waiting(1)
            killed.kill()
        # Its session did not see its end while it waited; it goes on, finds nobody to answer, and takes all back.
        await desk.alone()
        assert await desk.states() == {"open": 20}, table
        assert await desk.sums() == {}, table
    assert desk.outcomes("redrive", "--all", *BECAUSE) == {"counted": 20}


async def test_of_two_operators_at_once_one_counts(desk: QuarantineDesk) -> None:
    await desk.set_aside(items(20))
    async with desk.held("usage_hourly"):
        operators = [desk.spawn(COMMAND, desk.env, name="operator") for _ in range(2)]
        await desk.waiting(2)  # one for the hours, the other for the letters that the first one holds
    assert [p.wait(30) for p in operators] == [0, 0]
    told = [json.loads(p.log.read_text().splitlines()[-1])["counts"] for p in operators]
    assert sorted((t["counted"], t["settled_before"]) for t in told) == [(0, 20), (20, 0)]
    assert await desk.sums() == {"requests": 20, "items": 80}
    assert await desk.value("SELECT count(*) FROM dead_letter_actions") == 20
    assert (await i1(desk))[0] is True


async def test_bytes_that_were_left_on_the_log_are_read_there_and_compared(desk: QuarantineDesk) -> None:
    # A record of the size that its letter left out: one long customer id makes it so, and the ledger's index takes it.
    big = usage(customer_id="c" * 1000, quantities={f"m{n:07}" + "x" * 90: 1 for n in range(VALUE_MAX_BYTES // 90)})
    (place,) = await desk.set_aside([big])
    (lost,) = await desk.set_aside([usage(quantities={"x" * (VALUE_MAX_BYTES + 1): 1})])
    shown = desk.said("show", place)
    assert shown["letter"]["value"] is None
    assert shown["letter"]["value_sha256"] == hashlib.sha256(encode(big)).hexdigest()
    assert shown["decoded"]["fields"]["request_id"] == str(big.request_id)
    async with desk.tables() as c:
        await c.execute(
            """UPDATE dead_letters SET value_sha256 = repeat('0', 64) WHERE "offset" = $1""", int(lost.rsplit("/")[-1])
        )
    done = desk.said("redrive", "--all", *BECAUSE, exit_code=3)
    assert (done["counts"]["counted"], done["counts"]["refused"]) == (1, 1)
    assert "is another one" in done["first"][0]["why"]
    assert len(await desk.sums()) == len(big.quantities)


async def test_an_objection_to_a_records_time_is_overruled_by_name_alone(desk: QuarantineDesk) -> None:
    (place,) = await desk.set_aside(items(1), "occurred_at: 2026-01-01T00:00Z is past the horizon of 40 days")
    assert desk.call("redrive", "--all", "--accept", "horizon", *BECAUSE).exit_code == 2
    where = Place.parse(place, namespace=desk.settings.kafka.namespace)

    async with desk.tables() as c:
        counts_from = NOON + timedelta(hours=1)
        first_id = UUID(int=int(counts_from.timestamp() * 1000) << 80)
        await c.execute("UPDATE ledger_dedup SET counts_from = $1, first_id = $2", counts_from, first_id)
    async with open_connection(desk.settings.postgres) as connection:
        letter = await shelf.find(connection, where)
        assert letter is not None
        for accept, outcome in (
            ((), Outcome.REFUSED),
            ((Kind.FUTURE,), Outcome.REFUSED),
            ((Kind.HORIZON,), Outcome.COUNTED),
        ):
            (done,) = await redrive(
                connection,
                [letter.record(letter.value)],
                group=ledger_group(desk.settings.kafka.namespace),
                by=Author(actor="ada", reason="the invoice of January was not sent"),
                wanted=(State.OPEN,),
                accept=accept,
            )
            assert done.outcome is outcome, accept
        (action,) = await shelf.actions(connection, where)
    assert action.accepted == "horizon"
    assert await desk.sums() == {"requests": 1, "items": 4}


async def test_letters_of_workers_are_listed_once_and_a_strangers_bill_nothing(desk: QuarantineDesk) -> None:
    ns = desk.settings.kafka.namespace

    def letter(topic: str, offset: int, value: bytes, reason: str) -> DeadLetter:
        record = RawRecord(topic=topic, partition=0, offset=offset, follows=offset, key=b"k", value=value)
        return dead_letter(record, reason, occurred_at=datetime.now(timezone.utc))

    requests = requests_topic("gpu-a").in_namespace(ns).name
    of_worker = letter(requests, 5, b"\x1b[2J", "expected InferenceRequested \a framed")
    forged = letter(desk.topic, 7, encode(items(1)[0]), UNKNOWN)
    await desk.tell(
        [of_worker, of_worker, forged, letter("elsewhere", 0, b"", "x"), b"no letter", b"\x00\x00\x00\x00\x07"]
    )
    (own,) = await desk.set_aside(items(1))
    listed = desk.said("list")["letters"]
    assert [(x["place"], x["kind"]) for x in listed] == [
        ("requests.gpu-a/0/5", "undecodable"),
        (own, "unknown_schema"),
    ]
    await desk.tell([letter(requests, 6, b"", "a broken body")])
    assert len(desk.said("list")["letters"]) == 3
    assert "\a" not in desk.call("list").output + desk.call("show", "requests.gpu-a/0/5").output

    done = desk.said("redrive", "requests.gpu-a/0/5", *BECAUSE, exit_code=3)
    assert "only usage is redriven" in done["first"][0]["why"]
    assert desk.outcomes("redrive", "--all", *BECAUSE) == {"counted": 1}, "all means all usage"
    assert await desk.sums() == {"requests": 1, "items": 4}
    assert desk.outcomes("discard", "--all", "--topic", "requests.gpu-a", *BECAUSE) == {"discarded": 2}


async def test_pages_filters_and_summaries_of_many(desk: QuarantineDesk) -> None:
    odd = [usage(request_id=u.request_id, quantities={"items": 1}) for u in items(3)]
    for found in ("78", "7b", "ff", "deadbeefab", "6e6f742061"):
        await desk.set_aside([b"x"], f"expected UsageRecorded framed by 0x00 and a schema id, found {found}")
    for u in odd:
        await desk.set_aside([u], f"request {u.request_id}: differs from the usage record that was counted for it")
    places = [f"usage/{PARTITION}/{n}" for n in range(8)]
    first = desk.said("list", "--limit", "3")
    second = desk.said("list", "--limit", "3", "--after", first["next"])
    third = desk.said("list", "--limit", "3", "--after", second["next"])
    pages = [x["place"] for page in (first, second, third) for x in page["letters"]]
    assert (pages, third["next"]) == (places, None)
    assert [x["place"] for x in desk.said("list", "--kind", "contradicting")["letters"]] == places[5:]
    since = second["letters"][2]["seen_at"]
    assert [x["place"] for x in desk.said("list", "--since", since)["letters"]] == places[5:]
    assert [x["place"] for x in desk.said("list", "--until", since)["letters"]] == places[:5]
    summed = desk.said("list", "--summary")
    assert (summed["letters"], [(s["kind"], s["letters"]) for s in summed["sorts"]]) == (
        8,
        [("undecodable", 5), ("contradicting", 3)],
    )
    assert [s["reason"] for s in summed["sorts"]] == [
        "expected UsageRecorded framed by #x# and a schema id, found #",
        "request #: differs from the usage record that was counted for it",
    ]
    assert desk.outcomes("discard", "--all", "--kind", "undecodable", *BECAUSE) == {"discarded": 5}
    assert [x["place"] for x in desk.said("list", "--state", "discarded")["letters"]] == places[:5]
    assert len(desk.said("list", "--state", "all")["letters"]) == 8
    for wrong in (
        ["show", "usage/3"],
        ["show", "nothing/0/0"],
        ["redrive"],
        ["redrive", "usage/3/5"],
        ["list", "--topic", "x"],
    ):
        result = desk.call(*wrong)
        assert result.exit_code == 2, result.output
    assert "there is no dead letter" in desk.call("show", "usage/3/99").output
    assert desk.call("discard", "usage/3/99", *BECAUSE).exit_code == 1


async def test_the_commands_of_the_page_run_as_they_stand(desk: QuarantineDesk) -> None:
    await desk.produce(items(41), partition=PARTITION)
    await desk.count_but({})
    await desk.set_aside(items(1))
    await desk.set_aside([b"not a record"], "expected UsageRecorded framed by 0x00 and a schema id, found 6e6f742061")
    await desk.set_aside([usage(occurred_at=NOON)])
    page = (ROOT / "docs" / "dead-letters.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ inferlog (dead-letters .*)$", page, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        result = desk.call(*shlex.split(command)[1:])
        assert result.exit_code == 0, (command, result.output)
