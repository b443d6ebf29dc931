"""What each process must be told: one frozen class per process, read once from the environment.

Where the values come from is `infra.environment`, how each server is reached `infra.servers`; every other default and
every bound is here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from infra.environment import ENV_FILE, SettingsError, SettingsReader, home_dir, load_environment
from infra.process_settings import (
    ApiSettings,
    BillingSettings,
    OperatorSettings,
    ReplaySettings,
    StreamsSettings,
    WorkerSettings,
)
from infra.servers import (
    KafkaSettings,
    PostgresSettings,
    RedisSettings,
    S3Settings,
    StripeSettings,
    kafka_of,
    postgres_of,
    redis_of,
    s3_of,
    stripe_of,
)
from schemas.topics import POOL_NAME, requests_topic

__all__ = [
    "ENV_FILE",
    "ApiSettings",
    "BillingSettings",
    "KafkaSettings",
    "OperatorSettings",
    "PostgresSettings",
    "RedisSettings",
    "ReplaySettings",
    "S3Settings",
    "SettingsError",
    "StreamsSettings",
    "StripeSettings",
    "WorkerSettings",
    "api_settings",
    "billing_settings",
    "home_dir",
    "load_environment",
    "operator_settings",
    "replay_settings",
    "streams_settings",
    "worker_settings",
]


def _environment(r: SettingsReader) -> str:
    """Short name of the installation, part of every key and of Stripe identifiers."""
    return r.choice("INFERLOG_ENVIRONMENT", "[a-z0-9]{1,12}", "test", "1 to 12 of a-z and 0-9")


def _horizon_days(r: SettingsReader) -> int:
    """At least as long as a worker may repeat usage: for as long as the queues keep the requests."""
    least = requests_topic().retention_days or 0
    days = r.number("INFERLOG_LEDGER_HORIZON_DAYS", 40, low=0, high=3650)
    if not days >= least or days != int(days):
        r.refuse(
            f"INFERLOG_LEDGER_HORIZON_DAYS is {days:g}, expected whole days from {least}: a worker that has lost its "
            f"position repeats usage for as long as its queue keeps requests, {least} days, and with a shorter horizon "
            "the ledger would set usage aside that it has counted"
        )
    return int(days)


def _future_s(r: SettingsReader) -> float:
    """More than clocks of two machines differ; a day ahead is no difference of clocks."""
    return r.number("INFERLOG_LEDGER_FUTURE_S", 300.0, low=1, high=86400)


def _claim_check_bytes(r: SettingsReader) -> int:
    """At most what fits on a topic beside the rest of the record."""
    return r.integer("INFERLOG_CLAIM_CHECK_BYTES", 256 * 1024, low=0, high=7 * 1024 * 1024)


def _result_ttl_s(r: SettingsReader) -> int:
    """Seconds that Redis keeps a result; the gateway puts back for as long what it had to read from the log."""
    return r.integer("INFERLOG_RESULT_TTL_S", 3600, low=1, high=30 * 86400)


def _instance(prefix: str) -> str:
    return f"{prefix}-{socket.gethostname()}-{os.getpid()}"


def api_settings(env: Mapping[str, str] | None = None) -> ApiSettings:
    """Settings of `python -m api`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    max_in_flight = r.integer("INFERLOG_MAX_IN_FLIGHT", 2048, low=1, high=100_000)
    settings = ApiSettings(
        kafka=kafka_of(r),
        postgres=postgres_of(r),
        redis=redis_of(r),
        s3=s3_of(r),
        host=r.text("INFERLOG_API_HOST", "127.0.0.1"),
        port=r.integer("INFERLOG_API_PORT", 8080, low=0, high=65535),
        instance=r.text("INFERLOG_API_INSTANCE", _instance("api")),
        environment=_environment(r),
        deadline_s=r.number("INFERLOG_DEADLINE_S", 10.0, low=0.01, high=600),
        max_body_bytes=r.integer("INFERLOG_MAX_BODY_BYTES", 4 * 1024 * 1024, low=1024, high=7 * 1024 * 1024),
        max_in_flight=max_in_flight,
        max_queued=r.integer("INFERLOG_MAX_QUEUED", 5000, low=1, high=10_000_000),
        claim_check_bytes=_claim_check_bytes(r),
        max_connections=r.integer("INFERLOG_MAX_CONNECTIONS", 4096, low=16, high=1_000_000),
        strangers_per_s=r.integer("INFERLOG_STRANGERS_PER_S", 400, low=2, high=1_000_000),
        free_per_s=r.integer("INFERLOG_FREE_PER_S", 800, low=4, high=1_000_000),
        idempotency_hours=r.integer("INFERLOG_IDEMPOTENCY_HOURS", 24, low=1, high=720),
        max_in_flight_per_customer=r.integer(
            "INFERLOG_MAX_IN_FLIGHT_PER_CUSTOMER", max(1, max_in_flight // 4), low=1, high=100_000
        ),
        # Half of each is for one customer, or one key, and must hold the largest call there can be.
        max_in_flight_bytes=r.integer(
            "INFERLOG_MAX_IN_FLIGHT_BYTES", 256 * 1024 * 1024, low=64 * 1024 * 1024, high=2**40
        ),
        body_bytes=r.integer("INFERLOG_BODY_BYTES", 64 * 1024 * 1024, low=16 * 1024 * 1024, high=2**40),
        result_ttl_s=_result_ttl_s(r),
        spend_view_s=r.number("INFERLOG_SPEND_VIEW_S", 30.0, low=5, high=600),
        replicas=r.integer("INFERLOG_API_REPLICAS", 4, low=1, high=10_000),
    )
    r.finish()
    return settings


def worker_settings(env: Mapping[str, str] | None = None) -> WorkerSettings:
    """Settings of `python -m gpu_worker`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = WorkerSettings(
        kafka=kafka_of(r),
        redis=redis_of(r),
        s3=s3_of(r),
        pool=r.choice("INFERLOG_POOL", POOL_NAME, "default", "1 to 40 of a-z, 0-9 and '-'"),
        worker=r.text("INFERLOG_WORKER", _instance("worker")),
        health_port=r.integer("INFERLOG_WORKER_PORT", 0, low=0, high=65535),
        cache_dir=Path(r.text("INFERLOG_WEIGHTS_DIR", str(home_dir() / "weights"))),
        cache_bytes=r.integer("INFERLOG_WEIGHTS_BYTES", 20 * 1024**3, low=1, high=2**60),
        device=r.choice("INFERLOG_DEVICE", r"cpu|cuda(:\d+)?", "cpu", "'cpu', 'cuda' or 'cuda:N'"),
        device_bytes=r.integer("INFERLOG_DEVICE_BYTES", 4 * 1024**3, low=1, high=2**60),
        max_batch_items=r.integer("INFERLOG_MAX_BATCH_ITEMS", 64, low=1, high=65536),
        linger_ms=r.integer("INFERLOG_LINGER_MS", 5, low=0, high=10_000),
        result_ttl_s=_result_ttl_s(r),
        claim_check_bytes=_claim_check_bytes(r),
    )
    r.finish()
    return settings


def streams_settings(env: Mapping[str, str] | None = None) -> StreamsSettings:
    """Settings of `faust -A streams.app worker`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    mode = r.choice("INFERLOG_LEDGER_MODE", "agent|loop", "agent", "agent or loop")
    settings = StreamsSettings(
        mode=mode,
        kafka=kafka_of(r),
        postgres=postgres_of(r),
        health_port=r.integer("INFERLOG_STREAMS_PORT", 0, low=0, high=65535),
        batch_records=r.integer("INFERLOG_LEDGER_BATCH", 1000 if mode == "agent" else 5000, low=1, high=10_000),
        batch_wait_s=r.number("INFERLOG_LEDGER_WAIT_S", 0.2, low=0.01, high=10),
        # Below Faust's broker_max_poll_interval (1000 s): past it the consumer leaves its group for good.
        give_up_s=r.number("INFERLOG_LEDGER_GIVE_UP_S", 600, low=1, high=900),
        stall_s=r.number("INFERLOG_LEDGER_STALL_S", 120, low=5, high=3600),
        # The broker has bounds of its own: group.min.session.timeout.ms (6 s unless set) and its maximum.
        session_s=r.number("INFERLOG_LEDGER_SESSION_S", 10.0, low=1, high=300),
        rewind=r.choice("INFERLOG_LEDGER_REWIND", "[01]", "0", "0 or 1") == "1",
        skip_gone=r.choice("INFERLOG_LEDGER_SKIP_GONE", "[01]", "0", "0 or 1") == "1",
        set_aside_all=r.choice("INFERLOG_LEDGER_SET_ASIDE_ALL", "[01]", "0", "0 or 1") == "1",
        horizon_days=_horizon_days(r),
        future_s=_future_s(r),
    )
    r.finish()
    return settings


def billing_settings(env: Mapping[str, str] | None = None) -> BillingSettings:
    """Settings of `python -m streams.billing`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = BillingSettings(
        postgres=postgres_of(r),
        stripe=stripe_of(r),
        environment=_environment(r),
        seal_after_s=r.number("INFERLOG_SEAL_AFTER_S", 600, low=0, high=7 * 86400),
        interval_s=r.number("INFERLOG_BILLING_INTERVAL_S", 60, low=1, high=86400),
    )
    r.finish()
    return settings


def replay_settings(env: Mapping[str, str] | None = None) -> ReplaySettings:
    """Settings of `inferlog verify` and the replay commands. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = ReplaySettings(kafka=kafka_of(r), postgres=postgres_of(r), future_s=_future_s(r))
    r.finish()
    return settings


def operator_settings(env: Mapping[str, str] | None = None) -> OperatorSettings:
    """Settings of provision, models, customers, keys and usage commands. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = OperatorSettings(
        kafka=kafka_of(r), postgres=postgres_of(r), redis=redis_of(r), s3=s3_of(r), environment=_environment(r)
    )
    r.finish()
    return settings
