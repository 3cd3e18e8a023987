"""Why a cache at two resolutions holds what it holds, of one text, and what an answer looked at."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfold.cache import KVCache
from kvfold.errors import ConfigError
from kvfold.zoom.layer import ZoomLayer
from kvfold.zoom.notes import Tally, TextNotes
from kvfold.zoom.picture import SegmentedText


class Explainer:
    """Watches a `sekv` cache read one prompt and expand its spans while it is answered.

    Example:
        >>> explainer = Explainer(cache)  # doctest: +SKIP
        >>> logits = prefill(model, ids, cache)  # doctest: +SKIP
        >>> explainer.start_counting()  # doctest: +SKIP
        >>> answer = list(generate(model, cache, logits, ...))  # doctest: +SKIP
        >>> plot_segments(explainer.explain(words), "text.png")  # doctest: +SKIP
    """

    def __init__(self, cache: KVCache) -> None:
        """Begin to note what is read.

        Args:
            cache: Empty, for one row.

        Raises:
            ConfigError: When no layer of the cache ever makes spans.
        """
        self._layers = [part for part in cache.parts if isinstance(part, ZoomLayer)]
        if not self._layers:
            raise ConfigError(
                f"this cache of method {cache.spec.method} with budget {cache.spec.budget} keeps "
                "no spans that could be explained: use sekv with a budget below the whole cache"
            )
        self._notes = self._layers[0].notes = TextNotes()

    def start_counting(self) -> None:
        """Count from now on how often each span is expanded.

        Raises:
            ConfigError: When there is no span: the prompt was too short.
        """
        first = self._layers[0]
        if first.spans.is_empty:
            raise ConfigError(
                f"nothing of the prompt's {first.seen} tokens was folded into spans, so there is "
                "nothing to explain: give a longer prompt, some hundred tokens"
            )
        for layer in self._layers:
            layer.spans.tally = Tally()

    def explain(self, tokens: Sequence[str]) -> SegmentedText:
        """What became of the prompt, and which of its spans were expanded since.

        Args:
            tokens: The texts of the prompt's N tokens.
        """
        count = len(tokens)
        return SegmentedText(
            tokens=tokens,
            surprisal=self._notes.surprisal(0, count),
            anchors=self._notes.anchors(0, count),
            span_of=span_of(self._layers[0], 0)[:count],
            expanded=torch.stack([self._shares(layer) for layer in self._layers]),
        )

    def _shares(self, layer: ZoomLayer) -> torch.Tensor:
        tally, spans = layer.spans.tally, len(layer.spans)
        return torch.zeros(spans) if tally is None else tally.shares(spans)[0]


def span_of(layer: ZoomLayer, row: int) -> torch.Tensor:
    """The span of each token that a row has seen, `[N]` on the CPU; -1 for an exact one."""
    lengths = layer.row_lengths
    total = lengths if isinstance(lengths, int) else int(lengths[row])
    positions = layer.slots.positions[row, 0].cpu().long()
    inside = torch.ones(total, dtype=torch.bool)
    inside[positions[positions >= 0]] = False
    spans = layer.spans.lengths[row].cpu()
    found = torch.full((total,), -1)
    found[inside] = torch.arange(len(spans)).repeat_interleave(spans)
    return found
