"""Chinese text as words, through jieba, and its punctuation."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"  # noqa: RUF001
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
"""What LongBench and InfiniteBench leave out of Chinese answers, beside ASCII punctuation."""


def divide(text: str) -> list[str]:
    """A text as words.

    Args:
        text: Chinese, with any other script in it.
    """
    return list(_jieba().cut(text, cut_all=False))


@cache
def _jieba() -> ModuleType:
    library = import_module("jieba")
    library.setLogLevel(logging.WARNING)
    return library
