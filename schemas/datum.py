"""Typed records to the plain values Avro writes, and back. What a field may hold is read off its type hint, once.

Everything a schema would take silently and wrongly is refused here, with the field's name: floats and booleans for
integers, times without a zone, symbols that are only ever read. Ranges are checked both ways, since not every writer
checks them, and what was read is often written again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, time, timezone
from enum import Enum
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from schemas.ranges import MOMENTS, Moments, Range, Text

T = TypeVar("T")

_Convert = Callable[[Any], Any]
_LONGEST_SHOWN = 60
#: The first symbol of every enum: how a reader sees one that it does not know. Nobody writes it.
_ONLY_READ = "UNKNOWN"


class BadValue(ValueError):
    """A value that its field cannot carry. `path` names the field, as in `inputs[0].shape`."""

    def __init__(self, path: str, expected: str, found: object) -> None:
        shown = repr(found)
        shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"
        super().__init__(f"{path}: expected {expected}, found {shown} ({type(found).__name__})")
        self.path = path
        self.expected = expected
        self.found = found

    def inside(self, path: str) -> BadValue:
        """The same, seen from the record or list that holds the field."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return BadValue(f"{path}{joint}{self.path}", self.expected, self.found)


class Shape(Generic[T]):
    """How one dataclass becomes a datum and how a datum becomes it. Made once per class."""

    def __init__(self, cls: type[T]) -> None:
        self._cls: Any = cls
        self._names = tuple(f.name for f in fields(cast("Any", cls)))
        self._values: Callable[[T], tuple[Any, ...]] = attrgetter(*self._names)
        hints = get_type_hints(cls, include_extras=True)
        self._kinds = tuple(_Kind(hints[name]) for name in self._names)
        #: Fields that hold a moment.
        self.moments = tuple(n for n, k in zip(self._names, self._kinds, strict=True) if k.type is datetime)
        self._out = [(n, k.outward) for n, k in zip(self._names, self._kinds, strict=True) if k.outward]
        self._in = [(n, k.inward) for n, k in zip(self._names, self._kinds, strict=True) if k.inward]
        # What fields may not be together, where the class says so.
        self._contradiction: Any = getattr(cls, "contradiction", None)
        # Combinations of exact types that were found good; there are few, and looking one up costs next to nothing.
        self._good: set[tuple[type, ...]] = set()

    def datum(self, record: T) -> dict[str, Any]:
        """The record's fields as Avro takes them. Raises BadValue naming the first field that does not fit."""
        values = self._values(record)
        types_found = tuple(map(type, values))
        if types_found not in self._good:
            for name, kind, value in zip(self._names, self._kinds, values, strict=True):
                if not kind.admits(value):
                    raise BadValue(name, kind.words, value)
            self._good.add(types_found)
        found = dict(zip(self._names, values, strict=True))
        name = ""
        try:
            for name, convert in self._out:
                found[name] = convert(found[name])
        except BadValue as error:
            raise error.inside(name) from None
        if self._contradiction is not None:
            self._require_consistent(record)
        return found

    def record(self, datum: dict[str, Any]) -> T:
        """The typed record; fields that the datum lacks take their defaults. Changes the datum.

        Raises BadValue naming the first field out of its range, or that the others contradict, and what the class
        raises when it is made.
        """
        name = ""
        try:
            for name, convert in self._in:
                if name in datum:
                    datum[name] = convert(datum[name])
        except BadValue as error:
            raise error.inside(name) from None
        made: T = self._cls(**datum)
        if self._contradiction is not None:
            self._require_consistent(made)
        return made

    def _require_consistent(self, record: T) -> None:
        if found := self._contradiction(record):
            raise BadValue(found[0], found[1], getattr(record, found[0]))

    def explain(self, record: T) -> None:
        """Raise BadValue for text that cannot be written as UTF-8, which only the writer itself meets."""
        for name, value in zip(self._names, self._values(record), strict=True):
            _explain(name, value)


def _explain(path: str, value: object) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadValue(path, "text that can be written as UTF-8", value) from None
    elif isinstance(value, Mapping):
        for key in value:
            _explain(f"{path}[{key!r}]", key)
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            _explain(f"{path}[{number}]", one)
    elif is_dataclass(value):
        for field in fields(value):
            _explain(f"{path}.{field.name}", getattr(value, field.name))


class _Kind:
    """What one type hint admits, and how its values are converted. `outward` also checks what a type cannot say."""

    def __init__(self, hint: Any) -> None:
        self.nullable = False
        if get_origin(hint) in (Union, types.UnionType):
            inner = [a for a in get_args(hint) if a is not type(None)]
            self.nullable = len(inner) < len(get_args(hint))
            (hint,) = inner
        self.bounds: Range | Text | Moments | None = None
        if get_origin(hint) is Annotated:
            hint, self.bounds = get_args(hint)
        self.type: Any = get_origin(hint) or hint
        outward, inward = _conversions(hint, self.type, self.bounds)
        self.outward = _past_null(outward) if self.nullable else outward
        self.inward = _past_null(inward) if self.nullable else inward

    @property
    def words(self) -> str:
        """What is expected, in words."""
        name = _WORDS.get(self.type) or self.type.__name__
        return f"{name} or None" if self.nullable else name

    def admits(self, value: object) -> bool:
        """Whether a value's type fits; a bool is no integer here."""
        if value is None:
            return self.nullable
        return isinstance(value, self.type) and not (self.type is int and isinstance(value, bool))


