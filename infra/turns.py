"""Who takes turns by an advisory lock of Postgres, and its number; Postgres keeps them per database.

One list, because two users of one number would wait for each other for no reason that either could see.
"""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class Turn(IntEnum):
    """A lock's number."""

    #: Whoever changes tables, and whoever provisions.
    MIGRATION = 0x1F_E0_10_6
    PROVISION = 0x1F_E0_10_A
    #: Held from the first fact of a transaction to its end, so that positions are given out in the order of commits.
    FACTS = 0x1F_E0_10_8
    #: Held by the session of the one process that publishes facts, reports to Stripe, lets go of counted requests.
    RELAY = 0x1F_E0_10_9
    REPORTER = 0x1F_E0_10_7
    PRUNER = 0x1F_E0_10_B
    #: Held for a round by whoever brings the letters of workers into the table.
    COLLECTOR = 0x1F_E0_10_D
    #: Held for one slice by whoever lets go of claims that are too old.
    CLAIMS = 0x1F_E0_10_C
