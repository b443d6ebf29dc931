"""A schema as a tree of values: names resolved, references replaced by what they stand for, missing parts explicit.

What checks a schema or explains it to people reads this and not the JSON, in which a type may be text, a list or
an object and inherits its namespace from wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

#: The most types inside one another, and the most altogether, a named one counted wherever it is used. Ours are 6 deep
#: and of about 50; a schema of a few lines can say 2^30, and reading its records takes as many steps.
MAX_DEPTH = 32
MAX_TYPES = 1000

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})


class SchemaError(ValueError):
    """JSON that is no schema; the message names the place."""


class Absent(Enum):
    """Marks a default that is not there, which differs from a default of null."""

    DEFAULT = "no default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a record."""

    name: str
    type: Node
    doc: str = ""
    default: Any = Absent.DEFAULT
    aliases: tuple[str, ...] = ()

    @property
    def has_default(self) -> bool:
        """Whether a reader can do without the field."""
        return self.default is not Absent.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One type. Only the attributes of its `kind` are filled.

    `name` is the full name of a record, enum or fixed; `items` what an array or a map holds; `branches` a union's;
    `size` a fixed's, as the schema has it.
    """

    kind: str
    logical: str = ""
    name: str = ""
    doc: str = ""
    aliases: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    size: Any = None
    default: Any = Absent.DEFAULT
    fields: tuple[Field, ...] = ()
    items: Node | None = None
    branches: tuple[Node, ...] = ()

    @property
    def short_name(self) -> str:
        """The name without its namespace."""
        return self.name.rpartition(".")[2]

    @property
    def nullable(self) -> Node | None:
        """The other branch of a union of null and one type; None for anything else."""
        if len(self.branches) == 2 and self.branches[0].kind == "null":
            return self.branches[1]
        return None


def outline(definition: Any) -> Node:
    """The tree of a parsed `.avsc`, at most MAX_DEPTH deep and of MAX_TYPES types.

    Raises SchemaError for a type that is no type, for one that holds itself and for a larger tree.
    """
    return _Reader().node(definition, namespace="", place="the schema")


def children(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    """The types directly inside a type, each with its path, as in `inputs[].shape[]` or `quantities{}`."""
    for field in node.fields:
        yield (f"{path}.{field.name}" if path else field.name), field.type
    if node.items is not None:
        yield path + ("[]" if node.kind == "array" else "{}"), node.items
    for branch in node.branches:
        yield path, branch


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """The type and every type inside it, outermost first, each with the path of the field that holds it."""
    yield path, node
    for inner_path, inner in children(path, node):
        yield from walk(inner, inner_path)


class _Reader:
    def __init__(self) -> None:
        self._named: dict[str, Node | None] = {}  # None while a type is being read
        self._measured: dict[int, tuple[int, int]] = {}  # depth and number of types by id of a node with types inside

    def node(self, found: Any, *, namespace: str, place: str) -> Node:
        if isinstance(found, str):
            return Node(kind=found) if found in PRIMITIVES else self._reference(found, namespace, place)
        if isinstance(found, list):
            branches = tuple(self.node(one, namespace=namespace, place=place) for one in found)
            return self._bounded(Node(kind="union", branches=branches), place)
        if not isinstance(found, dict) or "type" not in found:
            raise SchemaError(f"{place}: expected a type, found {found!r}")
        kind = found["type"]
        if isinstance(kind, (dict, list)):
            return self.node(kind, namespace=namespace, place=place)
        logical = str(found.get("logicalType", ""))
        if kind in PRIMITIVES:
            return Node(kind=kind, logical=logical)
        if kind in ("array", "map"):
            inner = found.get("items" if kind == "array" else "values")
            items = self.node(inner, namespace=namespace, place=place)
            return self._bounded(Node(kind=kind, logical=logical, items=items), place)
        if kind in ("record", "enum", "fixed"):
            return self._definition(found, kind, logical, namespace, place)
        return self._reference(str(kind), namespace, place)

    def _bounded(self, node: Node, place: str) -> Node:
        inside = [self._measured.get(id(one), (1, 1)) for _, one in children("", node)]
        depth = 1 + max((d for d, _ in inside), default=0)
        count = 1 + sum(c for _, c in inside)
        if depth > MAX_DEPTH:
            raise SchemaError(f"{place}: types are inside one another {depth} deep, expected at most {MAX_DEPTH}")
        if count > MAX_TYPES:
            raise SchemaError(f"{place}: there are {count} types in it, counted wherever used, at most {MAX_TYPES} may")
        self._measured[id(node)] = depth, count
        return node

    def _reference(self, name: str, namespace: str, place: str) -> Node:
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        if full not in self._named:
            raise SchemaError(f"{place}: there is no type {name}")
        known = self._named[full]
        if known is None:
            raise SchemaError(f"{place}: {full} holds itself; records of the log have a bounded depth")
        return known

    def _definition(self, found: dict[str, Any], kind: str, logical: str, namespace: str, place: str) -> Node:
        if not isinstance(found.get("name"), str):
            raise SchemaError(f"{place}: this {kind} has no name")
        name = found["name"]
        if "." not in name:
            namespace = found.get("namespace", namespace)
            name = f"{namespace}.{name}" if namespace else name
        namespace = name.rpartition(".")[0]
        if name in self._named:
            raise SchemaError(f"{place}: {name} is defined twice; refer to it by name the second time")
        self._named[name] = None
        node = Node(
            kind=kind,
            logical=logical,
            name=name,
            doc=str(found.get("doc") or ""),
            aliases=_list(found, "aliases", name),
            symbols=_list(found, "symbols", name),
            size=found.get("size"),
            default=found.get("default", Absent.DEFAULT),
            fields=tuple(self._field(f, namespace, name) for f in _list(found, "fields", name)),
        )
        self._named[name] = self._bounded(node, place)
        return node

    def _field(self, found: Any, namespace: str, record: str) -> Field:
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            raise SchemaError(f"{record}: every field is an object with a name, found {found!r}")
        place = f"{record}.{found['name']}"
        return Field(
            name=found["name"],
            type=self.node(found.get("type"), namespace=namespace, place=place),
            doc=str(found.get("doc") or ""),
            default=found.get("default", Absent.DEFAULT),
            aliases=_list(found, "aliases", place),
        )


def _list(found: dict[str, Any], key: str, place: str) -> tuple[Any, ...]:
    values = found.get(key, [])
    if not isinstance(values, list):
        raise SchemaError(f"{place}: expected a list of {key}, found {values!r}")
    return tuple(values)
