"""What goes wrong during a storm, when, as a function of a seed: the same seed gives the same weather."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """One kind of trouble."""

    KILL_WORKER = "kill -9 a worker"
    STOP_WORKER = "SIGTERM a worker"
    RESTART_POSTGRES = "restart PostgreSQL"
    POSTGRES_OUTAGE = "PostgreSQL away for 20 s"
    RESTART_KAFKA = "restart Kafka"
    JOIN = "one more worker"
    LEAVE = "one worker fewer"


#: How often each happens in a full storm of FULL_S seconds; a shorter one has its share, and at least one of each.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`kind` happens `at_s` seconds after the storm began."""

    at_s: float
    kind: Kind


def plan(seed: int, seconds: float) -> list[Fault]:
    """The faults of a storm in order, none in its first and last tenth: there must be something to disturb."""
    rng = random.Random(seed)
    share = min(1.0, seconds / FULL_S)
    faults = []
    for kind, count in FULL.items():
        for _ in range(max(1, round(count * share))):
            faults.append(Fault(at_s=round(rng.uniform(0.1, 0.9) * seconds, 2), kind=kind))
    return sorted(faults, key=lambda fault: fault.at_s)
