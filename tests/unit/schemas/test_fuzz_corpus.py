"""Every input that fuzzing was started from or that it found keeps the decoder's promise."""

from __future__ import annotations

import pytest

from tests.fuzz.target import CORPUS, check


@pytest.mark.parametrize("name", sorted(path.name for path in CORPUS.iterdir()))
def test_the_promise_holds(name: str) -> None:
    check((CORPUS / name).read_bytes())
