"""`docs/events.md`, made from the schemas, the topics and the golden records: `make docs` writes it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from schemas import headers
from schemas.frame import HEADER_BYTES
from schemas.gate.catalogue import Catalogue, Entry, golden_name
from schemas.gate.checkout import Checkout
from schemas.outline import Field, Node, outline, walk
from schemas.topics import Topic, all_topics

_HEX_WIDTH = 96
_HEADERS = (
    (headers.SCHEMA, "full name of the record"),
    (
        headers.FINGERPRINT,
        "CRC-64-AVRO of the schema it was written with, 16 hex digits, little-endian, as in [ids](#ids)",
    ),
    (headers.PRODUCER, "program and version that wrote it, as in `gpu_worker/0.1.0`"),
    (
        headers.EVENT_ID,
        "`event_id` as text; only on what the relay publishes: changes of tables and the ledger's dead letters",
    ),
    (headers.TRACEPARENT, "W3C trace context of the call that caused the record; absent when there is none"),
)


def event_page(found: Catalogue) -> str:
    """The page as Markdown. The catalogue has passed the gate."""
    topics = {t.record.SCHEMA: t for t in all_topics(("<pool>",))}
    newest = {record: found.entries_of(record)[-1] for record in found.records()}
    trees = {record: outline(found.definitions[entry["file"]]) for record, entry in newest.items()}
    preface = files("schemas").joinpath("events_preface.md").read_text(encoding="utf-8")
    preface = preface.replace("@HEADERS@", _table(("header", "value"), [(f"`{n}`", v) for n, v in _HEADERS]))
    preface = preface.replace("@RECORDS@", _overview(trees, newest, topics))
    sections = [_section(found, tree, topics.get(record)) for record, tree in trees.items()]
    return "\n".join([preface, "## Records\n", *sections, _parts(found, trees), _ids(found.entries)])


def _overview(trees: dict[str, Node], newest: dict[str, Entry], topics: dict[str, Topic]) -> str:
    rows = []
    for record, tree in trees.items():
        topic = topics.get(record)
        kept = (_topic_name(newest[record], topic), topic.key if topic else "", topic.kept if topic else "")
        first = tree.doc.partition(". ")[0].rstrip(".")
        link = f"[{tree.short_name}](#{tree.short_name.lower()})"
        rows.append((link, f"`{kept[0]}`", *kept[1:], _words(first)))
    return _table(("record", "topic", "key", "kept", "says"), rows)


def _section(found: Catalogue, tree: Node, topic: Topic | None) -> str:
    entries = found.entries_of(tree.name)
    newest = entries[-1]
    lines = [
        f"### {tree.short_name}\n",
        f"{_words(tree.doc)}\n",
        f"Full name `{tree.name}`, topic `{_topic_name(newest, topic)}`",
    ]
    if topic is None:
        lines[-1] += ".\n"
    else:
        grows = ", more where load asks for it" if topic.may_grow else ""
        count = "1 partition" if topic.partitions == 1 else f"{topic.partitions} partitions"
        lines[-1] += f", key: {topic.key}, {count}{grows}, kept {topic.kept}. {topic.why}\n"
    lines.append(_fields(tree, _since(found, entries)) + "\n")
    versions = ", ".join(f"{e['version']} (id {e['id']}, `schemas/avro/{e['file']}`)" for e in entries)
    lines.append(f"Versions: {versions}.\n")
    example = found.goldens[golden_name(newest)]
    record = json.dumps(example["record"], indent=2, ensure_ascii=False)
    lines += [f"Example, version {newest['version']}:\n", "```text", *_hex(example["hex"]), "```\n"]
    lines += ["```json", record, "```\n"]
    return "\n".join(lines)


def _fields(tree: Node, since: dict[tuple[str, str], int]) -> str:
    rows = []
    for field in tree.fields:
        version = since.get((tree.name, field.name), 1)
        added = f" Since version {version}." if version > 1 else ""
        rows.append((f"`{field.name}`", _type(field.type), _default(field), _words(field.doc) + added))
    return _table(("field", "type", "default", "meaning"), rows)


def _since(found: Catalogue, entries: Sequence[Entry]) -> dict[tuple[str, str], int]:
    """Type and field to the version of this record that brought it; a type that is new itself brings nothing."""
    known: dict[tuple[str, str], int] = {}
    types: set[str] = set()
    for entry in entries:
        nodes = [node for _, node in walk(outline(found.definitions[entry["file"]])) if node.kind == "record"]
        for node in nodes:
            for field in node.fields:
                known.setdefault((node.name, field.name), int(entry["version"]) if node.name in types else 1)
        types |= {node.name for node in nodes}
    return known


def _parts(found: Catalogue, trees: dict[str, Node]) -> str:
    """The types inside records, each once: its section is where every field of that type points to."""
    lines = ["## Parts of records\n"]
    told: set[str] = set()
    for record, tree in trees.items():
        since = _since(found, found.entries_of(record))
        for _, node in walk(tree):
            if not node.name or node.name in trees or node.name in told:
                continue
            told.add(node.name)
            lines += [f"### {node.short_name}\n", f"{_words(node.doc)}\n"]
            if node.kind == "enum":
                symbols = ", ".join(f"`{s}`" for s in node.symbols)
                lines.append(f"An enum: {symbols}; unknown symbols read as `{node.default}`.\n")
            else:
                lines.append(_fields(node, since) + "\n")
    return "\n".join(lines)


def _ids(entries: Iterable[Entry]) -> str:
    rows = [
        (str(e["id"]), str(e["record"]), str(e["version"]), f"`{e['subject']}`", f"`{e['fingerprint']}`")
        for e in entries
    ]
    table = _table(("id", "record", "version", "subject", "fingerprint"), rows)
    return f"## Ids\n\nThe append-only list that every program carries (`schemas/schemas.lock.json`).\n\n{table}\n"


def _topic_name(entry: Entry, topic: Topic | None) -> str:
    return topic.name if topic else str(entry["subject"]).removesuffix("-value")


def _type(node: Node) -> str:
    if node.nullable is not None:
        return f"null or {_type(node.nullable)}"
    if node.items is not None:
        return f"array of {_type(node.items)}" if node.kind == "array" else f"map of string to {_type(node.items)}"
    if node.name:
        return f"[{node.short_name}](#{node.short_name.lower()})"
    return f"{node.kind} ({node.logical})" if node.logical else node.kind


def _default(field: Field) -> str:
    return f"`{json.dumps(field.default)}`" if field.has_default else ""


def _words(doc: str) -> str:
    """A description as Markdown, in which <id> would be taken for a tag."""
    return doc.replace("<", "&lt;")


def _hex(digits: str) -> Iterator[str]:
    body = 2 * HEADER_BYTES
    yield f"{digits[:2]} {digits[2:body]}"
    yield from textwrap.wrap(digits[body:], _HEX_WIDTH)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(f"| {line} |" for line in cells).replace("| --- ", "|---").replace("--- |", "---|")


if __name__ == "__main__":
    checkout = Checkout()
    with checkout.turn():
        checkout.write_page(event_page(checkout.catalogue()))
