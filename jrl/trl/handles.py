# SPDX-License-Identifier: Apache-2.0
"""A handle on a model: what to load, who trains it, and how to sample from it and save it."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.interop import UntrainedModel, as_torch, is_tensor, sample_rows, special_ids, warn_ignored
from jrl.models.adapters import is_adapter_folder, read_adapter_folder
from jrl.models.fused_attention import AttnImplementation
from jrl.models.hub import CONFIG_FILES, find_checkpoint, is_checkpoint, read_hf_config
from jrl.models.model_object import ModelObject, as_source
from jrl.notebook import Model, save_model
from jrl.trainers.base import Trainer
from jrl.trainers.config import ModelConfig
from jrl.trainers.loop import says_what_takes_long
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trl.generation import read_generation_kwargs
from jrl.trl.loaded_model import TemporaryFolder, linked, load_unbound
from jrl.trl.module_surface import ModuleSurface, check_rows
from jrl.trl.named_tensors import Held
from jrl.trl.reward_adapter import RewardAdapter
from jrl.typing import ModelInputs
from jrl.upload import push_to_hub

__all__ = ["resolve_model"]

_CLASSIFIER = "ForSequenceClassification"


@dataclass
class ModelHandle(ModuleSurface):
    """A model that a trainer will load, or has loaded.

    Attributes:
      source: What `TRLConfig.model.model_path` takes: a folder, a hub id, a model object of torch or a transformers
        config.
      peft_config: Of a fresh adapter, as a dict of PEFT's keys; None: no adapter, or that of the folder.
      frozen_dtype: What does not train is kept in this, as `TRLConfig.model.frozen_dtype`.
      compute_dtype: As `TRLConfig.train.compute_dtype`.
      attn_implementation: As `TRLConfig.model.attn_implementation`.
      model_extra_configs: Fields that replace those of the checkpoint's own config.
      kind: "causal", "seq2seq", or "classifier"; None: the config tells.
      with_value_head: Whether a script that uses the handle alone expects a value head.
      reward_adapter: Folder of a reward model's adapter on the same base, for `compute_reward_score`.
      summary_dropout_prob: Rate of dropout before the value head that a script asked for, and that has no effect.
      v_head_init_std: Standard deviation of a fresh value head's weights; 0, jrl's own, starts all values at 0.
      num_shared_layers: Of a reference: layers from the bottom that policy and reference share; None: none.
      model_tags: Those that TRL's trainers set, and those that a script added.
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
    reward_adapter: str | None = None
    summary_dropout_prob: float = 0.0
    v_head_init_std: float = 0.0
    num_shared_layers: int | None = None
    model_tags: list[str] = field(default_factory=list, compare=False)
    trainer: Trainer | None = field(default=None, repr=False, compare=False)
    _folder: Any = field(default=None, repr=False, compare=False)
    _links: Any = field(default=None, repr=False, compare=False)
    _reward: RewardAdapter | None = field(default=None, repr=False, compare=False)
    _loaded: UntrainedModel | None = field(default=None, repr=False, compare=False)

    def attach(self, trainer: Trainer) -> None:
        """Makes the handle answer with this trainer's parameters."""
        self.trainer, self._loaded = trainer, None

    def add_model_tags(self, tags: str | Iterable[str]) -> None:
        """Tags of the model, which the card of the trainer that has it carries too.

        Args:
          tags: One or several.
        """
        added = [tags] if isinstance(tags, str) else list(tags)
        self.model_tags += [tag for tag in dict.fromkeys(added) if tag not in self.model_tags]
        if self.trainer is not None:
            self.trainer.tags = tuple(dict.fromkeys([*self.trainer.tags, *added]))

    @property
    def place(self) -> Any:
        """The source, or links to its files where its folder was a temporary one that is gone."""
        gone = self._links is not None and not Path(self.source).expanduser().is_dir()
        return str(self._links.path) if gone else self.source

    @property
    def config(self) -> Any:
        """The transformers config of the model."""
        if not is_checkpoint(self.source):
            return self.source
        place: Any = self.place
        if is_adapter_folder(place):
            place = read_adapter_folder(place).base_model
        changes = dict(self.model_extra_configs)
        labels = changes.pop("num_labels", None)  # no entry of config.json, which names the labels
        found = read_hf_config(find_checkpoint(place, files=CONFIG_FILES), changes)
        if labels is not None:
            found.num_labels = labels
        return found

    @property
    def num_scored_labels(self) -> int | None:
        """Labels of the classification head that the checkpoint holds; None: it holds none, or an adapter."""
        source = self.place
        if not is_checkpoint(source) or is_adapter_folder(source):
            return None
        names = self.config.architectures or []
        if isinstance(source, ModelObject):
            names = [type(source.module).__name__]
        return self.config.num_labels if any(name.endswith(_CLASSIFIER) for name in names) else None

    @property
    def is_peft_model(self) -> bool:
        """True where an adapter trains and the model itself is frozen."""
        return self.peft_config is not None or is_adapter_folder(self.place)

    @property
    def is_encoder_decoder(self) -> bool:
        """True where an encoder reads the queries."""
        return bool(self.config.is_encoder_decoder)

    @property
    def arch_type(self) -> str:
        """Value for `TRLConfig.model.model_arch_type`."""
        return "seq2seq" if self.is_encoder_decoder else "causal"

    def generate(self, input_ids: Any, attention_mask: Any = None, **generation_kwargs: Any) -> Any:
        """Samples as transformers does: prompts (of a decoder) with what was written behind them.

        Args:
          input_ids: Prompts (B P), padded on the left.
          attention_mask: 1 on real tokens; default: all.
          **generation_kwargs: transformers' names; see `jrl.trl.generation`.
        Returns:
          ids (B, P + T) of a decoder, (B, 1 + T) of an encoder-decoder; pad after the end. A torch tensor if the
          prompts are one, else int32 of NumPy.
        """
        loaded = self._weights()
        lm, start = loaded.lm, loaded.lm.decoder_start_token_id
        tokens = np.atleast_2d(np.asarray(input_ids)).astype(np.int32)
        mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
        eos, pad = special_ids(lm)
        settings = read_generation_kwargs(
            generation_kwargs,
            eos_token_id=eos,
            pad_token_id=pad,
            vocab_size=lm.vocab_size,
            prompt_length=tokens.shape[1] if start is None else 0,
        )
        rows = [row[real].tolist() for row, real in zip(tokens, mask.reshape(tokens.shape), strict=True)]
        asks = loaded.sampler, lm, loaded.mesh, loaded.sampling_params, loaded.frozen
        written, lengths = sample_rows(*asks, rows, settings, loaded.draws.key())
        before = tokens if start is None else np.full((len(rows), 1), start, np.int32)
        found = np.concatenate([before, written[:, : int(lengths.max())]], axis=1)
        return as_torch(found) if is_tensor(input_ids) else found

    def compute_reward_score(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """Scores at every token, (B L labels), by the adapter that was given as `reward_adapter`.

        A text's reward stands at its last real token, which is not the last column where rows are padded on the right.

        Args:
          input_ids: Ids (B L).
          attention_mask: 1 on real tokens, padded on either side; default: all are.
        Returns:
          float32: a torch tensor if the ids are one, else NumPy's.
        Raises:
          ValueError: If no `reward_adapter` was given, or a row is longer than the model's context.
        """
        if self.reward_adapter is None:
            raise ValueError(
                "`compute_reward_score` needs a reward model: give its folder to `from_pretrained` as "
                "`reward_adapter`, or score texts with `jrl.load_reward_model(folder)`."
            )
        loaded = self._weights()
        if self._reward is None:
            self._reward = RewardAdapter.load(
                self.reward_adapter, self.config, loaded.base_model, compute_dtype=self.compute_dtype
            )
        tokens = np.asarray(input_ids).astype(np.int32)
        mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
        check_rows(loaded.lm, tokens, mask)
        with jax.set_mesh(loaded.mesh):
            inputs = ModelInputs(jnp.asarray(np.where(mask, tokens, 0)), jnp.asarray(mask))
            found = self._reward.scores(loaded.frozen, inputs)
        return as_torch(found) if is_tensor(input_ids) else np.asarray(found)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, merge_adapter: bool = False, **ignored: Any
    ) -> None:
        """Writes a Hugging Face folder with the parameters as they are now, a value head in TRL's names among them.

        Args:
          save_directory: Made if missing.
          merge_adapter: Writes the whole model instead of an adapter alone.
          **ignored: Of transformers' method; without effect.
        """
        for name in ignored:
            warn_ignored(f"save_pretrained: {name}", "files are safetensors in jrl's own shards")
        if self.trainer is not None:
            heads = self.with_value_head and self.trainer.has_heads
            self.trainer.save_pretrained(save_directory, merge_adapter=merge_adapter, heads=heads)
            return
        self._weights().save_pretrained(save_directory, merge_adapter=merge_adapter)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads what `save_pretrained` writes; returns the address. See `jrl.push_to_hub`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_to_hub(folder, repo_id, **options)

    def _weights(self) -> PolicyTrainer | UntrainedModel:
        """Model that samples and saves: the trainer's, or one that is loaded for this purpose."""
        if self.trainer is not None:
            if not isinstance(self.trainer, PolicyTrainer):
                raise ValueError(f"The model of a {type(self.trainer).__name__} writes no text.")
            return self.trainer
        if self._loaded is None:
            if self.kind == "classifier":
                raise ValueError(
                    "A sequence classifier writes no text; give the handle to a `RewardTrainer`."
                )
            section = ModelConfig(
                self.place,
                peft_config=self.peft_config,
                frozen_dtype=self.frozen_dtype,  # type: ignore[arg-type]
                model_extra_configs=dict(self.model_extra_configs),
            )
            with says_what_takes_long("loading the model"):
                self._loaded = load_unbound(
                    section,
                    compute_dtype=self.compute_dtype,
                    value_head="linear" if self.with_value_head else None,
                    init_std=self.v_head_init_std,
                )
        return self._loaded

    def _held(self) -> Held:
        """Tensors that the model holds now."""
        if self.trainer is not None:
            return Held.of_trainer(self.trainer, heads=self.with_value_head)
        found = self._weights()
        return Held.of_policy(found.lm, found.params, found.frozen, found.adapter, heads=self.with_value_head)


