from __future__ import annotations

from datetime import datetime, timezone
from uuid import UUID, uuid4

from schemas.ids import dead_letter_id, finished_id, new_request_id, request_time, requested_id, usage_id


def test_a_request_id_is_a_version_7_uuid_that_carries_its_time() -> None:
    at = datetime(2026, 3, 1, 12, 30, 15, 123000, tzinfo=timezone.utc)
    made = new_request_id(now_ns=int(at.timestamp() * 1000) * 1_000_000)
    assert made.version == 7
    assert made.variant == "specified in RFC 4122"
    assert request_time(made) == at
    assert request_time(uuid4()) is None


def test_ids_made_later_sort_later() -> None:
    assert new_request_id(now_ns=1_000_000_000) < new_request_id(now_ns=2_000_000_000)


def test_ids_do_not_repeat() -> None:
    assert len({new_request_id(now_ns=5_000_000) for _ in range(10_000)}) == 10_000


def test_derived_ids_are_functions_of_the_request_and_differ_by_kind() -> None:
    request = UUID("01900000-0000-7000-8000-000000000000")
    assert usage_id(request) == usage_id(UUID(str(request)))
    assert len({requested_id(request), finished_id(request), usage_id(request)}) == 3
    assert dead_letter_id("a", 1, 2) != dead_letter_id("a", 12, 2)
