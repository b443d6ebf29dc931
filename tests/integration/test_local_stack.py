"""`inferlog up`, `down` and `status` on the real servers, in homes of this file's own because it breaks them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from infra.kafka import TopicPartition, open_consumer, open_producer
from infra.local import processes
from infra.local.stack import Stack, StackError
from infra.postgres import connect
from infra.redis import RedisError, open_redis
from infra.s3 import Store, StoreUnavailable
from infra.settings import KafkaSettings, PostgresSettings, RedisSettings, S3Settings, load_environment
from tests.conditions import wait_until
from tests.processes import ROOT

T = TypeVar("T")
SERVICES = {"kafka", "postgres", "valkey", "s3", "stripe"}
TOPIC = "inferlog.local.ready"  # made by the readiness check


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("local") / "home"
    yield home
    Stack(home).down(wipe=True)
    assert remains(home) == []


@pytest.fixture
def stack(home: Path) -> Stack:
    """A stack whose servers all run, whatever the test before left."""
    stack = Stack(home)
    stack.up(services_only=True)
    return stack


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def inferlog(home: Path, *words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "INFERLOG_HOME": str(home)}
    return subprocess.Popen(
        [sys.executable, "-m", "infra.cli", *words],
        env=environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(command: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = command.communicate(timeout=120)
    return command.returncode, output


def remains(home: Path) -> list[str]:
    """Every process that names this home in its arguments, its environment or as its folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.cwd(), *process.environ().values()]
            if process.status() != psutil.STATUS_ZOMBIE and any(str(home) in word for word in words):
                found.append(f"{process.pid} {process.cmdline()[:3]}")
        except (psutil.Error, OSError):
            continue
    return found


def pids(stack: Stack) -> dict[str, int | None]:
    return {part.name: part.pid for part in stack.status()}


def settings(stack: Stack) -> dict[str, str]:
    return load_environment({"INFERLOG_HOME": str(stack.home)})


def store(environment: dict[str, str], *, secret_key: str = "") -> Store:
    return Store(
        S3Settings(
            endpoint=environment["INFERLOG_S3_ENDPOINT"],
            bucket=environment["INFERLOG_S3_BUCKET"],
            access_key=environment["INFERLOG_S3_ACCESS_KEY"],
            secret_key=secret_key or environment["INFERLOG_S3_SECRET_KEY"],
        )
    )


async def remember(environment: dict[str, str], word: str) -> None:
    """Write the word into every server that keeps data."""
    database = await connect(PostgresSettings(dsn=environment["INFERLOG_POSTGRES_DSN"]))
    await database.execute("CREATE TABLE IF NOT EXISTS words (word text)")
    await database.execute("INSERT INTO words VALUES ($1)", word)
    await database.close()
    async with open_producer(KafkaSettings(bootstrap=environment["INFERLOG_KAFKA_BOOTSTRAP"], namespace="")) as log:
        await log.send(TOPIC, word.encode(), timeout_s=10)
    store(environment).put_once(f"words/{word}", word.encode())


async def recalled(environment: dict[str, str], word: str) -> set[str]:
    """Names of the servers that still have the word."""
    found = set()
    database = await connect(PostgresSettings(dsn=environment["INFERLOG_POSTGRES_DSN"]))
    if await database.fetchval("SELECT count(*) FROM words WHERE word = $1", word):
        found.add("postgres")
    await database.close()
    kafka = KafkaSettings(bootstrap=environment["INFERLOG_KAFKA_BOOTSTRAP"], namespace="")
    async with open_consumer(kafka, group=None) as consumer:
        partition = TopicPartition(TOPIC, 0)
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        await consumer.seek_to_beginning(partition)
        while await consumer.position(partition) < end:
            records = await consumer.getmany(partition, timeout_ms=5000)
            if word.encode() in (record.value for batch in records.values() for record in batch):
                found.add("kafka")
    if store(environment).get(f"words/{word}") == word.encode():
        found.add("s3")
    return found


