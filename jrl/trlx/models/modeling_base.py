# SPDX-License-Identifier: Apache-2.0
"""trlX's models with heads, standing alone: loaded, asked, sampled from and saved without a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import jax

from jrl.distributed import join
from jrl.interop import TrainedModel, UntrainedModel
from jrl.mesh import make_mesh
from jrl.models.checkpoint import load_checkpoint
from jrl.models.heads import init_q_heads, init_value_head
from jrl.models.model import LanguageModel, make_model
from jrl.models.policy import init_reference
from jrl.rollout.sampler import Sampler


class PreTrainedModelWrapper(TrainedModel):
    """A model with heads. To train it, name its folder in `model.model_path` of a configuration."""

    kind: ClassVar[str] = "causal"
    untrained: UntrainedModel
    given: Mapping[str, Any]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Self:
        """Loads a model; heads that it does not bring start at 0.

        Args:
          pretrained_model_name_or_path: Folder, hub id or a model object of transformers.
          **options: `num_layers_unfrozen`, `num_value_layers_unfrozen`, `two_qs`, `alpha`, where the class has them.
        Raises:
          ValueError: If the model is of another kind than the class, or an option is not one of the class.
        """
        cls._check(options)
        join()  # before anything of JAX is computed
        loaded = load_checkpoint(pretrained_model_name_or_path)
        return cls._made(loaded.model, dict(loaded.params), options)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Self:
        """Builds the model with random weights.

        Args:
          config: Of transformers.
          **options: As of `from_pretrained`.
        """
        cls._check(options)
        join()
        lm = make_model(config)
        return cls._made(lm, dict(lm.init(jax.random.key(0))), options)

    options: ClassVar[Mapping[str, Any]] = {}
    """What a class takes beside the model, and the defaults."""

    @classmethod
    def _check(cls, options: dict[str, Any]) -> None:
        if options.pop("peft_config", None) is not None:
            raise ValueError(
                "`peft_config` belongs to a trainer, which trains the adapter: set `model.peft_config` there."
            )
        unknown = sorted(options.keys() - cls.options.keys())
        if unknown:
            raise ValueError(f"{cls.__name__} takes {sorted(cls.options)}, got `{unknown[0]}`.")

    @classmethod
    def _made(cls, lm: LanguageModel, params: dict[str, Any], given: Mapping[str, Any]) -> Self:
        if lm.family.kind != cls.kind:
            raise ValueError(f"{cls.__name__} needs a {cls.kind} model, got a {lm.family.kind} one.")
        options = {**cls.options, **given}
        split = {name: value for name, value in options.items() if name.endswith("_layers_unfrozen")}
        if "v_head" not in params:
            params["v_head"] = init_value_head("mlp", lm.feature_width, jax.random.key(1))
        if "two_qs" in options and "q_heads" not in params:
            sizes = lm.feature_width, lm.vocab_size, lm.config.padded_vocab_size
            params |= init_q_heads(2 if options["two_qs"] else 1, *sizes, jax.random.key(2))
        lm = replace(lm, value_head=lm.value_head or "mlp")
        trainable, frozen = lm.split_params(params, **split)
        reference = init_reference(trainable)
        mesh = make_mesh(1, 1, 1, devices=jax.local_devices()[:1])
        policy = lm.policy(**split, attn_implementation="einsum")
        untrained = UntrainedModel(lm, trainable, frozen, policy, Sampler(lm.policy(**split)), mesh)
        found = cls(untrained, reference=lambda: reference)
        found.untrained, found.given = untrained, options
        return found
