# SPDX-License-Identifier: Apache-2.0
"""Pages for users are easy to read, have an example, and lead somewhere; their code compiles and runs."""

import ast
import os
import re
from pathlib import Path

import pytest

from tests.trainers.runs import save_tiny_checkpoint

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/adapters.md",
    "docs/api.md",
    "docs/checkpoints.md",
    "docs/command_line.md",
    "docs/configuration.md",
    "docs/ddpo.md",
    "docs/dpo.md",
    "docs/environments.md",
    "docs/episodes.md",
    "docs/exact.md",
    "docs/migrating/from_trl.md",
    "docs/getting_started.md",
    "docs/grpo.md",
    "docs/hardware.md",
    "docs/ilql.md",
    "docs/index.md",
    "docs/launch.md",
    "docs/ppo.md",
    "docs/reward_models.md",
    "docs/rewards.md",
    "docs/rft.md",
    "docs/rollouts_ahead.md",
    "docs/sft.md",
    "docs/sweeps.md",
    "docs/migrating/trl_grpo.md",
    "docs/migrating/trl_ppo.md",
    "docs/migrating/trlx_surface.md",
    "docs/troubleshooting.md",
    "docs/verifiers.md",
    "examples/maze/README.md",
    "examples/wordle/README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
)
"""Held to the rules below; a page comes here once it is written to them."""
RUNNABLE = ("README.md", "docs/getting_started.md", "docs/ppo.md", "docs/rewards.md")
"""Those whose Python needs nothing but a checkpoint; other pages have tests of their own."""
MEAN_WORDS, LONG_WORDS, LONG_SHARE = 18, 30, 0.1
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def sentences(text: str) -> list[str]:
    """Sentences of a page's prose and lists: without code, tables, headings, pictures and addresses.

    Example:
      >>> sentences("# A title\\n\\nOne two. Three\\nfour five.\\n\\n- six seven\\n- eight\\n")
      ['One two.', 'Three four five.', 'six seven', 'eight']
    """
    text = _FENCE.sub("", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(?:#.*|\|.*|!\[.*| {4}.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        found += [part for part in re.split(r"(?<=[.?!])\s+", flat) if re.search(r"\w", part)]
    return found


def lengths(text: str) -> list[int]:
    """Words of each sentence; what stands between backticks is one word."""
    return [len(re.sub(r"`[^`]*`", "code", sentence).split()) for sentence in sentences(text)]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page):
    found = lengths(read(page))
    longest = sorted(sentences(read(page)), key=lambda sentence: -len(sentence.split()))[:3]
    assert len(found) >= 4
    assert sum(found) / len(found) <= MEAN_WORDS, longest
    assert sum(count > LONG_WORDS for count in found) <= LONG_SHARE * len(found), longest


def test_long_sentences_are_seen():
    text = "One two three. " + "word " * 39 + "end."
    assert lengths(text) == [3, 40]
    assert lengths("| a table |\n|---|\n\n```\ncode. code.\n```\n# A heading. Two.\n") == []
    assert lengths("See [the page](docs/a.md) of `one two three`.\n- first\n- second one") == [5, 1, 2]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_an_example(page):
    assert _FENCE.search(read(page))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (folder / name).resolve() if name else ROOT / page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, link


def blocks(page: str) -> list[str]:
    """Python of a page, but for two scripts side by side."""
    found = [code for language, code in _FENCE.findall(read(page)) if language == "python"]
    return [code for code in found if not code.startswith("# before")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_python_compiles(page):
    for code in blocks(page):
        ast.parse(code)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE)
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page, one after the other, on a small checkpoint and for few steps."""
    monkeypatch.chdir(tmp_path)
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    names: dict[str, object] = {}
    for code in blocks(page):
        code = code.replace("path/to/checkpoint", checkpoint).replace(
            '"total_steps": 200', '"total_steps": 16'
        )
        exec(compile(code, page, "exec"), names)
    if "trainer" in names:
        assert os.path.exists("ckpts/metrics.jsonl")
