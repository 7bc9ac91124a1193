# SPDX-License-Identifier: Apache-2.0
"""A model in memory that no trainer holds: what a script asks, samples from and saves before it has one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jrl.distributed import on_main
from jrl.models.adapters import Adapter
from jrl.models.model import LanguageModel
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.trainers.config import Sweep, parse_gen_kwargs
from jrl.trainers.loading import model_writer
from jrl.trainers.rollouts import Draws
from jrl.typing import Frozen, Params, PolicyFns


@dataclass
class UntrainedModel:
    """Stands in for the trainer that a model asks: nothing of it trains.

    Attributes:
      lm: Architecture.
      params: What would train, heads included.
      frozen: The rest.
      lenient_policy: The forward pass, which takes rows padded anywhere.
      sampler: Compiled samplers.
      mesh: Where the arrays are.
      adapter: What would train beside the frozen model; None: the model itself.
      base_model: The model without its adapter, as its source names it.
      draws: Keys of its sampling calls.
    """

    lm: LanguageModel
    params: Params
    frozen: Frozen
    lenient_policy: PolicyFns
    sampler: Sampler
    mesh: jax.sharding.Mesh
    adapter: Adapter | None = None
    base_model: Any = None
    draws: Draws = field(default_factory=Draws)

    @property
    def sampling_params(self) -> Params:
        """The parameters, with the target Q heads in the place of the online ones."""
        if "target_q_heads" not in self.params:
            return self.params
        return {**self.params, "q_heads": self.params["target_q_heads"]}

    @property
    def exported_params(self) -> Params:
        """The parameters: they hold the target heads too."""
        return self.params

    def parse_generation(self, gen_kwargs: Mapping[str, Any]) -> tuple[GenerationSettings, Sweep | None]:
        """Reads `gen_kwargs`, with the model's own special tokens filled in."""
        eos, pad = special_ids(self.lm)
        return parse_gen_kwargs(
            gen_kwargs, eos_token_id=eos, pad_token_id=pad, steers="q_heads" in self.params
        )

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, merge_adapter: bool = False, heads: bool = True
    ) -> None:
        """Writes a Hugging Face folder, an adapter alone unless it is merged; process 0 writes."""
        write = model_writer(
            self.lm,
            self.params,
            self.frozen,
            adapter=self.adapter,
            base_model=self.base_model,
            tokenizer=None,
            merge_adapter=merge_adapter,
            heads="inside" if heads else "left_out",
        )
        on_main(lambda: write(Path(directory)))


def special_ids(lm: LanguageModel) -> tuple[Any, int]:
    """Ids that end a row, and the one that fills it, by the model's own configuration."""
    config = lm.hf_config
    eos = lm.eos_token_ids or config.eos_token_id
    first = eos[0] if isinstance(eos, list | tuple) else eos
    return eos, next((found for found in (config.pad_token_id, first) if found is not None), 0)
