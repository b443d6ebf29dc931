"""`make bench-codec`: usage records to bytes and back on one core, ours beside bare fastavro in the same run.

Ours is the whole path: typed event, every field checked, Confluent frame. Bare fastavro writes and reads the same dict
with the same schema. The rounds alternate, so that noise of the machine meets both; the last line is one JSON object.
Exits 1 when ours falls below 0.6 of bare fastavro.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from io import BytesIO
from typing import Any

import click
import fastavro

from schemas.codec import decode, encode
from schemas.datum import Shape
from schemas.lockfile import latest
from schemas.records import UsageRecorded
from tests.factories import usage

TARGET_RATIO = 0.6


@click.command(epilog="Example:  python -m benchmarks.codec --records 2000 --rounds 5")
@click.option("--records", default=5_000, show_default=True, help="Records in one round.")
@click.option("--rounds", default=21, show_default=True, help="Rounds of each kind; the median counts.")
def main(records: int, rounds: int) -> None:
    """Measure the codec of usage records."""
    schema = fastavro.parse_schema(latest(UsageRecorded.SCHEMA).definition(), named_schemas={})
    events = [usage(quantities={"requests": 1, "items": n % 50 + 1, "tokens": 37 * n}) for n in range(records)]
    shape = Shape(UsageRecorded)
    datums = [shape.datum(e) for e in events]
    framed = [encode(e) for e in events]
    bodies = [value[5:] for value in framed]

    def bare_encode(datum: dict[str, Any]) -> bytes:
        out = BytesIO()
        fastavro.schemaless_writer(out, schema, datum)
        return out.getvalue()

    def bare_decode(body: bytes) -> Any:
        return fastavro.schemaless_reader(BytesIO(body), schema, None)

    if [bare_encode(d) for d in datums] != bodies or [decode(v, UsageRecorded) for v in framed] != events:
        raise SystemExit("ours and bare fastavro do not agree on the bytes")
    work: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "encode": (encode, events),
        "bare_encode": (bare_encode, datums),
        "decode": (lambda v: decode(v, UsageRecorded), framed),
        "bare_decode": (bare_decode, bodies),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, (call, given) in work.items():
            began = time.perf_counter()
            for one in given:
                call(one)
            seconds[name].append(time.perf_counter() - began)
    per_s = {name: round(records / statistics.median(taken)) for name, taken in seconds.items()}
    ratios = {
        name: round(statistics.median(b / a for a, b in zip(seconds[name], seconds[f"bare_{name}"], strict=True)), 2)
        for name in ("encode", "decode")
    }
    for name, rate in per_s.items():
        click.echo(f"{name:<12} {rate:>9,} records/s")
    held = min(ratios.values()) >= TARGET_RATIO
    figures = {"records_per_s": per_s, "of_bare_fastavro": ratios, "target": TARGET_RATIO, "held": held}
    figures |= {"bytes": len(framed[0]), "fastavro": fastavro.__version__, "python": platform.python_version()}
    click.echo(json.dumps(figures))
    if not held:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
