# SPDX-License-Identifier: Apache-2.0
"""A handle on a model: what to load, who trains it, and how to sample from it and save it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jrl.models.adapters.peft_format import is_adapter_folder, read_adapter_folder
from jrl.models.fused_attention import AttnImplementation
from jrl.models.hub import CONFIG_FILES, find_folder, read_hf_config
from jrl.notebook import Model, save_model
from jrl.trainers.base import Trainer
from jrl.trl.loading import LoadedModel, TemporaryFolder, load_unbound
from jrl.trlx.ignored import warn_ignored


@dataclass
class ModelHandle:
    """A model that a trainer will load, or has loaded.

    Attributes:
      source: What `TRLConfig.model.model_path` takes: a folder, a hub id or a transformers config.
      peft_config: Of a fresh adapter, as a dict of PEFT's keys; None: no adapter, or that of the folder.
      frozen_dtype: What does not train is kept in this, as `TRLConfig.model.frozen_dtype`.
      compute_dtype: As `TRLConfig.train.compute_dtype`.
      attn_implementation: As `TRLConfig.model.attn_implementation`.
      model_extra_configs: Fields that replace those of the checkpoint's own config.
      kind: "causal", "seq2seq", or "classifier"; None: the config tells.
      with_value_head: Whether a script that uses the handle alone expects a value head.
      v_head_init_std: Standard deviation of a fresh value head's weights; 0, jrl's own, starts all values at 0.
      num_shared_layers: Of a reference: layers from the bottom that policy and reference share; None: none.
      trainer: Who trains this model now; its parameters are then what is saved and sampled from.
    """

    source: Any
    peft_config: dict[str, Any] | None = None
    frozen_dtype: str = "float32"
    compute_dtype: str = "float32"
    attn_implementation: AttnImplementation = "auto"
    model_extra_configs: dict[str, Any] = field(default_factory=dict)
    kind: str | None = None
    with_value_head: bool = False
    v_head_init_std: float = 0.0
    num_shared_layers: int | None = None
    trainer: Trainer | None = field(default=None, repr=False, compare=False)
    _folder: Any = field(default=None, repr=False, compare=False)
    _loaded: LoadedModel | None = field(default=None, repr=False, compare=False)

    def attach(self, trainer: Trainer) -> None:
        """From here on the handle answers with this trainer's parameters."""
        self.trainer, self._loaded = trainer, None

    @property
    def config(self) -> Any:
        """The transformers config of the model."""
        if not isinstance(self.source, str | os.PathLike):
            return self.source
        path: Any = self.source
        if is_adapter_folder(path):
            path = read_adapter_folder(path).base_model
        return read_hf_config(find_folder(path, files=CONFIG_FILES), self.model_extra_configs)

    @property
    def is_peft_model(self) -> bool:
        """Whether an adapter trains and the model itself is frozen."""
        return self.peft_config is not None or is_adapter_folder(self.source)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder reads the queries."""
        return bool(self.config.is_encoder_decoder)

    @property
    def arch_type(self) -> str:
        """What `TRLConfig.model.model_arch_type` takes."""
        return "seq2seq" if self.is_encoder_decoder else "causal"

    def generate(self, input_ids: Any, attention_mask: Any = None, **generation_kwargs: Any) -> np.ndarray:
        """Samples as transformers does: prompts (of a decoder) with what was written behind them.

        Args:
          input_ids: Prompts (B P), padded on the left.
          attention_mask: 1 on real tokens; default: all.
          **generation_kwargs: transformers' names; see `jrl.trl.generation`.
        Returns:
          int32 ids (B, P + T) of a decoder, (B, 1 + T) of an encoder-decoder; pad after the end.
        """
        return self._weights().generate(input_ids, attention_mask, generation_kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, merge_adapter: bool = False, **ignored: Any
    ) -> None:
        """Writes a Hugging Face folder with the parameters as they are now, a value head in TRL's names beside them.

        Args:
          save_directory: Made if missing.
          merge_adapter: Writes the whole model instead of an adapter alone.
          **ignored: Of transformers' method; without effect.
        """
        for name in ignored:
            warn_ignored(f"save_pretrained: {name}", "files are safetensors in jrl's own shards")
        if self.trainer is not None:
            self.trainer.save_pretrained(save_directory, merge_adapter=merge_adapter)
            return
        self._weights().save(save_directory)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads what `save_pretrained` writes; returns the address. See `push_folder`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(folder, repo_id, **options)

    def _weights(self) -> LoadedModel:
        """What samples and saves: the trainer's model, or one that is loaded for this purpose."""
        if self.trainer is not None:
            return LoadedModel.of_trainer(self.trainer)
        if self._loaded is None:
            if self.kind == "classifier":
                raise ValueError(
                    "A sequence classifier writes no text; give the handle to a `RewardTrainer`."
                )
            if self.peft_config is not None:
                raise ValueError("A fresh adapter belongs to a trainer: give the handle to one first.")
            head = "linear" if self.with_value_head else None
            self._loaded = load_unbound(
                self.source, self.model_extra_configs, value_head=head, init_std=self.v_head_init_std
            )
        return self._loaded


