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

from jrl.distributed import join, on_main
from jrl.interop import sample_rows
from jrl.mesh import make_mesh
from jrl.models.adapters import Adapter
from jrl.models.checkpoint import load_checkpoint
from jrl.models.heads import HEADS, heads_of, init_value_head
from jrl.models.hub import is_checkpoint
from jrl.models.model import LanguageModel, make_model
from jrl.models.policy import ADAPTERS
from jrl.models.quantize import quantize_frozen
from jrl.models.safetensors_io import HEADS_FOLDER
from jrl.rollout.sampler import Sampler
from jrl.trainers.base import Trainer
from jrl.trainers.config import ModelConfig
from jrl.trainers.loading import ADAPTER_STREAM, COMPUTE_DTYPES, model_writer, plan_adapter
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.rollouts import Draws
from jrl.trl.generation import read_generation_kwargs
from jrl.typing import Frozen, Params, PolicyFns


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


def linked(path: str) -> TemporaryFolder | None:
    """Links to the files of a folder under the system's temporary one, which may be gone when its weights are read.

    Args:
      path: Of a model.
    Returns:
      The folder of links, which take no room; None where the folder is another, or cannot be linked.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir() or Path(tempfile.gettempdir()).resolve() not in folder.parents:
        return None
    found = TemporaryFolder("jrl_links_")
    try:
        for file in (*folder.glob("*"), *folder.glob(f"{HEADS_FOLDER}/*")):
            if file.is_file():
                place = found.path / file.relative_to(folder)
                place.parent.mkdir(exist_ok=True)
                os.link(file, place)
    except OSError:  # another file system, or one without links
        return None
    return found


@dataclass
class LoadedModel:
    """A model that samples and saves.

    Attributes:
      lm: Architecture.
      sampler: Compiled samplers.
      mesh: Where the arrays are.
      read: Gives (params, frozen) as they are now.
      save: Writes a folder, an adapter merged or not.
      draws: Keys of its sampling calls.
      policy: The forward pass, which takes rows padded on either side.
      adapter: What trains beside the frozen model; None: the model itself.
      base_model: The model without its adapter, as its handle names it.
    """

    lm: LanguageModel
    sampler: Sampler
    mesh: jax.sharding.Mesh
    read: Callable[[], tuple[Params, Frozen]]
    save: Callable[[Path, bool], Any]
    draws: Draws
    policy: PolicyFns
    adapter: Adapter | None
    base_model: Any

    @classmethod
    def of_trainer(cls, trainer: Trainer) -> LoadedModel:
        """The model of a trainer that writes text.

        Raises:
          ValueError: If its model does not.
        """
        if not isinstance(trainer, PolicyTrainer):
            raise ValueError(f"The model of a {type(trainer).__name__} writes no text.")
        read = lambda: (trainer.sampling_params, trainer.frozen)  # noqa: E731
        save = lambda folder, merge: trainer.save_pretrained(folder, merge_adapter=merge)  # noqa: E731
        parts = trainer.lm, trainer.sampler, trainer.mesh, read, save, trainer.draws
        return cls(*parts, trainer.lenient_policy, trainer.adapter, trainer.base_model)

    def generate(self, input_ids: Any, attention_mask: Any, kwargs: Mapping[str, Any]) -> np.ndarray:
        """Samples completions; see `ModelHandle.generate`."""
        tokens = np.atleast_2d(np.asarray(input_ids)).astype(np.int32)
        mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
        config, start = self.lm.hf_config, self.lm.decoder_start_token_id
        eos, pad = self.lm.eos_token_ids or config.eos_token_id, config.pad_token_id
        first_eos = eos[0] if isinstance(eos, list | tuple) else eos
        settings = read_generation_kwargs(
            kwargs,
            eos_token_id=eos,
            pad_token_id=pad if pad is not None else first_eos if first_eos is not None else 0,
            vocab_size=self.lm.vocab_size,
            prompt_length=tokens.shape[1] if start is None else 0,
        )
        rows = [row[real].tolist() for row, real in zip(tokens, mask.reshape(tokens.shape), strict=True)]
        key = self.draws.key()
        asks = self.sampler, self.lm, self.mesh, *self.read()
        written, lengths = sample_rows(*asks, rows, settings, key)
        before = tokens if start is None else np.full((len(rows), 1), start, np.int32)
        return np.concatenate([before, written[:, : int(lengths.max())]], axis=1)


def load_unbound(
    section: ModelConfig, *, compute_dtype: str, value_head: str | None, init_std: float
) -> LoadedModel:
    """Reads the weights of a handle that no trainer holds; a fresh adapter is drawn from seed 0.

    Args:
      section: What to load. A transformers config means random weights, those of seed 0.
      compute_dtype: As `train.compute_dtype`.
      value_head: Kind of value head where the checkpoint brings none; None: a language model alone.
      init_std: Standard deviation of a fresh value head's weights.
    """
    join()  # before anything of JAX is computed
    mesh = make_mesh(1, 1, 1, devices=jax.local_devices()[:1])
    key = jax.random.key(0)
    if str((section.peft_config or {}).get("prompt_tuning_init")).upper().endswith("TEXT"):
        raise ValueError(
            "A prompt that starts as a text needs a trainer's tokenizer: give the handle to one first."
        )
    plan = plan_adapter(section, None)
    if is_checkpoint(plan.base):
        loaded = load_checkpoint(plan.base, config_changes=section.model_extra_configs)
        lm, params = loaded.model, dict(loaded.params)
    else:
        lm = make_model(plan.base)
        params = dict(lm.init(key))
    of_folder = plan.load(lm)
    replaced = HEADS if any(name in of_folder for name in HEADS) else ()
    params = {name: value for name, value in params.items() if name not in replaced} | of_folder
    if value_head is not None and "v_head" not in params:
        params["v_head"] = fresh_value_head(value_head, lm.feature_width, key, init_std)
    kind, num_q_heads = heads_of(params)
    lm = replace(lm, value_head=kind, num_q_heads=num_q_heads)
    frozen: dict[str, Any] = {}
    if plan.config is not None:
        params = quantize_frozen(params, kind=section.frozen_dtype, mesh=mesh, keep=(*HEADS, *ADAPTERS))
        key = jax.random.fold_in(key, ADAPTER_STREAM)
        params, frozen = lm.split_params(params, num_layers_unfrozen=-1, adapter=plan.config, key=key)
    adapter = lm.bind(plan.config)

    def save(directory: Path, merge_adapter: bool) -> None:
        write = model_writer(
            lm, params, frozen, adapter=adapter, base_model=plan.base, tokenizer=None, merge_adapter=merge_adapter,
            heads="inside",
        )  # fmt: skip
        on_main(lambda: write(directory))

    policy = lm.policy(adapter=plan.config, compute_dtype=COMPUTE_DTYPES[compute_dtype])
    return LoadedModel(
        lm, Sampler(policy), mesh, lambda: (params, frozen), save, Draws(), policy, adapter, plan.base
    )


def fresh_value_head(kind: str, width: int, key: jax.Array, std: float) -> dict[str, Any]:
    """A new value head: one that says 0, or with a `std` one whose last layer is drawn from N(0, std²)."""
    head = init_value_head(kind, width, key)
    if not std:
        return head
    kernel = std * jax.random.normal(jax.random.fold_in(key, 1), head["out"]["kernel"].shape)
    return {**head, "out": {**head["out"], "kernel": kernel}}
