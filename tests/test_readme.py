# SPDX-License-Identifier: Apache-2.0
"""What the README and the page of results say is so."""

import re
from pathlib import Path

import pytest

import jrl
from jrl.cli.train import configuration, given_fields
from jrl.trainers.loading.learning_rate import RATE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_every_link_leads_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("mark", ["run", "test"])
def test_each_command_is_one_line_under_its_mark(mark):
    block = re.search(rf"<!-- {mark} -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert block is not None and len(block[1].strip().splitlines()) == 1
    assert block[1].startswith("python3 -m venv .venv && ")


def test_it_is_short_and_has_a_picture():
    assert len(README.splitlines()) <= 120
    picture = re.search(r"!\[[^\]]+\]\((docs/images/\w+\.png)\)", README)[1]
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:The configuration")  # says what takes its default
def test_its_python_call_its_command_and_its_recipe_are_one_run(tmp_path):
    recipe = tmp_path / "run.yaml"
    recipe.write_text(re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1], encoding="utf-8")
    changes = {"train": {"seq_length": 64, "total_steps": 200}, "method": {"init_kl_coef": 0.05}}
    assert 'train={"seq_length": 64, "total_steps": 200}, method={"init_kl_coef": 0.05}' in README
    expected = jrl.default_ppo_config().evolve(model={"model_path": "path/to/checkpoint"}, **changes)
    flags = re.search(r"^jrl ppo .*?(--model.*)$", README, re.MULTILINE)[1].split()
    for path, words in [(str(recipe), []), (None, flags)]:
        assert configuration("ppo", path, words) == expected
        given = given_fields(path, words)  # else they would go by the model
        assert {RATE, "method.init_kl_coef", "train.seq_length"} <= given


def head_of(recipe: str) -> str:
    """Comments at the head of a recipe, with the page's signs."""
    lines = (ROOT / "configs" / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines()
    head = " ".join(line for line in lines if line.startswith("#"))
    return head.replace("->", "→").replace("+0", "0").replace(" -", " −")


def test_the_figures_of_the_main_example_are_those_of_its_recipe():
    row = re.search(r"sentiment: VADER score of held-out completions (.*?); random walks", RESULTS)[1]
    figures = re.findall(r"\d\.\d+ → \d\.\d+", row)
    time, day = re.search(r"\d+ s\b", row)[0], re.search(r"\d{4}-\d\d-\d\d", row)[0]
    head = head_of("ppo_sentiment")
    assert len(figures) == 3
    assert [said for said in (*figures, time, day) if said not in head] == []


def test_the_figures_of_the_chain_are_those_of_its_recipes():
    said = " ".join(
        re.search(r"Learned and true reward of one run(.*?)CPU time", RESULTS, re.DOTALL)[1].split()
    )
    day = re.search(r"\d{4}-\d\d-\d\d", said)[0]
    number = r"(−?\d\.\d)"
    sft, sft_true = re.search(rf"SFT {number} and {number}", said).groups()
    ppo, ppo_true, best = re.search(rf"PPO {number} and {number} \({number} at best", said).groups()
    dpo, dpo_true = re.search(rf"DPO {number} and {number}", said).groups()
    head = head_of("ppo_chain")
    assert f"{day}: learned reward {sft} → {ppo}, true {sft_true} → {ppo_true} ({best} at best" in head
    assert f"{day}: true reward {sft_true} → {dpo_true}, learned {sft} → {dpo}" in head_of("dpo_chain")


def test_every_decision_is_linked_for_contributors():
    linked = re.findall(
        r"\]\((docs/internals/\d{4}-[\w-]+\.md)\)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    )
    assert linked == [
        str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/internals").glob("[0-9]*.md"))
    ]
