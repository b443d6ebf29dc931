"""The project's own processes in the local stack: the Stripe stand-in, the API, one CPU worker and one Faust worker.
They are started as a user would start them by hand and are ready when their health address says so."""

from __future__ import annotations

import sys
from pathlib import Path

import infra
from infra.local import probes
from infra.local.addresses import HOST, Addresses
from infra.local.part import Command, Part, Say

# The folder that holds the packages, so that `python -m api` also works from a checkout that is not installed.
_ROOT = Path(infra.__file__).resolve().parents[1]
PROVISION = "provision"


def stripe(home: Path, addresses: Addresses) -> Part:
    """Describe the Stripe stand-in."""
    port, key = addresses.ports["stripe"], addresses.secrets["stripe_api_key"]
    state = home / "data" / "stripe"

    def command(say: Say) -> Command:
        state.mkdir(parents=True, exist_ok=True)
        argv = (sys.executable, "-m", "infra.stripe_standin", "--port", str(port), "--state", str(state))
        # Not among the arguments, which every user of the machine can list.
        return Command(argv=argv, cwd=_ROOT, environ={"INFERLOG_STRIPE_API_KEY": key})

    return Part(
        name="stripe",
        address=addresses.url("stripe"),
        ports=("stripe",),
        fingerprint=addresses.fingerprint(["stripe"]),
        command=command,
        probe=lambda: probes.http(addresses.url("stripe") + "/healthz"),
        ready_within_s=20.0,
    )


def api(home: Path, addresses: Addresses) -> Part:
    """Describe the HTTP API."""
    return _service("api", "api", addresses, Command(argv=(sys.executable, "-m", "api"), cwd=_ROOT), 30.0)


def worker(home: Path, addresses: Addresses) -> Part:
    """Describe the CPU worker; importing torch alone takes seconds, hence its patience."""
    command = Command(argv=(sys.executable, "-m", "gpu_worker"), cwd=_ROOT)
    return _service("worker", "worker", addresses, command, 90.0)


def streams(home: Path, addresses: Addresses) -> Part:
    """Describe the Faust worker, started by Faust's own command line; `streams.app` says where its web port is."""
    faust = str(Path(sys.executable).parent / "faust")
    command = Command(argv=(faust, "-A", "streams.app", "worker", "-l", "info"), cwd=_ROOT)
    return _service("streams", "streams", addresses, command, 60.0)


def provision() -> Command:
    """Return the command that creates topics, tables and buckets, and ends."""
    return Command(argv=(sys.executable, "-m", "infra.cli", "provision"), cwd=_ROOT)


def _service(name: str, port: str, addresses: Addresses, command: Command, ready_within_s: float) -> Part:
    def prepared(say: Say) -> Command:
        return command

    return Part(
        name=name,
        address=f"http://{HOST}:{addresses.ports[port]}",
        ports=(port,),
        fingerprint=addresses.fingerprint(),
        command=prepared,
        probe=lambda: probes.http(f"http://{HOST}:{addresses.ports[port]}/readyz"),
        ready_within_s=ready_within_s,
    )
