# SPDX-License-Identifier: Apache-2.0
"""Training with nested configurations: flags, files and model are read at once, training starts on a call."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from jrl.api import prepare
from jrl.cli.dry_run import dry_run
from jrl.cli.summary import Work, status_of, tell
from jrl.data.episodes import has_episodes
from jrl.data.sources.named_sources import load_prompts, load_rewarded_samples, load_samples
from jrl.data.sources.records import read_records
from jrl.distributed import on_main
from jrl.named_functions import load_differentiable_reward, load_function, load_rewards
from jrl.trainers.base import Trainer
from jrl.trainers.checkpoints.run_folder import refuse_before_loading
from jrl.trainers.config.coercion import parse_yaml, read_yaml
from jrl.trainers.config.layouts import in_present_layout
from jrl.trainers.config.method import commands, entry_of
from jrl.trainers.config.overrides import apply_overrides
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.ddpo_prompts import PromptList
from jrl.trainers.diffusion.reward_gradient import RewardGradientTrainer
from jrl.trainers.loading.learning_rate import RATE, with_choices_for_model
from jrl.trainers.loading.setup import reward_mesh

Found = TypeVar("Found")


def train(flags: argparse.Namespace, overrides: list[str]) -> Work:
    """`jrl <algorithm>` with a nested configuration, or with its default one."""
    config = configuration(flags.command, flags.config, overrides)
    given = given_fields(flags.config, overrides)
    if not flags.dry_run:
        on_main(partial(refuse_before_loading, config.train))
    config, said = with_choices_for_model(config, given)
    if not said and RATE not in given:
        said = _default_rate(config)
    tell(f"{said}." if said else "")
    tell(f"jrl {flags.command}: loading model and data ...")
    make = partial(_TRAINERS[commands()[flags.command].data], flags)
    return dry_run(flags.command, config, make) if flags.dry_run else _learning(make(config))


def configuration(command: str, path: str | None, overrides: list[str]) -> TRLConfig:
    """Configuration of an algorithm's command: of a file or the default one, as the algorithm and the flags have it.

    Args:
      command: Name of the algorithm, or of a variant.
      path: Recipe; None: the default configuration.
      overrides: Dotted flags and their values.
    Raises:
      ValueError: If the recipe is another algorithm's, or a flag names no field.
    """
    entry = commands()[command]
    config = TRLConfig.load_recipe(path) if path else entry.default()
    if not isinstance(config.method, entry.config):
        own = entry_of(config.method)
        run = f"Run it by `jrl {own.name}`, or write" if own else "Write"
        raise ValueError(
            f"`--config` must be a recipe with `method.name: {entry.config.__name__}`, got {config.method.name!r} in "
            f"{path}. {run} one by `jrl config {command} > run.yaml`."
        )
    if command in entry.variants:
        config = _as_variant(command, config, entry.switches(command), from_file=bool(path))
    return apply_overrides(config, overrides)


def given_fields(path: str | None, overrides: Sequence[str]) -> frozenset[str]:
    """Dotted names of the fields that recipe or flags name; the learning rate is among them as `chooses_rate` has it.

    A recipe counts as naming all those of its method, and the interval of checkpoints: what it leaves out is the
    default, as in Python.

    Args:
      path: Recipe; None: there is none.
      overrides: Dotted flags and their values.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said when the configuration was read
        written = in_present_layout(read_yaml(path) if path else {})
        method = TRLConfig.load_recipe(path).method if path else None
    names = {f"{section}.{name}" for section, fields in written.items() for name in fields}
    if method is not None:
        names |= {f"method.{name}" for name in vars(method)} | {"train.checkpoint_interval"}
    names |= {word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--")}
    return frozenset(names | {RATE} if chooses_rate(path, overrides) else names)


def chooses_rate(path: str | None, overrides: Sequence[str]) -> bool:
    """True where recipe or flags name a learning rate, or an optimizer, which has a rate of its own.

    Args:
      path: Recipe; None: there is none.
      overrides: Dotted flags and their values.
    """
    written: Mapping[str, Any] = read_yaml(path) if path else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said when the configuration was read
        translated = in_present_layout(written).get("optimizer", {})
    flags = [word.partition("=") for word in overrides]
    names = [name for name, _, _ in flags]
    kwargs = [
        parse_yaml(text if equals else following)
        for (name, equals, text), following in zip(flags, [*overrides, ""][1:], strict=True)
        if name == "--optimizer.kwargs"
    ]
    return (
        "name" in written.get("optimizer", {})
        or any("lr" in given for given in [translated.get("kwargs", {}), *kwargs])
        or not {"--optimizer.name", "--optimizer.kwargs.lr"}.isdisjoint(names)
    )


def _default_rate(config: TRLConfig) -> str:
    """A sentence that says which learning rate nobody chose, and the model's size did not, either."""
    rate = config.optimizer.kwargs.get("lr")
    default = (
        f"of {config.optimizer.name}" if rate is None else f"{rate:g}, the default of {config.method.name}"
    )
    return f"learning rate {default}; `optimizer.kwargs.lr` sets another"


def _as_variant(name: str, config: TRLConfig, fields: Mapping[str, Any], *, from_file: bool) -> TRLConfig:
    """A recipe with the switches of a published algorithm; those of the file that they replace are told.

    Flags may still mend what does not fit together, so no value is checked here.
    """
    own = {field: vars(config.method)[field] for field in fields}
    replaced = {field: value for field, value in own.items() if from_file and value != fields[field]}
    if replaced:
        tell(f"`jrl {name}` sets {_listed(fields, replaced)}; the recipe had {_listed(own, replaced)}.")
    return config.draft(method=fields)


def _listed(fields: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {fields[name]!r}" for name in names)


def _learning(trainer: Trainer) -> Work:
    def work() -> int:
        trainer.learn()
        return status_of(trainer)

    return work


def _rewarded(flags: argparse.Namespace, config: TRLConfig) -> Trainer:
    records = _read("--samples", read_records, flags.samples)
    if has_episodes(records):  # their turns bring the rewards
        return prepare(config=config, samples=list(records), **_evaluation(flags))
    samples, rewards = _read("--samples", load_rewarded_samples, flags.samples)
    return prepare(config=config, samples=samples, rewards=rewards, **_evaluation(flags))


def _imitating(flags: argparse.Namespace, config: TRLConfig) -> Trainer:
    samples = _read("--samples", load_samples, flags.samples)
    return prepare(config=config, samples=samples, **_evaluation(flags))


def _paired(flags: argparse.Namespace, config: TRLConfig) -> Trainer:
    samples = list(iter(_read("--samples", read_records, flags.samples)))
    # A model that writes no text is not sampled from in evaluations.
    entry = entry_of(config.method)
    evaluation = _evaluation(flags) if entry is None or entry.model == "language" else {}
    return prepare(config=config, samples=samples, **evaluation)


def _online(flags: argparse.Namespace, config: TRLConfig) -> Trainer:
    config.validate()  # before its mesh is used
    reward = load_rewards(
        flags.reward, label=flags.reward_label, output=flags.reward_output, mesh=reward_mesh(config)
    )
    prompts = _read("--prompts", load_prompts, flags.prompts)
    return prepare(config=config, reward_fn=reward, prompts=prompts, **_evaluation(flags))


def _drawing(flags: argparse.Namespace, config: TRLConfig) -> Trainer:
    config.validate()
    prompts = PromptList(_read("--prompts", load_prompts, flags.prompts))
    reward = load_differentiable_reward(flags.reward)
    return RewardGradientTrainer(config, reward_function=reward, prompt_function=prompts)


def _read(flag: str, load: Callable[[str], Found], name: str) -> Found:
    """What a flag names, read; an error says by which flag it came."""
    try:
        return load(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{flag}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def _evaluation(flags: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `jrl.train` that all commands share."""
    prompts = _read("--eval-prompts", load_prompts, flags.eval_prompts) if flags.eval_prompts else None
    return {
        "eval_prompts": prompts[:2] if prompts and flags.dry_run else prompts,
        "metric_fn": load_function(flags.metric) if flags.metric else None,
        "stop_sequences": flags.stop,
    }


_TRAINERS: Mapping[str, Callable[[argparse.Namespace, TRLConfig], Trainer]] = {
    "prompts": _online,
    "rewarded": _rewarded,
    "samples": _imitating,
    "pairs": _paired,
    "drawn": _drawing,
}
"""Makers of the trainer, by what an algorithm learns from."""
