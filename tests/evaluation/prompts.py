"""Prompts as text."""

from __future__ import annotations

from kvfold.evaluation.sample import Sample
from tests.tiny_folder import byte_tokenizer

TOKENIZER = byte_tokenizer()
"""One token a byte."""


def parts(sample: Sample) -> tuple[str, str]:
    """Document and question as text, each with what the chat template puts round it."""
    end = len(sample.prompt) - sample.question
    return str(TOKENIZER.decode(sample.prompt[:end])), str(TOKENIZER.decode(sample.prompt[end:]))
