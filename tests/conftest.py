"""Fixtures of every ring. Real servers are started once per run by the code of `inferlog up`; each test that asks for
`env` gets its own namespace on them: topics, groups, Redis keys and a database of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from hypothesis import HealthCheck, settings

from infra.local.stack import Stack
from infra.postgres import connect
from infra.provision import migrate, provision
from infra.settings import PostgresSettings, operator_settings
from tests.processes import Process

T = TypeVar("T")

# How long an example takes to make or to try says something about the machine, and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Settings of whoever runs the tests must not leak into them.
for _name in [n for n in os.environ if n.startswith("INFERLOG_") and not n.startswith("INFERLOG_TEST_")]:
    del os.environ[_name]


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, so that it works inside and outside a test's event loop."""
    box: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            box.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 (handed on to the caller)
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return box[0]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The real servers. INFERLOG_TEST_HOME names a stack to reuse and leave running, for quick repeated runs."""
    reused = os.environ.get("INFERLOG_TEST_HOME")
    stack = Stack(Path(reused) if reused else tmp_path_factory.mktemp("stack"))
    stack.up(services_only=True, progress=lambda line: None)
    yield stack
    if not reused:
        stack.down(wipe=True)


@pytest.fixture(scope="session")
def servers(stack: Stack) -> Iterator[dict[str, str]]:
    """Settings that reach the servers, with a migrated database to clone from."""
    env = stack.up(services_only=True)
    run_apart(_make_template(env["INFERLOG_POSTGRES_DSN"]))
    yield env
    run_apart(_drop(env["INFERLOG_POSTGRES_DSN"], _TEMPLATE))


#: One per process, because several may run tests on one stack.
_TEMPLATE = f"inferlog_template_{os.getpid()}"
_number = itertools.count(1)


def dsn_for(dsn: str, database: str) -> str:
    """The same server and account, another database."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))


async def _make_template(dsn: str) -> None:
    connection = await connect(PostgresSettings(dsn=dsn))
    try:
        await connection.execute(f"DROP DATABASE IF EXISTS {_TEMPLATE} WITH (FORCE)")
        await connection.execute(f"CREATE DATABASE {_TEMPLATE}")
    finally:
        await connection.close()
    await migrate(PostgresSettings(dsn=dsn_for(dsn, _TEMPLATE)))


async def _clone(dsn: str, database: str) -> None:
    connection = await connect(PostgresSettings(dsn=dsn))
    try:
        await connection.execute(f"CREATE DATABASE {database} TEMPLATE {_TEMPLATE}")
    finally:
        await connection.close()


async def _drop(dsn: str, database: str) -> None:
    connection = await connect(PostgresSettings(dsn=dsn))
    try:
        await connection.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
    finally:
        await connection.close()


async def _delete_topics(bootstrap: str, namespace: str) -> None:
    """Hundreds of tests' topics would fill the broker's memory. One that is away keeps them: its end is near anyway."""
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5_000)
    try:
        await client.start()
        names = [name for name in await client.list_topics() if name.startswith(f"{namespace}.")]
        if names:
            await client.delete_topics(names, timeout_ms=5_000)
    except KafkaError:
        return
    finally:
        await client.close()


@pytest.fixture
def env(servers: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """INFERLOG_* settings of an installation of this test's own on the shared servers, provisioned."""
    namespace = f"t{next(_number)}-{uuid4().hex[:6]}"
    database = namespace.replace("-", "_")
    own = {
        **servers,
        "INFERLOG_NAMESPACE": namespace,
        "INFERLOG_POSTGRES_DSN": dsn_for(servers["INFERLOG_POSTGRES_DSN"], database),
        "INFERLOG_HOME": str(tmp_path / "home"),
        "INFERLOG_WEIGHTS_DIR": str(tmp_path / "weights"),
        "INFERLOG_LEDGER_HORIZON_DAYS": "3650",  # records of tests have times of their own
    }
    run_apart(_clone(servers["INFERLOG_POSTGRES_DSN"], database))
    run_apart(provision(operator_settings(own)))
    yield own
    run_apart(_drop(servers["INFERLOG_POSTGRES_DSN"], database))
    run_apart(_delete_topics(servers["INFERLOG_KAFKA_BOOTSTRAP"], namespace))


@pytest.fixture(params=["agent", "loop"])
def either(env: dict[str, str], request: pytest.FixtureRequest) -> dict[str, str]:
    """The same settings for a ledger that reads as Faust's agent and for one that reads in a loop of its own."""
    return {**env, "INFERLOG_LEDGER_MODE": request.param}


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start a process of the product: `spawn(["python", "-m", "api"], env, name="api")`; all end with the test."""
    started: list[Process] = []

    def start(command: list[str], env: dict[str, str], *, name: str = "process") -> Process:
        process = Process(command, env, tmp_path / f"{name}-{len(started)}.log")
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()
