"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.blob_store import FakeBlobStore


@pytest.fixture
def store() -> Iterator[FakeBlobStore]:
    """A store of large tensors; whoever a test still holds up in it is let go."""
    store = FakeBlobStore()
    yield store
    store.open.set()
