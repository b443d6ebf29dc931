"""`inferlog billing`: report to Stripe what is billed, and compare the two sides' sums."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

from infra.away import unanswered
from infra.postgres import is_outage
from infra.settings import billing_settings
from infra.telemetry import configure_logging
from streams.billing import app
from streams.billing.adjustments_commands import adjust_command, adjustments_command
from streams.billing.outcome import PassReport
from streams.billing.reconcile import Compared, Comparison, Difference
from streams.billing.stripe_gateway import CallFailed, StripeUnusable

T = TypeVar("T")


@click.group(epilog="Example:  inferlog billing run --once && inferlog billing compare")
def billing() -> None:
    """Report usage and its corrections to Stripe, compare totals, and correct what is billed."""


billing.add_command(adjust_command)
billing.add_command(adjustments_command)


@billing.command(epilog="Example:  inferlog billing run --once --json")
@click.option("--once", is_flag=True, help="One pass; exit 1 if anything is left to send or needs a person.")
@click.option("--include-open-hours", is_flag=True, help="Also report hours that can still grow; growth follows.")
@click.option("--retry-rejected", is_flag=True, help="With --once: say again what Stripe refused, its cause removed.")
@click.option("--json", "as_json", is_flag=True, help="Print each pass as one JSON object.")
def run(once: bool, include_open_hours: bool, retry_rejected: bool, as_json: bool) -> None:
    """Send what is billed (usage plus corrections) and Stripe has not been told, and confirm what was sent."""
    if retry_rejected and not once:
        raise click.UsageError("--retry-rejected needs --once")
    configure_logging()
    settings = billing_settings()
    if not once:
        _finish(app.run(settings, include_open_hours=include_open_hours, each=lambda r: _print_pass(r, as_json)))
        return
    report = _finish(app.run_once(settings, include_open_hours=include_open_hours, retry_rejected=retry_rejected))
    _print_pass(report, as_json)
    if not report.is_settled:
        raise SystemExit(1)


@billing.command(epilog="Example:  inferlog billing compare --json")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON object.")
def compare(as_json: bool) -> None:
    """Compare what the ledger bills, usage plus corrections, with Stripe for every customer and meter.

    Exits 1 on any difference but by what was carried: units of hours too old for Stripe's events, billed by invoice
    items. Counts every hour that is sealed, was reported, or has a sum at Stripe.
    """
    configure_logging("WARNING")
    found = _finish(app.compare_all(billing_settings()))
    differs = bool(found.outside) or any(c.differing for c in found.pairs)
    if as_json:
        rows = [_comparison_row(c) for c in found.pairs]
        about = {"equal": not differs, "compared": rows, "open_sums": found.open_sums, "outside": list(found.outside)}
        click.echo(json.dumps(about))
    else:
        click.echo("\n".join(_comparison_lines(found)))
    if differs:
        raise SystemExit(1)


def _finish(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (app.AnotherSender, StripeUnusable, CallFailed) as error:
        raise click.ClickException(str(error)) from error
    except Exception as error:
        if not is_outage(error):
            raise
        raise click.ClickException(unanswered("Postgres", error)) from error


def _print_pass(report: PassReport, as_json: bool) -> None:
    if as_json:
        fields = {
            "settled": report.is_settled,
            "counts": dict(sorted(report.counts.items())),
            "alerts": list(report.alerts),
            "differences": [_difference_row(d) for d in report.differences],
            "open_sums": report.open_sums,
        }
        click.echo(json.dumps(fields))
        return
    click.echo(_summary(report))
    for d in report.differences:
        where = f"{d.key.customer_id} {d.key.meter} {d.key.hour:%Y-%m-%dT%H}:00Z"
        click.echo(f"differs: {where}: told {d.our_units}, Stripe counts {d.stripe_units:g}")
    for sentence in report.alerts:
        click.echo(f"alert: {sentence}")


def _summary(report: PassReport) -> str:
    """What was done, and what is there but not yet reported."""
    done = ", ".join(f"{n} {word}" for word, n in sorted(report.counts.items()) if n)
    if not report.open_sums:
        return done or "nothing to report"
    n = report.open_sums
    left = f"{n} {'sum is' if n == 1 else 'sums are'} in hours still open"
    return f"{done or 'nothing reported'}; {left} (reported after they end; --include-open-hours reports them now)"


def _comparison_lines(found: Compared) -> list[str]:
    width = max((len(c.customer) for c in found.pairs), default=0)
    lines = []
    for c in found.pairs:
        mark = "differs" if c.differing else "equal but for what was carried" if c.carried else "equal"
        lines.append(
            f"{c.customer:<{width}}  {c.customer_id}  {c.meter:<12} "
            f"ledger {c.ledger_units:>12}  stripe {c.stripe_units:>12.0f}  {mark}"
        )
        for d in c.differing:
            also = f"  carried {d.carried_units}" if d.carried_units else ""
            lines.append(f"    {d.key.hour:%Y-%m-%dT%H}:00Z  ledger {d.our_units}  stripe {d.stripe_units:g}{also}")
        for d in c.carried:
            lines.append(
                f"    {d.key.hour:%Y-%m-%dT%H}:00Z  ledger {d.our_units}  stripe {d.stripe_units:g}  "
                f"carried {d.carried_units}: too old for an event, billed by an invoice item"
            )
    lines.append(f"{len(found.pairs)} compared, {sum(1 for c in found.pairs if c.differing)} differ")
    lines += [f"not compared: {sentence}" for sentence in found.outside]
    if n := found.open_sums:
        lines.append(f"not compared: {n} {'sum' if n == 1 else 'sums'} in hours still open, which are reported later")
    return lines


def _difference_row(d: Difference) -> dict[str, Any]:
    return {
        "customer_id": d.key.customer_id,
        "meter": d.key.meter,
        "hour": d.key.hour.isoformat(),
        "our_units": d.our_units,
        "stripe_units": _whole(d.stripe_units),
        "carried_units": d.carried_units,
    }


def _comparison_row(c: Comparison) -> dict[str, Any]:
    return {
        "customer_id": c.customer_id,
        "customer": c.customer,
        "meter": c.meter,
        "ledger_units": c.ledger_units,
        "stripe_units": _whole(c.stripe_units),
        "equal": not c.differing,
        "differing_hours": [_difference_row(d) for d in c.differing],
        "carried_hours": [_difference_row(d) for d in c.carried],
    }


def _whole(units: float) -> float:
    return int(units) if units == int(units) else units
