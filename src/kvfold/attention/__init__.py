"""How kvfold plugs into transformers: one attention function and one mask function."""

from kvfold.attention.attach import Attachment, attach, is_attached, require_attached
from kvfold.attention.grouped import Scoring
from kvfold.attention.interface import IMPLEMENTATION, hand_over
from kvfold.attention.mask import LazyMask

__all__ = [
    "IMPLEMENTATION",
    "Attachment",
    "LazyMask",
    "Scoring",
    "attach",
    "hand_over",
    "is_attached",
    "require_attached",
]
