"""`inferlog schemas`: list what is published, check it against every rule, publish a new version."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import click

from schemas.gate.additions import addition
from schemas.gate.catalogue import Catalogue, golden_name
from schemas.gate.check import gate_findings
from schemas.gate.checkout import Checkout, HistoryUnreadable
from schemas.gate.drafts import Past, draft_ids, removal
from schemas.gate.findings import Finding, Refused
from schemas.gate.golden import GoldenError, golden_text
from schemas.gate.lock_rules import entry_findings, lock_findings
from schemas.gate.text_files import Unreadable, read_text
from schemas.gate.turns import Busy

_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
#: A schema's file with all its spacing; what is published of it may be far less.
_MOST_BYTES = 1024 * 1024
_LISTED = ("id", "record", "version", "subject", "fingerprint")


@click.group(epilog="Example:  inferlog schemas list && inferlog schemas check")
@click.pass_context
def schemas(context: click.Context) -> None:
    """List, check and publish the schemas of the log's records."""
    context.obj = context.obj or Checkout()


@schemas.command("list", epilog="Example:  inferlog schemas list --json")
@_JSON
@click.pass_obj
def list_schemas(checkout: Checkout, as_json: bool) -> None:
    """List every published schema by its id on the wire."""
    _take_turn(checkout, shared=True)
    entries = [{key: entry.get(key) for key in _LISTED} for entry in _catalogue(checkout).entries]
    if as_json:
        click.echo(json.dumps({"schemas": entries}))
        return
    rows = [_LISTED, *(tuple(str(v) for v in e.values()) for e in entries)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_LISTED))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@schemas.command(epilog="Example:  inferlog schemas check --against main")
@click.option("--against", metavar="REF", help="Compare the lock file with this commit's only, not with all its past.")
@_JSON
@click.pass_obj
def check(checkout: Checkout, against: str | None, as_json: bool) -> None:
    """Check all versions of all records against each other, the lock file against its past, docs/events.md.

    Exits 1 when a rule is broken; each finding says which field, which rule, and what to do instead.
    """
    _same_checkout(checkout)
    _take_turn(checkout, shared=True)
    try:
        past = checkout.remembered(against)
    except HistoryUnreadable as error:
        raise click.ClickException(str(error)) from error
    found = checkout.catalogue()
    # Against one commit nobody can tell what is in the others.
    drafts = draft_ids(found.entries, past.locks) if against is None else ()
    broken = gate_findings(found, older=past.locks, drafts=drafts) or _page_findings(checkout, found)
    broken = (*checkout.leftovers(), *broken)
    if as_json:
        document = {
            "schemas": len(found.entries),
            "past_lock_files": len(past.locks),
            "note": past.note,
            "findings": [asdict(f) for f in broken],
        }
        click.echo(json.dumps(document))
    else:
        _tell(broken)
        if past.note:
            click.echo(f"note: {past.note}")
        if not broken:
            click.echo(
                f"schemas: {len(found.entries)} published, all versions read each other; the lock file only grew "
                f"({len(past.locks)} earlier ones)"
            )
    if broken:
        sys.exit(1)


@schemas.command(epilog="Example:  inferlog schemas add usage_recorded.avsc")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--topic", metavar="NAME", help="Topic of a new record that schemas/topics.py does not have yet.")
@click.option(
    "--id", "schema_id", type=int, metavar="N", help="Id to take, above all here; for whoever lost a race of branches."
)
@_JSON
@click.pass_obj
def add(checkout: Checkout, file: Path, topic: str | None, schema_id: int | None, as_json: bool) -> None:
    """Publish FILE as the next version of its record, or say why it may not be and change nothing.

    Writes the schema, its id, its golden record and docs/events.md, and says what to do next.
    """
    _needs_source(checkout)
    none: dict[str, Any] | None = {"added": None, "next": []} if as_json else None
    try:
        text = read_text(file, most_bytes=_MOST_BYTES)
    except Unreadable as error:
        remedy = "name a file with the schema as one JSON object in UTF-8, as those in schemas/avro are."
        _refuse(Refused.because(str(file), "file", f"The file is no schema: {error}.", remedy), none)
    _take_turn(checkout)
    found = checkout.catalogue()
    drafts = draft_ids(found.entries, _past(checkout))
    try:
        added = addition(found, text, file=str(file), topic=topic, schema_id=schema_id, drafts=drafts)
    except Refused as error:
        _refuse(error, none)
    # Only now: this loads the codec, which refuses to load beside a published schema that was edited.
    from schemas.gate.event_page import event_page

    checkout.write(added, event_page(added.catalogue))
    if as_json:
        click.echo(json.dumps({"added": dict(added.entry), "findings": [], "next": list(added.next_steps)}))
        return
    entry = added.entry
    where = _shown(checkout, f"schemas/avro/{entry['file']}")
    click.echo(f"published {entry['record']} version {entry['version']} as id {entry['id']} ({where})")
    click.echo("next:")
    for number, step in enumerate(added.next_steps, 1):
        click.echo(f"  {number}. {step}")


