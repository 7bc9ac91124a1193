# SPDX-License-Identifier: Apache-2.0
"""Learning rate, KL weight and length of a run whose user gave none, by its model.

The default configurations are trlX's and TRL's, which were made for GPT-2. Rates that work fall with size: in the
recipes of `configs/` that were run here, PPO takes 2e-4 to 1e-3 for a few million parameters; trlX's take 3e-5 for
GPT-2 and 5e-6 to 1e-5 for 6 billion of which few layers train; where all of 7 billion do, GRPO took 1e-6
(arXiv:2402.03300). A power of the size goes through these. Adapters take ten times as much (arXiv:2405.09673).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax

from jrl.models.adapters.peft_format import is_adapter_folder, read_adapter_folder
from jrl.models.checkpoint import read_model
from jrl.models.entries_io import initial_shapes
from jrl.models.hub import CONFIG_FILES, find_checkpoint, is_checkpoint
from jrl.models.model import LanguageModel, make_model
from jrl.trainers.config.method import entry_of
from jrl.trainers.config.trl_config import TRLConfig

Config = TypeVar("Config", bound=TRLConfig)

GPT2_PARAMETERS = 124_439_808
"""Parameters of the model for which the default rates were made."""
EXPONENT = 0.75
FASTEST, SLOWEST = 1e-3, 1e-6
"""Rates that are never passed, unless the default itself does."""
ADAPTER_FACTOR = 10.0
RATE = "optimizer.kwargs.lr"
"""Name of the rate's flag."""


def learning_rate_for(
    rate: float, num_parameters: int, *, has_adapter: bool = False, fastest: float | None = None
) -> float:
    """The learning rate for a model of a size, to two digits.

    Args:
      rate: That suits GPT-2.
      num_parameters: Of the whole model.
      has_adapter: Whether an adapter trains, and not the model.
      fastest: Never passed, unless `rate` itself does; None: `FASTEST`.
    Example:
      >>> learning_rate_for(3e-5, 124_439_808), learning_rate_for(3e-5, 7_000_000_000)
      (3e-05, 1.5e-06)
      >>> learning_rate_for(3e-5, 1_000_000)
      0.001
    """
    scaled = rate * (GPT2_PARAMETERS / num_parameters) ** EXPONENT * (ADAPTER_FACTOR if has_adapter else 1.0)
    bounded = min(max(scaled, min(rate, SLOWEST)), max(rate, FASTEST if fastest is None else fastest))
    return float(f"{bounded:.2g}")


def with_choices_for_model(config: Config, given: Collection[str] = ()) -> tuple[Config, str]:
    """A default configuration with what suits its model, where the user gave nothing.

    That is the learning rate, what the method's entry has for such runs (`Method.unasked`), and a `train.seq_length`
    of no more than the model's positions. A checkpoint is written with each evaluation.

    Args:
      config: Left untouched.
      given: Dotted names of the fields that the user gave, which stay.
    Returns:
      The configuration, and a sentence that says what was chosen. The configuration as it is and "" where the size is
      not known: of a model that is none of language, or cannot be read, which the trainer will say.
    """
    entry, kwargs = entry_of(config.method), config.optimizer.kwargs
    if entry is None or entry.model != "language":
        return config, ""
    try:
        lm, has_adapter = _model_of(config)
    except (ValueError, OSError):
        return config, ""
    said = []
    if RATE not in given and "lr" in kwargs:
        num_parameters = sum(leaf.size for leaf in jax.tree.leaves(initial_shapes(lm.init)))
        rate = learning_rate_for(
            kwargs["lr"], num_parameters, has_adapter=has_adapter, fastest=entry.fastest_rate
        )
        scheduler: Mapping[str, Any] = config.scheduler.kwargs
        falls_not = scheduler.get("eta_min") == kwargs["lr"] and "scheduler.kwargs.eta_min" not in given
        constant = {"eta_min": rate} if falls_not else {}
        what = "an adapter of a model" if has_adapter else "a model"
        said.append(
            f"learning rate {rate:g}, chosen for {what} of {num_parameters:,} parameters without heads (GPT-2's is "
            f"{kwargs['lr']:g}); `{RATE}` sets another"
        )
        config = config.evolve(optimizer={"kwargs": {"lr": rate}}, scheduler={"kwargs": constant})
    for name, value in entry.unasked.items():
        default = vars(config.method)[name]
        if f"method.{name}" not in given and value != default:
            said.append(f"`method.{name}` {value:g} ({config.method.name}'s is {default:g})")
            config = config.evolve(method={name: value})
    train = config.train
    if "train.seq_length" not in given and train.seq_length > lm.max_positions:
        said.append(f"`train.seq_length` {lm.max_positions}, the model's positions")
        config = config.evolve(train={"seq_length": lm.max_positions})
    often = train.eval_interval
    if "train.checkpoint_interval" not in given and 0 < often < train.checkpoint_interval:
        said.append(f"`train.checkpoint_interval` {often}, that of evaluations")
        config = config.evolve(train={"checkpoint_interval": often})
    return config, "; ".join(said)


def _model_of(config: TRLConfig) -> tuple[LanguageModel, bool]:
    """The whole model, by its config files, and whether an adapter trains."""
    source, has_adapter = config.model.model_path, config.model.peft_config is not None
    if is_adapter_folder(source):
        source, has_adapter = read_adapter_folder(source).base_model, True
    if is_checkpoint(source):
        return read_model(
            find_checkpoint(source, files=CONFIG_FILES), config.model.model_extra_configs
        ), has_adapter
    return make_model(source), has_adapter