_WORDS: dict[Any, str] = {int: "an integer", str: "text", bytes: "bytes", datetime: "a time", tuple: "a tuple"}


def _conversions(
    hint: Any, kind: Any, bounds: Range | Text | Moments | None
) -> tuple[_Convert | None, _Convert | None]:
    if kind is int:
        within = _within(_needed(bounds))
        return within, within
    if kind is datetime:
        return _moments(bounds if isinstance(bounds, Moments) else MOMENTS)
    if isinstance(bounds, Text):
        matching = _matching(bounds)
        return matching, matching
    if kind is tuple:
        return _of_tuple(_Kind(get_args(hint)[0]))
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return _of_map(_Kind(get_args(hint)[1]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _symbol, kind
    if is_dataclass(kind):
        shape: Shape[Any] = Shape(cast("type[Any]", kind))
        return shape.datum, shape.record
    return None, None


def _past_null(convert: _Convert | None) -> _Convert | None:
    if convert is None:
        return None
    return lambda value: None if value is None else convert(value)


def _needed(bounds: object) -> Range:
    if not isinstance(bounds, Range):
        raise TypeError("every integer of a record needs a Range")
    return bounds


def _within(bounds: Range) -> _Convert:
    low, high, never = bounds.low, bounds.high, bounds.never

    def check(value: int) -> int:
        if not low <= value <= high or value == never:
            raise _out_of(bounds, value)
        return value

    return check


def _out_of(bounds: Range, value: int, path: str = "") -> BadValue:
    return BadValue(path, bounds.words, value)


def _matching(bounds: Text) -> _Convert:
    match = bounds.pattern.fullmatch

    def check(value: str) -> str:
        if match(value) is None:
            raise BadValue("", bounds.words, value)
        return value

    return check


def _symbol(value: Enum) -> Any:
    if value.value == _ONLY_READ:
        raise BadValue("", f"a symbol other than {_ONLY_READ}, which is only ever read", value)
    return value.value


def _moments(bounds: Moments) -> tuple[_Convert, _Convert]:
    low, high, whole = bounds.low, bounds.high, bounds.whole_hours

    def inward(value: datetime) -> datetime:
        if not low <= value <= high or (whole and not _begins_an_hour(value)):
            raise BadValue("", bounds.words, value)
        return value

    def outward(value: datetime) -> datetime:
        if value.tzinfo is not timezone.utc and value.utcoffset() is None:
            raise BadValue("", "a time with a zone", value)
        return inward(value)

    return outward, inward


def _begins_an_hour(value: datetime) -> bool:
    return value.astimezone(timezone.utc).time().replace(hour=0) == time.min


def _of_tuple(kind: _Kind) -> tuple[_Convert, _Convert]:
    convert, inward = kind.outward, kind.inward

    def outward(values: tuple[Any, ...]) -> list[Any]:
        found: list[Any] = []
        try:
            for value in values:
                if not kind.admits(value):
                    raise BadValue("", kind.words, value)
                found.append(convert(value) if convert else value)
        except BadValue as error:
            raise error.inside(f"[{len(found)}]") from None
        return found

    def taken(values: list[Any]) -> tuple[Any, ...]:
        if inward is None:
            return tuple(values)
        found: list[Any] = []
        try:
            for value in values:
                found.append(inward(value))
        except BadValue as error:
            raise error.inside(f"[{len(found)}]") from None
        return tuple(found)

    return outward, taken


def _of_map(kind: _Kind) -> tuple[_Convert, _Convert]:
    if kind.type is not int:
        raise TypeError("a record's map holds integers with a Range")
    bounds = _needed(kind.bounds)
    if bounds.never is not None:
        raise TypeError("a record's map holds integers of a Range without an exception")
    low, high = bounds.low, bounds.high

    def outward(values: Mapping[str, int]) -> dict[str, int]:
        for key, value in values.items():
            if not isinstance(key, str):
                raise BadValue(f"[{key!r}]", "text as key", key)
            if not kind.admits(value):
                raise BadValue(f"[{key!r}]", kind.words, value)
            if not low <= value <= high:
                raise _out_of(bounds, value, f"[{key!r}]")
        return values if type(values) is dict else dict(values)

    def inward(values: dict[str, int]) -> dict[str, int]:
        for key, value in values.items():
            if not low <= value <= high:
                raise _out_of(bounds, value, f"[{key!r}]")
        return values

    return outward, inward
