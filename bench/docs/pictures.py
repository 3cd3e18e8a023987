"""Draws the pictures of docs/concepts.md: what real caches keep of one short document.

    python bench/docs/pictures.py --out docs/pictures

The default model reads the built-in document and a question about it; every picture has a row for
each layer and a column for each token. The pictures show one text. They are no measurement.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.artifacts import write_whole
from kvfold.cache import CacheLayer, KVCache, prefill
from kvfold.cache.split import SplitLayer
from kvfold.diffusion import DiffusionModel, LLaDASampler, load_tokenizer, stream
from kvfold.diffusion.own import own_folder
from kvfold.evaluation import Prompt, build_prompt, built_in_document, generate
from kvfold.models import anatomy_of
from kvfold.zoom.explain import Explainer

TOKENS, BUDGET = 256, 0.25
"""Of the document; of all methods."""
ASKED, WRITTEN = 8, 40
"""Generated tokens that look into `sekv`'s spans; and those of the picture of a generation."""
METHODS = ("streaming", "h2o", "snapkv", "tova", "knorm", "random", "distill")
ZOOM = "sekv"
INK, PALE, FACT = "#222222", "#6e6e6e", "#d55e00"
SHADES = ("#f4f4f2", "#b9d6ea", "#5a9fcf", "#0b4f80")
"""Nothing, and a third, two thirds and all of the kv heads of the default model."""
EXACT, SPAN, HEAT = "#d55e00", "#e2eef8", "#0b4f80"
UNDECIDED, DECIDED, NEW = "#f4f4f2", "#b9d6ea", "#0b4f80"


def kept(cache: KVCache, tokens: int) -> np.ndarray:
    """The share of a layer's kv heads that keep each token of the first row, `[L, N]`."""
    return np.stack([_kept_in(layer, tokens) for layer in cache.own_layers])


def _kept_in(layer: CacheLayer | SplitLayer, tokens: int) -> np.ndarray:
    counts, heads = np.zeros(tokens), 0
    for part in layer.parts:
        own, positions = part.slots.keys.shape[1], part.slots.positions[0]
        heads += own
        for place in positions:
            counts[place[place >= 0].numpy()] += own / len(positions)
    return counts / heads


