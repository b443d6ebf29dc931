"""What each process is told, one frozen class per process; `infra.settings` reads them from the environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.servers import KafkaSettings, PostgresSettings, RedisSettings, S3Settings, StripeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """The gateway. `deadline_s` bounds a request from admission to answer; `max_queued` bounds a pool's lag.

    `claim_check_bytes` is how much tensor data a record carries itself; what is beyond goes to S3. `max_connections` is
    how many callers may be connected, `strangers_per_s` how many calls without a key are answered, and `free_per_s` how
    many with one that take no tokens; half for one peer, a quarter for one key.
    `max_in_flight_bytes` is how many bytes of inputs unfinished calls may hold, `body_bytes` how many of bodies that
    are being read; half for one customer, or one key. `spend_view_s` is how old the ledger's word may be by which
    spend caps are kept.
    """

    kafka: KafkaSettings
    postgres: PostgresSettings
    redis: RedisSettings
    s3: S3Settings
    host: str
    port: int
    instance: str
    environment: str
    deadline_s: float
    max_body_bytes: int
    max_in_flight: int
    max_queued: int
    claim_check_bytes: int
    max_connections: int
    strangers_per_s: int
    free_per_s: int = 800
    result_ttl_s: int = 3600
    spend_view_s: float = 30.0
    replicas: int = 4
    max_in_flight_per_customer: int = 512
    idempotency_hours: int = 24
    max_in_flight_bytes: int = 256 * 1024 * 1024
    body_bytes: int = 64 * 1024 * 1024


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
    claim_check_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSettings:
    """The ledger's stream processor. `mode` is agent (Faust's) or loop (a plain consumer, faster).

    `give_up_s`: how long a batch waits for Postgres before the process exits.
    `stall_s`: how long unread records may wait without progress before it exits. `session_s`: how long the broker
    waits for a silent worker before it gives its partitions to another. `rewind`: on start, move the group back to the
    ledger's position when that is behind (a restored database), instead of refusing; `skip_gone`: go on after records
    that the topic lost before they were counted; `set_aside_all`: set a large batch aside even if
    nothing in it is good. `horizon_days`: how long the ledger knows what it has counted; `future_s`: how far
    ahead of its clock a record's time may lie.
    """

    kafka: KafkaSettings
    postgres: PostgresSettings
    health_port: int
    mode: str
    batch_records: int
    batch_wait_s: float
    give_up_s: float
    stall_s: float
    session_s: float
    rewind: bool
    skip_gone: bool
    set_aside_all: bool
    horizon_days: int
    future_s: float


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
    """Readers of the log and the tables. No Stripe key: replay cannot bill. `future_s` is the ledger's."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    future_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Commands that change the model registry, customers and keys, and provision servers."""

    kafka: KafkaSettings
    postgres: PostgresSettings
    redis: RedisSettings
    s3: S3Settings
    environment: str
