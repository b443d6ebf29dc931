"""How a caller names a model and a version of it: `model`, `model@alias`, `model@sha256:3fa1b2…`, alike everywhere."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Final

from api.errors import ApiError, BadInput, NotFound
from schemas.routes import is_alias

_DIGITS: Final = re.compile(r"[0-9a-f]{8,64}")
_MOST_NAMED: Final = 20


def split_name(name: str, version: str | None = None) -> tuple[str, str | None]:
    """Model and reference of `model` or `model@reference`; `version` is one that was named apart from it.

    Raises BadInput when both name one.
    """
    model, at, reference = name.partition("@")
    if at and version is not None:
        raise BadInput(
            f"model '{_shown(name)}' names a version already; leave '/versions/{_shown(version)}' out", param="version"
        )
    return model, reference if at else version


def unknown_model(model: str) -> NotFound:
    """The model is not routed, or not there."""
    return NotFound(f"unknown model '{_shown(model)}'", code="model_not_found", param="model")


def found_version(model: str, reference: str, versions: Sequence[str], aliases: Mapping[str, str]) -> str:
    """The version that a reference means: an alias, or 64 hex digits or a unique start of at least 8 of them.

    `versions` are those of the model, sorted. Raises NotFound; BadInput when several fit.
    """
    if (named := aliases.get(reference)) is not None:
        return named
    digits = reference.removeprefix("sha256:")
    if _DIGITS.fullmatch(digits) is None:
        raise _unknown_name(model, reference, aliases)
    start = bisect_left(versions, digits)
    fitting = list(takewhile(lambda version: version.startswith(digits), islice(versions, start, None)))
    if not fitting:
        raise NotFound(f"unknown version '{digits}' of model '{model}'", code="version_not_found", param="version")
    if len(fitting) > 1:
        raise BadInput(
            f"version '{digits}' of model '{model}' fits {len(fitting)} versions; give more digits",
            code="version_ambiguous",
            param="version",
        )
    return fitting[0]


def _unknown_name(model: str, reference: str, aliases: Mapping[str, str]) -> ApiError:
    names = sorted(aliases)
    there = ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
    if is_alias(reference):
        words = f"its aliases: {there}" if there else "it has none"
        return NotFound(
            f"model '{model}' has no version with the alias '{reference}'; {words}",
            code="alias_not_found",
            param="version",
        )
    words = f", or an alias: {there}" if there else ""
    return NotFound(
        f"unknown version '{_shown(reference)}' of model '{model}'; a version is 64 hex digits or the first 8 or more"
        f"{words}",
        code="version_not_found",
        param="version",
    )


def _shown(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "…"
