"""`make demo`: from one HTTP call to a billed hour, on real servers, checked against local torch and Stripe's sums.

Run it again and the totals grow by exactly the second run. Exits 1 and names the ids when any claim fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from docs.demo import digits, minilm
from docs.demo.checks import Check, equal_accuracy, equal_answers, equal_totals, refused_free
from docs.demo.shell import DemoFailed, inferlog, inferlog_json, say, step
from docs.demo.traffic import Sent, send_digits, send_sentences
from infra.local.stack import Stack, StackError
from infra.settings import home_dir

#: name, requests per second, burst
CUSTOMERS = (("acme", 2000, 500), ("globex", 200, 100), ("initech", 2, 5))
_HASTY_CALLS = 40
_LEDGER_WITHIN_S = 60.0

Totals = dict[tuple[str, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """A customer of this run: its id and the secret of a key made for the run."""

    name: str
    customer_id: str
    key: str


@click.command(epilog="Example:  python -m docs.demo --json")
@click.option("--json", "as_json", is_flag=True, help="Print what was accepted as one JSON object on the last line.")
def main(as_json: bool) -> None:
    """Run real inferences through the whole system and check the bill. Exits 1 when any claim fails, 130 on Ctrl-C."""
    try:
        status = _demo(as_json)
    except KeyboardInterrupt:
        say("\ninterrupted; nothing is lost, run it again")
        status = 130
    sys.exit(status)


def _demo(as_json: bool) -> int:
    started = time.monotonic()
    stack = Stack(home_dir())
    was_up = any(part.healthy for part in stack.status())
    try:
        with step("Start Kafka, PostgreSQL, Valkey, SeaweedFS, the Stripe stand-in, API, worker and ledger"):
            env = stack.up(progress=lambda line: say(f"   {line}"))
        url = f"http://127.0.0.1:{env['INFERLOG_API_PORT']}"
        checks, accepted = run(url)
    except (DemoFailed, StackError) as error:
        say(f"\nThe demo could not finish: {error}")
        return 1
    finally:
        if not was_up:
            with step("Stop everything (data stays; `make up` brings it back)"):
                stack.down()
    failed = [c for c in checks if not c.holds]
    say(f"\n{len(checks) - len(failed)} of {len(checks)} claims hold, in {time.monotonic() - started:.0f} s in all.")
    if not failed:
        say("Next: make up, then see README 'Try it by hand'.")
    if as_json:
        grown: Counter[str] = Counter()
        for (_, meter), units in accepted.items():
            grown[meter] += units
        say(json.dumps({"claims": len(checks), "failed": [c.claim for c in failed], "accepted": grown}))
    return 1 if failed else 0


def run(url: str) -> tuple[list[Check], Totals]:
    """Publish, send, wait, bill, compare; returns the checks and what was accepted. Raises DemoFailed."""
    bundles = home_dir() / "bundles"
    with step("Publish two real models: digits (MLP trained here) and minilm (exported to .pt2)"):
        digits.build(bundles / "digits")
        minilm.build(bundles / "minilm")
        inferlog("models", "publish", "digits", str(bundles / "digits"), "--route", show=True)
        inferlog("models", "publish", "minilm", str(bundles / "minilm"), "--route", show=True)
    with step("Create three customers with keys and limits of their own"):
        customers = [_customer(name, rate, burst) for name, rate, burst in CUSTOMERS]
        before = {c.customer_id: _usage(url, c) for c in customers}
        _wait_for_models(url, customers[0])
    acme, globex, initech = customers
    rows, labels = digits.held_out()
    sentences = files("docs.demo").joinpath("sentences.txt").read_text(encoding="utf-8").split("\n")[:60]
    with step(f"Send {len(rows)} digits, {len(sentences)} sentences, {_HASTY_CALLS} hasty calls"):
        sent = asyncio.run(_traffic(url, (acme, globex, initech), rows, sentences))
        for customer in customers:
            got = sent[customer.name]
            say(f"   {customer.name}: {len(got.answers)} answered, {got.refused} refused")
    failures = [f for s in sent.values() for f in s.failures]
    if failures:
        raise DemoFailed(f"{len(failures)} calls failed, first: {failures[:5]}")
    accepted = _accepted(customers, sent)
    with step("Wait until the ledger has caught up"):
        billed = _wait_for_ledger(url, customers, before, accepted)
    with step("Report the hours to Stripe (the stand-in)"):
        inferlog("billing", "run", "--once", "--include-open-hours", show=True)
        ledger, at_stripe = _both_sides(inferlog_json("billing", "compare"))
    with step("Prove the promises from the log and the tables"):
        inferlog("verify", "--wait", show=True)
    checks = [
        equal_answers("digits", sent["acme"].answers, digits.reference(bundles / "digits", rows), tolerance=1e-4),
        equal_answers("minilm", sent["globex"].answers, minilm.reference(sentences), tolerance=1e-4),
        equal_accuracy(sent["acme"].answers, digits.reference(bundles / "digits", rows), labels),
        equal_totals("accepted = billed per customer, in this run", "accepted", "billed", accepted, billed),
        equal_totals("Stripe's sum = ledger's sum, of all runs so far", "ledger", "Stripe", ledger, at_stripe),
        refused_free(
            {c.name: sent[c.name].refused for c in customers if sent[c.name].refused or c is initech},
            {c.name: billed.get((c.name, "requests"), 0) for c in customers},
            {c.name: accepted.get((c.name, "requests"), 0) for c in customers},
        ),
    ]
    _show(checks)
    return checks, accepted


def _customer(name: str, rate: int, burst: int) -> Customer:
    known = {c["name"]: c["customer_id"] for c in inferlog_json("customers", "list")}
    if name not in known:
        made = inferlog_json("customers", "create", name, "--requests-per-s", str(rate), "--burst", str(burst))
        known[name] = made["customer_id"]
    key = inferlog_json("keys", "create", known[name], "--label", "demo")
    say(f"   {name}: {rate}/s, burst {burst}")
    return Customer(name=name, customer_id=known[name], key=key["key"])


def _get(url: str, key: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def _usage(url: str, customer: Customer) -> Counter[str]:
    totals: Counter[str] = Counter(_get(f"{url}/v1/usage", customer.key)["totals"])
    return totals


def _wait_for_models(url: str, customer: Customer) -> None:
    ends = time.monotonic() + 30
    while True:
        listed = {m["id"] for m in _get(f"{url}/v1/models", customer.key)["data"]}
        if {"digits", "minilm"} <= listed:
            return
        if time.monotonic() > ends:
            raise DemoFailed(f"the API serves {sorted(listed)}, expected digits and minilm")
        time.sleep(0.1)


async def _traffic(
    url: str, customers: tuple[Customer, Customer, Customer], rows: list[list[float]], sentences: list[str]
) -> dict[str, Sent]:
    acme, globex, initech = customers
    found = await asyncio.gather(
        send_digits(url, acme.key, rows),
        send_sentences(url, globex.key, sentences),
        send_digits(url, initech.key, rows[:_HASTY_CALLS]),
    )
    return dict(zip((c.name for c in customers), found, strict=True))


def _accepted(customers: list[Customer], sent: dict[str, Sent]) -> Totals:
    """What each customer must be billed, from the answers alone."""
    totals: Totals = {}
    for c in customers:
        totals[c.name, "requests"] = len(sent[c.name].answers)
        totals[c.name, "items"] = sum(len(a.vectors) for a in sent[c.name].answers)
        if sent[c.name].tokens:
            totals[c.name, "tokens"] = sent[c.name].tokens
    return totals


def _wait_for_ledger(url: str, customers: list[Customer], before: dict[str, Counter[str]], accepted: Totals) -> Totals:
    """What this run added to each customer's usage, once it is complete or the wait is over."""
    ends = time.monotonic() + _LEDGER_WITHIN_S
    while True:
        billed: Totals = {}
        for c in customers:
            for meter, total in _usage(url, c).items():
                if grown := total - before[c.customer_id][meter]:
                    billed[c.name, meter] = grown
        say(f"   {sum(billed.values())} of {sum(accepted.values())} units in the ledger")
        if billed == accepted or time.monotonic() > ends:
            return billed
        time.sleep(0.5)


def _both_sides(compared: Any) -> tuple[Totals, Totals]:
    """The ledger's and Stripe's totals of every hour so far, of earlier runs too."""
    ledger: Totals = {}
    stripe: Totals = {}
    for row in compared["compared"]:
        key = (row["customer"] or row["customer_id"], row["meter"])
        ledger[key] = row["ledger_units"]
        stripe[key] = row["stripe_units"]
    return ledger, stripe


def _show(checks: list[Check]) -> None:
    console = Console(width=110, highlight=False)
    for position, check in enumerate(checks, start=1):
        table = Table()
        for number, column in enumerate(check.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in check.rows:
            table.add_row(*row)
        # Not as the table's title, which is broken at the table's width.
        mark = "✓" if check.holds else "✗"
        console.print(f"\n{mark} {position} of {len(checks)}: {check.claim}", style="bold")
        console.print(table)
        for name in check.disagree[:10]:
            console.print(f"  disagrees: {name}", style="red")


if __name__ == "__main__":
    main()
