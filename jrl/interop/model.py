# SPDX-License-Identifier: Apache-2.0
"""A trainer's model as torch's scripts see it: called with ids, it answers with logits and the heads' values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jrl.compilation import compiled
from jrl.interop.arguments import check_keywords
from jrl.interop.sampling import generate_ids
from jrl.interop.tensors import as_array, in_kind_of
from jrl.interop.untrained import UntrainedModel
from jrl.models.checkpoint import named_tensors
from jrl.models.entries_io import flat_tree
from jrl.models.policy import ADAPTERS, merge_params
from jrl.models.positions import check_length
from jrl.placement import fetch
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.typing import Frozen, ModelInputs, Params

_IGNORED_IN_FORWARD = {
    "return_dict": "one kind of output is returned",
    "output_hidden_states": "the last hidden states are returned",
    "output_attentions": "attention is not kept",
    "use_cache": "a forward pass keeps no cache",
    "position_ids": "positions are counted over the mask",
    "token_type_ids": "no language model here has a table for them",
}
_IGNORED_IN_GENERATE = ("return_dict", "output_attentions", "token_type_ids")
_OF_SAMPLING = ("temperature", "top_k", "top_p")
IGNORED_ON_SAVE = {
    "save_function": "files are safetensors, written by jrl",
    "is_main_process": "jrl knows which process writes",
    "state_dict": "the parameters of the current state are written",
    "safe_serialization": "files are safetensors",
    "max_shard_size": "shards have jrl's own size",
    "push_to_hub": "nothing is uploaded",
}


class ModelOutput(NamedTuple):
    """Outputs of a forward pass; None of heads that the model does not have.

    Attributes:
      logits: (B L V) float32; columns of a padded vocabulary are cut.
      hidden_states: Last hidden state, after the final norm, (B L D).
      value: V(s) at every column, (B L).
      qs: One array (B L V) a Q head.
      target_qs: Of the target heads.
    """

    logits: Float[Array, "B L V"]
    hidden_states: Float[Array, "B L D"]
    value: Float[Array, "B L"] | None = None
    qs: tuple[Float[Array, "B L V"], ...] | None = None
    target_qs: tuple[Float[Array, "B L V"], ...] | None = None


class OutputEmbeddings(NamedTuple):
    """Sizes of the layer that makes logits.

    Attributes:
      in_features: Width of a hidden state.
      out_features: Number of tokens.
    """

    in_features: int
    out_features: int


class FrozenHead:
    """The end of the frozen reference.

    Args:
      logits: `(hidden states) -> logits` with its parameters.
    """

    def __init__(self, logits: Callable[[jax.Array], jax.Array]) -> None:
        self._logits = logits

    def lm_head(self, hidden_states: Any) -> Any:
        """Logits (..., V), float32, of hidden states (..., D) behind the final norm."""
        return in_kind_of(hidden_states, self._logits(as_array(hidden_states, jnp.float32)))


class TrainedModel:
    """The model of a trainer, with the parameters of its current state.

    Args:
      trainer: Whose model it is.
      reference: Gives the parameters of the frozen reference; None where there is none.
    """

    def __init__(
        self, trainer: PolicyTrainer | UntrainedModel, *, reference: Callable[[], Params] | None = None
    ) -> None:
        self._trainer, self._reference = trainer, reference
        self._bound: tuple[Params, Frozen] | None = None
        self._forward = compiled(self._outputs)

    @property
    def config(self) -> Any:
        """The transformers config of the architecture."""
        return self._trainer.lm.hf_config

    @property
    def params(self) -> Params:
        """Trainable parameters: those of the current state, inside a compiled loss those that it differentiates by."""
        return self._trainer.params if self._bound is None else self._bound[0]

    @property
    def frozen(self) -> Frozen:
        """Everything that does not train."""
        return self._trainer.frozen if self._bound is None else self._bound[1]

    @property
    def sampling_params(self) -> Params:
        """Parameters that the sampler reads, with the target Q heads in the place of the online ones."""
        return self._trainer.sampling_params if self._bound is None else self._bound[0]

    @contextmanager
    def bound(self, params: Params, frozen: Frozen) -> Iterator[None]:
        """Inside, the model answers with these parameters instead: how a loss is differentiated."""
        before, self._bound = self._bound, (params, frozen)
        try:
            yield
        finally:
            self._bound = before

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        **others: Any,
    ) -> ModelOutput:
        """A forward pass. torch tensors in, torch tensors out.

        Args:
          input_ids: Ids (B L); of a seq2seq model, what the encoder reads.
          attention_mask: 1 on real tokens; default: all are. Padding may be on either side.
          decoder_input_ids: Of a seq2seq model: the decoder's row, its start id first.
          decoder_attention_mask: 1 on its real tokens; default: all are.
          **others: Of transformers' models; without effect.
        Raises:
          ValueError: If a row is longer than the context of a model that knows no further positions; a mask that is
            traced tells no length.
        """
        check_keywords("model", others, _IGNORED_IN_FORWARD)
        inputs = self._inputs(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask)
        targets = self.sampling_params if self._bound is None else self.params
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((self.params, inputs)))
        # Inside a compiled function the mesh is set already, and jax refuses to set it again.
        with nullcontext() if traced else jax.set_mesh(self._trainer.mesh):
            found = self._forward(self.params, targets, self.frozen, inputs)
        return found if traced else in_kind_of(input_ids, found)

    forward = __call__

    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Prompts with what the model writes behind them, as transformers' `generate`: greedy unless `do_sample`.

        A model with Q heads samples, steered by them. Every call draws anew.

        Args:
          input_ids: Prompts (B P), padded on either side.
          attention_mask: 1 on real tokens; default: all are.
          **kwargs: As `method.gen_kwargs`, with `max_length`; 20 tokens (with Q heads 32) where neither is given. Of a
            seq2seq model also `decoder_input_ids`, what its rows begin with; default: the start id.
        Returns:
          Ids (B L): the given columns, and behind them what was sampled.
        """
        start, real = kwargs.pop("decoder_input_ids", None), kwargs.pop("decoder_attention_mask", None)
        if real is not None and not np.all(real):
            raise ValueError("`decoder_attention_mask` must be 1 everywhere: rows begin without padding.")
        steered = "q_heads" in self.params
        values: dict[str, Any] = (
            {"do_sample": True, "top_k": 20, "beta": 1.0} if steered else {"do_sample": False}
        )
        values |= {name: value for name, value in kwargs.items() if name not in _IGNORED_IN_GENERATE}
        if "max_length" not in kwargs:
            values.setdefault("max_new_tokens", 32 if steered else 20)
        if not values["do_sample"]:
            values = {name: value for name, value in values.items() if name not in _OF_SAMPLING}
        key = self._trainer.draws.key()
        found = generate_ids(self._trainer, input_ids, attention_mask, values, key, start)
        return in_kind_of(input_ids, found.astype(np.int64))

    def save_pretrained(self, save_directory: str | os.PathLike[str], **others: Any) -> None:
        """Writes a Hugging Face folder with the heads.

        Args:
          save_directory: Made where it does not exist.
          **others: Of transformers' method; without effect.
        """
        check_keywords("save_pretrained", others, IGNORED_ON_SAVE)
        self._trainer.save_pretrained(save_directory, heads=True)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Every tensor on the host under its name in a checkpoint; those of an adapter under jrl's own names."""
        params = self._trainer.exported_params
        whole = fetch(merge_params(params, self.frozen), everywhere=True)
        adapters = {name: params[name] for name in ADAPTERS if name in params}
        found = named_tensors(self._trainer.lm, whole)
        return found | {name: np.asarray(leaf) for name, leaf in flat_tree(adapters).items()}

    def parameters(self) -> Iterator[jax.Array]:
        """The arrays that train."""
        yield from jax.tree.leaves(self.params)

    @property
    def base_model(self) -> TrainedModel:
        """The model: its heads do not wrap it."""
        return self

    def get_output_embeddings(self) -> OutputEmbeddings:
        """Sizes of the layer that makes logits."""
        lm = self._trainer.lm
        return OutputEmbeddings(lm.feature_width, lm.vocab_size)

    def eval(self) -> TrainedModel:
        """The model: it has no mode."""
        return self

    def train(self, mode: bool = True) -> TrainedModel:
        """The model: it has no mode."""
        del mode
        return self

    def to(self, *places: Any, **others: Any) -> TrainedModel:
        """The model where it is: the mesh places arrays."""
        del places, others
        return self

    def forward_hydra(self, input_ids: Any, attention_mask: Any = None, **decoder: Any) -> ModelOutput:
        """Forward pass under the frozen reference; arguments as of a call.

        Raises:
          ValueError: If the trainer has no reference.
        """
        with self.bound(self._reference_params(), self._trainer.frozen):
            return self(input_ids, attention_mask, **decoder)

    @property
    def frozen_head(self) -> FrozenHead:
        """The end of the frozen reference.

        Raises:
          ValueError: If the trainer has no reference.
        """
        params, trainer = self._reference_params(), self._trainer
        program = compiled(trainer.lenient_policy.logits)

        def logits(hidden: jax.Array) -> jax.Array:
            with jax.set_mesh(trainer.mesh):
                return program(params, trainer.frozen, hidden)[..., : trainer.lm.vocab_size]

        return FrozenHead(logits)

    def _reference_params(self) -> Params:
        if self._reference is None:
            raise ValueError(f"{type(self._trainer).__name__} has no reference model.")
        return self._reference()

    def _inputs(self, input_ids: Any, attention_mask: Any, decoder: Any, decoder_mask: Any) -> ModelInputs:
        tokens = as_array(input_ids, jnp.int32)
        mask = jnp.ones(tokens.shape, bool) if attention_mask is None else as_array(attention_mask, bool)
        if self._trainer.lm.decoder_start_token_id is None:
            if decoder is not None:
                raise ValueError("`decoder_input_ids` are those of a seq2seq model, and this one is causal.")
            if not isinstance(mask, jax.core.Tracer):
                check_length(self._trainer.lm.config, tokens.shape, mask)
            return ModelInputs(tokens, mask)
        if decoder is None:
            raise ValueError("`decoder_input_ids` are required: a seq2seq model writes with its decoder.")
        rows = as_array(decoder, jnp.int32)
        real = jnp.ones(rows.shape, bool) if decoder_mask is None else as_array(decoder_mask, bool)
        return ModelInputs(rows, real, None, tokens, mask)

    def _outputs(self, params: Params, targets: Params, frozen: Frozen, inputs: ModelInputs) -> ModelOutput:
        policy, size = self._trainer.lenient_policy, self._trainer.lm.vocab_size
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
        heads, of_targets = policy.heads(params, features.value), policy.heads(targets, features.value)
        return ModelOutput(
            policy.logits(params, frozen, features.policy)[..., :size],
            features.policy,
            heads.get("values"),
            tuple(heads["q_values"][..., :size]) if "q_values" in heads else None,
            tuple(of_targets["q_values"][..., :size]) if "q_values" in heads else None,
        )
