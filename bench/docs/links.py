"""Hook of mkdocs: links that leave the folder of documents become the name of the file.

The documents are read in a checkout, too, where such links lead to tests and scripts; the site has
neither.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

_LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: object, config: dict, files: object) -> str:
    """Called by mkdocs with the text of every page."""
    source = PurePosixPath(page.file.src_uri)  # pyright: ignore[reportAttributeAccessIssue]
    return without_outside_links(markdown, Path(config["docs_dir"]), source)


def without_outside_links(markdown: str, folder: Path, page: PurePosixPath) -> str:
    """The text with links to files outside a folder as code.

    Args:
        markdown: Of one page.
        folder: Of the documents.
        page: The page, from the folder.
    """
    inside = folder.resolve()

    def replaced(match: re.Match[str]) -> str:
        target = (inside / page.parent / match[2]).resolve()
        return match[0] if target.is_relative_to(inside) else f"`{match[2].lstrip('./')}`"

    return _LINK.sub(replaced, markdown)
