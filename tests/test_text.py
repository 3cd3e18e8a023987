"""Python's reference as text: from its beginning, repeated, and the part that is not shown."""

from __future__ import annotations

from tokenizers.processors import TemplateProcessing

from kvfold.text import (
    SHOWN,
    encode,
    leading_tokens,
    reference_text,
    text_tokens,
    unseen_paragraphs,
)
from tests.tiny_folder import byte_tokenizer


def test_short_texts_begin_again() -> None:
    tokenizer = byte_tokenizer()
    length = len(encode(tokenizer, reference_text(1_000_000)))
    whole = text_tokens(tokenizer, length + 50)
    assert len(whole) == length + 50
    assert whole[length:] == whole[:50] == text_tokens(tokenizer, 50)


def test_what_is_learnt_from_repeats_nothing_and_nothing_that_is_shown() -> None:
    paragraphs = unseen_paragraphs()
    keys = [" ".join(paragraph.split()) for paragraph in paragraphs]
    assert len(set(keys)) == len(keys)
    shown = {" ".join(part.split()) for part in reference_text(1_000_000)[:SHOWN].split("\n\n")}
    assert not shown & set(keys)
    assert all(paragraph.endswith("\n\n") for paragraph in paragraphs)
    assert sum(map(len, paragraphs)) > 150_000


def test_the_leading_token_is_the_tokenizers() -> None:
    tokenizer = byte_tokenizer()
    assert leading_tokens(tokenizer) == []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    assert leading_tokens(tokenizer) == [1]
