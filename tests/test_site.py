# SPDX-License-Identifier: Apache-2.0
"""The site's table of contents has every page once, and the index leads to them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(part: Any) -> Iterator[str]:
    """Pages of a part of the table of contents."""
    if isinstance(part, str):
        yield part
    else:
        for below in part.values() if isinstance(part, dict) else part:
            yield from pages(below)


def test_every_page_is_in_the_contents_once():
    written = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(pages(SITE["nav"])) == written


def test_the_index_leads_to_every_page_for_users():
    linked = set(re.findall(r"\]\(([\w/]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    for_users = {page for page in pages(SITE["nav"]) if not page.startswith("internals/")}
    surfaces = {"migrating/trl_surface.md", "migrating/trlx_surface.md"}
    assert for_users - surfaces - {"index.md", "lore.md"} == linked


def test_nothing_is_fetched_to_read_it():
    assert SITE["theme"]["font"] is False
    assert not any("http" in str(value) for value in (SITE.get("extra_css"), SITE.get("extra_javascript")))
