"""Texts to token ids, and which texts run side by side.

Padding costs as much as words, so texts of like length are run together: sorted by length, then cut where another one
would make the slice too large.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_worker.errors import ItemError, ModelError

# The tokenizer's own threads would take cores that the settings give to nobody; it must be said before its import.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"

Ids = npt.NDArray[np.int64]


class Tokeniser:
    """The tokenizer a version carries. Its own truncation and padding settings are replaced by the version's bound."""

    def __init__(self, path: Path, *, max_length: int) -> None:
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelError(f"{path.name}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length=max_length)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text with the tokenizer's special tokens, at most `max_length`."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]


def decode_texts(name: str, elements: Sequence[bytes]) -> list[str]:
    """BYTES elements as text. Raises ItemError naming the element that is not UTF-8."""
    texts = []
    for i, element in enumerate(elements):
        try:
            texts.append(element.decode())
        except UnicodeDecodeError as error:
            raise ItemError(
                f"input '{name}': element {i} is not UTF-8 ({error.reason} at byte {error.start})"
            ) from None
    return texts


def slices(lengths: Sequence[int], *, max_items: int, max_padded: int) -> list[list[int]]:
    """Indices of texts that run together, shortest first; every index appears once.

    A slice holds at most `max_items` texts and, unless one text alone is longer, `max_padded` padded tokens.
    """
    found: list[list[int]] = []
    current: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        # In ascending order the newest text is the longest, so it sets what every row is padded to.
        if current and (len(current) == max_items or (len(current) + 1) * lengths[i] > max_padded):
            found.append(current)
            current = []
        current.append(i)
    if current:
        found.append(current)
    return found


def pad(rows: Sequence[Sequence[int]]) -> tuple[Ids, Ids]:
    """Token ids [n, longest] padded with 0, and the mask [n, longest] that is 1 where a token is."""
    longest = max(len(row) for row in rows)
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return ids, mask
