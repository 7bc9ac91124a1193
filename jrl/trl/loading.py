# SPDX-License-Identifier: Apache-2.0
"""A model in memory behind a handle: one that a trainer holds, or one loaded for a script that has no trainer yet."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.distributed import join
from jrl.mesh import make_mesh
from jrl.models.adapters.peft_format import is_adapter_folder
from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.heads import init_value_head
from jrl.models.model import LanguageModel, make_model
from jrl.notebook import load_model
from jrl.trainers.base import Trainer
from jrl.trainers.generation import Sampler
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trl.generation import read_generation_kwargs, sample_rows
from jrl.typing import Frozen, Params


class TemporaryFolder:
    """A folder that goes with the object, or with the process.

    Args:
      prefix: Of its name.

    Attributes:
      path: The folder.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass
class LoadedModel:
    """What samples and saves.

    Attributes:
      lm: Architecture.
      sampler: Compiled samplers.
      mesh: Where the arrays are.
      read: Gives (params, frozen) as they are now.
      save: Writes a folder.
      calls: Sampling calls so far: each draws with a key of its own.
    """

    lm: LanguageModel
    sampler: Sampler
    mesh: jax.sharding.Mesh
    read: Callable[[], tuple[Params, Frozen]]
    save: Callable[[Any], Any]
    calls: int = 0

    @classmethod
    def of_trainer(cls, trainer: Trainer) -> LoadedModel:
        """The model of a trainer that writes text.

        Raises:
          ValueError: If its model does not.
        """
        if not isinstance(trainer, PolicyTrainer):
            raise ValueError(f"The model of a {type(trainer).__name__} writes no text.")
        read = lambda: (trainer.sampling_params, trainer.frozen)  # noqa: E731
        return cls(trainer.lm, trainer.sampler, trainer.mesh, read, trainer.save_pretrained)

    def generate(self, input_ids: Any, attention_mask: Any, kwargs: Mapping[str, Any]) -> np.ndarray:
        """See `ModelHandle.generate`."""
        tokens = np.atleast_2d(np.asarray(input_ids)).astype(np.int32)
        mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
        config, start = self.lm.hf_config, self.lm.decoder_start_token_id
        eos, pad = config.eos_token_id, config.pad_token_id
        first_eos = eos[0] if isinstance(eos, list | tuple) else eos
        settings = read_generation_kwargs(
            kwargs,
            eos_token_id=eos,
            pad_token_id=pad if pad is not None else first_eos if first_eos is not None else 0,
            vocab_size=self.lm.vocab_size,
            prompt_length=tokens.shape[1] if start is None else 0,
        )
        rows = [row[real].tolist() for row, real in zip(tokens, mask.reshape(tokens.shape), strict=True)]
        key, self.calls = jax.random.fold_in(jax.random.key(0), self.calls), self.calls + 1
        written = sample_rows(self.sampler, self.lm, self.mesh, *self.read(), rows, settings, key)
        before = tokens if start is None else np.full((len(rows), 1), start, np.int32)
        longest = max(map(len, written))
        after = np.full((len(rows), longest), settings.pad_token_id, np.int32)
        for row, ids in zip(after, written, strict=True):
            row[: len(ids)] = ids
        return np.concatenate([before, after], axis=1)


def load_unbound(
    source: Any, changes: Mapping[str, Any], *, value_head: str | None, init_std: float
) -> LoadedModel:
    """Reads the weights of a handle that no trainer holds.

    Args:
      source: A folder, a hub id or a transformers config, whose random weights are those of seed 0.
      changes: Fields of a checkpoint's config to replace.
      value_head: Kind of value head where the checkpoint brings none; None: a language model alone.
      init_std: Standard deviation of a fresh value head's weights.
    """
    join()  # before anything of JAX is computed
    mesh = make_mesh(1, 1, 1, devices=jax.local_devices()[:1])
    key = jax.random.key(0)
    if not isinstance(source, str | os.PathLike):
        lm = make_model(source)
        params: dict[str, Any] = dict(lm.init(key))
    elif is_adapter_folder(source):
        model, merged = load_model(source, quiet=True)
        lm, params = model.lm, dict(merged)
    else:
        loaded = load_checkpoint(source, config_changes=changes)
        lm, params = loaded.model, dict(loaded.params)
    if value_head is not None and "v_head" not in params:
        params["v_head"] = fresh_value_head(value_head, lm.feature_width, key, init_std)
        lm = replace(lm, value_head=value_head)

    def save(directory: str | os.PathLike[str]) -> None:
        save_checkpoint(Path(directory), lm, params)

    return LoadedModel(lm, Sampler(lm.policy()), mesh, lambda: (params, {}), save)


def fresh_value_head(kind: str, width: int, key: jax.Array, std: float) -> dict[str, Any]:
    """A new value head: one that says 0, or with a `std` one whose last layer is drawn from N(0, std²)."""
    head = init_value_head(kind, width, key)
    if not std:
        return head
    kernel = std * jax.random.normal(jax.random.fold_in(key, 1), head["out"]["kernel"].shape)
    return {**head, "out": {**head["out"], "kernel": kernel}}
