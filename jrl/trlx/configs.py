# SPDX-License-Identifier: Apache-2.0
"""trlX's configuration classes: its arguments, their order and its defaults, on jrl's sections.

Every object is one of jrl's own with another constructor, so `jrl.train` takes it as well. Arguments of the first
releases (v0.2) are told by their names and kinds, and a `TRLConfig` made of them has the present six sections.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, Self, cast

from jrl.learners import config as methods
from jrl.learners.ilql import ILQLConfig as NativeILQLConfig
from jrl.learners.ppo import PPOConfig as NativePPOConfig
from jrl.learners.rft import RFTConfig as NativeRFTConfig
from jrl.learners.sft import SFTConfig as NativeSFTConfig
from jrl.trainers import config as native
from jrl.trainers import defaults, sections
from jrl.trainers.fields import build_section
from jrl.trlx.old_configs import OldILQLConfig, OldModelConfig, OldPPOConfig, OldTrainConfig
from jrl.trlx.signatures import OldSection, also_takes, bind, defaults_of, set_signature, takes


class _FromDict:
    """What every section of trlX can do."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """The section of a dictionary of its fields.

        Raises:
          ValueError: On an unknown field, naming the closest one, or a value out of range.
          TypeError: On a value of the wrong type, or a missing one.
        """
        return cast(Self, build_section(cls.__name__, cls, config))


@also_takes(OldModelConfig, lambda given: isinstance(given["model_type"], str))
@takes(
    "model_path",
    model_arch_type="causal",
    num_layers_unfrozen=-1,
    peft_config=None,
    model_extra_configs={},
)
class ModelConfig(sections.ModelConfig, _FromDict):
    """The policy; of v0.2 with `tokenizer_path` and `model_type`."""


@takes("tokenizer_path", padding_side="left", truncation_side="right", tokenizer_extra_configs={})
class TokenizerConfig(sections.TokenizerConfig, _FromDict):
    """The tokenizer."""


@takes("name", kwargs={})
class OptimizerConfig(sections.OptimizerConfig, _FromDict):
    """The optimizer."""


@takes("name", kwargs={})
class SchedulerConfig(sections.SchedulerConfig, _FromDict):
    """The learning rate over optimizer steps."""


@also_takes(OldTrainConfig, lambda given: not isinstance(given["weight_decay"], str))
@takes(
    "total_steps",
    "seq_length",
    "epochs",
    "batch_size",
    "checkpoint_interval",
    "eval_interval",
    "pipeline",
    "trainer",
    trainer_kwargs={},
    project_name="trlx",
    run_name=None,
    entity_name=None,
    group_name=None,
    checkpoint_dir="ckpts",
    rollout_logging_dir=None,
    save_best=True,
    save_optimizer=True,
    resume_from_checkpoint=None,
    tracker="wandb",
    logging_dir=None,
    tags=[],
    seed=1000,
    minibatch_size=None,
)
class TrainConfig(sections.TrainConfig, _FromDict):
    """The run; of v0.2 with optimizer, learning rates and `orchestrator`."""


@takes("name")
class MethodConfig(methods.MethodConfig, _FromDict):
    """What a method of one's own derives from, as a dataclass under `register_method`."""


@also_takes(OldPPOConfig, lambda given: isinstance(given["gen_kwargs"], Mapping))
@takes(
    "name",
    "ppo_epochs",
    "num_rollouts",
    "chunk_size",
    "init_kl_coef",
    "target",
    "horizon",
    "gamma",
    "lam",
    "cliprange",
    "cliprange_value",
    "vf_coef",
    "scale_reward",
    "ref_mean",
    "ref_std",
    "cliprange_reward",
    "gen_kwargs",
    gen_experience_kwargs=None,
    num_value_layers_unfrozen=0,
)
class PPOConfig(NativePPOConfig, _FromDict):
    """PPO; of v0.2 without scaling and clipping of scores."""


@also_takes(OldILQLConfig, lambda given: isinstance(given["betas"], list | tuple))
@takes(
    "name",
    "tau",
    "gamma",
    "cql_scale",
    "awac_scale",
    "alpha",
    "beta",
    "steps_for_target_q_sync",
    "two_qs",
    "gen_kwargs",
)
class ILQLConfig(NativeILQLConfig, _FromDict):
    """Implicit language Q-learning; of v0.2 with `betas`."""


