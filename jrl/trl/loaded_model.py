# SPDX-License-Identifier: Apache-2.0
"""A model loaded for a script that has no trainer yet, and the folders that go with it."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jrl.distributed import join
from jrl.interop import UntrainedModel
from jrl.mesh import make_mesh
from jrl.models.checkpoint import load_checkpoint
from jrl.models.heads import HEADS, heads_of, init_value_head
from jrl.models.hub import is_checkpoint
from jrl.models.model import make_model
from jrl.models.policy import ADAPTERS
from jrl.models.quantize import quantize_frozen
from jrl.models.safetensors_io import HEADS_FOLDER
from jrl.rollout.sampler import Sampler
from jrl.trainers.config import ModelConfig
from jrl.trainers.loading import ADAPTER_STREAM, COMPUTE_DTYPES, plan_adapter


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


def load_unbound(
    section: ModelConfig, *, compute_dtype: str, value_head: str | None, init_std: float
) -> UntrainedModel:
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
    policy = lm.policy(adapter=plan.config, compute_dtype=COMPUTE_DTYPES[compute_dtype])
    parts = lm, params, frozen, policy, Sampler(policy), mesh
    return UntrainedModel(*parts, adapter=lm.bind(plan.config), base_model=plan.base)


def fresh_value_head(kind: str, width: int, key: jax.Array, std: float) -> dict[str, Any]:
    """A new value head: one that says 0, or with a `std` one whose last layer is drawn from N(0, std²)."""
    body_key, kernel_key = (jax.random.fold_in(key, part) for part in (0, 1))
    head = init_value_head(kind, width, body_key)
    if not std:
        return head
    kernel = std * jax.random.normal(kernel_key, head["out"]["kernel"].shape)
    return {**head, "out": {**head["out"], "kernel": kernel}}
