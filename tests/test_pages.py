# SPDX-License-Identifier: Apache-2.0
"""Pages for users are easy to read, have an example, and lead somewhere; their code compiles and runs."""

import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import jrl
from jrl import trlx
from jrl.trainers.loop.run import run_length
from jrl.trl import DDPOConfig
from tests.environments.chat_models import chat_tokenizer, save_chat_model
from tests.models.diffusion.tiny_folder import save_tiny_folder
from tests.trainers.loading.reward_models import save_reward_model

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
QUICK = (
    "CONTRIBUTING.md",
    "docs/api.md",
    "docs/internals/0001-shift-once.md",
    "docs/internals/0002-one-update.md",
    "docs/internals/0003-vocabulary-padding.md",
    "docs/internals/0004-model-contract.md",
    "docs/internals/0005-decoder-by-kinds.md",
    "docs/internals/0006-two-faces.md",
    "docs/metrics.md",
    "docs/migrating/trl_surface.md",
    "docs/models.md",
    "docs/performance.md",
    "docs/reward_gradient.md",
    "docs/rewards.md",
    "docs/words.md",
)
"""Those whose Python trains nothing."""
TRAINING = (
    "README.md",
    "docs/data.md",
    "docs/ddpo.md",
    "docs/dpo.md",
    "docs/episodes.md",
    "docs/getting_started.md",
    "docs/grpo.md",
    "docs/ilql.md",
    "docs/index.md",
    "docs/migrating/from_trlx.md",
    "docs/migrating/trl_ppo.md",
    "docs/migrating/trlx_surface.md",
    "docs/ppo.md",
    "docs/reward_models.md",
    "docs/rft.md",
    "docs/sft.md",
    "docs/sweeps.md",
    "docs/verifiers.md",
)
"""Those whose Python trains; `tests/tiers/broad.txt` names their test."""
SLOW = "docs/environments.md"
"""The one of them whose five runs take a minute."""
ELSEWHERE = {
    "docs/migrating/from_trl.md": "tests/trl/test_from_trl.py",
    "docs/migrating/trl_grpo.md": "tests/trl/test_trl_grpo_page.py",
}
"""Those whose scripts have tests of their own."""
LANGUAGE = (*("path/to/checkpoint", "gpt2", "lvwerra/gpt2-imdb", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B"),)
CLASSIFIER, DIFFUSION = "lvwerra/distilbert-imdb", "path/to/stable-diffusion-v1-5"
"""What pages call their models."""
NEEDS = {"AutoModelForCausalLM.": "torch", "import Verifiers": "verifiers", "import verifiers": "verifiers"}
"""Words of a block, and the package that it needs and the extra `test` does not bring."""
MODULE = re.compile(r"# (\w+)\.py$", re.MULTILINE)
"""First line of a block that is a module of its own."""
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
    lists = (*QUICK, *TRAINING, SLOW, *ELSEWHERE)
    assert sorted(lists) == sorted(page for page in PAGES if re.search(r"^ *```py", read(page), re.M))
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


def test_python_is_marked_as_such():
    """A block under another word is run by no test."""
    for page in PAGES:
        assert not re.search(r"^ *```(?!python\n)py", read(page), re.M), page


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pages call their models, and the tiny one that takes its place."""
    folder = tmp_path_factory.mktemp("models")
    language = save_chat_model(folder / "language", chat_tokenizer(()))
    others = {CLASSIFIER: save_reward_model(folder / "classifier"), DIFFUSION: str(folder / "diffusion")}
    save_tiny_folder(folder / "diffusion")
    return {**dict.fromkeys(LANGUAGE, language), **others}


def in_few_steps(train: Callable[..., Any]) -> Callable[..., Any]:
    """`jrl.train` with a short run on few rows, in the place of the one before, whatever the page's configuration."""

    def shortened(*arguments: Any, config: jrl.TRLConfig, **others: Any) -> Any:
        rows = {"num_rollouts": 16, "chunk_size": 16, "n_generations_per_prompt": 4}
        method = {name: value for name, value in rows.items() if hasattr(config.method, name)}
        steps = {"total_steps": 4, "batch_size": 2, "minibatch_size": 2, "overwrite": True}
        return train(*arguments, config=config.evolve(train=steps, method=method), **others)

    return shortened


def in_one_epoch(**fields: Any) -> jrl.DDPOConfig:
    """`jrl.DDPOConfig` of an epoch of four samples."""
    sizes = {
        "num_epochs": 1,
        "sample_num_steps": 2,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 2,
    }
    updates = {"train_batch_size": 2, "train_gradient_accumulation_steps": 1, "allow_tf32": False}
    return DDPOConfig(**(fields | sizes | updates))


def run(
    page: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch, package: str | None = None
) -> dict:
    """The names that the blocks of a page leave, one after the other in an empty folder, as one script.

    Args:
      page: From the root.
      models: What stands in the page, and what is read in its place.
      monkeypatch: Shortens the runs.
      package: Blocks that need it run, too.
    """
    monkeypatch.setattr(jrl, "train", in_few_steps(jrl.train))
    monkeypatch.setattr(trlx, "train", in_few_steps(trlx.train))
    monkeypatch.setattr(jrl, "DDPOConfig", in_one_epoch)
    monkeypatch.syspath_prepend(os.getcwd())
    absent = {word for word, needed in NEEDS.items() if needed != package}
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in blocks(page):
        for name, folder in models.items():
            code = code.replace(f'"{name}"', repr(folder))
        if any(word in code for word in absent):
            continue
        if module := MODULE.match(code):
            Path(module[0].removeprefix("# ")).write_text(code, encoding="utf-8")
            made = ModuleType(module[1])
            exec(compile(code, page, "exec"), vars(made))
            monkeypatch.setitem(sys.modules, module[1], made)
        else:
            exec(compile(code, page, "exec"), names)
    return names


def test_the_first_grpo_run_makes_its_steps(monkeypatch):
    """`train.epochs` are iterations, of one optimizer step there."""
    configs = []

    def kept(*_: Any, config: jrl.TRLConfig, **others: Any) -> SimpleNamespace:
        configs.append(config)
        return SimpleNamespace(save_pretrained=lambda folder: folder)

    monkeypatch.setattr(jrl, "train", kept)
    exec(compile(blocks("docs/grpo.md")[0], "docs/grpo.md", "exec"), {})
    (config,) = configs
    method, train = config.method, config.train
    each = method.num_rollouts * method.num_iterations // train.batch_size
    _, end = run_length(train.total_steps, steps_per_iteration=each, max_iterations=train.epochs)
    assert end == train.total_steps == 200


@pytest.mark.parametrize("page", QUICK)
def test_python_that_trains_nothing_runs(page, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpts" / "metrics.jsonl").write_text('{"step": 8, "reward/mean": 0.5}\n', encoding="utf-8")
    run(page, models, monkeypatch)


@pytest.mark.parametrize(
    ("page", "package"),
    [
        *((page, None) for page in TRAINING),
        pytest.param(SLOW, None, marks=pytest.mark.slow),
        pytest.param(SLOW, "verifiers", marks=pytest.mark.slow),
        pytest.param("docs/getting_started.md", "torch", marks=pytest.mark.parity),
    ],
)
@pytest.mark.filterwarnings("ignore:Iteration .. no prompt has two samples")  # weights are random
def test_python_runs(page, package, models, tmp_path, monkeypatch):
    if package is not None:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = run(page, models, monkeypatch, package)
    if "main" in names:  # a sweep's script: it gets the values of a trial
        names["main"]({"optimizer.kwargs.lr": 1e-4, "method.target": None})
    assert list(tmp_path.rglob("metrics.jsonl")) or list(tmp_path.rglob("model.safetensors"))