def test_up_makes_servers_that_do_real_work(stack: Stack) -> None:
    assert {part.name for part in stack.status() if part.healthy} == SERVICES
    environment = settings(stack)
    run(remember(environment, "first"))
    assert run(recalled(environment, "first")) == {"postgres", "kafka", "s3"}
    assert stat.S_IMODE((stack.home / "stack.env").stat().st_mode) == 0o600


def test_up_again_is_a_no_op_that_says_so(stack: Stack) -> None:
    before, file = pids(stack), (stack.home / "stack.env").read_text()
    status, output = finish(inferlog(stack.home, "up", "--services-only"))
    assert status == 0, output
    assert output.count("runs already") == len(SERVICES)
    assert pids(stack) == before
    assert (stack.home / "stack.env").read_text() == file


def test_every_server_asks_for_its_credentials(stack: Stack) -> None:
    environment = settings(stack)

    async def strangers() -> None:
        url = environment["INFERLOG_REDIS_URL"].replace("redis://:", "redis://:not")
        async with open_redis(RedisSettings(url=url, namespace="")) as client:
            with pytest.raises(RedisError, match=r"(?i)password|auth"):
                await client.get("x")
        dsn = environment["INFERLOG_POSTGRES_DSN"].replace("postgresql://inferlog:", "postgresql://inferlog:not")
        with pytest.raises(Exception, match="password authentication failed"):
            await connect(PostgresSettings(dsn=dsn))

    run(strangers())
    with pytest.raises(StoreUnavailable, match=r"SignatureDoesNotMatch|AccessDenied"):
        store(environment, secret_key="wrong").get("x")


