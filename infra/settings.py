"""What each process must be told: one frozen class per process, read once from the environment.

Environment variables win over the file `stack.env` that `inferlog up` writes into the home folder
(`INFERLOG_HOME`, default `./.inferlog`). All mistakes are reported together.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ENV_FILE: Final = "stack.env"


class SettingsError(ValueError):
    """One or more settings are missing or malformed; the message lists every one and what to do."""


def home_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder that holds the local stack's state: INFERLOG_HOME, else `.inferlog` in the current folder."""
    env = os.environ if environ is None else environ
    return Path(env.get("INFERLOG_HOME") or ".inferlog").absolute()


def load_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings by name: the lines KEY=VALUE of `<home>/stack.env`, overridden by the process environment."""
    env = dict(os.environ if environ is None else environ)
    path = home_dir(env) / ENV_FILE
    found: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            name, separator, value = line.partition("=")
            if separator and not line.startswith("#"):
                found[name.strip()] = value.strip()
    found.update((k, v) for k, v in env.items() if k.startswith("INFERLOG_"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """`bootstrap` is host:port[,host:port]; `namespace` prefixes topics, groups and Redis keys."""

    bootstrap: str
    namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings:
    """Connection string with its password; never shown."""

    dsn: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Connection URL with its password; never shown."""

    url: str = field(repr=False)
    namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """`endpoint` is empty for the cloud's own S3."""

    endpoint: str
    bucket: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeSettings:
    """`api_base` is empty for Stripe itself."""

    api_base: str
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The gateway. `deadline_s` bounds a request from admission to answer; `max_queued` bounds a pool's lag."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    redis: RedisSettings
    host: str
    port: int
    instance: str
    environment: str
    deadline_s: float
    max_body_bytes: int
    max_in_flight: int
    max_queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """A worker of one pool. `linger_ms` is the longest a batch waits for more items while the device is busy."""

    kafka: KafkaSettings
    redis: RedisSettings
    s3: S3Settings
    pool: str
    worker: str
    health_port: int
    cache_dir: Path
    cache_bytes: int
    device: str
    device_bytes: int
    max_batch_items: int
    linger_ms: int
    result_ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSettings:
    """The ledger's stream processor. `give_up_s`: how long a batch waits for Postgres before the process exits."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    health_port: int
    batch_records: int
    batch_wait_s: float
    give_up_s: float
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingSettings:
    """The Stripe reporter. `seal_after_s` is how long after its end an hour still waits for late usage."""

    postgres: PostgresSettings
    stripe: StripeSettings
    environment: str
    seal_after_s: float
    interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Readers of the log and the tables. No Stripe key: replay cannot bill."""

    kafka: KafkaSettings
    postgres: PostgresSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Commands that change the model registry, customers and keys, and provision servers."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    redis: RedisSettings
    s3: S3Settings
    environment: str


class SettingsReader:
    """Reads settings one by one, remembers every mistake, and reports them together in `finish`."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._mistakes: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """The setting as text; without a default it must be present."""
        value = self._env.get(name, default)
        if value is None:
            self._mistakes.append(f"{name} is not set")
            return ""
        return value

    def choice(self, name: str, pattern: str, default: str, expected: str) -> str:
        """The setting as text that matches `pattern` whole; `expected` says so in words."""
        value = self.text(name, default)
        if not re.fullmatch(pattern, value):
            self._mistakes.append(f"{name} is {value!r}, expected {expected}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """The setting as a number between `low` and `high`."""
        raw = self._env.get(name)
        if raw is None:
            return default
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            self._mistakes.append(f"{name} is {raw!r}, expected a number from {low:g} to {high:g}")
            return default
        return value

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """The setting as a whole number between `low` and `high`."""
        return int(self.number(name, default, low=low, high=high))

    def kafka(self) -> KafkaSettings:
        """The Kafka group of settings."""
        return KafkaSettings(bootstrap=self.text("INFERLOG_KAFKA_BOOTSTRAP"), namespace=self._namespace())

    def postgres(self) -> PostgresSettings:
        """The Postgres group of settings."""
        return PostgresSettings(dsn=self.text("INFERLOG_POSTGRES_DSN"))

    def redis(self) -> RedisSettings:
        """The Redis group of settings."""
        return RedisSettings(url=self.text("INFERLOG_REDIS_URL"), namespace=self._namespace())

    def s3(self) -> S3Settings:
        """The S3 group of settings."""
        return S3Settings(
            endpoint=self.text("INFERLOG_S3_ENDPOINT", ""),
            bucket=self.text("INFERLOG_S3_BUCKET", "inferlog"),
            access_key=self.text("INFERLOG_S3_ACCESS_KEY"),
            secret_key=self.text("INFERLOG_S3_SECRET_KEY"),
        )

    def stripe(self) -> StripeSettings:
        """The Stripe group of settings."""
        return StripeSettings(
            api_base=self.text("INFERLOG_STRIPE_API_BASE", ""), api_key=self.text("INFERLOG_STRIPE_API_KEY")
        )

    def environment(self) -> str:
        """Short name of the installation, part of every key and of Stripe identifiers."""
        return self.choice("INFERLOG_ENVIRONMENT", "[a-z0-9]{1,12}", "test", "1 to 12 of a-z and 0-9")

    def finish(self) -> None:
        """Raise SettingsError listing every mistake met so far."""
        if self._mistakes:
            raise SettingsError(
                "; ".join(self._mistakes)
                + f" (set the variable, or start the local stack with 'inferlog up', which writes {ENV_FILE})"
            )

    def _namespace(self) -> str:
        return self.choice("INFERLOG_NAMESPACE", "[a-z0-9_-]{0,40}", "", "up to 40 of a-z, 0-9, '_' and '-'")


def _instance(prefix: str) -> str:
    return f"{prefix}-{socket.gethostname()}-{os.getpid()}"


def api_settings(env: Mapping[str, str] | None = None) -> ApiSettings:
    """Settings of `python -m api`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = ApiSettings(
        kafka=r.kafka(),
        postgres=r.postgres(),
        redis=r.redis(),
        host=r.text("INFERLOG_API_HOST", "127.0.0.1"),
        port=r.integer("INFERLOG_API_PORT", 8080, low=0, high=65535),
        instance=r.text("INFERLOG_API_INSTANCE", _instance("api")),
        environment=r.environment(),
        deadline_s=r.number("INFERLOG_DEADLINE_S", 10.0, low=0.01, high=600),
        max_body_bytes=r.integer("INFERLOG_MAX_BODY_BYTES", 4 * 1024 * 1024, low=1024, high=7 * 1024 * 1024),
        max_in_flight=r.integer("INFERLOG_MAX_IN_FLIGHT", 2048, low=1, high=100_000),
        max_queued=r.integer("INFERLOG_MAX_QUEUED", 5000, low=1, high=10_000_000),
    )
    r.finish()
    return settings


