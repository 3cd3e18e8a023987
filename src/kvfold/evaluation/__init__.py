"""Measures methods against the full cache: the same prompt, the same budget, side by side."""

from kvfold.evaluation.comparison import compare
from kvfold.evaluation.document import Document, Fact, built_in_document, document_from_text
from kvfold.evaluation.export import write_comparison
from kvfold.evaluation.generation import TextStream, generate, sampler, stop_tokens
from kvfold.evaluation.prompt import Prompt, build_prompt, chat_tokens, require_positions
from kvfold.evaluation.results import Comparison, Divergence, MethodResult
from kvfold.evaluation.settings import Settings
from kvfold.evaluation.statistics import Interval

__all__ = [
    "Comparison",
    "Divergence",
    "Document",
    "Fact",
    "Interval",
    "MethodResult",
    "Prompt",
    "Settings",
    "TextStream",
    "build_prompt",
    "built_in_document",
    "chat_tokens",
    "compare",
    "document_from_text",
    "generate",
    "require_positions",
    "sampler",
    "stop_tokens",
    "write_comparison",
]
