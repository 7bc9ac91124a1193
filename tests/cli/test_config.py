# SPDX-License-Identifier: Apache-2.0
"""`jrl config`, and the fields in a command's help."""

import re
from pathlib import Path

import pytest

import jrl
from jrl.cli import main
from jrl.trainers.config.described import as_yaml, field_notes
from jrl.trainers.config.method import commands, entries

ROOT = Path(__file__).parents[2]
NESTED = [name for name, entry in commands().items() if entry.data != "images"]


@pytest.mark.parametrize("name", NESTED)
def test_it_is_a_recipe_that_is_read_back(name, tmp_path, capsys):
    assert main(["config", name]) == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    entry = commands()[name]
    expected = entry.default()
    if name in entry.variants:
        expected = expected.evolve(method=entry.switches(name))
    assert jrl.TRLConfig.load_yaml(path) == expected


def test_files_and_flags_change_it(tmp_path, capsys):
    recipe = ROOT / "configs" / "ppo_sentiment.yaml"
    assert main(["config", "ppo", "--config", str(recipe), "--method.cliprange", "0.1"]) == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert jrl.TRLConfig.load_yaml(path) == jrl.TRLConfig.load_yaml(recipe).evolve(method={"cliprange": 0.1})


@pytest.mark.parametrize("name", [name for name in entries() if name in NESTED])
def test_every_field_says_what_it_means(name):
    for section in vars(entries()[name].default()).values():
        assert set(vars(section)) <= field_notes(type(section)).keys()


def test_a_field_stands_under_its_meaning():
    text = as_yaml(jrl.default_ppo_config(), ["method"])
    assert "  # Passes over each set of rollouts, usually 1 to 4.\n  ppo_epochs: 4\n" in text
    assert "train:" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_sections_are_named(capsys):
    assert main(["config", "ppo", "--section", "train", "--section", "model"]) == 0
    assert re.findall(r"^\w+:", capsys.readouterr().out, re.MULTILINE) == ["model:", "train:"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dpoo"], "got 'dpoo'. Did you mean `dpo`?"),
        (["ddpo"], "The fields of `jrl ddpo` are flat"),
        (["ppo", "--section", "methd"], "Unknown section `methd`"),
        (["ppo", "--method.cliprang", "0.1"], "cliprange"),
        (["ppo", "--method.cliprange", "-1"], "`method.cliprange` must be positive, got -1"),
        (
            ["dpo", "--config", str(ROOT / "configs" / "ppo_sentiment.yaml")],
            "`--config` must be a recipe with",
        ),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["config", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jrl config: ") and message in line


@pytest.mark.parametrize("name", ["ppo", "sft", "dapo"])
def test_help_lists_every_field(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    found = capsys.readouterr().out
    for section, values in commands()[name].default().to_dict().items():
        for field in values:
            assert re.search(rf"^  --{section}\.{field} \S", found, re.MULTILINE), (section, field)
    assert "Passes over each set of rollouts, usually 1 to 4\n" in found or name != "ppo"


def page() -> str:
    """What docs/configuration.md has to say, of the docstrings as they are."""
    default = entries()["ppo"].default()
    parts = [
        INTRODUCTION,
        "## Sections that all algorithms share\n",
        f"```yaml\n{as_yaml(default, ['model', 'optimizer', 'scheduler', 'tokenizer', 'train'])}```\n",
    ]
    for name, entry in entries().items():
        if name in NESTED:
            parts += [f"## `jrl {name}`\n", f"```yaml\n{as_yaml(entry.default(), ['method'])}```\n"]
    return "\n".join(parts)


INTRODUCTION = """# Configuration

Every field of every algorithm, with its meaning and its default. The text comes from the docstrings.
`jrl config` prints the same as a recipe:

```bash
jrl config ppo > run.yaml                          # all sections
jrl config dapo --section method                   # one section
jrl config ppo --config ppo_sentiment --method.cliprange 0.1
```

A field is set in three ways. Later ones win.

1. In a YAML file, by section and name: `jrl ppo --config run.yaml`.
2. On the command line, with a dot: `--method.cliprange 0.1`.
3. In Python: `config.evolve(method={"cliprange": 0.1})`.

Unknown names are errors, and the message names the closest field. Type and range of values are checked before anything
is loaded. `sft`, `dpo`, `reward` and `ppo` also have a flat layout with TRL's names: see
[the command line](command_line.md) and [TRL's surface](migrating/trl_surface.md).
"""


def test_the_page_is_as_the_docstrings_are():
    found = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert found == page(), "write it anew: python -m tests.cli.test_config"


if __name__ == "__main__":
    (ROOT / "docs" / "configuration.md").write_text(page(), encoding="utf-8")