def resolve_model(model: Any) -> ModelHandle:
    """A handle of whatever names a model.

    Args:
      model: A handle, a folder or hub id, a transformers model object of torch (PEFT's too), a transformers config, or
        a pair (model, params) of `jrl.load_model`, which is written to a temporary folder that lives as long as the
        handle.
    Raises:
      ValueError: If it is none of these, or an object that neither writes nor scores.
    """
    if isinstance(model, ModelHandle):
        return model
    found = as_source(model)
    if isinstance(found, ModelObject):
        return _of_object(found)
    if isinstance(model, str | os.PathLike):
        return ModelHandle(os.fspath(model), _links=linked(os.fspath(model)))
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], Model):
        folder = TemporaryFolder("jrl_model_")
        save_model(folder.path, *model)
        return ModelHandle(str(folder.path), _folder=folder)
    if isinstance(getattr(model, "model_type", None), str) and callable(getattr(model, "to_dict", None)):
        return ModelHandle(model)
    raise ValueError(
        "`model` must be a handle of `from_pretrained`, a folder, a hub id, a transformers model or config, or a pair "
        f"(model, params) of `jrl.load_model`, got {type(model).__name__}."
    )


def _of_object(found: ModelObject) -> ModelHandle:
    """A handle of a torch model: it computes in half precision if the object does."""
    inner = found.base.module if found.adapter is not None else found.module
    classifier = type(inner).__name__.endswith(_CLASSIFIER)
    if not classifier and inner.get_output_embeddings() is None:
        raise ValueError(
            f"`model` must have a head that writes text or scores it, got {found}: give the model itself, "
            "such as AutoModelForCausalLM.from_pretrained(...), and no part of it."
        )
    half = str(inner.dtype) in ("torch.bfloat16", "torch.float16")
    return ModelHandle(
        found,
        compute_dtype="bfloat16" if half else "float32",
        kind="classifier" if classifier else None,
    )


