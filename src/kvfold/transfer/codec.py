"""A codec: what turns a prefix that one model read into a cache of another.

The two models have the same shapes and other weights. Each layer travels as codes of its keys and
values (REUSE) or of its attention's input (PATCH): SCD, arXiv 2606.07684.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvfold.attention import require_attached
from kvfold.cache import KVCache
from kvfold.errors import ArtifactError
from kvfold.models import differing_facts, fingerprint_facts
from kvfold.tensorfile import digest_of
from kvfold.transfer.coder import Coder, bits_of, layout_of, patched
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.ends import Receiver, Sender
from kvfold.transfer.storage import Facts, facts_of, fingerprint_of, row_width, tensors_of
from kvfold.transfer.wire import Header, Limits, MessageWriter


@dataclass(frozen=True, eq=False)
class Codec:
    """How a prefix travels from one model to another.

    Example:
        >>> codec = calibrate(base, specialist, texts, payload=0.25)  # doctest: +SKIP
        >>> message = codec.encode(base, prefix)  # doctest: +SKIP
        >>> cache = codec.decode(specialist, message, ids=prefix)  # doctest: +SKIP
        >>> specialist.generate(prompt, cache=cache)  # doctest: +SKIP
    """

    coders: tuple[Coder, ...]
    """One a layer."""
    producer: Facts
    """The producer's facts, as `kvfold.models.fingerprint_facts` gives them."""
    consumer: Facts
    """The consumer's."""
    tokenizer: str
    """Digest of the tokenizer that both share; empty where none was named."""
    record: dict[str, object]
    """How it was calibrated."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that decides what a code means."""
        facts = json.dumps([self.producer, self.consumer, self.tokenizer, facts_of(self.coders)])
        return digest_of(facts, tensors_of(self.coders))

    @property
    def patched(self) -> list[int]:
        """Indices of the patched layers."""
        return patched(self.coders)

    @property
    def bits(self) -> int:
        """Bits of a token's codes, over all layers."""
        return sum(map(bits_of, self.coders))

    def payload(self, lengths: Sequence[int]) -> int:
        """Bytes of the whole message for rows of so many tokens, headers and seals included."""
        writer = MessageWriter(self.header("0" * 64, tuple(lengths)))
        total = len(writer.start)
        for layer, coder in enumerate(self.coders):
            layout = layout_of(coder, sum(lengths)).items()
            nothing = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in layout}
            total += len(writer.frame(layer, nothing))
        return total

    def share(self, tokens: int) -> float:
        """Bytes of the message for one row, as a share of its keys and values in bfloat16."""
        raw = 2 * sum(row_width(self.consumer, name) for name in ("key", "value"))
        return self.payload([tokens]) / (raw * tokens * len(self.coders))

    def sender(self, model: PreTrainedModel) -> Sender:
        """The producer's end, made once for many prefixes.

        Raises:
            ArtifactError: For another model than the codec's producer.
        """
        _require(model, self.producer, "producer")
        return Sender(self, Endpoint(model))

    def receiver(self, model: PreTrainedModel) -> Receiver:
        """The consumer's end, made once for many prefixes.

        Raises:
            ArtifactError: For another model than the codec's consumer.
            ConfigError: When it is not attached.
        """
        _require(model, self.consumer, "consumer")
        require_attached(model)
        return Receiver(self, Endpoint(model))

    def encode(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        key: bytes | None = None,
    ) -> bytes:
        """Let the producer read a prefix; returns the message. See `Sender.pieces`."""
        return b"".join(self.sender(model).pieces(ids, mask=mask, key=key))

    def decode(
        self,
        model: PreTrainedModel,
        message: bytes,
        *,
        ids: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        key: bytes | None = None,
        limits: Limits | None = None,
        into: KVCache | None = None,
    ) -> KVCache:
        """The consumer's cache of a message. See `Receiver.decode`."""
        receiver = self.receiver(model)
        return receiver.decode(message, ids=ids, mask=mask, key=key, limits=limits, into=into)

    def save(self, folder: str | Path) -> Path:
        """Write the codec into a folder, whole or not at all; returns the file.

        Raises:
            ArtifactError: When it cannot be written.
        """
        from kvfold.transfer.artifact import save_codec

        return save_codec(self, Path(folder))

    @classmethod
    def load(cls, name: str | Path) -> Codec:
        """Read a codec from a file, or from the folder that holds one; `shipped` is the package's.

        Raises:
            ArtifactError: When there is none, or it is damaged or of another format.
        """
        from kvfold.transfer.artifact import load_codec

        return load_codec(Path(name))

    def header(self, ids: str, lengths: tuple[int, ...]) -> Header:
        """The header of a message for rows of so many tokens, whose ids have this digest."""
        return Header(
            codec=self.digest,
            producer=fingerprint_of(self.producer),
            consumer=fingerprint_of(self.consumer),
            tokenizer=self.tokenizer,
            ids=ids,
            lengths=lengths,
            layers=len(self.coders),
        )


def _require(model: PreTrainedModel, expected: Facts, end: str) -> None:
    """Refuse another model than the codec's."""
    if difference := differing_facts(expected, fingerprint_facts(model)):
        raise ArtifactError(
            f"this model is not the codec's {end}: {difference}; use the model that the codec was "
            "calibrated with, or calibrate one for this"
        )
