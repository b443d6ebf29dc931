"""`inferlog provision` and `inferlog topics`: create what an installation needs, or say how it differs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from infra import provision as provisioning
from infra.arguments import Parsed
from infra.provision import Provisioned
from infra.schema_publish import SchemaConflict
from infra.settings import operator_settings
from schemas.topics import DEFAULT_POOL, Topic, all_topics, require_pool_name

_pools = click.option(
    "--pool",
    "pools",
    type=Parsed("name", require_pool_name),
    multiple=True,
    default=(DEFAULT_POOL,),
    show_default=True,
    help="Worker pool to serve.",
)


@click.command(epilog="Example:  inferlog provision --pool default --pool gpu-a --json")
@_pools
@click.option("--check", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
def provision(pools: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Create topics, tables and the bucket, and put schemas on the log; report drift, never change what holds data.

    Request topics get the partitions they lack; everything else that exists otherwise than declared is left alone.
    Exits 3 when there is such drift, with --check also when something is missing. May be repeated.
    """
    settings = operator_settings()
    try:
        if check:
            done = asyncio.run(provisioning.examine(settings, pools=pools))
        else:
            say = (lambda _line: None) if as_json else click.echo
            done = asyncio.run(provisioning.provision(settings, pools=pools, progress=say))
    except (SchemaConflict, provisioning.MigrationChanged) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(asdict(done)))
    else:
        for line in _lines(done, check=check, bucket=settings.s3.bucket):
            click.echo(line)
    if done.drift or (check and not done.nothing_new):
        raise SystemExit(3)


def _lines(done: Provisioned, *, check: bool, bucket: str) -> Iterator[str]:
    """What was done beyond the lines of progress; of a check, all that would be."""
    if check:
        yield from (f"would create topic {name}" for name in done.topics)
        if done.schemas:
            yield f"would put schemas on the log: ids {', '.join(map(str, done.schemas))}"
        yield from (f"would apply migration {name}" for name in done.migrations)
        if done.bucket_created:
            yield f"would create bucket {bucket}"
        if done.blobs_expire:
            yield f"would let large tensors in bucket {bucket} expire"
        if done.nothing_new:
            yield "nothing is missing"
    for its in done.unknown_schemas:
        yield (
            f"note: the log has schema id {its.schema_id} ({its.subject} version {its.version}), which this release "
            "has not: a newer one, or another branch, has published it"
        )
    for g in done.grown:
        yield f"{'would grow' if check else 'grew'} {g.topic} from {g.found} to {g.partitions} partitions"
    if done.grown:
        yield (
            "  a gateway sends to new partitions once it is restarted, until then to the earlier ones; workers find "
            "them by themselves; a version whose partitions move is loaded by other workers"
        )
    for d in done.drift:
        yield f"drift: {d.topic} {d.setting}: declared {d.declared}, found {d.found}"
        yield f"  left alone: {d.why}"
        yield f"  to mend it: {d.remedy}"


@click.group(epilog="Example:  inferlog topics list")
def topics() -> None:
    """Topics, as they are declared."""


@topics.command("list", epilog="Example:  inferlog topics list --pool gpu-a --json")
@_pools
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_topics(pools: tuple[str, ...], as_json: bool) -> None:
    """List the topics of an installation with these pools: key, record, partitions, retention, and why."""
    rows = [_row(topic) for topic in all_topics(pools)]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo(f"{row['name']}\n  {row['record']}, key: {row['key']}\n  {_layout(row)}\n  {row['why']}")


def _row(topic: Topic) -> dict[str, object]:
    return {
        "name": topic.name,
        "key": topic.key,
        "record": topic.record.SCHEMA,
        "partitions": topic.partitions,
        "may_grow": topic.may_grow,
        "retention_ms": topic.retention_ms,
        "kept": topic.kept,
        "cleanup_policy": topic.cleanup_policy,
        "max_message_bytes": topic.max_message_bytes,
        "why": topic.why,
    }


def _layout(row: dict[str, object]) -> str:
    count = f"{row['partitions']} partition" + ("" if row["partitions"] == 1 else "s")
    return f"{count}{' or more' if row['may_grow'] else ''}, kept {row['kept']}"