@takes("name", "gen_kwargs")
class SFTConfig(NativeSFTConfig, _FromDict):
    """Supervised fine-tuning."""


@takes(
    "name",
    "gen_kwargs",
    start_percentile=0.7,
    end_percentile=0.95,
    n_improve_steps=4,
    n_generations_per_prompt=32,
)
class RFTConfig(NativeRFTConfig, _FromDict):
    """Rejection fine-tuning."""


_FACES: Mapping[type, type] = {
    face.__mro__[1]: face
    for face in (
        ModelConfig,
        TokenizerConfig,
        OptimizerConfig,
        SchedulerConfig,
        TrainConfig,
        MethodConfig,
        PPOConfig,
        ILQLConfig,
        SFTConfig,
        RFTConfig,
    )
}
_ORDER = ("method", "model", "optimizer", "scheduler", "tokenizer", "train")
_OLD_ORDER = ("model", "train", "method")


def with_face(section: Any) -> Any:
    """A section of jrl's own as trlX's class, with the same values; any other object as it is."""
    face = _FACES.get(type(section))
    if face is None:
        return section
    made: Any = object.__new__(face)
    vars(made).update(vars(section))
    return made


class TRLConfig(native.TRLConfig):
    """A run's whole configuration: six sections, or `model`, `train` and `method` of v0.2, which are translated.

    Args:
      method: The algorithm's own section; its class decides the algorithm.
      model: The policy.
      optimizer: The optimizer.
      scheduler: The learning rate over steps.
      tokenizer: The tokenizer.
      train: The run.
    Raises:
      TypeError: On a missing or unknown section.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The method came first from the day on that it had company; before, the model did.
        old_order = bool(args) and isinstance(args[0], OldModelConfig)
        given = dict(zip(_OLD_ORDER if old_order else _ORDER, args, strict=False)) | kwargs
        if any(isinstance(section, OldSection) for section in given.values()):
            translated = type(self).from_dict({name: vars(section) for name, section in given.items()})
            vars(self).update(vars(translated))
        else:
            found = bind("TRLConfig", inspect.signature(native.TRLConfig), set(), args, kwargs)
            super().__init__(**{name: with_face(section) for name, section in found.items()})

    @classmethod
    def load_yaml(cls, yml_fp: str | os.PathLike[str]) -> Self:
        """As in jrl: reads a YAML file."""
        return super().load_yaml(yml_fp)

    @classmethod
    def update(cls, baseconfig: native.TRLConfig | Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """As in jrl: a new configuration from another one and changes, nested or by dotted name."""
        return cast(Self, super().update(baseconfig, config))

    @classmethod
    def _build(cls, sections: Mapping[str, Any], classes: Mapping[str, type]) -> Self:
        """As in jrl, but a field that is missing takes trlX's default where there is one."""
        faces = {name: _FACES.get(section, section) for name, section in classes.items()}
        filled = {name: defaults_of(faces[name]) | dict(sections[name]) for name in sections}
        return super()._build(filled, classes)


set_signature(TRLConfig, "__init__", TRLConfig.__init__, inspect.signature(native.TRLConfig))


def default_ppo_config() -> TRLConfig:
    """GPT-2 fine-tuned on IMDB, two layers unfrozen."""
    return _as_seed(defaults.default_ppo_config())


def default_ilql_config() -> TRLConfig:
    """GPT-2, all layers, two Q heads."""
    return _as_seed(defaults.default_ilql_config())


def default_sft_config() -> TRLConfig:
    """GPT-2, all layers."""
    return _as_seed(defaults.default_sft_config())


def _as_seed(config: native.TRLConfig) -> TRLConfig:
    """A default configuration with what jrl's differs in: tracker, project and the names of trainers."""
    train = {"tracker": "wandb", "project_name": "trlx", "trainer": f"Accelerate{config.train.trainer}"}
    return TRLConfig(**vars(config.evolve(train=train)))
