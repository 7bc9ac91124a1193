# SPDX-License-Identifier: Apache-2.0
"""Models that score a text: encoders with a classification head, and decoders with a score head.

Both in the layouts of transformers' `AutoModelForSequenceClassification`, read and written.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jrl.models.attention import AttentionContext, full_context
from jrl.models.config import TransformerConfig
from jrl.models.encoder import Encoder, EncoderConfig, init_encoder, init_encoder_head
from jrl.models.entries_io import (
    check_entries,
    entry_tensors,
    flat_tree,
    initial_shapes,
    load_entries,
    parameter_targets,
    some,
)
from jrl.models.families import find_family
from jrl.models.families.base import Entry, Family, check_direction, linear
from jrl.models.families.config_keys import read_all_keys
from jrl.models.folders import replace_folder
from jrl.models.hub import find_checkpoint, named_folder, open_tensors, read_hf_config
from jrl.models.layers import Projection
from jrl.models.positions import check_length, token_positions
from jrl.models.safetensors_io import Tensors
from jrl.models.safetensors_write import is_model_file, write_tensors
from jrl.models.transformer import Decoder, init_decoder
from jrl.ops.rewards import last_token_scores
from jrl.typing import Params, PRNGKey

SCORE = "score"
HEADS = (SCORE, "pooler", "classifier")


@dataclass(frozen=True, eq=False)
class Classifier:
    """A text classifier, or a reward model, of a known family. It holds no arrays.

    Attributes:
      hf_config: The transformers config it was made from: what `save_classifier` writes.
      family: The family's tables.
      config: The architecture as jrl sees it; of a decoder, the body without a language-model head.
    """

    hf_config: Any
    family: Family
    config: EncoderConfig | TransformerConfig

    @classmethod
    def from_config(cls, hf_config: Any) -> Classifier:
        """The classifier of a transformers config; a decoder gets a score head.

        Raises:
          ValueError: If the architecture, or an option of it, is not supported.
        """
        family = find_family(hf_config.model_type)
        if family.kind == "seq2seq":
            raise ValueError(
                f"{family.model_type}: a classifier must be an encoder or a decoder, got an encoder-decoder model."
            )
        if family.is_multimodal:
            raise ValueError(
                f"{family.model_type}: a classifier must be a text model alone, got one with images: save its text "
                "model with its `text_config`."
            )
        config = read_all_keys(family, hf_config)
        if isinstance(config, TransformerConfig):
            check_direction(hf_config)
            config = replace(config, tie_embeddings=True, head_bias=False)
        return cls(hf_config, family, config)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the scores, in order."""
        return tuple(str(self.hf_config.id2label[index]) for index in range(self.hf_config.num_labels))

    @property
    def vocab_size(self) -> int:
        """Real entries of the vocabulary."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens."""
        return self.config.max_positions

    @property
    def architecture(self) -> str:
        """The class of transformers that opens its checkpoint."""
        usual = re.sub(r"(LMHeadModel|ForCausalLM)$", "ForSequenceClassification", self.family.architecture)
        return self.family.classifier or usual

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters."""
        if isinstance(self.config, EncoderConfig):
            return init_encoder(self.config, key)
        body_key, score_key = jax.random.split(key)
        return init_decoder(self.config, body_key) | self.init_heads(score_key)

    def init_heads(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters of the head alone."""
        if isinstance(self.config, EncoderConfig):
            found = init_encoder_head(self.config, key)
            return {name: found[name] for name in HEADS if name in found}
        shape = (self.config.feature_width, len(self.labels))
        return {SCORE: {"kernel": self.config.init_range * jax.random.normal(key, shape)}}

    @property
    def body(self) -> TransformerConfig:
        """Embedding and blocks."""
        return self.config.body if isinstance(self.config, EncoderConfig) else self.config

    def head_entries(self) -> list[Entry]:
        """The tensors of the head."""
        return [entry for entry in self.entries() if entry.paths[0].split("/")[0] in HEADS]

    @property
    def head_modules(self) -> tuple[str, ...]:
        """Names of the modules that hold the head, as PEFT's `modules_to_save` has them."""
        prefix = self.family.base_prefix
        names = (entry.name.removeprefix(prefix).split(".")[0] for entry in self.head_entries())
        return tuple(sorted(set(names)))

    def entries(self) -> list[Entry]:
        """Every tensor of its checkpoint, head included."""
        entries = self.family.entries(self.config)
        if isinstance(self.config, EncoderConfig):
            return entries
        shape = (len(self.labels), self.config.feature_width)
        return [*entries, Entry(f"{SCORE}.weight", (f"{SCORE}/kernel",), linear(), shape)]

    def scores(
        self,
        params: Params,
        tokens: Int[Array, "B L"],
        attention_mask: Bool[Array, "B L"],
        *,
        compute_dtype: Any = jnp.float32,
    ) -> Float[Array, "B labels"]:
        """Float32 scores (logits) of each row: an encoder's from its first real token, a decoder's from its last.

        Args:
          params: The whole model.
          tokens: Ids; anything where padded.
          attention_mask: True on real tokens; padding may be left or right. A row of mere padding scores 0 under a
            decoder.
          compute_dtype: Of activations and matrix products in the body.
        Raises:
          ValueError: If a row is longer than the context of a model that knows no further positions.
        """
        mask = jnp.asarray(attention_mask, bool)
        check_length(self.body, tokens.shape, attention_mask)
        # Padding may hold any id, even one outside the vocabulary: nothing of it may reach a result.
        tokens = jnp.where(mask, tokens, 0)
        if isinstance(self.config, EncoderConfig):
            scores: Any = Encoder(self.config, compute_dtype).apply({"params": params}, tokens, mask)
            return scores
        positions = token_positions(mask)
        context = full_context(self.config, mask, positions)
        decoder = Decoder(self.config, compute_dtype)
        hidden: Any = decoder.apply({"params": params}, tokens, positions, context, method=_read_text)
        return read_scores(params[SCORE], hidden, mask)


