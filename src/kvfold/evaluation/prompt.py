"""A document and a question as the tokens that a model is given, in two parts.

The parts are kept apart, so that a cache can be cut before the question is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.evaluation.document import Document
from kvfold.text import encode, leading_tokens

_MARK = "@@document@@"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads."""

    document: list[int]
    """The document and all that stands before it."""
    question: list[int]
    """The question and all that stands after it."""

    def __len__(self) -> int:
        """Tokens in all."""
        return len(self.document) + len(self.question)


def build_prompt(tokenizer: PreTrainedTokenizerBase, document: Document) -> Prompt:
    """Put a document and its question into the model's chat template, or into plain text.

    Args:
        tokenizer: Of the model; its chat template is used where it has one.
        document: The document and the question.

    Returns:
        The tokens, before and from the question on.

    Raises:
        ConfigError: When the chat template refuses the message.
    """
    plain = tokenizer.chat_template is None
    after = f"\n\nQuestion: {document.question}\nAnswer:" if plain else f"\n\n{document.question}"
    before, after = frame(tokenizer, after)
    return Prompt([*before, *document.tokens], encode(tokenizer, after))


def frame(
    tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool = True
) -> tuple[list[int], str]:
    """What stands around a document.

    Args:
        tokenizer: Of the model.
        text: What follows the document in a user's message.
        chat: Whether to use the chat template, where there is one.

    Returns:
        Tokens before the document, and the text after it.

    Raises:
        ConfigError: When the chat template refuses the message.
    """
    if tokenizer.chat_template is None or not chat:
        return leading_tokens(tokenizer), text
    head, _, after = _render(tokenizer, f"{_MARK}{text}").partition(_MARK)
    return encode(tokenizer, head), after


def chat_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool | None = None
) -> list[int]:
    """One message of a user as tokens.

    Args:
        tokenizer: Of the model.
        text: The message.
        chat: Whether to use the chat template; by default where there is one.

    Returns:
        Token ids.

    Raises:
        ConfigError: For an empty message, or when there is no chat template that takes it.
    """
    if not text.strip():
        raise ConfigError("the prompt is empty: give some text")
    if chat and tokenizer.chat_template is None:
        raise ConfigError("this model has no chat template: leave --chat out, or give --raw")
    if chat or (chat is None and tokenizer.chat_template is not None):
        return encode(tokenizer, _render(tokenizer, text))
    return [*leading_tokens(tokenizer), *encode(tokenizer, text)]


def require_positions(model: PreTrainedModel, tokens: int, more: int, advice: str) -> None:
    """Refuse a prompt that the model has no positions for.

    Args:
        model: The model.
        tokens: Of the prompt.
        more: Tokens that are to follow.
        advice: What the user can do about it.

    Raises:
        ConfigError: Naming all three.
    """
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and tokens + more > limit:
        raise ConfigError(
            f"the prompt has {tokens} tokens and {more} more are to follow, but the model has "
            f"{limit} positions: {advice}"
        )


def _render(tokenizer: PreTrainedTokenizerBase, content: str) -> str:
    message = [{"role": "user", "content": content}]
    try:
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError(
            f"the model's chat template refuses a single message of a user ({error}): give "
            "another model"
        ) from error
    return str(text)
