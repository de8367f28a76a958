"""For `make docs`: links that leave docs/ become links to the repository's files.

In the repository `../../README.md` is a page; on the site it is not. Where it leads there is
REPOSITORY, which the environment sets; without it such links become plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^)\s]+)\)")
REPOSITORY = os.environ.get("REPOSITORY", "").rstrip("/")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page; those into folders of docs/ lose their target too."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if picture or re.match(r"[a-z]+:|#", target):
            return match[0]
        path = target.partition("#")[0]
        inside = posixpath.normpath(posixpath.join("docs", folder, path))
        if inside.startswith("docs/") and posixpath.splitext(inside)[1] in (".md", ".png", ".svg"):
            return match[0]
        return f"[{text}]({REPOSITORY}/{inside})" if REPOSITORY else text

    return LINK.sub(rewritten, markdown)