def same_source(one: ModelHandle, other: ModelHandle) -> bool:
    """True where two handles name the same weights."""
    pair = [
        handle.source.module if isinstance(handle.source, ModelObject) else handle.source
        for handle in (one, other)
    ]
    return pair[0] is pair[1] or (isinstance(pair[0], str) and pair[0] == pair[1])


def say_untrained(handle: ModelHandle, cure: str) -> None:
    """Warns, when training starts, that the torch object which a script gave stays as it is.

    Args:
      handle: What trains.
      cure: The call that writes what was trained.
    """
    if isinstance(handle.source, ModelObject):
        warnings.warn(
            f"The {handle.source} is read, and does not train: its own parameters stay as they are. `trainer.model` "
            f"has what is trained, and `{cure}` writes it.",
            stacklevel=3,
        )


def untrained(handle: ModelHandle) -> ModelHandle:
    """The handle, or where a trainer has it one of its parameters as they are now, in a folder that lives as long.

    A source that is gone is replaced by the links to its files.
    """
    if handle.trainer is None:
        return handle if handle.place is handle.source else replace(handle, source=handle.place)
    folder = TemporaryFolder("jrl_model_")
    handle.save_pretrained(folder.path)
    return replace(
        handle, source=str(folder.path), peft_config=None, model_extra_configs={}, trainer=None, _folder=folder,
        _loaded=None,
    )  # fmt: skip


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
    """Value for `TRLConfig.model.num_layers_unfrozen`, where so many layers are shared; None: all train.

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
