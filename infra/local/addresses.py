"""Where the parts of one local stack listen and the credentials they ask for, kept in `<home>/stack.env`.
Made once and reused, so that a second `up` finds the same ports, the same passwords and therefore its data."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

HOST = "127.0.0.1"

PORTS = (
    "kafka",
    "kafka_controller",
    "postgres",
    "valkey",
    "s3",
    "s3_grpc",
    "weed_master",
    "weed_master_grpc",
    "weed_volume",
    "weed_volume_grpc",
    "weed_filer",
    "weed_filer_grpc",
    "stripe",
    "api",
    "worker",
    "streams",
)
"""Every port of the stack by name."""

# Below the range from which Linux and macOS take ports for outgoing connections: a port chosen here is not
# taken by accident between `down` and the next `up`.
_PORT_RANGE = range(15_000, 32_000)

_SECRETS: Mapping[str, Callable[[], str]] = {
    "kafka_cluster_id": lambda: base64.urlsafe_b64encode(b"\x01" + secrets.token_bytes(15)).decode()[:22],
    "postgres_password": lambda: secrets.token_urlsafe(18),
    "valkey_password": lambda: secrets.token_urlsafe(18),
    "s3_access_key": lambda: secrets.token_hex(10),
    "s3_secret_key": lambda: secrets.token_urlsafe(30),
    "stripe_api_key": lambda: "sk_test_" + secrets.token_hex(16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Ports and credentials by name, and whatever else the owner wrote into the file."""

    ports: Mapping[str, int]
    secrets: Mapping[str, str]
    extra: Mapping[str, str]

    def url(self, port: str) -> str:
        """Return the http address of the named port."""
        return f"http://{HOST}:{self.ports[port]}"

    def environment(self) -> dict[str, str]:
        """Return the settings that every process of the project reads."""
        ports, secret = self.ports, self.secrets
        return {
            **self.extra,
            "INFERLOG_KAFKA_BOOTSTRAP": f"{HOST}:{ports['kafka']}",
            "INFERLOG_POSTGRES_DSN": f"postgresql://inferlog:{secret['postgres_password']}@{HOST}:{ports['postgres']}"
            "/inferlog",
            "INFERLOG_REDIS_URL": f"redis://:{secret['valkey_password']}@{HOST}:{ports['valkey']}/0",
            "INFERLOG_S3_ENDPOINT": self.url("s3"),
            "INFERLOG_S3_ACCESS_KEY": secret["s3_access_key"],
            "INFERLOG_S3_SECRET_KEY": secret["s3_secret_key"],
            "INFERLOG_S3_BUCKET": "inferlog",
            "INFERLOG_STRIPE_API_BASE": self.url("stripe"),
            "INFERLOG_STRIPE_API_KEY": secret["stripe_api_key"],
            "INFERLOG_API_HOST": HOST,
            "INFERLOG_API_PORT": str(ports["api"]),
            "INFERLOG_WORKER_PORT": str(ports["worker"]),
            "INFERLOG_STREAMS_PORT": str(ports["streams"]),
        }

    def fingerprint(self, ports: Iterable[str] | None = None) -> str:
        """Return a digest of the named ports and all credentials, or of the whole environment."""
        if ports is None:
            values = sorted(self.environment().items())
        else:
            values = sorted([*((name, str(self.ports[name])) for name in ports), *self.secrets.items()])
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def complete(values: Mapping[str, str], *, choose_port: Callable[[set[int]], int]) -> Addresses:
    """Read addresses from the file's values and make up whatever is missing.

    Raises ValueError naming the line when a port is not a number.
    """
    ports: dict[str, int] = {}
    for name in PORTS:
        text = values.get(_port_key(name))
        if text is None:
            continue
        if not text.isdigit() or not 0 < int(text) < 65_536:
            raise ValueError(f"{_port_key(name)}: expected a port number, got {text!r}")
        ports[name] = int(text)
    for name in PORTS:
        if name not in ports:
            ports[name] = choose_port(set(ports.values()))
    known = {name: values.get(_secret_key(name)) or make() for name, make in _SECRETS.items()}
    addresses = Addresses(ports=ports, secrets=known, extra={})
    ours = {*addresses.environment(), *map(_port_key, PORTS), *map(_secret_key, _SECRETS)}
    return replace(addresses, extra={key: value for key, value in values.items() if key not in ours})


def with_new_ports(addresses: Addresses, names: Iterable[str]) -> Addresses:
    """Return the addresses with other free ports for the named ones."""
    ports = dict(addresses.ports)
    for name in names:
        ports[name] = free_port(set(ports.values()))
    return replace(addresses, ports=ports)


def load(home: Path) -> Addresses | None:
    """Return the addresses of the stack at this home, None when it never started."""
    path = home / "stack.env"
    if not path.exists():
        return None
    return complete(_parse(path.read_text()), choose_port=free_port)


def save(home: Path, addresses: Addresses) -> None:
    """Write the file in one step, readable by its owner only."""
    lines = [
        "# Addresses and credentials of this local stack; made by `inferlog up`, read by every command.",
        *(f"{key}={value}" for key, value in addresses.environment().items()),
        "# What only `inferlog up` needs:",
        *(f"{_port_key(name)}={port}" for name, port in addresses.ports.items()),
        *(f"{_secret_key(name)}={value}" for name, value in addresses.secrets.items()),
    ]
    draft = home / "stack.env.new"
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(home / "stack.env")


def is_free(port: int) -> bool:
    """Say whether a server could listen on this port of the loopback address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port(taken: set[int]) -> int:
    """Return a port nobody listens on, none of `taken`. Raises OSError after 500 tries."""
    for _ in range(500):
        port = secrets.choice(_PORT_RANGE)
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port found on {HOST} between {_PORT_RANGE.start} and {_PORT_RANGE.stop}")


def _parse(text: str) -> dict[str, str]:
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): value.strip() for key, value in pairs}


def _port_key(name: str) -> str:
    return f"INFERLOG_LOCAL_PORT_{name.upper()}"


def _secret_key(name: str) -> str:
    return f"INFERLOG_LOCAL_{name.upper()}"
