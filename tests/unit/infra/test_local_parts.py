"""What each server is told, without starting it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.local import jars, kafka, postgres, programs, seaweed, valkey
from infra.local.addresses import PORTS, Addresses, complete
from infra.local.part import Account, Command, Part, PartError
from infra.local.stack import PROGRAMS, SERVICES


@pytest.fixture
def addresses() -> Addresses:
    numbers = itertools.count(20_000)
    return complete({}, choose_port=lambda taken: next(numbers))


def command_of(make: Callable[[Path, Addresses], Part], home: Path, addresses: Addresses) -> Command:
    return make(home, addresses).command(lambda line: None)


def test_every_port_belongs_to_exactly_one_part(addresses: Addresses, tmp_path: Path) -> None:
    owned = [port for make in (*SERVICES, *PROGRAMS) for port in make(tmp_path, addresses).ports]
    assert sorted(owned) == sorted(PORTS)


def test_kafka_creates_no_topic_by_itself(
    addresses: Addresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jars, "fetch", lambda say: [Path("a.jar"), Path("b.jar")])
    command = command_of(kafka.part, tmp_path, addresses)
    properties = (tmp_path / "data" / "kafka" / "server.properties").read_text().splitlines()
    assert "auto.create.topics.enable=false" in properties
    (advertised,) = [line for line in properties if line.startswith("advertised.listeners=")]
    assert f"=PLAINTEXT://127.0.0.1:{addresses.ports['kafka']}," in advertised
    assert "a.jar:b.jar" in command.argv
    assert "-XX:TieredStopAtLevel=1" in command.argv


def test_valkey_refuses_strangers_and_never_evicts(addresses: Addresses, tmp_path: Path) -> None:
    command = command_of(valkey.part, tmp_path, addresses)
    path = Path(command.argv[-1])
    lines = path.read_text().splitlines()
    assert f"requirepass {addresses.secrets['valkey_password']}" in lines
    assert "maxmemory-policy noeviction" in lines
    assert "appendonly yes" in lines  # what was spent outlives the process
    assert f'dir "{tmp_path / "data" / "valkey"}"' in lines
    assert "bind 127.0.0.1" in lines
    assert path.stat().st_mode & 0o077 == 0


def test_the_s3_server_knows_one_key_pair_and_reports_to_nobody(addresses: Addresses, tmp_path: Path) -> None:
    command = command_of(seaweed.part, tmp_path, addresses)
    (identity,) = json.loads((tmp_path / "data" / "s3" / "keys.json").read_text())["identities"]
    assert identity["credentials"] == [
        {"accessKey": addresses.secrets["s3_access_key"], "secretKey": addresses.secrets["s3_secret_key"]}
    ]
    assert "-master.telemetry=false" in command.argv
    assert "-ip=127.0.0.1" in command.argv


def test_no_part_of_ours_is_told_a_secret_in_its_arguments(addresses: Addresses, tmp_path: Path) -> None:
    for make in (programs.stripe, *PROGRAMS):
        arguments = command_of(make, tmp_path, addresses).argv
        assert not set(addresses.secrets.values()) & set(arguments)
    environ = command_of(programs.stripe, tmp_path, addresses).environ
    assert environ["INFERLOG_STRIPE_API_KEY"] == addresses.secrets["stripe_api_key"]


def test_the_stream_processor_starts_by_fausts_own_command(addresses: Addresses, tmp_path: Path) -> None:
    faust, *words = command_of(programs.streams, tmp_path, addresses).argv
    assert Path(faust).name == "faust"
    assert words == ["-A", "streams.app", "worker", "-l", "info"]


def test_postgres_as_a_common_user_runs_as_that_user(
    addresses: Addresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (tmp_path / "data").mkdir()
    command = command_of(postgres.part, tmp_path, addresses)
    assert command.run_as is None
    assert command.cwd == tmp_path / "data" / "postgres"
    assert f"port={addresses.ports['postgres']}" in command.argv
    assert "listen_addresses=127.0.0.1" in command.argv


def test_root_runs_postgres_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    account = postgres.unprivileged_account()
    assert isinstance(account, Account)
    assert account.uid != 0


def test_root_without_such_an_account_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(postgres, "_ACCOUNT", "no-such-account")
    with pytest.raises(PartError, match="refuses to run as root and this machine has no account 'no-such-account'"):
        postgres.unprivileged_account()
