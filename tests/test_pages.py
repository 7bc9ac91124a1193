# SPDX-License-Identifier: Apache-2.0
"""Pages for users are easy to read, have an example, and lead somewhere; their code compiles and runs."""

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jrl
from tests.trainers.runs import save_tiny_checkpoint

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    "examples/README.md",
    "examples/maze/README.md",
    "examples/randomwalks/README.md",
    "examples/wordle/README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
)
"""Held to the rules below: all of them."""
MATHS = (
    "docs/api.md",
    "docs/internals/0001-shift-once.md",
    "docs/internals/0002-one-update.md",
    "docs/internals/0003-vocabulary-padding.md",
    "docs/internals/0004-model-contract.md",
    "docs/internals/0005-decoder-by-kinds.md",
    "docs/metrics.md",
    "docs/reward_gradient.md",
    "docs/words.md",
)
"""Those whose Python trains nothing."""
RUNNABLE = (
    "README.md",
    "docs/data.md",
    "docs/dpo.md",
    "docs/getting_started.md",
    "docs/ilql.md",
    "docs/index.md",
    "docs/models.md",
    "docs/ppo.md",
    "docs/rewards.md",
    "docs/rft.md",
)
"""Those whose Python needs nothing but a checkpoint."""
ELSEWHERE = {
    "docs/migrating/from_trl.md": "tests/trl/test_from_trl.py",
    "docs/migrating/trl_grpo.md": "tests/trl/test_trl_grpo_page.py",
}
"""Those whose scripts have tests of their own."""
COMPILED = (
    "docs/ddpo.md",
    "docs/environments.md",
    "docs/episodes.md",
    "docs/grpo.md",
    "docs/migrating/trl_ppo.md",
    "docs/migrating/trlx_surface.md",
    "docs/performance.md",
    "docs/reward_models.md",
    "docs/sft.md",
    "docs/sweeps.md",
    "docs/verifiers.md",
    "CONTRIBUTING.md",
)
"""Those whose Python is compiled and not run: it leaves out names that its reader has."""
CHECKPOINT = re.compile(r"path/to/checkpoint|(?<=\")gpt2(?=\")")
"""What a page calls its checkpoint."""
MEAN_WORDS, LONG_WORDS, LONG_SHARE = 18, 30, 0.1
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def sentences(text: str) -> list[str]:
    """Sentences of a page's prose and lists: without code, tables, headings, pictures and addresses.

    Example:
      >>> sentences("# A title\\n\\nOne two. Three\\nfour five.\\n\\n- six seven\\n- eight\\n")
      ['One two.', 'Three four five.', 'six seven', 'eight']
    """
    text = FENCE.sub("", text)
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
    assert FENCE.search(read(page))


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
    found = [code for language, code in FENCE.findall(read(page)) if language == "python"]
    return [code for code in found if not code.startswith("# before")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_python_compiles(page):
    for code in blocks(page):
        ast.parse(code)


def test_every_page_with_python_is_in_one_list():
    lists = (*MATHS, *RUNNABLE, *ELSEWHERE, *COMPILED)
    assert sorted(lists) == sorted(page for page in PAGES if re.search(r"^ *```python", read(page), re.M))
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", MATHS)
def test_python_that_trains_nothing_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpts" / "metrics.jsonl").write_text('{"step": 8, "reward/mean": 0.5}\n', encoding="utf-8")
    names: dict[str, object] = {}
    for code in blocks(page):
        exec(compile(code, page, "exec"), names)


def in_few_steps(train: Callable[..., jrl.Trainer]) -> Callable[..., jrl.Trainer]:
    """`jrl.train` with a run of two iterations on few rows, whatever the page's own configuration says."""

    def shortened(*arguments: Any, config: jrl.TRLConfig, **others: Any) -> jrl.Trainer:
        rows = {"num_rollouts": 16, "chunk_size": 16, "n_generations_per_prompt": 4}
        method = {name: value for name, value in rows.items() if hasattr(config.method, name)}
        config = config.evolve(
            train={"total_steps": 4, "batch_size": 2, "minibatch_size": 2, "seq_length": 96}, method=method
        )
        return train(*arguments, config=config, **others)

    return shortened


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE)
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page, one after the other, on a small checkpoint and for few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jrl, "train", in_few_steps(jrl.train))
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    names: dict[str, object] = {"jrl": jrl}
    for code in blocks(page):
        exec(compile(CHECKPOINT.sub(lambda _: checkpoint, code), page, "exec"), names)
    if "trainer" in names:
        assert os.path.exists("ckpts/metrics.jsonl")
