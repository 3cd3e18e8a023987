"""A masked diffusion model: our decoder with a checkpoint's weights, and its traits."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from kvfold.diffusion.decoder import Decoder
from kvfold.diffusion.description import family_of, read_config, shape_of, traits_of
from kvfold.diffusion.own import OWN, own_folder
from kvfold.diffusion.proxy import Proxy, proxies_of
from kvfold.diffusion.shape import DecoderShape, Traits
from kvfold.diffusion.weights import read_decoder
from kvfold.errors import ConfigError, TransferError
from kvfold.models import ensure_default, parse_device, parse_dtype
from kvfold.models.hub import cached_snapshot, first_line, hub_commit
from kvfold.models.loading import require_finite

_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_CHECKED_PARAMETERS = 1_000_000_000


class DiffusionModel:
    """A decoder and what a sampler must know of it.

    Example:
        >>> model = DiffusionModel.from_pretrained("GSAI-ML/LLaDA-8B-Instruct", dtype="bfloat16")
        >>> generate(model, [[1, 2, 3]], cache="spa", length=64).tokens
    """

    def __init__(self, decoder: Decoder, traits: Traits, *, source: str = "") -> None:
        """Join the two.

        Args:
            decoder: With weights.
            traits: Mask token, prediction, ends.
            source: Where the weights come from.
        """
        self.decoder, self.traits, self.source = decoder, traits, source
        self._proxies: dict[int, tuple[object, list[Proxy]]] = {}

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        mask_token_id: int | None = None,
        prediction: str | None = None,
    ) -> DiffusionModel:
        """Load a model without running any code of its makers.

        Args:
            name: A folder with config.json and safetensors, a name on the Hugging Face Hub,
                `default`, or one of kvfold's own (`OWN`), such as `arithmetic`.
            dtype: As `kvfold.load` takes it; by default float32 on the CPU and the checkpoint's
                own elsewhere.
            device: By default CUDA where there is one, else the CPU.
            mask_token_id: Of the undecided token, where the configuration does not tell.
            prediction: `same` or `shifted`, likewise.

        Raises:
            ConfigError: There is no such model, or it is not known to be a diffusion model.
            ArtifactError: Its files are damaged or do not fit one another.
            UnsupportedModelError: It has a setting that our decoder does not know.
        """
        place, wanted = parse_device(device), parse_dtype(dtype)
        if dtype is None and place.type == "cpu":
            wanted = torch.float32
        folder = model_folder(name)
        config = read_config(folder)
        family = family_of(config)
        shape = shape_of(config, family)
        traits = traits_of(
            config, family, shape, mask_token_id=mask_token_id, prediction=prediction
        )
        decoder = read_decoder(folder, family, shape, dtype=wanted, device=place)
        if sum(weight.numel() for weight in decoder.parameters()) < _CHECKED_PARAMETERS:
            require_finite(str(name), decoder)
        return cls(decoder, traits, source=str(name))

    @property
    def shape(self) -> DecoderShape:
        """Sizes and flags."""
        return self.decoder.shape

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.decoder.embedding.weight.dtype

    def logits(self, ids: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """The dense forward, whose logits at a place speak of the token at that place.

        Args:
            ids: `[B, T]`, rows of different lengths padded on the left.
            valid: False at padding, `[B, T]`; no padding without it.

        Returns:
            `[B, T, V]`; under a shifted prediction the first place has its own output's.
        """
        held = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid.bool()
        positions = positions_of(held)
        hidden = self.decoder(ids, positions, visibility(self.traits, held, positions, positions))
        if self.traits.shift:
            hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        return self.decoder.logits(hidden)

    def proxies(self, rank: int) -> list[Proxy]:
        """Each layer's proxy of values, made when first asked for or when weights have changed."""
        weights = [layer.value.weight for layer in self.decoder.blocks]
        # What was made under inference mode counts no versions.
        versions = tuple(
            (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
            for weight in weights
        )
        made = self._proxies.get(rank)
        if made is None or made[0] != versions:
            made = self._proxies[rank] = (versions, proxies_of(self.decoder, rank))
        return made[1]


def positions_of(valid: torch.Tensor) -> torch.Tensor:
    """Logical positions of tokens padded on the left, `[B, T]`; 0 at padding."""
    return (valid.long().cumsum(dim=-1) - 1).clamp_min(0)


def visibility(
    traits: Traits, valid: torch.Tensor, positions: torch.Tensor, queries: torch.Tensor
) -> torch.Tensor | None:
    """Which tokens the queries see.

    Args:
        traits: Of the model.
        valid: False at padding, `[B, T]`.
        positions: Of all tokens, `[B, T]`.
        queries: Positions of the queries, `[B, Q]`.

    Returns:
        Boolean, `[B, 1, 1, T]`, or `[B, 1, Q, T]` when it depends on the query; None for all.
    """
    if traits.topology == "block_causal":
        length = traits.block_length or 1
        earlier = positions[:, None] // length <= queries[:, :, None] // length
        return (earlier & valid[:, None])[:, None]
    return None if bool(valid.all()) else valid[:, None, None]


def model_folder(name: str | Path) -> Path:
    """The folder of a model, fetched from the Hub if need be.

    Raises:
        ConfigError: There is none of that name.
        TransferError: The download broke off.
    """
    if str(name) == "default":
        return ensure_default()
    if str(name) in OWN:
        return own_folder(str(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(
            f"there is no folder {name}: give a folder, 'default' or a name on the Hugging Face Hub"
        )
    return _snapshot(name)


def _snapshot(name: str) -> Path:
    try:
        commit = hub_commit(name)
    except TransferError as error:
        cached = cached_snapshot(name, ("config.json",))
        if cached is None:
            raise ConfigError(
                f"there is no folder {name!r}, and as a name on the Hugging Face Hub it is not on "
                f"this machine yet: {error}. Connect to a network, or give a model folder"
            ) from error
        return cached
    try:
        return Path(snapshot_download(name, revision=commit, allow_patterns=_PATTERNS))
    except Exception as error:
        raise TransferError(
            f"the download of {name} from the Hugging Face Hub broke off ({first_line(error)}): "
            "try again"
        ) from error