@schemas.command(epilog="Example:  inferlog schemas golden usage_recorded.json")
@click.argument("name")
@_JSON
@click.pass_obj
def golden(checkout: Checkout, name: str, as_json: bool) -> None:
    """Make the bytes of schemas/golden/NAME anew from its record, which was edited; docs/events.md with it."""
    _needs_source(checkout)
    _take_turn(checkout)
    found = _catalogue(checkout)
    if malformed := [*entry_findings(found.entries)]:
        raise click.ClickException("\n".join(f.text() for f in malformed))
    name = Path(name).name
    entry = next((e for e in found.entries if golden_name(e) == name), None)
    if entry is None or name not in found.goldens:
        raise click.ClickException(f"schemas/golden/{name}: expected a golden file of the lock file, holding an object")
    if entry["file"] not in found.definitions:
        raise click.ClickException(f"schemas/avro/{entry['file']}: expected its schema; see  inferlog schemas check")
    try:
        record = found.goldens[name].get("record", {})
        text = golden_text(int(entry["id"]), found.definitions[entry["file"]], record)
    except GoldenError as error:
        raise click.ClickException(f"schemas/golden/{name}: {error}") from error
    from schemas.gate.event_page import event_page  # late, as above

    made = replace(found, golden={**found.golden, name: text})
    drafts = draft_ids(found.entries, _past(checkout))
    # Golden records of other files that are being edited too wait for their own turn; a broken file does not pass.
    waiting = [f for f in lock_findings(found, drafts=drafts) if f.rule == "golden"]
    readable = {golden_name(e) for e in found.entries} <= found.goldens.keys()
    if broken := [f for f in lock_findings(made, drafts=drafts) if not (readable and f in waiting)]:
        raise click.ClickException("\n".join(f.text() for f in broken))
    checkout.write_golden(name, text, event_page(made))
    where = _shown(checkout, f"schemas/golden/{name}")
    click.echo(json.dumps({"golden": name}) if as_json else f"{where} and docs/events.md are written")


@schemas.command(epilog="Example:  inferlog schemas drop UsageRecorded")
@click.argument("name")
@_JSON
@click.pass_obj
def drop(checkout: Checkout, name: str, as_json: bool) -> None:
    """Take back the newest version of record NAME (or of schema file NAME), while it is in no commit.

    Removes its entry, its golden record and its schema file; one that was edited since is kept, to be added again.
    """
    _needs_source(checkout)
    _take_turn(checkout)
    try:
        dropped = removal(checkout.catalogue(), name, _past(checkout))
    except Refused as error:
        _refuse(error, {"dropped": None} if as_json else None)
    checkout.drop(dropped)
    entry, file = dropped.entry, f"schemas/avro/{dropped.entry['file']}"
    steps = [f"it was edited since and is kept; add it again, or delete it:  inferlog schemas add {file}"]
    steps = steps if dropped.edited else []
    if lock_findings(dropped.catalogue):
        steps.append("the page waits, since more is broken: inferlog schemas check, and then  make docs")
    else:
        # Only now, when the lock file no longer speaks of a file that may have been edited: this loads the codec.
        from schemas.gate.event_page import event_page

        checkout.write_page(event_page(dropped.catalogue))
    steps.append("a stack on which  inferlog provision  or  inferlog up  ran with it has it on its log and keeps it.")
    if as_json:
        click.echo(json.dumps({"dropped": dict(entry), "kept": dropped.edited, "findings": [], "next": steps}))
        return
    click.echo(f"dropped {entry['record']} version {entry['version']}, id {entry['id']} ({_shown(checkout, file)})")
    for step in steps:
        click.echo(f"  {step}")


def _catalogue(checkout: Checkout) -> Catalogue:
    """Everything published, for a command that only goes by the lock file."""
    _same_checkout(checkout)
    found = checkout.catalogue()
    if (broken := found.lock_unreadable()) is not None:
        raise click.ClickException(broken.text())
    return found


def _take_turn(checkout: Checkout, *, shared: bool = False) -> None:
    """Nobody else changes what is published until this command ends."""
    try:
        click.get_current_context().with_resource(checkout.turn(shared=shared))
    except Busy as error:
        raise click.ClickException(str(error)) from error


def _past(checkout: Checkout) -> Past:
    try:
        return checkout.remembered().locks
    except HistoryUnreadable as error:
        raise click.ClickException(str(error)) from error


def _page_findings(checkout: Checkout, found: Catalogue) -> tuple[Finding, ...]:
    """Whether the page is what the schemas make, which have passed the gate. An installed package has no page."""
    if not checkout.is_source:
        return ()
    from schemas.gate.event_page import event_page  # late, as above

    if checkout.page_text() == event_page(found):
        return ()
    problem = "docs/events.md is not what the schemas make, and it is what analysts read."
    remedy = "make docs  (what people write on it belongs into schemas/events_preface.md)."
    return (Finding(record="docs/events.md", path="", rule="page", problem=problem, remedy=remedy),)


def _same_checkout(checkout: Checkout) -> None:
    """Refuses to work on one clone while somebody stands in another, since what is printed would not say which."""
    other = checkout.other_than_here(Path.cwd())
    if other is not None:
        raise click.ClickException(
            f"this program is that of {checkout.root.resolve()} and the current folder lies in another checkout, "
            f"{other.resolve()}; nothing was done. Use the program of the checkout you mean, by its path or by "
            f"activating its environment (make setup makes it):  {other.resolve()}/.venv/bin/inferlog"
        )


def _shown(checkout: Checkout, path: str) -> str:
    """A path of the checkout, as it is found from the current folder."""
    return path if Path.cwd() == checkout.root.resolve() else str(checkout.root.resolve() / path)


def _refuse(error: Refused, document: dict[str, Any] | None) -> NoReturn:
    if document is not None:
        click.echo(json.dumps({**document, "findings": [asdict(f) for f in error.findings]}))
    else:
        _tell(error.findings)
        click.echo("nothing was changed")
    sys.exit(1)


def _needs_source(checkout: Checkout) -> None:
    if not checkout.is_source:
        raise click.ClickException(
            f"{checkout.root} is no checkout of inferlog: schemas are published in its repository, with a release. "
            "Clone it and run this there"
        )
    _same_checkout(checkout)


def _tell(findings: Sequence[Finding]) -> None:
    for finding in findings:
        click.echo(finding.text())
        click.echo()
