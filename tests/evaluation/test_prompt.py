"""Prompts in two parts, in chat templates and without."""

from __future__ import annotations

import pytest

from kvfold.errors import ConfigError
from kvfold.evaluation.document import Document
from kvfold.evaluation.prompt import build_prompt, chat_tokens, require_positions
from kvfold.text import encode
from tests.tiny import tiny_model
from tests.tiny_folder import byte_tokenizer


def test_the_parts_make_up_the_template() -> None:
    tokenizer = byte_tokenizer()
    document = Document("x", encode(tokenizer, "Once."), "When?")
    prompt = build_prompt(tokenizer, document)
    assert tokenizer.decode(prompt.document) == "<s><user>Once."
    assert tokenizer.decode(prompt.question) == "\n\nWhen?<assistant>"
    assert len(prompt) == len(prompt.document) + len(prompt.question)


def test_without_a_template_the_prompt_is_plain_text() -> None:
    tokenizer = byte_tokenizer(template=None)
    document = Document("x", encode(tokenizer, "Once."), "When?")
    prompt = build_prompt(tokenizer, document)
    assert tokenizer.decode([*prompt.document, *prompt.question]) == (
        "Once.\n\nQuestion: When?\nAnswer:"
    )


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (True, None, "<s><user>Hi<assistant>"),
        (True, True, "<s><user>Hi<assistant>"),
        (True, False, "Hi"),
        (False, None, "Hi"),
    ],
)
def test_messages(template: bool, chat: bool | None, expected: str) -> None:
    tokenizer = byte_tokenizer() if template else byte_tokenizer(template=None)
    assert tokenizer.decode(chat_tokens(tokenizer, "Hi", chat=chat)) == expected


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        chat_tokens(byte_tokenizer(template=None), "Hi", chat=True)


def test_a_template_that_refuses_is_named() -> None:
    tokenizer = byte_tokenizer(template="{{ raise_exception('system first') }}")
    with pytest.raises(ConfigError, match="system first"):
        chat_tokens(tokenizer, "Hi")


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(ConfigError, match="the prompt is empty"):
        chat_tokens(byte_tokenizer(), " \n")


def test_positions_are_counted_to_the_last() -> None:
    model = tiny_model(max_position_embeddings=100)
    require_positions(model, 90, 10, "advice")
    with pytest.raises(ConfigError, match="the model has 100 positions: advice"):
        require_positions(model, 90, 11, "advice")
