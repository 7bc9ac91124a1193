# SPDX-License-Identifier: Apache-2.0
"""The model card: `README.md` beside every model that a run writes, with what it is, how it came about, and a plot.

What the card says is gathered when a save begins; writing and drawing happen where the model is written, for a
checkpoint on its own thread. Folders of the machine are cut to their last name: a card is read elsewhere.
"""

from __future__ import annotations

import contextlib
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import yaml

from jrl.learners.config import MethodConfig
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.ppo import PPOConfig
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.rft import RFTConfig
from jrl.learners.sft import SFTConfig
from jrl.models.adapters.config import to_peft_dict
from jrl.models.adapters.lora import Lora
from jrl.models.quantize import num_weights
from jrl.trainers.citations import LORA, Paper, citations
from jrl.trainers.config import TRLConfig
from jrl.trainers.loggers_jsonl import SAMPLING
from jrl.trainers.resume import plain
from jrl.trainers.run_plot import Record, plot_run
from jrl.trainers.secrets import hide_secrets, without_secrets

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer

CARD, PLOT = "README.md", "training.png"
_CLOCKS = ("time/", "perf/")
_HELD_OUT = "eval/"
_COUNTERS = ("step", "iteration", "evaluation")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_KINDS = ("samples", "eval_samples", "prompts", "eval_prompts", "rewards")
_PACKAGES = ("jrl", "jax", "jaxlib", "flax", "optax", "transformers")
# What a method is called, and its tags on the hub.
_METHODS: Mapping[type[MethodConfig], tuple[str, tuple[str, ...]]] = {
    PPOConfig: ("proximal policy optimisation (PPO)", ("ppo", "reinforcement-learning")),
    ILQLConfig: ("implicit language Q-learning (ILQL)", ("ilql", "reinforcement-learning")),
    RFTConfig: ("rejection fine-tuning (RFT)", ("rft", "reinforcement-learning")),
    DPOConfig: ("direct preference optimisation (DPO)", ("dpo", "preference-optimization")),
    RewardConfig: ("reward modelling (pairs of a chosen and a rejected completion)", ("reward-model",)),
    SFTConfig: ("supervised fine-tuning (SFT)", ("sft",)),
    DDPOConfig: (
        "denoising diffusion policy optimisation (DDPO)",
        ("ddpo", "reinforcement-learning", "diffusion"),
    ),
}


@dataclass(frozen=True)
class ModelCard:
    """What a card says: plain values, so that it can be written later and on another thread.

    Attributes:
      config: The run's own configuration.
      base: The model that the run started from, as the card names it, and whether the hub knows that name.
      is_adapter: Whether an adapter is written, and not a whole model.
      library: "transformers", "peft" where an adapter is written, or "diffusers" where the model makes images.
      datasets: Names of the data, as the user gave them.
      data: One line for each kind of data, with its size.
      sha256: Fingerprints of the data, by kind.
      description: Lines of what trains.
      history: The run's records so far.
      papers: What to cite.
    """

    config: TRLConfig
    base: tuple[str, bool]
    is_adapter: bool
    library: str
    datasets: tuple[str, ...]
    data: Mapping[str, str]
    sha256: Mapping[str, str]
    description: Mapping[str, str]
    history: Sequence[Record]
    papers: Sequence[Paper]

    def write(self, directory: Path, *, name: str | None = None) -> None:
        """Writes `README.md`, and `training.png` where there are curves to draw and they can be drawn.

        Args:
          directory: Exists.
          name: Title; default: what the model is.
        Raises:
          OSError: If the card cannot be written. A plot that cannot be drawn is left out.
        """
        drawn = False
        with contextlib.suppress(Exception):  # a save must never fail for want of a picture
            drawn = plot_run(self.history, directory / PLOT)
        (directory / CARD).write_text(self.text(name=name, plot=PLOT if drawn else None), encoding="utf-8")

    def text(self, *, name: str | None = None, plot: str | None = None) -> str:
        """The card as Markdown, with its YAML head.

        Args:
          name: Title; default: what the model is.
          plot: File beside the card that shows the run; None: none does.
        """
        what, _ = method_names(self.config.method)
        method = type(self.config.method).__name__.removesuffix("Config")
        base, known = self.base
        link = f"[{base}](https://huggingface.co/{base})" if known else f"`{base}`"
        parts = [
            f"---\n{yaml.safe_dump(self._head(), sort_keys=False, allow_unicode=True)}---",
            f"# {name or f'{base}, trained by {method}'}",
            f"{'An adapter of' if self.is_adapter else 'Started from'} {link}; trained by {what} with jrl "
            f"{version('jrl')}, {_steps(self.history)} optimizer steps.",
            _bullets(self.description),
            "## Data",
            _bullets({"data sets": ", ".join(self.datasets)} if self.datasets else {})
            + _bullets(self.data)
            + _bullets({f"SHA-256 of {kind}": f"`{digest[:16]}`" for kind, digest in self.sha256.items()}),
            "## Metrics at the end",
            f"![Curves of the run]({plot})" if plot else "",
            _metrics(self.history),
            "## Hyperparameters",
            _hyperparameters(self.config, base),
            "## Versions",
            _bullets({"Python": platform.python_version()} | {name: version(name) for name in _PACKAGES}),
        ]
        if self.papers:
            parts += ["## Citation", *(f"```bibtex\n{paper.bibtex()}\n```" for paper in self.papers)]
        return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"

    def _head(self) -> dict[str, Any]:
        """What the hub reads."""
        base, known = self.base
        _, tags = method_names(self.config.method)
        head: dict[str, Any] = {"library_name": self.library, "pipeline_tag": _task(self.config)}
        head |= {"base_model": base} if known else {}
        hub_names = [name for name in self.datasets if "/" in name and _HUB_ID.fullmatch(name)]
        head |= {"datasets": hub_names} if hub_names else {}
        return head | {"tags": ["jrl", *tags, *(["lora"] if LORA in self.papers else [])]}


