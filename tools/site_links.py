"""A hook of mkdocs: links to files of the repository beside docs/ become the path of the file, as the site has no such page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """The text of a page with such links replaced."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return found[0]
        path = str(target.relative_to(ROOT))
        return f"`{path}`" if found[1].strip("`").rstrip("/") in path else f"{found[1]} (`{path}`)"

    return LINK.sub(replaced, markdown)
