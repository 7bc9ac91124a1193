# SPDX-License-Identifier: Apache-2.0
"""Citations for a run: entries of `papers.bib` by their keys, or BibTeX that a method brings itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from jrl.learners.config import MethodConfig
from jrl.trainers.config.method import entry_of

LORA = "hu2021lora"
_FILE = Path(__file__).with_name("papers.bib")


@functools.cache
def bibliography() -> Mapping[str, str]:
    """BibTeX entries of `papers.bib` by key."""
    entries = re.findall(r"^@.*?^\}", _FILE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {entry.split("{", 1)[1].split(",", 1)[0]: entry for entry in entries}


def citations(method: MethodConfig) -> list[str]:
    """BibTeX of what to cite for a method as it is configured; [] for one that is not known, and for SFT.

    Args:
      method: The algorithm's section of a configuration.
    Raises:
      TypeError: If the entry's `papers` are a single text.
      ValueError: If one is neither a key nor BibTeX.
    """
    entry = entry_of(method)
    if entry is None:
        return []
    papers = entry.papers(method)
    if isinstance(papers, str):
        raise TypeError(f"`papers` of the method {entry.name!r} must give a list of texts, got {papers!r}.")
    return [bibtex(paper) for paper in dict.fromkeys(papers)]


def bibtex(paper: str) -> str:
    """The entry of a key of `papers.bib`; a text that is an entry already stays what it is.

    Raises:
      ValueError: If there is no such key.
    """
    if paper.lstrip().startswith("@"):
        return paper.strip()
    if paper not in bibliography():
        raise ValueError(
            f"`papers` must be keys of papers.bib or BibTeX entries, got {paper!r}: an entry begins with @."
        )
    return bibliography()[paper]
