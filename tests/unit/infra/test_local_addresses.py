from __future__ import annotations

import itertools
import stat
from pathlib import Path

import pytest

from infra.local import addresses as address_book
from infra.local.addresses import PORTS, Addresses, complete, with_new_ports


def made_up(values: dict[str, str] | None = None) -> Addresses:
    numbers = itertools.count(20_000)
    return complete(values or {}, choose_port=lambda taken: next(numbers))


def reread(home: Path) -> Addresses:
    found = address_book.load(home)
    assert found is not None
    return found


def test_what_was_saved_is_found_again_whole(tmp_path: Path) -> None:
    saved = made_up()
    address_book.save(tmp_path, saved)
    assert reread(tmp_path) == saved


def test_only_the_owner_may_read_the_credentials(tmp_path: Path) -> None:
    address_book.save(tmp_path, made_up())
    address_book.save(tmp_path, made_up())
    assert stat.S_IMODE((tmp_path / "stack.env").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["stack.env"]


def test_two_stacks_share_no_credential() -> None:
    first, second = made_up(), made_up()
    assert not set(first.secrets.values()) & set(second.secrets.values())


def test_the_settings_of_every_process_follow_from_ports_and_credentials() -> None:
    addresses = made_up()
    environment = addresses.environment()
    password, port = addresses.secrets["postgres_password"], addresses.ports["postgres"]
    assert environment["INFERLOG_POSTGRES_DSN"] == f"postgresql://inferlog:{password}@127.0.0.1:{port}/inferlog"
    assert environment["INFERLOG_KAFKA_BOOTSTRAP"] == f"127.0.0.1:{addresses.ports['kafka']}"
    assert environment["INFERLOG_STRIPE_API_KEY"].startswith("sk_test_")


def test_lines_added_by_hand_survive(tmp_path: Path) -> None:
    address_book.save(tmp_path, made_up())
    with (tmp_path / "stack.env").open("a") as file:
        file.write("INFERLOG_MAX_QUEUED=7\n")
    address_book.save(tmp_path, reread(tmp_path))
    assert reread(tmp_path).environment()["INFERLOG_MAX_QUEUED"] == "7"


def test_a_missing_port_is_made_up_and_the_others_stay() -> None:
    known = {f"INFERLOG_LOCAL_PORT_{name.upper()}": str(100 + i) for i, name in enumerate(PORTS) if name != "s3"}
    ports = made_up(known).ports
    assert ports["s3"] == 20_000
    assert ports["kafka"] == 100


@pytest.mark.parametrize("text", ["", "many", "0", "65536", "-1"])
def test_a_port_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="INFERLOG_LOCAL_PORT_KAFKA: expected a port number"):
        made_up({"INFERLOG_LOCAL_PORT_KAFKA": text})


def test_replacing_one_port_leaves_the_other_parts_alone() -> None:
    before = made_up()
    after = with_new_ports(before, ["s3"])
    assert after.ports["s3"] != before.ports["s3"]
    assert {n: p for n, p in after.ports.items() if n != "s3"} == {n: p for n, p in before.ports.items() if n != "s3"}
    assert after.fingerprint(["kafka"]) == before.fingerprint(["kafka"])
    assert after.fingerprint(["s3"]) != before.fingerprint(["s3"])
    assert after.fingerprint() != before.fingerprint()
