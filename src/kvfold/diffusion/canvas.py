"""What is being written: prompts padded on the left, and the same number of places after each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from kvfold.diffusion.model import DiffusionModel, positions_of
from kvfold.diffusion.options import is_whole
from kvfold.errors import ConfigError

Prompts = Sequence[Sequence[int] | torch.Tensor] | torch.Tensor
"""Token ids of each prompt, of any lengths, or `[B, P]` of one length."""


@dataclass(slots=True, eq=False)
class Canvas:
    """The rows that are not finished. Column `prompt` is the first generated one of every row."""

    ids: torch.Tensor
    """`[B, N]`, the mask token where nothing is decided."""
    valid: torch.Tensor
    """False at padding, `[B, N]`."""
    positions: torch.Tensor
    """Logical positions, `[B, N]`."""
    masked: torch.Tensor
    """Whether a generated place is undecided, `[B, N]`."""
    changed: torch.Tensor
    """Whether it was decided in the last step, `[B, N]`."""
    wanted: torch.Tensor
    """Undecided places that are predicted in this step, `[B, N]`."""
    start: torch.Tensor
    """First column of the block being decided, `[B]`."""
    end: torch.Tensor
    """First column after it, `[B]`."""
    in_block: torch.Tensor
    """Steps taken in that block before this one, `[B]`."""
    numbers: torch.Tensor
    """Which prompt each row is of, `[B]`."""
    prompt: int
    """Columns before the generated ones."""
    step: int = 0
    """Steps taken."""

    @property
    def width(self) -> int:
        """N, columns of a row."""
        return self.ids.shape[1]

    def generated(self, field: torch.Tensor) -> torch.Tensor:
        """The part of a field `[B, N]` that is generated."""
        return field[:, self.prompt :]

    def sources(self, shift: int) -> torch.Tensor:
        """Places whose outputs predict the wanted tokens, `[B, N]`."""
        return torch.nn.functional.pad(self.wanted[:, shift:], (0, shift))

    def decide(self, tokens: torch.Tensor, chosen: torch.Tensor) -> None:
        """Write tokens, `[B, N]`, where `chosen` says, `[B, N]`; a step is over."""
        self.ids = torch.where(chosen, tokens, self.ids)
        self.masked = self.masked & ~chosen
        self.changed = chosen
        self.step += 1

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, `[B']` indices."""
        for name in _FIELDS:
            setattr(self, name, getattr(self, name)[rows])

    def with_blank(self, mask_id: int) -> Canvas:
        """Every row twice, first as it is and then with its prompt masked, `[2 B, ...]`."""
        twice = {name: torch.cat([getattr(self, name)] * 2) for name in _FIELDS}
        blank = self.ids.clone()
        blank[:, : self.prompt] = mask_id
        return replace(self, **twice | {"ids": torch.cat([self.ids, blank])})


_FIELDS = tuple(field.name for field in fields(Canvas) if field.name not in ("prompt", "step"))


def blank_canvas(model: DiffusionModel, prompts: Prompts, length: int) -> Canvas:
    """A canvas on which nothing is decided yet.

    Args:
        model: Whose mask token, device and limits count.
        prompts: At least one, none empty.
        length: Tokens to generate after each.

    Raises:
        ConfigError: A prompt is empty or holds what is no token, or it is all too long.
    """
    rows = _rows(prompts, model.shape.vocabulary)
    longest = max(map(len, rows))
    _require_room(model, longest, length)
    mask = model.traits.mask_id
    ids = torch.tensor([[mask] * (longest - len(row)) + row + [mask] * length for row in rows])
    ids = ids.to(model.device)
    starts = torch.tensor([longest - len(row) for row in rows], device=model.device)
    columns = torch.arange(ids.shape[1], device=model.device)
    valid = columns >= starts[:, None]
    masked = (columns >= longest).expand_as(valid).clone()
    none = torch.zeros_like(valid)
    numbers = torch.arange(len(rows), device=model.device)
    unset = torch.full_like(numbers, -1)
    return Canvas(
        ids=ids,
        valid=valid,
        positions=positions_of(valid),
        masked=masked,
        changed=none,
        wanted=none,
        start=unset,
        end=unset,
        in_block=torch.zeros_like(numbers),
        numbers=numbers,
        prompt=longest,
    )


def _rows(prompts: Prompts, vocabulary: int) -> list[list[int]]:
    if not len(prompts):
        raise ConfigError("there is no prompt: give at least one")
    return [_row(number, prompt, vocabulary) for number, prompt in enumerate(prompts)]


def _row(number: int, prompt: object, vocabulary: int) -> list[int]:
    row = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
    if not isinstance(row, Sequence) or not row:
        raise ConfigError(f"prompt {number} is {row!r}: give a list of one token id or more")
    wrong = [token for token in row if not is_whole(token, 0) or token >= vocabulary]
    if wrong:
        raise ConfigError(
            f"prompt {number} holds {wrong[0]!r}: give token ids from 0 to {vocabulary - 1}"
        )
    return list(row)


def _require_room(model: DiffusionModel, prompt: int, length: int) -> None:
    if not is_whole(length):
        raise ConfigError(f"the length is {length!r}: give a whole number of at least 1")
    if prompt + length > model.shape.positions:
        raise ConfigError(
            f"a prompt of {prompt} and {length} generated tokens are more than the model's "
            f"{model.shape.positions} positions: shorten one of them"
        )