def test_no_server_listens_beyond_this_machine(stack: Stack) -> None:
    listening = []
    for pid in pids(stack).values():
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            listening += [c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= len(SERVICES)
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_credentials_are_not_among_the_arguments_of_the_servers(stack: Stack) -> None:
    """Any user of the machine may list those."""
    text = (stack.home / "stack.env").read_text()
    known = [line.split("=", 1)[1] for line in text.splitlines() if line.startswith("INFERLOG_LOCAL_")]
    words = [value for value in known if len(value) >= 18]
    assert any(word.startswith("sk_test_") for word in words)
    cluster = next(line.split("=")[1] for line in text.splitlines() if "CLUSTER_ID" in line)  # no secret
    for name, pid in pids(stack).items():
        arguments = " ".join(psutil.Process(pid).cmdline())
        assert not [word for word in words if word in arguments and word != cluster], name


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_parts_come_back_on_their_port_with_their_data(stack: Stack, kill: bool) -> None:
    environment, word = settings(stack), f"back-{kill}"
    run(remember(environment, word))
    for name in ("postgres", "kafka", "s3"):
        stack.stop_part(name, kill=kill)
    down = {part.name: part.why for part in stack.status() if not part.healthy}
    assert down == dict.fromkeys(["kafka", "postgres", "s3"], "not started")
    for name in ("postgres", "kafka", "s3"):
        stack.start_part(name)
    assert settings(stack) == environment
    assert run(recalled(environment, word)) == {"postgres", "kafka", "s3"}


def test_a_server_that_died_is_started_again_and_the_others_left(stack: Stack) -> None:
    before = pids(stack)
    os.kill(before["valkey"] or 0, signal.SIGKILL)
    wait_until(lambda: pids(stack)["valkey"] is None)
    status, output = finish(inferlog(stack.home, "status", "--json"))
    assert status == 1
    (dead,) = [part for part in json.loads(output) if not part["healthy"]]
    assert (dead["name"], dead["why"]) == ("valkey", f"its process {before['valkey']} is gone")
    status, output = finish(inferlog(stack.home, "up", "--services-only"))
    assert status == 0, output
    assert "valkey    starting again: its process is gone" in output
    after = pids(stack)
    assert after.pop("valkey") not in (None, before.pop("valkey"))
    assert after == before


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_frozen_server_is_unhealthy_and_recovers(stack: Stack, name: str) -> None:
    """Its port still accepts connections, so only a real operation can tell."""
    stack.pause_part(name)
    frozen = {part.name: part.why for part in stack.status() if not part.healthy}
    stack.resume_part(name)
    assert list(frozen) == [name]
    wait_until(lambda: all(part.healthy for part in stack.status()))


def test_a_port_taken_meanwhile_is_replaced_and_the_data_kept(stack: Stack) -> None:
    before = settings(stack)
    run(remember(before, "moved"))
    stack.stop_part("postgres")
    taken = int(before["INFERLOG_LOCAL_PORT_POSTGRES"])
    with socket.create_server(("127.0.0.1", taken)):
        lines: list[str] = []
        stack.up(services_only=True, progress=lines.append)
    after = settings(stack)
    assert any(f"port {taken} is taken" in line for line in lines)
    changed = {key for key in after if after[key] != before[key]}
    assert changed == {"INFERLOG_LOCAL_PORT_POSTGRES", "INFERLOG_POSTGRES_DSN"}
    assert "postgres" in run(recalled(after, "moved"))


def test_a_server_that_cannot_start_is_named_with_its_log_and_the_rest_stays(stack: Stack) -> None:
    stack.stop_part("kafka")
    properties = next((stack.home / "data" / "kafka" / "log").glob("meta.properties"))
    good = properties.read_text()
    properties.write_text("node.id=99\nversion=1\ncluster.id=other\n")
    try:
        with pytest.raises(StackError) as caught:
            stack.up(services_only=True)
    finally:
        properties.write_text(good)
    assert list(caught.value.failures) == ["kafka"]
    assert "its process ended" in caught.value.failures["kafka"]
    assert str(stack.home / "logs" / "kafka.log") in caught.value.failures["kafka"]
    assert {part.name for part in stack.status() if part.healthy} == SERVICES - {"kafka"}


def test_down_finds_a_server_whose_pid_file_was_lost(stack: Stack) -> None:
    (stack.home / "pids" / "kafka.json").unlink()
    status, output = finish(inferlog(stack.home, "down"))
    assert (status, remains(stack.home)) == (0, []), output


def test_two_ups_at_once_start_one_stack(home: Path) -> None:
    Stack(home).down(wipe=True)
    commands = [inferlog(home, "up", "--services-only") for _ in range(2)]
    results = [finish(command) for command in commands]
    assert [status for status, _ in results] == [0, 0], results
    assert sum(output.count("runs already") for _, output in results) == len(SERVICES)
    marked = [process.environ()[processes.PART_MARK] for process in processes.strays(home)]
    assert sorted(marked) == sorted(SERVICES)


@pytest.mark.parametrize("files", [1, 3, 5])
def test_an_up_that_was_killed_leaves_nothing_after_down(home: Path, files: int) -> None:
    """Killed as soon as so many parts have been started: while they make their data, or wait to be ready."""
    Stack(home).down(wipe=True)
    command = inferlog(home, "up", "--services-only")
    wait_until(lambda: len(list(home.glob("pids/*.json"))) >= files)
    command.kill()
    command.communicate()
    assert remains(home)
    status, output = finish(inferlog(home, "down"))
    assert (status, remains(home)) == (0, []), output
    assert list(home.glob("pids/*")) == []


def test_up_completes_what_a_killed_one_began(home: Path) -> None:
    Stack(home).down(wipe=True)
    command = inferlog(home, "up", "--services-only")
    wait_until(lambda: len(list(home.glob("pids/*.json"))) >= len(SERVICES))
    command.kill()
    command.communicate()
    status, output = finish(inferlog(home, "up", "--services-only"))
    assert status == 0, output
    assert {part.name for part in Stack(home).status() if part.healthy} == SERVICES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs PostgreSQL as another account")
def test_root_may_start_it_below_a_folder_only_root_can_enter(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    stack = Stack(private / "home")
    stack.up(services_only=True)
    try:
        outside = Path((stack.home / "data" / "postgres.outside").read_text().strip())
        owner = psutil.Process(pids(stack)["postgres"]).username()
        assert owner == "nobody"
        stack.stop_part("postgres")
        stack.start_part("postgres")
        assert (outside / "data" / "cluster" / "PG_VERSION").exists()
    finally:
        stack.down(wipe=True)
    assert not outside.exists()
    assert remains(private) == []
