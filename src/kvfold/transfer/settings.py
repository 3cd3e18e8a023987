"""What a calibration is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from kvfold.errors import ConfigError
from kvfold.transfer.basis import Form
from kvfold.transfer.patch import AlignerSettings
from kvfold.transfer.quantiser import WIDTHS


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineSettings:
    """How decoders are taught."""

    batch: int = 2
    """Most texts of an update; all are of one length."""
    learning_rate: float = 3e-4
    """AdamW's highest; it falls to 0 along a cosine. Channels and states count in their spreads."""
    check_every: int = 10
    """Updates between looks at the texts that choices are made by."""

    def check(self) -> None:
        """Refuse what cannot be taught with.

        Raises:
            ConfigError: When a value is out of its range.
        """
        if self.batch < 1 or self.check_every < 1 or not 0 < self.learning_rate < float("inf"):
            raise ConfigError(
                f"{self.batch} texts an update, looks every {self.check_every} and a learning rate "
                f"of {self.learning_rate:g}: give whole numbers and a rate above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """How a codec is fitted. The defaults are ours."""

    form: Form = "regression"
    """How the codes of keys and values are found."""
    widths: tuple[int, ...] = (8, 4)
    """Bits that a channel of a code may take."""
    granule: int = 4
    """Channels that are given bits together."""
    strength: float = 1e-6
    """Of the ridge, as a share of the mean variance."""
    dtype: Literal["float32", "float16"] = "float16"
    """In which encoders and decoders are stored; the decoders are fitted to what is stored."""
    tokens: int = 1024
    """Length of a prefix for which the payload is meant: headers weigh more on shorter ones."""
    probes: int = 4
    """Texts that the choices are made by; as many more measure the result."""
    continuation: int = 64
    """Last tokens of such a text: the consumer's predictions on them are compared."""
    patches: int = 8
    """Most patched layers; 0 leaves them out."""
    pool: int = 12
    """Layers that may be patched: those whose restoring helps most."""
    least_gain: float = 0.01
    """Share of the divergence that a further patch must take off, at an equal payload."""
    sample_rows: int = 2048
    """Rows of each part of a layer that are kept to fit the quantisers."""
    aligner_rows: int = 4096
    """Rows of each layer that may be patched, kept to train its aligner."""
    aligner: AlignerSettings = field(default_factory=AlignerSettings)
    """How the aligners are trained."""
    refine: RefineSettings = field(default_factory=RefineSettings)
    """How decoders are taught, where texts are given for it."""
    save_every: int = 25
    """Texts between two states on disk."""
    seed: int = 0
    """Of the samples and the aligners."""
    tokenizer: str = ""
    """Digest of the tokenizer that made the texts (`tokenizer_digest`); others are then refused."""

    def to_dict(self) -> dict[str, object]:
        """The settings as plain data."""
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type that encoders and decoders are stored in."""
        return {"float32": torch.float32, "float16": torch.float16}[self.dtype]

    def check(self) -> None:
        """Refuse what cannot be calibrated with.

        Raises:
            ConfigError: When a value is out of its range.
        """
        widths = list(self.widths)
        conditions = (
            ("form", self.form in ("regression", "joint", "shared"), "one of the three forms"),
            ("widths", bool(widths) and set(widths) <= set(WIDTHS), f"some of {WIDTHS}"),
            ("granule", self.granule > 0 and self.granule % 2 == 0, "even and above 0"),
            ("strength", 0 <= self.strength < 1, "a share from 0 up to 1"),
            ("dtype", self.dtype in ("float32", "float16"), "float32 or float16"),
            ("tokens", self.tokens > 0, "at least 1"),
            ("probes", self.probes > 0, "at least 1"),
            ("continuation", self.continuation > 0, "at least 1"),
            ("patches", self.patches >= 0, "0 or more"),
            ("pool", self.pool >= self.patches, f"at least the {self.patches} patches"),
            ("least_gain", 0 <= self.least_gain < 1, "a share from 0 up to 1"),
            ("sample_rows", self.sample_rows > 0, "at least 1"),
            ("aligner_rows", self.aligner_rows > 1, "at least 2"),
            ("save_every", self.save_every > 0, "at least 1"),
        )
        for name, holds, wanted in conditions:
            if not holds:
                raise ConfigError(f"{name} {getattr(self, name)!r} is not {wanted}: change it")
        self.refine.check()


@dataclass(frozen=True, slots=True)
class Target:
    """What the codec is to keep to; without either, nothing is left out."""

    payload: float | None
    """Most bytes of a message, as a share of keys and values in bfloat16."""
    divergence: float | None
    """Most divergence of the consumer's predictions, in nats, on the texts that the choices are
    made by; others may show more."""

    def __post_init__(self) -> None:
        """Refuse what cannot be kept to."""
        if self.payload is not None and self.divergence is not None:
            raise ConfigError("payload and max_kl were both given: give one, the other follows")
        if self.payload is not None and not 0 < self.payload <= 4:
            raise ConfigError(f"payload {self.payload:g} is not a share in (0, 4], such as 0.25")
        if self.divergence is not None and not self.divergence > 0:
            raise ConfigError(f"max_kl {self.divergence:g} is not above 0: give nats, such as 0.05")

    @property
    def is_full(self) -> bool:
        """Whether nothing is to be left out."""
        return self.payload is None and self.divergence is None

    def __str__(self) -> str:
        """A name for a folder."""
        if self.payload is not None:
            return f"payload-{self.payload:g}"
        return "full" if self.divergence is None else f"kl-{self.divergence:g}"
