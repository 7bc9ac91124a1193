# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: files of the repository that pages link to, such as recipes and sources, become pages of the site.

A page links to them relative to itself (`../configs/ppo.yaml`), as a reader of the repository needs it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOM = "repository"
RECORDS = 50
"""Lines that are shown of a file of records."""
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".jsonl": "json", ".json": "json", ".sh": "bash"}
_PICTURES = {".png", ".gif", ".jpg", ".svg"}


def on_files(files: Files, config: Any) -> Files:
    """Adds what is linked, and what the pages among it link to."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    seen: set[str] = set()
    while waiting:
        page = waiting.pop()
        for target in _linked(page):
            name = target.relative_to(ROOT).as_posix()
            if name in seen or target.is_relative_to(ROOT / "docs"):
                continue
            seen.add(name)
            files.append(_file(config, name, target))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links at the site's copies."""
    del config, files
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix(f"{ROOM}/") if uri.startswith(f"{ROOM}/") else ROOT / "docs" / uri

    def rewritten(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        target = (source.parent / link).resolve()
        if "://" in link or not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        found = os.path.relpath(_uri(target), Path(uri).parent)
        return f"]({found}{anchor})"

    return _LINK.sub(rewritten, markdown)


def _linked(page: Path) -> Iterator[Path]:
    """Files and folders of the repository that a page links to."""
    for link, _ in _LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / link).resolve()
        if "://" not in link and target.is_relative_to(ROOT) and target.exists():
            yield target


def _uri(target: Path) -> str:
    """Where a file of the repository stands among the site's sources."""
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    name = f"{ROOM}/{target.relative_to(ROOT).as_posix()}"
    return name if target.suffix in _PICTURES | {".md"} else f"{name}.md"


def _file(config: Any, name: str, target: Path) -> File:
    """A picture or page as it is; anything else as a page that shows it."""
    uri = _uri(target)
    if target.suffix in _PICTURES | {".md"}:
        return File.generated(config, uri, abs_src_path=str(target))
    if target.is_dir():
        body = "\n".join(f"- `{path.name}`" for path in sorted(target.iterdir()))
        return File.generated(config, uri, content=f"# {name}\n\n{body}\n")
    language = _LANGUAGES.get(target.suffix, "text")
    lines = target.read_text(encoding="utf-8").splitlines()
    shown = lines[:RECORDS] if target.suffix == ".jsonl" else lines
    cut = "" if len(shown) == len(lines) else f"The first {RECORDS} of {len(lines)} lines.\n\n"
    body = "\n".join(shown)
    return File.generated(config, uri, content=f"# {name}\n\n{cut}~~~~{language}\n{body}\n~~~~\n")
