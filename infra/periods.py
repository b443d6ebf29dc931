"""Hours, days and months of any IANA zone, cut from sums that are kept by UTC hour.

The one place where zones are reckoned with: a query gets the beginnings of its periods and never sees a zone. An hour
of the sums is never divided; in zones whose clocks are not on the full hour it belongs to the day in which it begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date, datetime, time, timedelta, timezone
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

INTERVALS: Final = ("hour", "day", "month", "total")
RULE: Final = "sums are kept by UTC hour; a day or month counts each hour whole that begins in it on the zone's clocks"
HOUR: Final = timedelta(hours=1)
UTC: Final = ZoneInfo("UTC")
#: Times outside are refused or counted apart: nothing was summed then, and calendars end.
FIRST: Final = datetime(2000, 1, 1, tzinfo=timezone.utc)
LAST: Final = datetime(2999, 1, 1, tzinfo=timezone.utc)
_DAY: Final = timedelta(days=1)
_MONTH: Final = re.compile(r"(\d{4})-(\d{2})")
_NAME: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_LONGEST_NAME: Final = 64


class UnknownZone(ValueError):
    """No zone has this name; the message names those that come near."""


@lru_cache(maxsize=1)
def zone_names() -> frozenset[str]:
    """Every zone of the IANA database, by its name."""
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="utf-8").split()) - {"Factory"}


def zone_named(name: str) -> ZoneInfo:
    """The zone of this name, as IANA spells it. Raises UnknownZone."""
    # The pattern first: a name becomes a path.
    if len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) and name in zone_names():
        try:
            return ZoneInfo(name)
        except ZoneInfoNotFoundError as error:
            raise UnknownZone(f"the data of zone '{name}' is missing here; install the package tzdata") from error
    near = _near(name[:_LONGEST_NAME])
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise UnknownZone(f"expected a zone of the IANA database, like Europe/Berlin or UTC, found {name[:80]!r}{hint}")


def _near(name: str) -> list[str]:
    """At most three names that look alike or hold what was written, whatever its case."""
    spelled = {known.lower(): known for known in zone_names()}
    wanted = name.lower().strip().replace(" ", "_")
    if wanted in spelled:
        return [spelled[wanted]]
    cities = {known.rpartition("/")[2]: known for known in spelled}
    found = [cities[city] for city in get_close_matches(wanted.rpartition("/")[2], cities, n=3, cutoff=0.75)]
    found += get_close_matches(wanted, spelled, n=3, cutoff=0.75)
    return [spelled[known] for known in dict.fromkeys(found)][:3]


def next_hour(moment: datetime) -> datetime:
    """The first UTC hour that begins at a moment or after it: from there on hours are counted."""
    begun = moment.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)
    return begun if begun == moment else begun + HOUR


def first_hour(day: date, zone: ZoneInfo) -> datetime:
    """The first UTC hour that begins on a local day, or after it where the clocks skip the day."""
    # Midnight may not exist, or exist twice; what the clocks show at each full hour is never in doubt.
    hour = next_hour(datetime.combine(day, time(), zone)) - 4 * HOUR
    while hour.astimezone(zone).date() < day:
        hour += HOUR
    return hour


def start_of(hour: datetime, interval: str, zone: ZoneInfo) -> datetime:
    """Where the first hour of the hour's own period begins."""
    if interval == "hour":
        return hour
    day = hour.astimezone(zone).date()
    return first_hour(day.replace(day=1) if interval == "month" else day, zone)


def end_of(hour: datetime, interval: str, zone: ZoneInfo) -> datetime:
    """Where the last hour of the hour's own period ends."""
    if interval == "hour":
        return hour + HOUR
    day = hour.astimezone(zone).date()
    after = (day.replace(day=1) + 31 * _DAY).replace(day=1) if interval == "month" else day + _DAY
    return first_hour(after, zone)


def cut(since: datetime, until: datetime, interval: str, zone: ZoneInfo) -> list[datetime]:
    """The beginnings of the periods that make up [since, until), both of them full UTC hours, in order.

    The first is `since` and the last ends at `until`, also where a day or month began before or goes on.
    """
    if interval == "total":
        return [since]
    starts, at = [], since
    while at < until:
        starts.append(at)
        at = end_of(at, interval, zone)
    return starts


def cut_days(
    days: Iterable[datetime], interval: str, zone: ZoneInfo, *, since: datetime | None, until: datetime | None
) -> list[datetime]:
    """The beginnings of all periods that hold any hour of these UTC days and lie in [since, until), in order."""
    starts = set()
    for day in days:
        begin, end = max(day, since or day), min(day + _DAY, until or day + _DAY)
        if begin < end:
            begin = start_of(begin, interval, zone)
            starts |= {max(start, since or start) for start in cut(begin, end, interval, zone)}
    return sorted(starts)


def shown(moment: datetime, zone: ZoneInfo) -> str:
    """ISO 8601 to the second, as the zone's clocks show it, with their distance from UTC ("Z" in UTC itself)."""
    text = moment.astimezone(zone).isoformat(timespec="seconds")
    return text.replace("+00:00", "Z") if zone.key == "UTC" else text


def moment_in(text: str, zone: ZoneInfo) -> datetime:
    """A date's first hour or an ISO 8601 time, on the zone's clocks unless it says its own distance from UTC.

    Of a time that the clocks show twice it is the first. Raises ValueError saying what was expected.
    """
    text = text.strip()
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00").replace("z", "+00:00"))
        dated = len(text) == len("2026-01-31")
        if found.tzinfo is None:
            _require_known(found.replace(tzinfo=timezone.utc))  # else the next line may leave the calendar
            found = first_hour(found.date(), zone) if dated else found.replace(tzinfo=zone).astimezone(timezone.utc)
        _require_known(found)
    except (ValueError, OverflowError):
        raise ValueError(
            "expected a date or an ISO 8601 time of the years 2000 to 2998, like 2026-01-31 or 2026-01-31T13:00:00Z, "
            f"found {text[:40]!r}"
        ) from None
    return found.astimezone(timezone.utc)


def day_in(text: str, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """[since, until) of a local day like 2026-01-31. Raises ValueError saying what was expected."""
    try:
        day = date.fromisoformat(text.strip())
        _require_known(datetime.combine(day, time(), timezone.utc))
    except ValueError:
        raise ValueError(f"expected a day, like 2026-01-31, found {text[:40]!r}") from None
    return first_hour(day, zone), first_hour(day + _DAY, zone)


def month_in(text: str, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """[since, until) of a local month like 2026-01. Raises ValueError saying what was expected."""
    try:
        if not _MONTH.fullmatch(text.strip()):
            raise ValueError
        day = date.fromisoformat(f"{text.strip()}-01")
        _require_known(datetime.combine(day, time(), timezone.utc))
    except ValueError:
        raise ValueError(f"expected a month, like 2026-01, found {text[:40]!r}") from None
    return first_hour(day, zone), first_hour((day + 31 * _DAY).replace(day=1), zone)


def _require_known(moment: datetime) -> None:
    # A day more on both sides: the first and the last day begin and end elsewhere in other zones.
    if not FIRST - _DAY <= moment.astimezone(timezone.utc) < LAST + _DAY:
        raise ValueError
