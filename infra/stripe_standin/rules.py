"""What a meter event has to be before Stripe takes it: names, lengths, times, digits.

Pure checks on decoded parameters; what depends on earlier calls (meters, identifiers) is in `books`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone

from infra.stripe_standin import forms
from infra.stripe_standin.forms import Params
from infra.stripe_standin.refusals import Refusal, missing

PAST_LIMIT_S = 35 * 86_400
FUTURE_LIMIT_S = 300
MAX_DIGITS = 15
MAX_NAME_CHARS = 100
EVENT_PARAMS = ("event_name", "payload", "identifier", "timestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """A meter event whose parts are well formed; its payload is still to be matched with a meter."""

    event_name: str
    payload: dict[str, str]
    identifier: str | None
    timestamp_s: int


def event_draft(params: Params, *, now_s: float, v2: bool) -> EventDraft:
    """Check the parameters of a create call; raises Refusal naming the parameter."""
    forms.only(params, EVENT_PARAMS)
    event_name = forms.required_text(params, "event_name", max_chars=MAX_NAME_CHARS)
    payload = forms.mapping(params, "payload")
    if not payload:
        raise missing("payload")
    for key, value in payload.items():
        if not isinstance(value, str):
            raise Refusal(f"Invalid payload[{key}]: must be a string.", param=f"payload[{key}]")
    identifier = forms.text(params, "identifier", max_chars=MAX_NAME_CHARS)
    stamp = _rfc3339(params) if v2 else forms.whole(params, "timestamp")
    timestamp_s = int(now_s) if stamp is None else stamp
    if timestamp_s < now_s - PAST_LIMIT_S:
        raise Refusal(
            "The timestamp must be within the past 35 calendar days.",
            code="timestamp_too_far_in_past",
            param="timestamp",
        )
    if timestamp_s > now_s + FUTURE_LIMIT_S:
        raise Refusal(
            "The timestamp must be at most 5 minutes in the future.",
            code="timestamp_in_future",
            param="timestamp",
        )
    return EventDraft(event_name=event_name, payload=payload, identifier=identifier, timestamp_s=timestamp_s)


def event_value(payload: dict[str, str], key: str) -> int:
    """The whole number an event counts for; raises Refusal for decimals (stricter than Stripe) and long numbers."""
    label = f"payload[{key}]"
    value = payload.get(key, "")
    if value == "":
        raise missing(label)
    if not re.fullmatch(r"-?[0-9]+", value):
        raise Refusal(
            f"Invalid {label}: {value!r} is not a whole number.",
            code="meter_event_invalid_value",
            param=label,
        )
    if len(value.lstrip("-").lstrip("0")) > MAX_DIGITS:
        raise Refusal(
            f"Invalid {label}: at most {MAX_DIGITS} digits.",
            code="meter_event_value_too_many_digits",
            param=label,
        )
    return int(value)


def rfc3339(moment_s: float) -> str:
    """A v2 time: UTC with milliseconds."""
    moment = datetime.fromtimestamp(moment_s, tz=timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _rfc3339(params: Params) -> int | None:
    value = forms.text(params, "timestamp")
    if value is None:
        return None
    try:
        # Parts of a second are cut off, as v1 has none; 3.10 also reads only three or six digits of them.
        moment = datetime.fromisoformat(re.sub(r"\.[0-9]+", "", value.replace("Z", "+00:00")))
    except ValueError as error:
        raise Refusal(f"Invalid timestamp: {value!r} is not RFC 3339.", param="timestamp") from error
    if moment.tzinfo is None:
        raise Refusal(f"Invalid timestamp: {value!r} has no zone.", param="timestamp")
    return int(moment.timestamp())
