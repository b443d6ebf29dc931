"""What a customer may ask of its usage, read from the query string; and the place where a page of the answer ended.

Pure. Every refusal names the parameter at fault.
"""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Final, TypeVar
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from api.errors import BadInput
from infra.periods import (
    INTERVALS,
    UnknownZone,
    cut,
    day_in,
    first_hour,
    moment_in,
    month_in,
    next_hour,
    shown,
    zone_named,
)

T = TypeVar("T")

#: What sums may be told apart by, besides the meter: meters are different units and are never added together.
GROUPS: Final = ("model", "version", "price_id")
FILTERS: Final = ("model", "version", "price_id", "meter")
FORMATS: Final = ("json", "csv")
LIMIT, MOST = 1000, 5000
KNOWN: Final = ("from", "to", "month", "day", "interval", "zone", "by", *FILTERS, "limit", "after", "format")
_LONGEST_DAYS: Final = {"hour": 32, "day": 367, "month": 1100, "total": 1100}
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The line after which a page begins: where its period starts, and its values of GROUPS and the meter."""

    start: datetime
    values: tuple[str, str, str, str]

    def token(self) -> str:
        """The place as text for `after`."""
        said = json.dumps([int(self.start.timestamp()), *self.values], separators=(",", ":"))
        return base64.urlsafe_b64encode(said.encode()).decode().rstrip("=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """UTC hours that begin in [since, until), summed over the periods that begin at `starts` and by `by`.

    `filters` has every name of FILTERS; None asks for all.
    """

    since: datetime
    until: datetime
    starts: tuple[datetime, ...]
    interval: str
    zone: ZoneInfo
    by: tuple[str, ...]
    filters: Mapping[str, str | None]
    limit: int
    after: Place | None
    format: str

    def end_of(self, period: int) -> datetime:
        """Where a period ends, by its place in `starts`."""
        return self.starts[period + 1] if period + 1 < len(self.starts) else self.until

    def first_period(self) -> int:
        """The place in `starts` of the period that `after` names; -1 when the page is the first."""
        return -1 if self.after is None else bisect_left(self.starts, self.after.start)

    def page_after(self, place: Place) -> str:
        """The query string of the page that begins after this line; its range is fixed, whatever the clock says."""
        said = {"from": shown(self.since, UTC_ZONE), "to": shown(self.until, UTC_ZONE), "interval": self.interval}
        said |= {"zone": self.zone.key, "by": ",".join(self.by)}
        said |= {name: value for name, value in self.filters.items() if value is not None}
        return urlencode({**said, "limit": self.limit, "format": self.format, "after": place.token()})


UTC_ZONE: Final = zone_named("UTC")


def question(query: Mapping[str, str], *, now: datetime) -> Question:
    """The query string as a question. Raises BadInput."""
    for name, times in Counter(name for name, _ in query.items()).items():
        if name not in KNOWN:
            raise BadInput(f"{name}: unknown parameter; known are {', '.join(KNOWN)}", param=name)
        if times > 1:
            raise BadInput(f"{name}: expected once, found {times} times", param=name)
        if not _carried(query[name]):
            raise BadInput(f"{name}: expected text in UTF-8 without NUL characters", param=name)
    interval = _one_of("interval", query.get("interval", "hour"), INTERVALS)
    try:
        zone = zone_named(query.get("zone", "UTC"))
    except UnknownZone as error:
        raise BadInput(f"zone: {error}", param="zone") from error
    since, until = _range(query, interval, zone, next_hour(now))
    if until - since > _LONGEST_DAYS[interval] * _DAY:
        raise BadInput(f"from: at most {_LONGEST_DAYS[interval]} days can be asked for by {interval}", param="from")
    starts = tuple(cut(since, until, interval, zone))
    return Question(
        since=since,
        until=until,
        starts=starts,
        interval=interval,
        zone=zone,
        by=_groups(query.get("by", "model")),
        filters={name: query.get(name) for name in FILTERS},
        limit=_limit(query.get("limit", str(LIMIT))),
        after=_place(query["after"], starts) if "after" in query else None,
        format=_one_of("format", query.get("format", "json"), FORMATS),
    )


def _carried(text: str) -> bool:
    """Whether Postgres can take this text. Raises TypeError when it is none."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _one_of(name: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise BadInput(f"{name}: expected {' or '.join(map(repr, allowed))}, found {value[:40]!r}", param=name)
    return value


def _range(query: Mapping[str, str], interval: str, zone: ZoneInfo, soon: datetime) -> tuple[datetime, datetime]:
    """[since, until), both full UTC hours: those that begin from `from` on and before `to`."""
    asked = [name for name in ("month", "day") if name in query]
    if asked:
        if len(asked) > 1 or "from" in query or "to" in query:
            raise BadInput(
                f"{asked[0]}: leaves no room for another range; give month, day, or from and to", param=asked[0]
            )
        return _parsed(asked[0], query, month_in if asked[0] == "month" else day_in, zone)
    until = next_hour(_parsed("to", query, moment_in, zone)) if "to" in query else soon
    since = next_hour(_parsed("from", query, moment_in, zone)) if "from" in query else _usual(until, interval, zone)
    if since >= until:
        words = (
            f"expected a time at least one full UTC hour before 'to' ({shown(until, zone)}), found {shown(since, zone)}"
        )
        raise BadInput(f"from: {words}", param="from")
    return since, until


def _parsed(name: str, query: Mapping[str, str], parse: Callable[[str, ZoneInfo], T], zone: ZoneInfo) -> T:
    try:
        # A '+' that was not escaped arrives as a space; the one between a date and a time may be a space as well.
        text = query[name].strip()
        return parse(text[:16] + text[16:].replace(" ", "+"), zone)
    except ValueError as error:
        raise BadInput(f"{name}: {error}", param=name) from error


def _usual(until: datetime, interval: str, zone: ZoneInfo) -> datetime:
    """Where the answer begins unless it is said: 24 hours, 30 local days or 12 local months, today's among them."""
    if interval == "hour":
        return until - _DAY
    today = (until - timedelta(hours=1)).astimezone(zone).date()
    if interval == "month":
        return first_hour(date(today.year - 1 + today.month // 12, today.month % 12 + 1, 1), zone)
    return first_hour(today - 29 * _DAY, zone)


def _groups(text: str) -> tuple[str, ...]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in (*GROUPS, "meter"):
            allowed = ", ".join((*GROUPS, "meter"))
            raise BadInput(f"by: expected names of {allowed} with commas between, found {name[:40]!r}", param="by")
    return tuple(name for name in GROUPS if name in wanted)


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= MOST):
        raise BadInput(f"limit: expected a number of lines from 1 to {MOST}, found {text[:40]!r}", param="limit")
    return int(text)


def _place(token: str, starts: tuple[datetime, ...]) -> Place:
    try:
        start, *values = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
        place = Place(start=datetime.fromtimestamp(start, timezone.utc), values=tuple(values))
        if len(values) != 4 or not all(map(_carried, values)) or place.start not in starts:
            raise ValueError
    except (binascii.Error, ValueError, TypeError, OverflowError, OSError) as error:
        words = "after: expected what 'next' of an answer to the same question says"
        raise BadInput(words, param="after") from error
    return place
