"""What is decided of each partition before a ledger reads."""

from __future__ import annotations

import pytest

from streams.ledger.positions import Standing


@pytest.mark.parametrize(
    ("kept", "committed", "next_offset", "begin", "ahead", "gone"),
    [
        (range(9), None, None, 0, False, 0),  # never read
        (range(4, 9), None, None, 4, False, 0),  # never read, and the topic is older than the ledger
        (range(9), 5, 5, 5, False, 0),
        (range(9), 3, 5, 5, False, 0),  # written to Postgres, not yet committed to Kafka
        (range(9), None, 5, 5, False, 0),
        (range(9), 7, 5, 5, True, 0),  # a database from a backup
        (range(9), 5, None, 0, True, 0),  # an emptied database
        (range(4, 9), 7, None, 4, True, 4),  # an emptied database, and some of it is gone
        (range(6, 9), 5, 5, 6, False, 1),  # down for longer than the topic keeps
        (range(5, 9), 5, 5, 5, False, 0),  # all that is gone was counted
        (range(9, 9), 9, 9, 9, False, 0),
        (range(3), None, 5, 0, False, 0),  # the topic was made anew
        (range(3), 5, 5, 0, False, 0),  # with the group's offset left over, past its end
        (range(3), 2, 5, 0, True, 0),  # and somebody of the group has read the new one already
    ],
)
def test_where_the_ledger_begins_and_what_refuses_it(
    kept: range, committed: int | None, next_offset: int | None, begin: int, ahead: bool, gone: int
) -> None:
    standing = Standing(kept=kept, committed=committed, next_offset=next_offset)
    assert (standing.begin, standing.ahead, len(standing.gone)) == (begin, ahead, gone)


@pytest.mark.parametrize(
    ("kept", "committed", "begin", "ahead", "gone"),
    [
        (range(100), None, 0, False, 0),  # longer than the old one, so that only its id tells
        (range(100), 60, 0, True, 0),  # somebody of the group went on in it
        (range(4, 100), None, 4, False, 4),
    ],
)
def test_offsets_of_another_topic_of_the_name_mean_nothing(
    kept: range, committed: int | None, begin: int, ahead: bool, gone: int
) -> None:
    standing = Standing(kept=kept, committed=committed, next_offset=20, remade=True)
    assert (standing.begin, standing.ahead, len(standing.gone)) == (begin, ahead, gone)
