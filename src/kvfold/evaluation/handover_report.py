"""Answers over handed-over prefixes as statistics, plain data, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from matplotlib.figure import Figure

from kvfold.bench.chart import COLOURS
from kvfold.evaluation.handover import BASE, ORACLE, HandoverRow
from kvfold.evaluation.statistics import Interval


@dataclass(frozen=True, slots=True)
class Summary:
    """What one way gives over all items."""

    way: str
    """How prefixes were handed over."""
    share: float
    """Bytes that travelled, as a share of the raw caches in bfloat16."""
    f1: Interval
    """Of the words of the answers."""
    lost: Interval
    """F1 that it falls short of the oracle by, item by item."""
    exact: Interval
    """Share of the answers that are right to the last sign."""
    divergence: Interval
    """KL from the oracle's predictions, in nats."""

    @property
    def kept(self) -> float | None:
        """F1 as a share of the oracle's; None where that is 0."""
        whole = self.f1.mean + self.lost.mean
        return self.f1.mean / whole if whole else None

    def to_dict(self) -> dict[str, object]:
        """The summary as plain data."""
        return {**asdict(self), "kept": self.kept}


def summarise(rows: Sequence[HandoverRow], *, seed: int) -> list[Summary]:
    """Statistics by way, in the order of the rows.

    Args:
        rows: Of the same items for every way.
        seed: Of the bootstrap; the same items are drawn for every way.
    """
    own = {row.index: row.f1 for row in rows if row.way == ORACLE}
    found = []
    for way in dict.fromkeys(row.way for row in rows):
        these = [row for row in rows if row.way == way]
        columns = {
            "f1": [row.f1 for row in these],
            "lost": [own[row.index] - row.f1 for row in these],
            "exact": [float(row.is_exact) for row in these],
            "divergence": [row.divergence for row in these],
        }
        share = sum(row.payload for row in these) / sum(row.raw for row in these)
        intervals = {name: Interval.of(values, seed=seed) for name, values in columns.items()}
        found.append(Summary(way, share, **intervals))
    return found


def draw_answers(summaries: Sequence[Summary], title: str) -> Figure:
    """F1 against payload, with 95 % intervals; the oracle and the producer alone are lines."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines = {
        ORACLE: ("--", "oracle: the consumer's own prefill"),
        BASE: (":", "the producer alone"),
    }
    others = [each for each in summaries if each.way not in lines]
    for each in summaries:
        if each.way in lines:
            style, label = lines[each.way]
            axes.axhline(each.f1.mean, color=COLOURS[0], linestyle=style, label=label)
    for index, each in enumerate(others):
        low, high = each.f1.mean - each.f1.low, each.f1.high - each.f1.mean
        axes.errorbar(
            each.share,
            each.f1.mean,
            [[max(low, 0)], [max(high, 0)]],
            fmt="osD^v"[index // (len(COLOURS) - 1) % 5],
            color=COLOURS[1 + index % (len(COLOURS) - 1)],
            capsize=3,
            label=each.way,
        )
    axes.set(xlabel="payload, share of raw bfloat16", ylabel="F1 of the answers", ylim=(0, 1.03))
    axes.set_xlim(left=0)
    axes.set_title(title.replace("$", r"\$"), fontsize=10)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure
