# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model under the names of its files, read one by one from wherever they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl.models.adapters import Adapter, Lora, adapter_entries
from jrl.models.classifier import Classifier
from jrl.models.entries_io import entry_tensors, flat_tree
from jrl.models.families import Entry, Shape
from jrl.models.heads import head_entries
from jrl.models.model import LanguageModel
from jrl.models.policy import merge_params
from jrl.models.quantize import QuantizedKernel
from jrl.placement import fetch
from jrl.trainers.base import Trainer
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.reward_model import RewardTrainer
from jrl.typing import Frozen, Params


@dataclass(frozen=True)
class Held:
    """The tensors of a model.

    Attributes:
      entries: Every tensor: those of the model, of its heads, and of an adapter under PEFT's names.
      leaves: Path → array, of all that the entries name.
      roots: First steps of the paths that train.
      vocab_size: Real entries of the vocabulary.
    """

    entries: Sequence[Entry]
    leaves: Mapping[str, Any]
    roots: Collection[str]
    vocab_size: int

    @classmethod
    def of_policy(
        cls, lm: LanguageModel, params: Params, frozen: Frozen, adapter: Adapter | None, *, heads: bool
    ) -> Held:
        """A language model's; its heads only where they are asked for."""
        entries = list(lm.entries())
        if heads:
            sizes = {"width": lm.feature_width, "vocab_size": lm.vocab_size}
            entries += head_entries(lm.value_head, lm.num_q_heads, **sizes)
        return cls._joined(entries, params, frozen, adapter, lm.vocab_size)

    @classmethod
    def of_classifier(
        cls, model: Classifier, params: Params, frozen: Frozen, adapter: Adapter | None
    ) -> Held:
        """A classifier's, with its head."""
        return cls._joined(list(model.entries()), params, frozen, adapter, model.vocab_size)

    @classmethod
    def of_trainer(cls, trainer: Trainer, *, heads: bool) -> Held:
        """Tensors of a trainer's model, as they are now.

        Raises:
          ValueError: If it trains neither a language model nor a classifier.
        """
        given = trainer.params, trainer.frozen, trainer.adapter
        if isinstance(trainer, RewardTrainer):
            return cls.of_classifier(trainer.model, *given)
        if not isinstance(trainer, PolicyTrainer):
            raise ValueError(
                f"The tensors of a {type(trainer).__name__} have no names here: read `native.params`."
            )
        return cls.of_policy(trainer.lm, *given, heads=heads and trainer.has_heads)

    @classmethod
    def _joined(
        cls, entries: list[Entry], params: Params, frozen: Frozen, adapter: Adapter | None, vocab_size: int
    ) -> Held:
        """The model's tensors and the adapter's."""
        leaves, roots = flat_tree(merge_params(params, frozen)), set(params)
        if adapter is not None:
            own = params[adapter.name]
            added = flat_tree(own if isinstance(adapter, Lora) else adapter.saved(own))
            entries, leaves = entries + adapter_entries(adapter), leaves | added
            roots |= {path.split("/")[0] for path in added}
        return cls(entries, leaves, roots, vocab_size)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name → shape; no array is read."""
        return {entry.name: entry.shape for entry in self.entries}

    @property
    def trained(self) -> set[str]:
        """Names of what trains."""
        return {entry.name for entry in self.entries if entry.paths[0].split("/")[0] in self.roots}

    def tensors(self, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Name → array on the host; kernels of int8 and nf4 as the float32 numbers that they stand for.

        All processes must call it.

        Args:
          names: Which; None: all.
        """
        entries = [entry for entry in self.entries if names is None or entry.name in names]
        paths = sorted({path for entry in entries for path in entry.paths})
        host = {path: fetch(_expanded(self.leaves[path])) for path in paths}
        return {name: lazy.make() for name, lazy in entry_tensors(entries, host, self.vocab_size).items()}


def _expanded(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if isinstance(leaf, QuantizedKernel) else leaf
