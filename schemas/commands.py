"""`inferlog schemas`: list what is published, check it against every rule, publish a new version."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from schemas.additions import Refused, addition
from schemas.catalogue import golden_name
from schemas.checkout import Checkout, HistoryUnreadable
from schemas.findings import Finding
from schemas.gate import gate_findings
from schemas.golden import GoldenError, golden_text
from schemas.lock_rules import lock_findings

_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
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
    entries = [{key: entry.get(key) for key in _LISTED} for entry in checkout.catalogue().entries]
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
    """Check all versions of all records against each other, the lock file against its past.

    Exits 1 when a rule is broken; each finding says which field, which rule, and what to do instead.
    """
    try:
        past = checkout.remembered(against)
    except HistoryUnreadable as error:
        raise click.ClickException(str(error)) from error
    found = checkout.catalogue()
    broken = gate_findings(found, older=past.locks)
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
@_JSON
@click.pass_obj
def add(checkout: Checkout, file: Path, topic: str | None, as_json: bool) -> None:
    """Publish FILE as the next version of its record, or say why it may not be and change nothing.

    Writes the schema, its id, its golden record and docs/events.md, and says what to do next.
    """
    _needs_source(checkout)
    try:
        added = addition(checkout.catalogue(), file.read_text(encoding="utf-8"), file=str(file), topic=topic)
    except Refused as error:
        if as_json:
            click.echo(json.dumps({"added": None, "findings": [asdict(f) for f in error.findings], "next": []}))
        else:
            _tell(error.findings)
            click.echo("nothing was changed")
        sys.exit(1)
    # Only now: this loads the codec, which refuses to load beside a published schema that was edited.
    from schemas.event_page import event_page

    checkout.write(added, event_page(added.catalogue))
    if as_json:
        click.echo(json.dumps({"added": dict(added.entry), "findings": [], "next": list(added.next_steps)}))
        return
    entry = added.entry
    click.echo(
        f"published {entry['record']} version {entry['version']} as id {entry['id']} (schemas/avro/{entry['file']})"
    )
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
    found = checkout.catalogue()
    name = Path(name).name
    entry = next((e for e in found.entries if golden_name(e) == name), None)
    if entry is None or name not in found.goldens:
        raise click.ClickException(f"schemas/golden/{name}: expected a golden file of the lock file, holding an object")
    try:
        record = found.goldens[name].get("record", {})
        text = golden_text(int(entry["id"]), found.definitions[entry["file"]], record)
    except GoldenError as error:
        raise click.ClickException(f"schemas/golden/{name}: {error}") from error
    from schemas.event_page import event_page  # late, as above

    made = replace(found, golden={**found.golden, name: text})
    if broken := lock_findings(made):
        raise click.ClickException("\n".join(f.text() for f in broken))
    checkout.write_golden(name, text, event_page(made))
    click.echo(json.dumps({"golden": name}) if as_json else f"schemas/golden/{name} and docs/events.md are written")


def _needs_source(checkout: Checkout) -> None:
    if not checkout.is_source:
        raise click.ClickException(
            f"{checkout.root} is no checkout of inferlog: schemas are published in its repository, with a release. "
            "Clone it and run this there"
        )


def _tell(findings: Sequence[Finding]) -> None:
    for finding in findings:
        click.echo(finding.text())
        click.echo()
