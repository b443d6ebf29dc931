"""How limits are said on a command line: `--limit items=1000/1m,burst=200,model=minilm`, and what else changes them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import click

from api.operators.console import RATE
from api.operators.customers import Customer
from api.operators.keyring import ApiKey
from api.operators.rates import Place, changed, place
from infra.arguments import Parsed
from schemas.facts import RateLimit

R = TypeVar("R")
S = TypeVar("S", ApiKey, Customer)

_UNITS: Final = ("requests", "items", "tokens")
_WINDOW_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW_S: Final = 31 * 86400
_LARGEST_BURST: Final = 10**12
#: The table's bound: in which time an empty bucket fills again.
_LONGEST_FILL_US: Final = 10**14
_LIMIT: Final = re.compile(r"([a-z]+)=(\d{1,19})/(\d{0,9})([smhd])((?:,[a-z]+=[^,]*)*)", re.ASCII)
_MODEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FORM: Final = "expected UNIT=AMOUNT/WINDOW[,burst=N]"
_EXAMPLE: Final = "like items=1000/1m or tokens=1000000/24h,burst=50000"


def rate_limit(text: str) -> RateLimit:
    """What `UNIT=AMOUNT/WINDOW[,burst=N][,model=NAME]` says. Without a burst, the amount may come at once.

    Raises ValueError saying what was expected.
    """
    match = _LIMIT.fullmatch(text)
    if match is None or match[1] not in _UNITS:
        raise ValueError(f"{_FORM} with a unit of {', '.join(_UNITS)}, {_EXAMPLE}; found {text[:80]!r}")
    more = _settings(match[5])
    amount, window_s = int(match[2]), int(match[3] or 1) * _WINDOW_S[match[4]]
    if not 1 <= window_s <= _LONGEST_WINDOW_S:
        raise ValueError(f"expected a window of 1s to 31d, found {match[3]}{match[4]}")
    if not 1 <= amount <= window_s * 1_000_000:
        raise ValueError(f"expected an amount from 1 to a million per second of its window, found {amount}")
    burst = _number(more.get("burst", str(amount)))
    if burst * -(-window_s * 1_000_000 // amount) > _LONGEST_FILL_US:
        raise ValueError(f"expected a burst that the rate gives back within three years, found {burst}")
    model = more.get("model")
    if model is not None and not _MODEL.fullmatch(model):
        raise ValueError(f"expected the name of a model, found {model[:80]!r}")
    return RateLimit(unit=match[1], model=model, amount=amount, window_s=window_s, burst=burst)


def _settings(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(",")[1:]:
        name, _, value = part.partition("=")
        if name not in ("burst", "model") or name in found:
            raise ValueError(f"{_FORM}, {_EXAMPLE}; nobody knows '{name[:20]}', or it stands there twice")
        found[name] = value
    return found


def _number(text: str) -> int:
    if not re.fullmatch(r"\d{1,13}", text, re.ASCII) or not 1 <= int(text) <= _LARGEST_BURST:
        raise ValueError(f"expected a burst from 1 to {_LARGEST_BURST}, found {text[:20]!r}")
    return int(text)


def limit_place(text: str) -> Place:
    """What `UNIT[,model=NAME]` names. Raises ValueError saying what was expected."""
    unit, comma, rest = text.partition(",")
    name, _, model = rest.partition("=")
    if unit not in _UNITS or (comma and (name != "model" or not _MODEL.fullmatch(model))):
        raise ValueError(f"expected UNIT or UNIT,model=NAME with a unit of {', '.join(_UNITS)}; found {text[:80]!r}")
    return unit, model or None


LIMIT: Final = Parsed("limit", rate_limit)
PLACE: Final = Parsed("limit's unit", limit_place)


def shown(limits: Sequence[RateLimit]) -> str:
    """The same as text, as `rate_limit` reads it."""
    return " ".join(
        f"{one.unit}={one.amount}/{_window(one.window_s)},burst={one.burst}"
        f"{'' if one.model is None else f',model={one.model}'}"
        for one in limits
    )


def _window(window_s: int) -> str:
    """In the largest unit that it is whole in: 1h, not 3600s."""
    unit = max((u for u, unit_s in _WINDOW_S.items() if window_s % unit_s == 0), key=_WINDOW_S.__getitem__)
    return f"{window_s // _WINDOW_S[unit]}{unit}"


def require_distinct(limits: Sequence[RateLimit]) -> None:
    """Raise UsageError when two are of one unit and model."""
    if len({place(limit) for limit in limits}) < len(limits):
        raise click.UsageError("--limit: expected one limit of each unit (and model), found two")


def require_of_a_key(limits: Sequence[RateLimit]) -> None:
    """Raise UsageError for a limit that only a customer can have."""
    if any(limit.model is not None for limit in limits):
        raise click.UsageError("--limit: a limit of one model is a customer's; see  inferlog customers limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsChange:
    """What is to change; None and empty: nothing. `frees` takes the limit of unfinished requests away."""

    requests_per_s: int | None = None
    burst: int | None = None
    put: tuple[RateLimit, ...] = ()
    drop: tuple[Place, ...] = ()
    max_concurrent: int | None = None
    frees: bool = False

    def applied(self, to: S) -> S:
        """A key or customer after the change. Raises NoSuchLimit for a limit to drop that is not there."""
        return replace(
            to,
            requests_per_s=self.requests_per_s or to.requests_per_s,
            burst=self.burst or to.burst,
            limits=changed(to.limits, put=self.put, drop=self.drop),
            max_concurrent=None if self.frees else (self.max_concurrent or to.max_concurrent),
        )


_OPTIONS: Final = (
    click.option("--requests-per-s", type=RATE, help="The rate that every key and customer has."),
    click.option("--burst", type=RATE, help="Requests at once, of that rate."),
    click.option(
        "--limit", "put", type=LIMIT, multiple=True,
        help="UNIT=AMOUNT/WINDOW[,burst=N], in place of the one of this unit; repeatable.",
    ),
    click.option("--without", "drop", type=PLACE, multiple=True, help="UNIT whose limit goes; repeatable."),
    click.option("--max-concurrent", type=RATE, help="Unfinished requests at once."),
    click.option("--no-max-concurrent", "frees", is_flag=True, help="As many unfinished requests as there may be."),
)  # fmt: skip


def changes_limits(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options of a change of limits; it is called with `change`, a LimitsChange."""

    @functools.wraps(command)
    def call(
        *args: Any,
        requests_per_s: int | None,
        burst: int | None,
        put: tuple[RateLimit, ...],
        drop: tuple[Place, ...],
        max_concurrent: int | None,
        frees: bool,
        **kwargs: Any,
    ) -> R:
        if not (requests_per_s or burst or put or drop or max_concurrent or frees):
            raise click.UsageError("nothing to change; say one of --requests-per-s, --burst, --limit, --without, …")
        if max_concurrent and frees:
            raise click.UsageError("--max-concurrent and --no-max-concurrent: expected one of them")
        require_distinct(put)
        if both := {place(limit) for limit in put} & set(drop):
            unit, model = min(both, key=str)
            of = f"{unit}{'' if model is None else f',model={model}'}"
            raise click.UsageError(f"--limit and --without: expected one of them for {of}, found both")
        change = LimitsChange(
            requests_per_s=requests_per_s,
            burst=burst,
            put=put,
            drop=drop,
            max_concurrent=max_concurrent,
            frees=frees,
        )
        return command(*args, change=change, **kwargs)

    for option in reversed(_OPTIONS):
        call = option(call)
    return call
