"""`kvfold generate --explain`: the picture of what `sekv` does with a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.files import output_folder
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvfold.cache import KVCache
    from kvfold.zoom.explain import Explainer

METHOD, ENDING = "sekv", ".png"

ExplainOption = Annotated[
    Path | None,
    typer.Option(
        "--explain",
        help="With sekv: draw surprisal, anchors, spans, and which of them the answer expands.",
        metavar="PNG",
        show_default=False,
    ),
]


def check_explain(path: Path | None, method: str) -> None:
    """Refuse another method, and a file that cannot be written.

    Raises:
        ConfigError: Saying what to give.
    """
    if path is None:
        return
    if method != METHOD:
        raise ConfigError(
            f"--explain shows what {METHOD} does with a prompt, not {method}: add --method {METHOD}"
        )
    if path.suffix.lower() != ENDING:
        raise ConfigError(
            f"--explain writes a PNG file, not {str(path)!r}: give a name that ends in {ENDING}"
        )
    if path.is_dir():
        raise ConfigError(f"--explain {str(path)!r} is a folder: give the name of a file")
    output_folder(str(path.parent))


def explainer_of(cache: KVCache, path: Path | None) -> Explainer | None:
    """What watches an empty cache, if there is a picture to be drawn.

    Raises:
        ConfigError: When the cache never makes spans.
    """
    if path is None:
        return None
    from kvfold.zoom.explain import Explainer

    return Explainer(cache)


def write_explanation(
    explainer: Explainer, tokenizer: PreTrainedTokenizerBase, tokens: list[int], path: Path
) -> None:
    """Draw what became of a prompt, into a folder that is made if it is missing.

    Args:
        explainer: That watched it.
        tokenizer: The model's.
        tokens: Of the prompt.
        path: The PNG file.

    Raises:
        ArtifactError: When the file cannot be written.
    """
    from kvfold.zoom.picture import plot_segments

    words = [str(tokenizer.decode([token])) for token in tokens]
    path.parent.mkdir(parents=True, exist_ok=True)
    plot_segments(explainer.explain(words), path)
