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

import yaml

from jrl.learners.config import MethodConfig
from jrl.models.adapters.config import to_peft_dict
from jrl.models.adapters.lora import Lora
from jrl.models.hub import name_of_base
from jrl.trainers.cards.citations import LORA, bibtex, citations
from jrl.trainers.cards.run_plot import PLOT, Record, plot_run
from jrl.trainers.checkpoints.resume import plain
from jrl.trainers.config.method import entry_of
from jrl.trainers.config.secrets import hide_secrets, without_secrets
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loggers.description import describe_parameters
from jrl.trainers.loggers.evaluated_reward import ERROR, MEAN, EvaluatedReward
from jrl.trainers.loggers.jsonl import SAMPLING
from jrl.trainers.loggers.safe_text import code_block, code_span, for_markdown, one_line
from jrl.version import __version__

if TYPE_CHECKING:
    from jrl.trainers.base import Trainer

CARD = "README.md"
_CLOCKS = ("time/", "perf/")
_HELD_OUT = "eval/"
_COUNTERS = ("step", "iteration", "evaluation")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FIRST = (MEAN, "reward/", "rewards/", "metrics/")
_KINDS = ("samples", "eval_samples", "prompts", "eval_prompts", "rewards")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "transformers")


@dataclass(frozen=True)
class ModelCard:
    """Contents of a model card: plain values, so that it can be written later and on another thread.

    Attributes:
      config: The run's own configuration.
      base: The model that the run started from, as the card names it, and whether the hub knows that name.
      is_adapter: Whether an adapter is written, and not a whole model.
      library: "transformers", "peft" where an adapter is written, or "diffusers" where the model makes images.
      datasets: Names of the data, as the user gave them.
      data: One line of Markdown for each kind of data, with its size.
      sha256: Fingerprints of the data, by kind.
      description: Lines of what trains.
      history: The run's records so far.
      papers: BibTeX of what to cite.
      tags: Beside its own.
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
    papers: Sequence[str]
    tags: Sequence[str] = ()

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
        link = f"[{for_markdown(base)}](https://huggingface.co/{base})" if known else code_span(base)
        parts = [
            # ASCII and endless lines: no value can begin a line, let alone with the mark that ends the head.
            f"---\n{yaml.safe_dump(self._head(), sort_keys=False, width=math.inf)}---",
            f"# {for_markdown(name or f'{base}, trained by {method}')}",
            f"{'An adapter of' if self.is_adapter else 'Started from'} {link}; trained by {what} with jrl "
            f"{__version__}, {_steps(self.history)} optimizer steps.",
            _bullets(self.description),
            "## Data",
            _bullets({"data sets": ", ".join(self.datasets)} if self.datasets else {})
            + "".join(f"- {kind}: {one_line(text)}\n" for kind, text in self.data.items())
            + "".join(
                f"- SHA-256 of {kind}: {code_span(digest[:16])}\n" for kind, digest in self.sha256.items()
            ),
            "## Metrics at the end",
            f"![Curves of the run]({plot})" if plot else "",
            _metrics(self.history),
            "## Hyperparameters",
            _hyperparameters(self.config, base),
            "## Versions",
            _bullets(
                {"Python": platform.python_version(), "jrl": __version__}
                | {name: version(name) for name in _PACKAGES}
            ),
        ]
        if self.papers:
            parts += ["## Citation", *(f"```bibtex\n{paper}\n```" for paper in self.papers)]
        return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"

    def _head(self) -> dict[str, Any]:
        """Metadata of the card, which the hub reads."""
        base, known = self.base
        _, tags = method_names(self.config.method)
        head: dict[str, Any] = {"library_name": self.library, "pipeline_tag": _task(self.config)}
        head |= {"base_model": base} if known else {}
        hub_names = [name for name in self.datasets if "/" in name and _HUB_ID.fullmatch(name)]
        head |= {"datasets": hub_names} if hub_names else {}
        of_adapter = ["lora"] if bibtex(LORA) in self.papers else []
        return head | {"tags": list(dict.fromkeys(["jrl", *tags, *of_adapter, *self.tags]))}


def model_card(
    trainer: Trainer,
    *,
    merged: bool = False,
    data_sha256: Mapping[str, str] | None = None,
    left_out: Sequence[str] = (),
) -> ModelCard:
    """Collects the contents of a trainer's model card at this moment.

    Args:
      trainer: With its data, where it has any.
      merged: Whether an adapter is written into the weights.
      data_sha256: As `Trainer.data_sha256` gives it, where it is at hand.
      left_out: Heads that train and are not written.
    """
    adapter, data = trainer.adapter, trainer.describe_data()
    is_adapter = adapter is not None and not merged
    sha256 = (trainer.data_sha256() if data_sha256 is None else data_sha256) if data else {}
    description = {"size": describe_parameters(trainer.params, trainer.frozen)}
    if adapter is not None:
        values = {
            key: value for key, value in to_peft_dict(adapter.config).items() if value not in (None, {}, [])
        }
        description["adapter"] = ", ".join(f"{key} {_short(value)}" for key, value in values.items())
    if left_out:
        description["left out"] = f"{', '.join(left_out)}; save_pretrained(heads=True) writes them"
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
        tags=trainer.tags,
        papers=(*citations(trainer.config.method), *([bibtex(LORA)] if isinstance(adapter, Lora) else [])),
    )


def method_names(method: MethodConfig) -> tuple[str, tuple[str, ...]]:
    """(what it is called, its tags); a method of a user's own is called by its class."""
    entry = entry_of(method)
    if entry is None:
        return type(method).__name__.removesuffix("Config"), ()
    return entry.title, entry.tags


