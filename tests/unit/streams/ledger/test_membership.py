"""A ledger that is refused says so at bounded intervals, ends in the end, and one that is merely idle never does."""

from __future__ import annotations

import logging

import pytest
from aiokafka.errors import GroupAuthorizationFailedError, InconsistentGroupProtocolError

from streams.ledger.membership import SAY_S, Membership, Refused

PATIENCE_S = 200.0


class Time:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def membership(time: Time) -> Membership:
    return Membership(group="ledger", patience_s=PATIENCE_S, clock=time)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_refusal_is_said_with_its_reason_and_what_to_do_and_ends_when_nothing_changes(
    membership: Membership, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(int(PATIENCE_S)):
        membership.heard(InconsistentGroupProtocolError(), member=False)
        time.now_s += 1
    with pytest.raises(Refused, match="refused for 200 s"):
        membership.heard(InconsistentGroupProtocolError(), member=False)
    assert len(said(caplog)) == 1 + PATIENCE_S // SAY_S
    assert "InconsistentGroupProtocolError" in said(caplog)[0]
    assert "shares partitions out in another way; end it" in said(caplog)[0]
    assert "ends in 200 s" in said(caplog)[0]


def test_whoever_is_taken_in_meanwhile_stays(membership: Membership, time: Time) -> None:
    for _ in range(5):
        membership.heard(GroupAuthorizationFailedError("g"), member=False)
        assert membership.refused is not None
        assert "kafka-acls" in membership.refused
        time.now_s += PATIENCE_S - 1
        membership.heard(None, member=True)
        assert membership.refused is None


def test_a_silence_while_it_tries_again_is_not_taken_for_a_welcome(membership: Membership, time: Time) -> None:
    membership.heard(GroupAuthorizationFailedError("g"), member=False)
    time.now_s += PATIENCE_S
    with pytest.raises(Refused):
        membership.heard(None, member=False)


def test_a_member_that_merely_has_nothing_to_do_never_ends(membership: Membership, time: Time) -> None:
    for member in (False, True, True):
        membership.heard(None, member=member)
        time.now_s += 10 * PATIENCE_S
    assert membership.refused is None
