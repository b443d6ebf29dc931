"""Usage as bars in a terminal: one block per meter, a bar per period, as wide as the terminal.

Pure. Works without colours, and without any character that ASCII has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, BinaryIO, Final
from zoneinfo import ZoneInfo

from rich.cells import cell_len, set_cell_size

from infra.periods import HOUR, cut
from streams.usage.lines import UsageLine, Wanted
from streams.usage.writers import as_shown, period_label, visible

#: More bars are no picture.
MOST_BARS: Final = 2000
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_SHORT_VERSION: Final = 12
_NARROWEST_BAR: Final = 10


class TooManyBars(ValueError):
    """The answer has more lines than a chart takes; the message says what to do."""


def bar(quantity: int, most: int, width: int, *, plain: bool) -> str:
    """A bar of up to `width` cells in proportion to `most`; whatever is above zero can be seen."""
    if quantity <= 0 or most <= 0:
        return ""
    if plain:
        return "#" * max(1, quantity * width // most)
    eighths = max(1, quantity * width * 8 // most)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


class ChartWriter:
    """Collects the lines, and draws at the end. `whole_until` is up to when sums are complete; None: not known."""

    def __init__(
        self,
        out: BinaryIO,
        encoding: str,
        *,
        interval: str,
        zone: ZoneInfo,
        by: Sequence[str],
        width: int,
        plain: bool,
        whole_until: datetime | None,
        gaps: Sequence[UsageLine] = (),
    ) -> None:
        self._out = out
        self._encoding = encoding
        self._interval = interval
        self._zone = zone
        self._by = by
        self._width = width
        self._plain = plain or not _has(encoding, _EIGHTHS)
        self._whole_until = whole_until
        #: Periods in which nothing was used, one line of quantity 0 for each; a picture of time has no holes.
        self._gaps = gaps
        self._lines: list[UsageLine] = []

    def add(self, lines: Sequence[UsageLine]) -> None:
        """Keep them. Raises TooManyBars."""
        self._lines += lines
        if len(self._lines) > MOST_BARS:
            raise TooManyBars(
                f"more than {MOST_BARS} bars; ask for a longer --interval, less --by, or a range (--from, --month)"
            )

    def end(self, totals: Mapping[str, int], said: Mapping[str, Any], remarks: Sequence[str]) -> None:
        """The blocks and the remarks."""
        if not self._lines:
            self._say("no usage")
        marked = False
        for meter, total in totals.items():
            lines = [line for line in self._lines if line.meter == meter]
            known = {line.start for line in lines}
            lines += [gap for gap in self._gaps if gap.start not in known]
            lines.sort(key=lambda line: (line.start is not None, line.start.timestamp() if line.start else 0))
            self._say(f"{visible(meter)}, {total:,} in all")
            marked |= self._block(lines)
            self._say("")
        for remark in ["* may still grow", *remarks] if marked else remarks:
            self._say(remark)

    def _block(self, lines: Sequence[UsageLine]) -> bool:
        """The bars of one meter; True when one is marked as one that may still grow."""
        labels = [self._label(line) for line in lines]
        most = max(line.quantity for line in lines)
        figures = [f"{line.quantity:,}" for line in lines]
        room = self._width - max(map(len, figures)) - 3
        label_width = max(1, min(max(map(cell_len, labels)), room - _NARROWEST_BAR))
        width = max(_NARROWEST_BAR, room - label_width)
        for line, label, figure in zip(lines, labels, figures, strict=True):
            drawn = bar(line.quantity, most, width, plain=self._plain)
            self._say(f"{set_cell_size(label, label_width)}{'*' if self._grows(line) else ' '} {drawn} {figure}")
        return any(map(self._grows, lines))

    def _label(self, line: UsageLine) -> str:
        values = {
            "customer": line.customer or line.customer_id,
            "model": line.model,
            "version": line.version[:_SHORT_VERSION],
            "price_id": line.price_id,
        }
        return " ".join([period_label(line, self._interval, self._zone), *(visible(values[name]) for name in self._by)])

    def _grows(self, line: UsageLine) -> bool:
        return line.end is not None and (self._whole_until is None or line.end > self._whole_until)

    def _say(self, text: str) -> None:
        self._out.write(as_shown(text.rstrip() + "\n", self._encoding))


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def gap_lines(
    starts: Sequence[datetime], end_of: Callable[[datetime], datetime], wanted: Wanted, *, now: datetime
) -> list[UsageLine]:
    """A line of 0 for each period between the first and the last that is used, so that a picture of time has no holes.

    Of periods that have begun by now: which days hold usage is known by UTC, and a zone's next day may share its last
    hours. None where periods are not what bars stand for, or where there would be more than MOST_BARS.
    """
    shortest = {"hour": HOUR, "day": 23 * HOUR, "month": 28 * 24 * HOUR}.get(wanted.interval)
    if wanted.by or shortest is None or not starts or (starts[-1] - starts[0]) / shortest > MOST_BARS:
        return []
    none = dict.fromkeys(("customer_id", "customer", "model", "version", "price_id", "meter"), "")
    every = cut(starts[0], end_of(starts[-1]), wanted.interval, wanted.zone)
    return [UsageLine(start=start, end=end_of(start), quantity=0, **none) for start in every if start <= now]
