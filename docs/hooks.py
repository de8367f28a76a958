"""Extends the site of `make docs` with the files outside docs/ to which its pages link.

The copy of README.md on the site is `repository/README.md`. A code file becomes a page with syntax
highlighting, and other files are copied. A link to a folder becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[[^\]\[]*\])\(([^)\s#]*)(#[^)\s]*)?\)")
CODE = {".py": "python", ".c": "c", ".yaml": "yaml", ".txt": "text", ".http": "http"}
COPIED: dict[str, str] = {}  # path on the site → path in the repository


def on_files(files: Any, config: Any) -> Any:
    """Add the linked files, and also the files to which the added pages link."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    while waiting:
        for path in linked(waiting.pop()):
            there = site_path(path)
            if path.startswith("docs/") or there in COPIED or not (ROOT / path).is_file():
                continue
            COPIED[there] = path
            if language := CODE.get(Path(path).suffix):
                code = (ROOT / path).read_text(encoding="utf-8")
                text = f"# {path}\n\n`````{language}\n{code}`````\n"
                unlisted = (
                    "---\nsearch: {exclude: true}\n---\n"  # the search covers only text pages
                )
                files.append(File.generated(config, there, content=unlisted + text))
            else:
                files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))
                waiting += [path] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    here = page.file.src_uri
    path = COPIED.get(here, f"docs/{here}")
    if not path.endswith(".md"):  # code has no links
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        there = inside(path, target)
        if not (ROOT / there).is_file():
            return text.strip("[]")
        relative = posixpath.relpath(site_path(there), posixpath.dirname(here))
        return f"{text}({relative}{anchor or ''})"

    return LINK.sub(rewritten, markdown)


def linked(page: str) -> Iterator[str]:
    """Yield the paths, relative to the repository, of the files to which a page links."""
    for _, target, _ in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if target and not re.match(r"[a-z]+:", target):
            yield inside(page, target)


def inside(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site_path(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" + (".md" if Path(path).suffix in CODE else "")
