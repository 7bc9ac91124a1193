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

import jrl.trlx.maths as maths
from jrl.interop import own_methods
from jrl.learners import config as methods
from jrl.learners.ilql import ILQLConfig as NativeILQLConfig
from jrl.learners.ilql import ILQLObjective
from jrl.learners.ppo import PPOConfig as NativePPOConfig
from jrl.learners.recipe import Recipe
from jrl.learners.rft import RFTConfig as NativeRFTConfig
from jrl.learners.sft import SFTConfig as NativeSFTConfig
from jrl.trainers import config as native
from jrl.trainers.config import build_section
from jrl.trlx.old_configs import (
    PPO_ARGUMENTS,
    OldILQLConfig,
    OldModelConfig,
    OldPPOConfig,
    OldTrainConfig,
)
from jrl.trlx.signatures import OldSection, also_takes, bind, defaults_of, set_signature, takes


class _FromDict:
    """Methods of every section of trlX's configuration."""

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
class ModelConfig(native.ModelConfig, _FromDict):
    """The policy; of v0.2 with `tokenizer_path` and `model_type`."""


@takes("tokenizer_path", padding_side="left", truncation_side="right", tokenizer_extra_configs={})
class TokenizerConfig(native.TokenizerConfig, _FromDict):
    """The tokenizer."""


@takes("name", kwargs={})
class OptimizerConfig(native.OptimizerConfig, _FromDict):
    """The optimizer."""


@takes("name", kwargs={})
class SchedulerConfig(native.SchedulerConfig, _FromDict):
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
class TrainConfig(native.TrainConfig, _FromDict):
    """The run; of v0.2 with optimizer, learning rates and `orchestrator`."""


@takes("name")
class MethodConfig(methods.MethodConfig, _FromDict):
    """Base class of a custom method's configuration, as a dataclass under `register_method`."""


@also_takes(OldPPOConfig, lambda given: isinstance(given["gen_kwargs"], Mapping))
@takes(
    *PPO_ARGUMENTS,
    "scale_reward",
    "ref_mean",
    "ref_std",
    "cliprange_reward",
    "gen_kwargs",
    gen_experience_kwargs=None,
    num_value_layers_unfrozen=0,
)
class PPOConfig(NativePPOConfig, _FromDict):
    """PPO; of v0.2 without scaling and clipping of scores.

    A subclass that defines `loss` or `get_advantages_and_returns` learns by them: they are compiled into the update, so
    they compute with `jax.numpy`.
    """

    def get_advantages_and_returns(
        self, values: Any, rewards: Any, response_length: int, use_whitening: bool | None = True
    ) -> tuple[Any, Any]:
        """Advantages by GAE, and returns: the raw advantages plus the values.

        Args:
          values: V_old of the state before each token, (B T); 0 behind a row's end.
          rewards: Of each token, the KL penalty in them, (B T); 0 behind a row's end.
          response_length: T.
          use_whitening: Whether advantages are brought to mean 0 and variance 1 over everything that is given, padding
            too, as trlX does. Updates that no subclass changes count actions alone.
        """
        return maths.advantages_and_returns(self, values, rewards, response_length, use_whitening)

    def loss(
        self,
        logprobs: Any,
        values: Any,
        old_logprobs: Any,
        old_values: Any,
        advantages: Any,
        returns: Any,
        mask: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Clipped surrogate and value loss, as a mean over actions, and its metrics. An entropy bonus is not in it.

        Args:
          logprobs: log π_θ of the tokens, (B T).
          values: V_θ of the state before each.
          old_logprobs: Of the policy that sampled them.
          old_values: Of its values.
          advantages: Of the tokens.
          returns: What the values are trained towards.
          mask: 1 on actions.
        """
        now = {"logprobs": logprobs, "values": values, "old_logprobs": old_logprobs, "old_values": old_values}
        return maths.ppo_mean_loss(self, {**now, "advantages": advantages, "returns": returns}, mask)

    def adapt(self, recipe: Recipe) -> Recipe:
        """The recipe with the methods that a subclass defines in the place of its parts."""
        own = own_methods(self, PPOConfig, ("loss", "get_advantages_and_returns"))
        return maths.own_recipe(self, recipe, own)


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
    """Implicit language Q-learning; of v0.2 with `betas`.

    A subclass that defines `loss` learns by it: it is compiled into the update, so it computes with `jax.numpy`.
    """

    def loss(self, outputs: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
        """The sum of the Q, value, conservative and likelihood losses, as a mean over actions, and its metrics.

        Args:
          outputs: `(logits, (qs, target_qs, vs))`: logits (B L V) of all columns, Q values (B T V) of every head at the
            actions, values (B T+1 1) at the states.
          labels: An `ILQLBatch` or `ILQLSeq2SeqBatch`.
        """
        return maths.ilql_mean_loss(self, outputs, labels)

    def own_objective(self) -> ILQLObjective | None:
        """The `loss` that a subclass defines, as what the update minimises."""
        own = own_methods(self, ILQLConfig, ("loss",))
        return maths.own_ilql_objective(self, own["loss"]) if own else None


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
        """Reads a YAML file, as in jrl."""
        return super().load_yaml(yml_fp)

    @classmethod
    def update(cls, baseconfig: native.TRLConfig | Mapping[str, Any], config: Mapping[str, Any]) -> Self:
        """New configuration from another one and changes, nested or by dotted name, as in jrl."""
        return cast(Self, super().update(baseconfig, config))

    @classmethod
    def _build(cls, sections: Mapping[str, Any], classes: Mapping[str, type]) -> Self:
        """Builds the configuration as in jrl, but a missing field takes trlX's default where there is one."""
        faces = {name: _FACES.get(section, section) for name, section in classes.items()}
        filled = {name: defaults_of(faces[name]) | dict(sections[name]) for name in sections}
        return super()._build(filled, classes)


set_signature(TRLConfig, "__init__", TRLConfig.__init__, inspect.signature(native.TRLConfig))
