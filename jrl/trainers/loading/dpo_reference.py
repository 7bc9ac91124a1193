# SPDX-License-Identifier: Apache-2.0
"""The reference of DPO: where it comes from, and its log-probabilities of a whole data set, computed once and kept."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from jrl.data.preferences.preference_set import PreferenceSet
from jrl.models.hub import is_checkpoint
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.adapters import plan_adapter
from jrl.trainers.loading.setup import PolicyBundle, described_model, load_policy
from jrl.trainers.loading.tokenizers import load_run_tokenizer, tokenizer_path
from jrl.typing import Frozen, Params, PolicyFns, PreferenceBatch

CACHE = "reference_logps"
"""Folder, in the run's own, of what was computed once."""

Logprobs = list[Float[np.ndarray, "n"]]
"""One array a pair, one log-probability a token of the completion."""


@dataclass(frozen=True)
class Reference:
    """The model that the policy is compared with.

    Attributes:
      policy: Its functions.
      params: Gives its own parameters at the moment of the call: a reference may follow the policy.
      frozen: The rest.
      architecture: Its configuration, as text.
    """

    policy: PolicyFns
    params: Callable[[], Params]
    frozen: Frozen
    architecture: str


def load_reference(config: TRLConfig, path: Any, mesh: Mesh) -> PolicyBundle:
    """A reference of its own, whole and in float32; an adapter's folder is base model and adapter.

    Args:
      config: The run's.
      path: Directory, hub id, or transformers config.
      mesh: Where the arrays go.
    """
    return load_policy(reference_config(config, path), mesh, with_value_head=False)


def check_reference(config: TRLConfig, path: Any) -> None:
    """Policy and reference must count the same tokens; said before weights of either are read.

    Raises:
      ValueError: If their vocabularies differ in size.
    """
    tokenizer = load_run_tokenizer(config.model, config.tokenizer)
    sizes = [
        described_model(each, plan_adapter(each.model, tokenizer)).vocab_size
        for each in (config, reference_config(config, path))
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"`method.ref_model_path` must name a model with the policy's vocabulary of {sizes[0]} tokens, got one of "
            f"{sizes[1]}: log-probabilities of other tokens cannot be compared."
        )


def starting_from(given: Params, params: Params) -> Params:
    """A given reference as the start of one that follows the policy: it must have the tree of what trains.

    Raises:
      ValueError: If it has another one.
    """
    shapes = [jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree) for tree in (given, params)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "`method.ref_model_path` must name a model of the policy's architecture under `method.sync_ref_model`, all "
            "of whose layers train (`model.num_layers_unfrozen: -1`): other parameters cannot follow it."
        )
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), given, params)


def reference_config(config: TRLConfig, path: Any) -> TRLConfig:
    """The run's configuration with a reference of its own as the model."""
    changes = {
        "model_path": path,
        "peft_config": None,
        "num_layers_unfrozen": -1,
        "frozen_dtype": "float32",
        "model_extra_configs": {},
    }
    # A config object, as plans may have: a run was told of its tokenizer.
    if config.tokenizer.tokenizer_path is None and not is_checkpoint(config.model.model_path):
        return config.evolve(model=changes)
    # The tokenizer stays the policy's.
    tokenizer = {"tokenizer_path": tokenizer_path(config.model, config.tokenizer)}
    return config.evolve(model=changes, tokenizer=tokenizer)


def score_samples(
    samples: PreferenceSet,
    score: Callable[[PreferenceBatch], tuple[jax.Array, jax.Array]],
    *,
    batch_size: int,
) -> tuple[Logprobs, Logprobs]:
    """The reference's log-probabilities of all pairs, in the order of `samples.rows`: (chosen, rejected).

    Args:
      samples: The pairs.
      score: Of a host batch, two arrays (B T).
      batch_size: Pairs of a call.
    """
    chosen: Logprobs = []
    rejected: Logprobs = []
    for number in range(math.ceil(len(samples) / batch_size)):
        places = np.arange(number * batch_size, (number + 1) * batch_size)
        real = places < len(samples)
        found = jax.device_get(score(samples.batch_of(np.minimum(places, len(samples) - 1), real)))
        for place, good, bad in zip(places[real], *found, strict=False):
            row = samples.rows[place]
            chosen.append(np.array(good[: len(row.chosen.tokens)], np.float32))
            rejected.append(np.array(bad[: len(row.rejected.tokens)], np.float32))
    return chosen, rejected


def save_logprobs(path: Path, chosen: Sequence[np.ndarray], rejected: Sequence[np.ndarray]) -> None:
    """Writes both sides into one file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.tmp.npz")
    arrays: dict[str, Any] = {}
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        arrays[name] = np.concatenate(side)
        arrays[f"{name}_lengths"] = np.array([len(row) for row in side], np.int64)
    np.savez(unfinished, **arrays)
    unfinished.replace(path)


def load_logprobs(path: Path) -> tuple[Logprobs, Logprobs] | None:
    """Loads a file of `save_logprobs`; None where there is no such file or it is damaged."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            sides = [
                np.split(found[name], np.cumsum(found[f"{name}_lengths"])[:-1])
                for name in ("chosen", "rejected")
            ]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return list(sides[0]), list(sides[1])
