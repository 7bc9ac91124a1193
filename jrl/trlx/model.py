# SPDX-License-Identifier: Apache-2.0
"""A trainer's model as trlX's scripts see it: called with ids, it answers with logits and the heads' values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.typing import Frozen, ModelInputs, Params


class ModelOutput(NamedTuple):
    """What a forward pass gives; of heads that the model does not have, None.

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


class TrainedModel:
    """The model of a trainer, with the parameters of its current state.

    Args:
      trainer: Whose model it is.
      reference: Gives the parameters of the frozen reference; None where there is none.
    """

    def __init__(self, trainer: PolicyTrainer, *, reference: Callable[[], Params] | None = None) -> None:
        self._trainer, self._reference = trainer, reference
        self._bound: tuple[Params, Frozen] | None = None
        self._forward = jax.jit(self._outputs)

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
        """What the sampler reads: the parameters, with the target Q heads in the place of the online ones."""
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
    ) -> ModelOutput:
        """A forward pass.

        Args:
          input_ids: Ids (B L); of a seq2seq model, what the encoder reads.
          attention_mask: 1 on real tokens; default: all are. Padding may be on either side.
          decoder_input_ids: Of a seq2seq model: the decoder's row, its start id first.
          decoder_attention_mask: 1 on its real tokens; default: all are.
        """
        inputs = self._inputs(input_ids, attention_mask, decoder_input_ids, decoder_attention_mask)
        targets = self.sampling_params if self._bound is None else self.params
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((self.params, inputs)))
        # Inside a compiled function the mesh is set already, and jax refuses to set it again.
        with nullcontext() if traced else jax.set_mesh(self._trainer.mesh):
            return self._forward(self.params, targets, self.frozen, inputs)

    def forward_hydra(self, input_ids: Any, attention_mask: Any = None, **decoder: Any) -> ModelOutput:
        """The same under the frozen reference.

        Raises:
          ValueError: If the trainer has no reference.
        """
        if self._reference is None:
            raise ValueError(f"{type(self._trainer).__name__} has no reference model.")
        with self.bound(self._reference(), self._trainer.frozen):
            return self(input_ids, attention_mask, **decoder)

    def _inputs(self, input_ids: Any, attention_mask: Any, decoder: Any, decoder_mask: Any) -> ModelInputs:
        tokens = as_array(input_ids, jnp.int32)
        mask = jnp.ones(tokens.shape, bool) if attention_mask is None else as_array(attention_mask, bool)
        if self._trainer.lm.decoder_start_token_id is None:
            if decoder is not None:
                raise ValueError("`decoder_input_ids` are those of a seq2seq model, and this one is causal.")
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


def as_array(array: Any, dtype: Any) -> jax.Array:
    """Lists, NumPy and torch arrays as jax has them; tracers stay what they are."""
    return jnp.asarray(array if isinstance(array, jax.Array) else np.asarray(array), dtype)
