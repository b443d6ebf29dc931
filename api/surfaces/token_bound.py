"""The most tokens that texts can come to, without their tokenizer, which only workers have.

A tokenizer makes at most one token of a byte of what its normalizer leaves of a text, and adds a few around it; and a
version cuts every text at its `max_length`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Final

from api.routing.catalogue import Deployment
from schemas.records import Task
from schemas.tensors import Tensor

#: Tokens that are put around a text, or in front of it. Those in use add one to three.
ADDED: Final = 8
#: Some characters come to more bytes in another normal form, a few in small letters.
_FORMS: Final = ("NFD", "NFKD")


def most_tokens(texts: Iterable[str], *, max_length: int) -> int:
    """Tokens of all texts together, at most. `max_length` is the version's, 0 when it does not cut.

    It holds for tokenizers that rewrite text by Unicode's normal forms and in small letters; not for one with rules of
    its own that make long words of a character.
    """
    return sum(_most(text, max_length) for text in texts)


def tokens_of(tensors: tuple[Tensor, ...], deployment: Deployment) -> int:
    """The most tokens of a call's inputs; 0 for versions that count none. Bytes that are no text fail, for nothing."""
    if deployment.task is not Task.EMBEDDINGS:
        return 0
    texts = (element.decode(errors="replace") for element in tensors[0].elements())
    return most_tokens(texts, max_length=deployment.manifest.max_length)


def _most(text: str, max_length: int) -> int:
    if max_length and len(text) >= max_length:
        return max_length
    size = len(text)
    if not text.isascii():
        forms = [text, *(unicodedata.normalize(form, text) for form in _FORMS)]
        size = max(len(form.encode()) for form in (*forms, *(f.lower() for f in forms)))
    return min(size + ADDED, max_length) if max_length else size + ADDED
