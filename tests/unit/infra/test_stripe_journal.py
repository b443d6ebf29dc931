"""The stand-in's memory: what a killed process keeps, and what a damaged file may not hide."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from infra.stripe_standin.account import Account, Settings
from infra.stripe_standin.endpoints import Answer, Call, execute, fail
from infra.stripe_standin.journal import Journal, JournalDamagedError

NOW_S = 1_800_000_000.0


def call(path: str, body: str = "", *, method: str = "POST", key: str | None = None) -> Call:
    query = "" if method == "POST" else body
    return Call(method=method, path=path, query=query, body=body.encode(), idempotency_key=key)


class Desk:
    """An account on a folder, with a wall clock that stands still."""

    def __init__(self, folder: Path) -> None:
        numbers = itertools.count(1)
        self.account = Account(folder, wall=lambda: NOW_S, mint=lambda prefix: f"{prefix}_{next(numbers)}")

    def customer(self, body: str = "name=Ada", key: str | None = None) -> Answer:
        return execute(self.account, call("/v1/customers", body, key=key))

    def ids(self) -> list[Any]:
        return list(self.account.books.customers)


def test_a_torn_last_line_is_dropped_and_the_next_entry_starts_clean(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"facts":[]}\n{"facts":[{"kind":"cus')
    journal = Journal(path)
    assert list(journal.replay()) == [{"facts": []}]
    journal.append({"facts": [1]})
    journal.close()
    assert path.read_bytes() == b'{"facts":[]}\n{"facts":[1]}\n'


@pytest.mark.parametrize("line", [b"{oops}\n", b"[1]\n"])
def test_a_damaged_whole_line_is_reported_with_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"facts":[]}\n' + line + b'{"facts":[]}\n')
    journal = Journal(path)
    with pytest.raises(JournalDamagedError, match="line 2"):
        list(journal.replay())
    journal.close()


def test_one_process_holds_a_folder(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    with pytest.raises(BlockingIOError, match="in use"):
        Desk(tmp_path)
    first.account.close()
    Desk(tmp_path).account.close()


def test_a_line_that_could_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    desk.customer()
    size_bytes = (tmp_path / "journal.jsonl").stat().st_size
    write = os.write

    def disk_full(file: int, data: bytes) -> int:
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(28, "No space left on device")

    def shrinking(file: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", lambda file, data: disk_full(file, b""))
        return disk_full(file, data)

    monkeypatch.setattr(os, "write", shrinking)
    with pytest.raises(OSError, match="No space left"):
        desk.customer()
    monkeypatch.undo()
    assert (tmp_path / "journal.jsonl").stat().st_size == size_bytes
    assert desk.ids() == ["cus_1"]
    desk.account.close()


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = desk.customer(key="k1")
    execute(
        desk.account,
        call("/v1/billing/meters", "event_name=tok&display_name=T&default_aggregation[formula]=sum"),
    )
    event = f"event_name=tok&payload[stripe_customer_id]={first.body['id']}&payload[value]=4&identifier=i1"
    assert execute(desk.account, call("/v1/billing/meter_events", event)).status == 200
    failed = fail(desk.account, call("/v1/customers", "name=Bob", key="k2"), 500)
    desk.account.set_settings(Settings(lag_s=5.0))
    desk.account.set_clock(desk.account.clock.moved_to(NOW_S + 100, frozen=True))
    desk.account.close()

    again = Desk(tmp_path)
    assert again.account.now_s() == NOW_S + 100
    assert again.account.settings == Settings(lag_s=5.0)
    replay = again.customer(key="k1")
    assert (replay.status, replay.body, replay.headers) == (200, first.body, {"Idempotent-Replayed": "true"})
    assert again.customer("name=Bob", key="k2").body == failed.body
    assert execute(again.account, call("/v1/billing/meter_events", event)).status == 400
    assert again.account.books.outcomes() == ["counted"]
    assert again.ids() == [first.body["id"]]
    again.account.close()


def test_an_idempotency_key_remembers_the_first_answer_for_a_day(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = desk.customer(key="k")
    assert desk.customer(key="k").body == first.body
    reused = desk.customer("name=Eve", key="k")
    assert (reused.status, reused.body["error"]["type"]) == (400, "idempotency_error")
    desk.account.set_clock(desk.account.clock.moved_to(NOW_S + 86_400, frozen=False))
    assert desk.customer("name=Eve", key="k").body["name"] == "Eve"
    assert len(desk.ids()) == 2
    desk.account.close()


def test_which_failures_an_idempotency_key_remembers(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.customer("nope=1", key="invalid").status == 400
    assert desk.customer(key="invalid").status == 200
    assert fail(desk.account, call("/v1/customers", "name=Ada", key="limited"), 429).status == 429
    assert desk.customer(key="limited").status == 200
    assert fail(desk.account, call("/v1/customers", "name=Ada", key="broken"), 500).status == 500
    assert desk.customer(key="broken").status == 500
    done = execute(desk.account, call("/v1/customers", "name=Ada", key="done"), forced_status=500)
    assert done.status == 500
    assert desk.customer(key="done").status == 500
    assert len(desk.ids()) == 3
    v2 = call("/v2/billing/meter_events", '{"event_name": "tok"}', key="v2")
    assert fail(desk.account, v2, 500).status == 500
    assert execute(desk.account, v2).status == 400
    desk.account.close()


def test_moving_the_clock_back_changes_nothing_that_a_replay_would_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    execute(
        desk.account,
        call("/v1/billing/meters", "event_name=tok&display_name=T&default_aggregation[formula]=sum"),
    )
    desk.account.set_settings(Settings(lag_s=60.0))
    body = "event_name=tok&payload[stripe_customer_id]=cus_2&payload[value]=4"
    assert execute(desk.account, call("/v1/billing/meter_events", body)).status == 200
    desk.account.set_clock(desk.account.clock.moved_to(NOW_S + 61, frozen=False))
    desk.account.set_clock(desk.account.clock.moved_to(NOW_S, frozen=False))
    desk.customer()
    before = desk.account.books.outcomes()
    assert before == ["meter_event_customer_not_found"]
    desk.account.close()
    again = Desk(tmp_path)
    assert again.account.books.outcomes() == before
    again.account.close()
