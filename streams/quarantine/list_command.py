"""`inferlog dead-letters list`: which records were set aside and why, in pages or summed up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import click

from infra.settings import replay_settings
from streams.quarantine import shelf
from streams.quarantine.desk import Desk, open_desk
from streams.quarantine.letters import Place, Selection, State
from streams.quarantine.options import place_of, say_away, selecting
from streams.quarantine.rendering import letter_lines, plain, plain_letter, sort_lines

_ANY = "all"


@click.command("list", epilog="Example:  inferlog dead-letters list --topic usage --kind undecodable --json")
@selecting
@click.option(
    "--state",
    type=click.Choice([*(s.value for s in State), _ANY]),
    default=State.OPEN.value,
    show_default=True,
    help="Only letters in this state.",
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most this many.")
@click.option("--after", help="Go on after this place, as the end of the last page says.")
@click.option("--summary", "as_summary", is_flag=True, help="Only how many there are of each topic, kind and reason.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(
    selection: Selection, state: str, limit: int, after: str | None, as_summary: bool, as_json: bool
) -> None:
    """Show which records were set aside and why, oldest first."""
    settings = replay_settings()
    begin = None if after is None else place_of(after, settings)
    chosen = replace(selection, state=None if state == _ANY else State(state))

    async def run() -> list[str]:
        async with open_desk(settings) as desk:
            say_away(desk)
            if as_summary:
                return await _summary(desk, chosen, as_json=as_json)
            return await _page(desk, chosen, begin, limit, as_json=as_json)

    click.echo("\n".join(asyncio.run(run())))


async def _summary(desk: Desk, chosen: Selection, *, as_json: bool) -> list[str]:
    sorts = await shelf.summary(desk.connection, chosen)
    total = await shelf.count(desk.connection, chosen)
    if as_json:
        return [json.dumps({"letters": total, "sorts": [plain(s) for s in sorts]})]
    return [*(sort_lines(sorts, with_state=chosen.state is None) if sorts else []), _how_many(total)]


async def _page(desk: Desk, chosen: Selection, begin: Place | None, limit: int, *, as_json: bool) -> list[str]:
    if begin is not None and await shelf.find(desk.connection, begin) is None:
        raise click.BadParameter("there is no letter of that place", param_hint="--after")
    letters = await shelf.page(desk.connection, chosen, after=begin, limit=limit + 1)
    more = len(letters) > limit
    letters = letters[:limit]
    ns = desk.namespace
    last = letters[-1].place.short(namespace=ns) if more else None
    if as_json:
        return [json.dumps({"letters": [plain_letter(x, namespace=ns) for x in letters], "next": last})]
    if not letters:
        return ["no dead letters" if chosen.state is None else f"no {chosen.state.value} dead letters"]
    lines = letter_lines(letters, namespace=ns, with_state=chosen.state is None)
    if last is not None:
        lines.append(f"there are more:  --after {last}, or --summary")
    return lines


def _how_many(total: int) -> str:
    return f"{total} dead letter{'' if total == 1 else 's'}"
