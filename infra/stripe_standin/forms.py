"""Parameters as Stripe's clients send them: `payload[value]=3` in forms and queries, plain objects in JSON.

Pure; whatever does not fit is refused with the parameter's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qsl

from infra.stripe_standin.refusals import Refusal, missing

Params = dict[str, Any]

_KEY = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_PART = re.compile(r"\[([^\[\]]*)\]")


def decode_form(text: str) -> Params:
    """Nested parameters of a form body or query string; every leaf is a string, lists become maps by index."""
    params: Params = {}
    for key, value in parse_qsl(text, keep_blank_values=True):
        match = _KEY.fullmatch(key)
        if match is None:
            raise Refusal(f"Invalid parameter name: {key!r}.", param=key)
        path = [match[1], *_PART.findall(match[2])]
        place = params
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise Refusal(f"Parameter {match[1]} is sent both as a value and as a map.", param=match[1])
        leaf = path[-1] or str(len(place))
        if isinstance(place.get(leaf), dict):
            raise Refusal(f"Parameter {match[1]} is sent both as a value and as a map.", param=match[1])
        place[leaf] = value
    return params


def decode_json(body: bytes) -> Params:
    """The JSON object of a v2 body."""
    try:
        params = json.loads(body or b"{}")
    except ValueError as error:
        raise Refusal(f"The request body is not JSON: {error}") from error
    if not isinstance(params, dict):
        raise Refusal("The request body must be a JSON object.")
    return params


def only(params: Params, allowed: Collection[str]) -> None:
    """Refuse a parameter that the endpoint does not know; `expand` is known everywhere and changes nothing."""
    for name in params:
        if name not in allowed and name != "expand":
            raise Refusal(f"Received unknown parameter: {name}", code="parameter_unknown", param=name)


def text(params: Params, name: str, *, within: str = "", max_chars: int = 5000) -> str | None:
    """A string parameter, or None when absent or empty; `within` is the map's name for the message."""
    value = params.get(name)
    label = f"{within}[{name}]" if within else name
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise Refusal(f"Invalid {label}: must be a string.", code="parameter_invalid_string", param=label)
    if len(value) > max_chars:
        raise Refusal(f"Invalid {label}: must be at most {max_chars} characters.", param=label)
    return value


def required_text(params: Params, name: str, *, within: str = "", max_chars: int = 5000) -> str:
    """A string parameter that must be there."""
    value = text(params, name, within=within, max_chars=max_chars)
    if value is None:
        raise missing(f"{within}[{name}]" if within else name)
    return value


def one_of(params: Params, name: str, choices: tuple[str, ...], *, within: str = "") -> str | None:
    """A string parameter with a closed set of values."""
    value = text(params, name, within=within)
    if value is not None and value not in choices:
        label = f"{within}[{name}]" if within else name
        raise Refusal(f"Invalid {label}: must be one of {' or '.join(choices)}.", param=label)
    return value


def whole(params: Params, name: str) -> int | None:
    """An integer parameter, or None when absent."""
    value = text(params, name)
    if value is None:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise Refusal(f"Invalid integer: {value}", code="parameter_invalid_integer", param=name)
    return int(value)


def mapping(params: Params, name: str) -> Params:
    """A map parameter; empty when absent."""
    value = params.get(name)
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise Refusal(f"Invalid {name}: must be a map.", code="parameter_invalid_map", param=name)
    return value