def _task(config: TRLConfig) -> str:
    """The hub's name of what the model does."""
    kind = _kind(config)
    if kind != "language":
        return {"classifier": "text-classification", "diffusion": "text-to-image"}[kind]
    return "text2text-generation" if config.model.model_arch_type == "seq2seq" else "text-generation"


def _library(config: TRLConfig, *, is_adapter: bool) -> str:
    """The library that loads what is written."""
    if _kind(config) == "diffusion":
        return "diffusers"
    return "peft" if is_adapter else "transformers"


def _kind(config: TRLConfig) -> str:
    """Kind of model that the method trains, as its entry says; without one, a language model."""
    entry = entry_of(config.method)
    return "language" if entry is None else entry.model


def _base_name(base: Any) -> tuple[str, bool]:
    """Name of the model that was trained, for the card, and whether that is a name on the hub."""
    if hasattr(base, "model_type"):
        return f"a fresh {base.model_type}", False
    name = name_of_base(base)
    if name is None:
        return f"a {type(base.module).__name__} that had no name", False
    return (name, True) if _HUB_ID.fullmatch(name) and not Path(name).exists() else (Path(name).name, False)


def _steps(history: Sequence[Record]) -> int:
    return max((int(record["step"]) for record in history if "step" in record), default=0)


def _bullets(lines: Mapping[str, str]) -> str:
    return "".join(f"- {for_markdown(name)}: {for_markdown(text)}\n" for name, text in lines.items())


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
        reward = EvaluatedReward.of(record) if figures.pop(ERROR, None) is not None else None
        figures |= {} if reward is None else {MEAN: str(reward)}
        if figures:
            columns.append((for_markdown(f"{kind}, step {record.get('step', '–')}"), figures))
    if not columns:
        return "None yet."
    names = sorted(dict.fromkeys(name for _, figures in columns for name in figures), key=_place)
    rows = [[code_span(name), *(_number(figures.get(name)) for _, figures in columns)] for name in names]
    head = ["metric", *(title for title, _ in columns)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _place(name: str) -> int:
    """Place of a metric among the others: the mean reward, what else is of rewards, the user's metrics, the rest."""
    return next((place for place, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else for_markdown(str(value))


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
    rows = [f"| {code_span(name)} | {code_span(_short(value))} |" for name, value in changed.items()]
    everything = code_block(yaml.safe_dump(values, sort_keys=False), "yaml")
    folded = f"<details><summary>All of them</summary>\n\n{everything}\n\n</details>"
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