def read_scores(
    head: Params, hidden: Float[Array, "B L D"], attention_mask: Bool[Array, "B L"]
) -> Float[Array, "B labels"]:
    """A decoder's float32 scores: its head on the last real token of each row; 0 for a row of mere padding.

    Args:
      head: The score head's parameters.
      hidden: What it reads, of any dtype.
      attention_mask: True on real tokens.
    """
    per_token = token_scores(head, hidden)
    return jax.vmap(last_token_scores, in_axes=(2, None), out_axes=1)(per_token, attention_mask)


def token_scores(head: Params, hidden: Float[Array, "B L D"]) -> Float[Array, "B L labels"]:
    """Float32 scores of a decoder at every token; arguments as of `read_scores`."""
    width, labels = head["kernel"].shape
    projection = Projection((width,), (labels,), False, 0.0, jnp.float32)
    found: Any = projection.apply({"params": head}, hidden)
    return found


def _read_text(
    decoder: Decoder, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], context: AttentionContext
) -> Float[Array, "B L D"]:
    """Final hidden states of a decoder, which its heads read."""
    embedded = decoder.embed_tokens(tokens, positions)
    after, _ = decoder.run_layers(embedded, context, 0, decoder.config.num_layers)
    return decoder.norm(after.x)


def load_classifier(
    source: Any, *, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[Classifier, dict[str, Any]]:
    """Reads a sequence-classification checkpoint: a folder, one of the Hugging Face hub, or a model object.

    Args:
      source: A folder, "organisation/name" on the hub, or a transformers model object of torch.
      dtype: Of the parameters, whatever the file holds; the head is float32 always.
      mesh: Where to place them; None is the default device.
    Raises:
      FileNotFoundError: If the folder holds no checkpoint, or only a pickled one.
      ValueError: If the architecture is not supported, there is no classification head, or the tensors are not those
        of its config.json.
    """
    place = find_checkpoint(source, argument="the reward model")
    hf_config = read_hf_config(place)
    with named_folder(place):
        model = Classifier.from_config(hf_config)
    files, entries = open_tensors(place), model.entries()
    names = {present_name(name): name for name in files}
    _check_head(model, files, {entry.name for entry in entries} - set(names))
    check_entries(
        files,
        entries,
        names,
        is_ignored=lambda name: model.family.is_ignored(name, model.config),
        what=f"{model.family.model_type} classifier",
    )
    shapes = initial_shapes(model.init)
    targets, _ = parameter_targets(shapes, dtype=dtype, mesh=mesh, float32=HEADS)
    return model, load_entries(files, entries, targets, names)


def present_name(name: str) -> str:
    """Files of the first years call a LayerNorm's weight and bias gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _check_head(model: Classifier, files: Tensors, missing: Set[str]) -> None:
    """Says what is the matter where the body of a model was saved without a classification head."""
    head = sorted(name for name in missing if not name.startswith(model.family.base_prefix))
    if head:
        named = ", ".join(model.hf_config.architectures or ["no architecture"])
        raise ValueError(
            f"{files.folder}: there is no classification head: {some(head)} is missing. config.json names {named}; a "
            f"classifier needs {model.architecture}."
        )


def save_classifier(
    directory: str | os.PathLike[str],
    model: Classifier,
    params: Params,
    *,
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a folder that `AutoModelForSequenceClassification` opens with equal scores.

    Args:
      directory: Made if missing. The model files of an older checkpoint in it are replaced.
      model: What the parameters belong to.
      params: The whole tree.
      tokenizer: A transformers tokenizer to store with the model.
      max_shard_bytes: Larger models are split into several files with an index.
    Raises:
      ValueError: If `params` is not the whole tree of this model, `directory` holds the working folder, or
        `max_shard_bytes` is no positive whole number.
    """
    entries = model.entries()
    wrong = sorted({path for entry in entries for path in entry.paths} ^ set(flat_tree(params)))
    if wrong:
        raise ValueError(
            f"`params` must be the whole tree of a {model.family.model_type} classifier; missing or unknown: "
            f"{some(wrong)}."
        )
    hf_config = copy.deepcopy(model.hf_config)
    hf_config.architectures = [model.architecture]
    hf_config.dtype = str(params["embed"]["embedding"].dtype)
    with replace_folder(directory, obsolete=is_model_file) as folder:
        tensors = entry_tensors(entries, params, model.vocab_size)
        write_tensors(folder, tensors, max_shard_bytes=max_shard_bytes)
        hf_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