def model_card(
    trainer: Trainer, *, merged: bool = False, data_sha256: Mapping[str, str] | None = None
) -> ModelCard:
    """What a trainer's card says at this moment.

    Args:
      trainer: With its data, where it has any.
      merged: Whether an adapter is written into the weights.
      data_sha256: As `Trainer.data_sha256` gives it, where it is at hand.
    """
    adapter, data = trainer.adapter, trainer.describe_data()
    is_adapter = adapter is not None and not merged
    sha256 = (trainer.data_sha256() if data_sha256 is None else data_sha256) if data else {}
    trained = sum(leaf.size for leaf in jax.tree.leaves(trainer.params))
    description = {"parameters": f"{trained:,} train, {num_weights(trainer.frozen):,} are frozen"}
    if adapter is not None:
        values = {
            key: value for key, value in to_peft_dict(adapter.config).items() if value not in (None, {}, [])
        }
        description["adapter"] = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    return ModelCard(
        config=trainer.config,
        base=_base_name(trainer.base_model),
        is_adapter=is_adapter,
        library=_library(trainer.config, is_adapter=is_adapter),
        datasets=tuple(_short(name) for name in trainer.dataset_names),
        data=data,
        sha256={kind: sha256[kind] for kind in _KINDS if kind in sha256},
        description=description,
        history=tuple(trainer.history),
        papers=(*citations(trainer.config.method), *([LORA] if isinstance(adapter, Lora) else [])),
    )


def method_names(method: MethodConfig) -> tuple[str, tuple[str, ...]]:
    """(what it is called, its tags); a method of a user's own is called by its class."""
    for known, names in _METHODS.items():
        if isinstance(method, known):
            return names
    return type(method).__name__.removesuffix("Config"), ()


def _task(config: TRLConfig) -> str:
    """The hub's name of what the model does."""
    if isinstance(config.method, RewardConfig):
        return "text-classification"
    if isinstance(config.method, DDPOConfig):
        return "text-to-image"
    return "text2text-generation" if config.model.model_arch_type == "seq2seq" else "text-generation"


def _library(config: TRLConfig, *, is_adapter: bool) -> str:
    """The library that loads what is written."""
    if isinstance(config.method, DDPOConfig):
        return "diffusers"
    return "peft" if is_adapter else "transformers"


def _base_name(base: Any) -> tuple[str, bool]:
    """How the card names the model that was trained, and whether that is a name on the hub."""
    if hasattr(base, "model_type"):
        return f"a fresh {base.model_type}", False
    name = str(base)
    return (name, True) if _HUB_ID.fullmatch(name) and not Path(name).exists() else (Path(name).name, False)


def _steps(history: Sequence[Record]) -> int:
    return max((int(record["step"]) for record in history if "step" in record), default=0)


def _bullets(lines: Mapping[str, str]) -> str:
    return "".join(f"- {name}: {text}\n" for name, text in lines.items())


def _metrics(history: Sequence[Record]) -> str:
    """The last training record and the last evaluation, side by side; only one where the other is not there."""
    columns = []
    for kind, key in (("training", "iteration"), ("evaluation", "evaluation")):
        record = next((record for record in reversed(history) if key in record), {})
        figures = {
            name.removeprefix(_HELD_OUT): value
            for name, value in record.items()
            if name not in _COUNTERS and not name.startswith((*_CLOCKS, SAMPLING))
        }
        if figures:
            columns.append((f"{kind}, step {record.get('step', '–')}", figures))
    if not columns:
        return "None yet."
    names = dict.fromkeys(name for _, figures in columns for name in figures)
    rows = [[f"`{name}`", *(_number(figures.get(name)) for _, figures in columns)] for name in names]
    head = ["metric", *(title for title, _ in columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _hyperparameters(config: TRLConfig, base: str) -> str:
    """Fields that differ from their defaults as a table; all fields folded away."""
    written = config.to_dict() | {"model": vars(config.model) | {"model_path": base}}
    values = _cut(without_secrets(plain(written)))
    changed: dict[str, Any] = {}
    for section, of_section in vars(config).items():
        for field in fields(of_section):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            value = values[section][field.name]
            if default is MISSING or value != plain(default):
                changed[f"{section}.{field.name}"] = value
    rows = [f"| `{name}` | `{_short(value)}` |" for name, value in changed.items()]
    everything = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    folded = f"<details><summary>All of them</summary>\n\n```yaml\n{everything}```\n\n</details>"
    return "\n".join(["| set | to |", "|---|---|", *rows, "", folded])


def _short(value: Any) -> str:
    """A value on one line, folders cut."""
    found = _cut(plain(value))
    return (
        found
        if isinstance(found, str)
        else yaml.safe_dump(found, default_flow_style=True, width=1000).split("\n")[0]
    )


def _cut(value: Any) -> Any:
    """A plain value with every absolute path in it cut to its last name, and without what looks like a secret."""
    if isinstance(value, dict):
        return {key: _cut(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_cut(entry) for entry in value]
    if isinstance(value, str):
        return f".../{Path(value).name}" if Path(value).is_absolute() else hide_secrets(value)
    return value