class Reader:
    """One document and its question, read by one cache after the other."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        document = built_in_document(tokenizer, length=TOKENS)
        self.prompt: Prompt = build_prompt(tokenizer, document)
        before = len(self.prompt) - len(self.prompt.question) - len(document.tokens)
        asked = next(fact for fact in document.facts if fact.number == document.expected)
        first = before + asked.position
        self.fact = (first, first + len(tokenizer(asked.sentence)["input_ids"]))

    @property
    def ids(self) -> torch.Tensor:
        """The whole prompt, `[1, N]`."""
        return torch.tensor([[*self.prompt.document, *self.prompt.question]])

    def read(self, cache: KVCache) -> torch.Tensor:
        """Prefill; the last logits."""
        return prefill(self.model, self.ids, cache)


def draw_kept(reader: Reader, method: str) -> Figure:
    """What a policy keeps, a row a layer."""
    cache = kvfold.make_cache(reader.model, method, budget=BUDGET)
    reader.read(cache)
    figure, axes = _panel(reader)
    shades = ListedColormap(SHADES)
    _paint(axes, kept(cache, len(reader.prompt)), cmap=shades, vmin=-1 / 6, vmax=7 / 6)
    _title(axes, f"{method}: {cache.report().share:.0%} of a full cache's bytes")
    heads = ("no", "1 of 3", "2 of 3", "all")
    named = [Patch(facecolor=c, edgecolor=PALE, lw=0.4) for c in SHADES]
    _legend(figure, named, [f"{each} kv heads keep it" for each in heads])
    return figure


def draw_zoom(reader: Reader) -> Figure:
    """Exact tokens, spans, and how often each span is expanded while the answer is written."""
    cache = kvfold.make_cache(reader.model, ZOOM, budget=BUDGET)
    explainer = Explainer(cache)
    logits = reader.read(cache)
    share = cache.report().share
    explainer.start_counting()
    generation = generate(reader.model, cache, logits, max_new_tokens=ASKED)
    assert len(list(generation)) == ASKED
    text = explainer.explain([""] * len(reader.prompt))
    assert text.expanded is not None
    span_of, expanded = text.span_of.numpy(), text.expanded.numpy()
    heat = np.where(span_of >= 0, expanded[:, span_of.clip(min=0)], np.nan)
    figure, axes = _panel(reader)
    _paint(axes, np.where(np.isnan(heat), 1.0, np.nan), cmap=ListedColormap([EXACT]))
    _paint(axes, heat, cmap=_blues(), vmin=0, vmax=1)
    _title(axes, f"{ZOOM}: {share:.0%} of a full cache's bytes are fast")
    named = [Patch(facecolor=c, edgecolor=PALE, lw=0.4) for c in (EXACT, SPAN, HEAT)]
    _legend(figure, named, ["exact token", "in a span never expanded", "in one always expanded"])
    return figure


def draw_generation(reader: Reader, method: str = "tova") -> Figure:
    """What one layer keeps, a row for the prompt and for each generated token."""
    cache = kvfold.make_cache(reader.model, method, budget=64)
    logits, rows = reader.read(cache), []
    width, layer = len(reader.prompt) + WRITTEN, len(cache.own_layers) // 2
    for _ in range(WRITTEN):
        rows.append(_kept_in(cache.own_layers[layer], width))
        logits = prefill(reader.model, logits.argmax(-1)[:, None], cache)
    figure, axes = _panel(reader)
    _paint(axes, np.stack(rows), cmap=ListedColormap(SHADES), vmin=-1 / 6, vmax=7 / 6)
    axes.set_ylabel("generated tokens", fontsize=9, color=INK)
    axes.axvline(len(reader.prompt) - 0.5, color=INK, lw=0.8, ls="--")
    axes.annotate(
        "end of the prompt",
        (len(reader.prompt) - 0.5, WRITTEN - 2),
        xytext=(-90, 0),
        textcoords="offset points",
        fontsize=8,
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        arrowprops={"arrowstyle": "->", "color": INK},
    )
    _title(axes, f"{method}, budget of 64 tokens: layer {layer} while {WRITTEN} are generated")
    return figure


def draw_diffusion() -> Figure:
    """Places of an addition as they are decided, and the tokens that a layer computes."""
    model = DiffusionModel.from_pretrained("arithmetic")
    tokenizer = load_tokenizer(own_folder("arithmetic"))
    prompt = tokenizer("123+456=", add_special_tokens=False)["input_ids"]
    writing = stream(model, [prompt], "spa", length=16, sampler=LLaDASampler(steps=16))
    frames = [(frame.ids[0], frame.changed[0]) for frame in writing]
    mask = model.traits.mask_id
    figure = Figure(figsize=(7.2, 4.2), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots()
    grid = np.stack([np.where(c, 2, np.where(i != mask, 1, 0)) for i, c in frames])
    _paint(axes, grid, cmap=ListedColormap([UNDECIDED, DECIDED, NEW]), vmin=0, vmax=2)
    for step, (ids, changed) in enumerate(frames):
        for place in (ids != mask).nonzero()[:, 0].tolist():
            letter = str(tokenizer.decode([int(ids[place])])).replace("<end>", "·")
            colour = "white" if bool(changed[place]) else INK
            axes.text(place, step, letter, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xlabel("generated places after 123+456=", fontsize=9, color=INK)
    axes.set_ylabel("step", fontsize=9, color=INK)
    axes.set_xticks(range(grid.shape[1]))
    axes.set_title("a masked diffusion model decides one place a step", fontsize=10, loc="left")
    named = [Patch(facecolor=c, edgecolor=PALE, lw=0.4) for c in (UNDECIDED, DECIDED, NEW)]
    _legend(figure, named, ["a mask", "decided before", "decided in this step"])
    return figure


def draw_growth(token_bytes: int) -> Figure:
    """Bytes of keys and values against tokens, by budget."""
    figure = Figure(figsize=(7.2, 3.2), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots()
    tokens = np.arange(0, 8193, 64)
    lines = {
        "everything": (tokens, INK, "-"),
        "budget=0.25": (0.25 * tokens, "#0b4f80", "-"),
        "budget=512": (np.minimum(tokens, 512), FACT, "--"),
    }
    for label, (held, colour, style) in lines.items():
        axes.plot(tokens, held * token_bytes / 2**20, color=colour, ls=style, lw=1.8, label=label)
    axes.set_xlabel("tokens read", fontsize=9, color=INK)
    axes.set_ylabel("MiB of keys and values", fontsize=9, color=INK)
    axes.set_title(f"one row of the default model: {token_bytes:,} bytes a token", fontsize=10)
    axes.legend(fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _blues() -> ListedColormap:
    low, high = (np.array([int(c[i : i + 2], 16) for i in (1, 3, 5)]) / 255 for c in (SPAN, HEAT))
    return ListedColormap([tuple(low + (high - low) * share) for share in np.linspace(0, 1, 64)])


def _panel(reader: Reader) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 3.6), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("position of the token", fontsize=9, color=INK)
    axes.set_ylabel("layer", fontsize=9, color=INK)
    middle = sum(reader.fact) / 2
    axes.annotate(
        "what is asked for",
        (middle, 1.02),
        xycoords=("data", "axes fraction"),
        xytext=(7, -1),
        textcoords="offset points",
        fontsize=8,
        color=FACT,
    )
    mark = {"color": FACT, "clip_on": False, "lw": 0}
    axes.plot([middle], [1.02], "v", ms=6, transform=axes.get_xaxis_transform(), **mark)
    return figure, axes


def _paint(axes: Axes, values: np.ndarray, **options: object) -> None:
    axes.imshow(values, aspect="auto", interpolation="nearest", **options)  # pyright: ignore
    axes.tick_params(labelsize=8, colors=PALE)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=10, color=INK, loc="left", pad=14)


def _legend(figure: Figure, handles: list[Patch], labels: list[str]) -> None:
    place = {"loc": "outside lower center", "ncols": len(labels), "fontsize": 8}
    figure.legend(handles, labels, frameon=False, **place)  # pyright: ignore


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file."""
    canvas = FigureCanvasAgg(figure)
    write_whole(path, lambda temporary: canvas.print_png(temporary))


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/concepts.md.")
    parser.add_argument("--out", default="docs/pictures", help="folder of the PNG files")
    folder = Path(parser.parse_args().out)
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = kvfold.load("default")
    reader = Reader(model, tokenizer)
    for method in METHODS:
        save(draw_kept(reader, method), folder / f"{method}.png")
    save(draw_zoom(reader), folder / f"{ZOOM}.png")
    save(draw_generation(reader), folder / "generation.png")
    save(draw_diffusion(), folder / "diffusion.png")
    save(draw_growth(anatomy_of(model).kv_bytes_per_token()), folder / "growth.png")


if __name__ == "__main__":
    main()