def worker_settings(env: Mapping[str, str] | None = None) -> WorkerSettings:
    """Settings of `python -m gpu_worker`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = WorkerSettings(
        kafka=r.kafka(),
        redis=r.redis(),
        s3=r.s3(),
        pool=r.choice("INFERLOG_POOL", "[a-z0-9-]{1,40}", "default", "1 to 40 of a-z, 0-9 and '-'"),
        worker=r.text("INFERLOG_WORKER", _instance("worker")),
        health_port=r.integer("INFERLOG_WORKER_PORT", 0, low=0, high=65535),
        cache_dir=Path(r.text("INFERLOG_WEIGHTS_DIR", str(home_dir() / "weights"))),
        cache_bytes=r.integer("INFERLOG_WEIGHTS_BYTES", 20 * 1024**3, low=1, high=2**60),
        device=r.choice("INFERLOG_DEVICE", r"cpu|cuda(:\d+)?", "cpu", "'cpu', 'cuda' or 'cuda:N'"),
        device_bytes=r.integer("INFERLOG_DEVICE_BYTES", 4 * 1024**3, low=1, high=2**60),
        max_batch_items=r.integer("INFERLOG_MAX_BATCH_ITEMS", 64, low=1, high=65536),
        linger_ms=r.integer("INFERLOG_LINGER_MS", 5, low=0, high=10_000),
        result_ttl_s=r.integer("INFERLOG_RESULT_TTL_S", 3600, low=1, high=30 * 86400),
    )
    r.finish()
    return settings


def streams_settings(env: Mapping[str, str] | None = None) -> StreamsSettings:
    """Settings of `faust -A streams.app worker`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = StreamsSettings(
        kafka=r.kafka(),
        postgres=r.postgres(),
        health_port=r.integer("INFERLOG_STREAMS_PORT", 0, low=0, high=65535),
        batch_records=r.integer("INFERLOG_LEDGER_BATCH", 1000, low=1, high=10_000),
        batch_wait_s=r.number("INFERLOG_LEDGER_WAIT_S", 0.2, low=0.01, high=10),
        # Below Faust's broker_max_poll_interval (1000 s): past it the consumer leaves its group for good.
        give_up_s=r.number("INFERLOG_LEDGER_GIVE_UP_S", 600, low=1, high=900),
        stall_s=r.number("INFERLOG_LEDGER_STALL_S", 120, low=5, high=3600),
    )
    r.finish()
    return settings


def billing_settings(env: Mapping[str, str] | None = None) -> BillingSettings:
    """Settings of `python -m streams.billing`. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = BillingSettings(
        postgres=r.postgres(),
        stripe=r.stripe(),
        environment=r.environment(),
        seal_after_s=r.number("INFERLOG_SEAL_AFTER_S", 600, low=0, high=7 * 86400),
        interval_s=r.number("INFERLOG_BILLING_INTERVAL_S", 60, low=1, high=86400),
    )
    r.finish()
    return settings


def replay_settings(env: Mapping[str, str] | None = None) -> ReplaySettings:
    """Settings of `inferlog verify` and the replay commands. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = ReplaySettings(kafka=r.kafka(), postgres=r.postgres())
    r.finish()
    return settings


def operator_settings(env: Mapping[str, str] | None = None) -> OperatorSettings:
    """Settings of provision, models, customers, keys and usage commands. Raises SettingsError."""
    r = SettingsReader(load_environment() if env is None else env)
    settings = OperatorSettings(
        kafka=r.kafka(), postgres=r.postgres(), redis=r.redis(), s3=r.s3(), environment=r.environment()
    )
    r.finish()
    return settings
