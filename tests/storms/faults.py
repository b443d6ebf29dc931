"""What goes wrong during a storm, when, as a function of a seed: the same seed gives the same weather."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from itertools import chain


class Kind(str, Enum):
    """One kind of trouble."""

    KILL_WORKER = "kill -9 a worker"
    STOP_WORKER = "SIGTERM a worker"
    RESTART_POSTGRES = "restart PostgreSQL"
    POSTGRES_OUTAGE = "PostgreSQL away"
    RESTART_KAFKA = "restart Kafka"
    JOIN = "one more worker"
    LEAVE = "one worker fewer"


#: How often each happens in a storm of FULL_S seconds; others have their share, and at least one of each.
FULL = {
    Kind.KILL_WORKER: 20,
    Kind.STOP_WORKER: 10,
    Kind.RESTART_POSTGRES: 3,
    Kind.POSTGRES_OUTAGE: 2,
    Kind.RESTART_KAFKA: 1,
    Kind.JOIN: 3,
    Kind.LEAVE: 3,
}
FULL_S = 600.0
OUTAGE_S = 20.0

#: What one lane has in it happens one after the other; the lanes do not wait for each other, so that a worker is also
#: killed while a server is away, and one server goes away while the other is.
LANES = (
    (Kind.KILL_WORKER, Kind.STOP_WORKER, Kind.JOIN, Kind.LEAVE),
    (Kind.RESTART_POSTGRES, Kind.POSTGRES_OUTAGE),
    (Kind.RESTART_KAFKA,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`kind` happens `at_s` seconds after the storm began. `abrupt`: a server is killed with SIGKILL, not asked."""

    at_s: float
    kind: Kind
    abrupt: bool = False


def plan(seed: int, seconds: float) -> list[Fault]:
    """The faults of a storm in order, none in its first and last tenth: there must be something to disturb.

    Those of a kind have a stretch of the storm each, at a random time within it; joins come before leaves.
    """
    rng = random.Random(seed)
    faults = []
    for kind, often in FULL.items():
        count = max(1, round(often * seconds / FULL_S))
        lag = {Kind.JOIN: 0.0, Kind.LEAVE: 0.5}.get(kind)
        for number in range(count):
            within = rng.random() if lag is None else lag + rng.random() / 2
            at = 0.1 + 0.8 * (number + within) / count
            abrupt = kind in (Kind.RESTART_POSTGRES, Kind.RESTART_KAFKA) and rng.random() < 0.5
            faults.append(Fault(at_s=round(at * seconds, 2), kind=kind, abrupt=abrupt))
    return sorted(faults, key=lambda fault: fault.at_s)


def in_lanes(faults: list[Fault]) -> list[list[Fault]]:
    """The faults of each lane, in order. Raises ValueError for a kind that no lane has."""
    if strays := {fault.kind for fault in faults} - set(chain(*LANES)):
        raise ValueError(f"{sorted(strays)}: in no lane")
    return [[fault for fault in faults if fault.kind in lane] for lane in LANES]


def outage_s(seconds: float) -> float:
    """How long PostgreSQL stays away in an outage of a storm this long."""
    return min(OUTAGE_S, seconds / 10)
