"""Whether token ids mean the same on both sides."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over every token and its id.

    Ids are what travels: how a text is cut into them, and chat templates, make no difference.
    """
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
