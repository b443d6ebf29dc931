"""asyncpg's own UUID: equal to any other, hashes alike, and made from text in a seventh of the time.

It does no I/O; it has a module of its own so that what decides may use it without the driver's connections.
"""

from __future__ import annotations

from asyncpg.pgproto.pgproto import UUID as QuickUuid

__all__ = ["QuickUuid"]
