"""How each server is reached: one frozen class per server, and how it is read from the environment.

A process reads only those that it talks to (`infra.settings`); secrets are never shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.environment import SettingsReader


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


def kafka_of(r: SettingsReader) -> KafkaSettings:
    """Settings of Kafka."""
    return KafkaSettings(bootstrap=r.text("INFERLOG_KAFKA_BOOTSTRAP"), namespace=_namespace(r))


def postgres_of(r: SettingsReader) -> PostgresSettings:
    """Settings of Postgres."""
    return PostgresSettings(dsn=r.text("INFERLOG_POSTGRES_DSN"))


def redis_of(r: SettingsReader) -> RedisSettings:
    """Settings of Redis."""
    return RedisSettings(url=r.text("INFERLOG_REDIS_URL"), namespace=_namespace(r))


def s3_of(r: SettingsReader) -> S3Settings:
    """Settings of S3."""
    return S3Settings(
        endpoint=r.text("INFERLOG_S3_ENDPOINT", ""),
        bucket=r.text("INFERLOG_S3_BUCKET", "inferlog"),
        access_key=r.text("INFERLOG_S3_ACCESS_KEY"),
        secret_key=r.text("INFERLOG_S3_SECRET_KEY"),
    )


def stripe_of(r: SettingsReader) -> StripeSettings:
    """Settings of Stripe."""
    return StripeSettings(api_base=r.text("INFERLOG_STRIPE_API_BASE", ""), api_key=r.text("INFERLOG_STRIPE_API_KEY"))


def _namespace(r: SettingsReader) -> str:
    return r.choice("INFERLOG_NAMESPACE", "[a-z0-9_-]{0,40}", "", "up to 40 of a-z, 0-9, '_' and '-'")