def resolve_model(model: Any) -> ModelHandle:
    """A handle of whatever names a model.

    Args:
      model: A handle, a folder or hub id, a transformers config, or a pair (model, params) of `jrl.load_model`, which
        is written to a temporary folder that lives as long as the handle.
    Raises:
      ValueError: If it is none of these.
    """
    if isinstance(model, ModelHandle):
        return model
    if isinstance(model, str | os.PathLike):
        return ModelHandle(os.fspath(model))
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], Model):
        folder = TemporaryFolder("jrl_model_")
        save_model(folder.path, *model)
        return ModelHandle(str(folder.path), _folder=folder)
    if isinstance(getattr(model, "model_type", None), str) and callable(getattr(model, "to_dict", None)):
        return ModelHandle(model)
    raise ValueError(
        "`model` must be a handle of `from_pretrained`, a folder, a hub id, a transformers config or a pair "
        f"(model, params) of `jrl.load_model`, got {type(model).__name__}. A torch module must be saved first."
    )


def create_reference_model(
    model: Any, num_shared_layers: int | None = None, pattern: str | None = None
) -> ModelHandle:
    """A frozen copy of the model, made when a trainer loads it.

    Args:
      model: Whatever `resolve_model` takes.
      num_shared_layers: Layers from the bottom, embeddings with them, that policy and reference share: they do not
        train, and exist once. None: nothing is shared, and everything trains.
      pattern: Of parameter names in torch; without effect.
    Raises:
      ValueError: If the model has fewer layers.
    """
    if pattern is not None:
        warn_ignored("create_reference_model: pattern", "jrl knows where each family's layers are")
    handle = resolve_model(model)
    if num_shared_layers is not None:
        unfrozen_layers(handle, num_shared_layers)
    return replace(handle, num_shared_layers=num_shared_layers, trainer=None, _loaded=None)


def unfrozen_layers(handle: ModelHandle, num_shared_layers: int | None) -> int:
    """What `TRLConfig.model.num_layers_unfrozen` takes, where so many layers are shared; None: all train.

    Raises:
      ValueError: If the model has no more layers than that.
    """
    if num_shared_layers is None:
        return -1
    config = handle.config
    layers = config.num_decoder_layers if config.is_encoder_decoder else config.num_hidden_layers
    if not 0 <= num_shared_layers < layers:
        raise ValueError(
            f"`num_shared_layers` must be in [0, {layers}), since {config.model_type!r} has {layers} layers and one "
            f"must train, got {num_shared_layers}."
        )
    return int(layers) - num_shared_layers


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: Any = None,
    commit_message: str = "Upload model",
) -> str:
    """Uploads a folder to the Hugging Face hub and returns its address.

    Raises:
      RuntimeError: If the hub cannot be reached, or refuses; the message has the hub's reason.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token)
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=Path(folder), commit_message=commit_message)
    except (OSError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())
        raise RuntimeError(f"`repo_id` {repo_id!r} could not be pushed to: {reason}") from error
    return str(address)
