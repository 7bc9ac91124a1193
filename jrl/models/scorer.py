# SPDX-License-Identifier: Apache-2.0
"""A classifier with one label as a `Scorer`: what trains, what is frozen, and one number a text.

What trains is chosen as for a policy (`jrl.models.policy`): everything, the last k layers over a frozen trunk, or a
LoRA adapter; and the head, always.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.models.adapters.lora import Lora
from jrl.models.classifier import HEADS, SCORE, Classifier, read_scores
from jrl.models.decoder_policy import LORA
from jrl.models.encoder import Encoder, EncoderConfig
from jrl.models.fused_attention import AttnImplementation, require_einsum
from jrl.models.policy import branch_start, make_policy, split_params
from jrl.typing import Frozen, ModelInputs, Params, PRNGKey, Scorer


def make_scorer(
    model: Classifier,
    *,
    num_layers_unfrozen: int = -1,
    adapter: Lora | None = None,
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
    attn_implementation: AttnImplementation = "einsum",
) -> Scorer:
    """The function by which algorithms know this classifier.

    A decoder's score is read at its last real token, an encoder's from its first; padding may be of any length and id,
    and by einsums on either side. Dropout acts where a key is given, above the frozen trunk.

    Args:
      model: With one label.
      num_layers_unfrozen: How many of the last layers train beside the head; −1 is everything.
      adapter: Trains in place of layers, whatever `num_layers_unfrozen` says; bound to this model.
      compute_dtype: Of activations and matrix products in the body; scores are float32.
      remat: Recompute each layer in the backward pass.
      attn_implementation: As in `make_policy`: by some, padding must be on the right.
    Raises:
      ValueError: If there is more than one label, the number of layers is out of range, or the implementation does not
        serve this model on these devices.
    """
    if len(model.labels) != 1:
        raise ValueError(
            f"`model` must have one label to be trained as a reward model, got {len(model.labels)}: "
            f"{', '.join(model.labels)}."
        )
    branch_start(model.body, num_layers_unfrozen, adapter=adapter)
    if isinstance(model.config, EncoderConfig):
        require_einsum(attn_implementation, "an encoder reads in both directions")
        trains_layers = adapter is None and num_layers_unfrozen != -1
        first_trained = model.body.num_layers - num_layers_unfrozen if trains_layers else 0
        encoder = Encoder(model.config, compute_dtype, remat, first_trained=first_trained)
        return _encoder_scorer(encoder, adapter)
    policy = make_policy(
        model.config,
        num_layers_unfrozen=num_layers_unfrozen,
        adapter=adapter,
        compute_dtype=compute_dtype,
        remat=remat,
        attn_implementation=attn_implementation,
    )

    def score(
        params: Params, frozen: Frozen, inputs: ModelInputs, dropout_key: PRNGKey | None
    ) -> Float[Array, "B"]:
        body = {name: value for name, value in params.items() if name != SCORE}
        features = policy.branch(body, frozen, policy.trunk(frozen, inputs), inputs, dropout_key)
        return read_scores(params[SCORE], features.policy, inputs.attention_mask)[:, 0]

    return score


def _encoder_scorer(encoder: Encoder, adapter: Lora | None) -> Scorer:
    def score(
        params: Params, frozen: Frozen, inputs: ModelInputs, dropout_key: PRNGKey | None
    ) -> Float[Array, "B"]:
        own = {name: value for name, value in params.items() if name != LORA}
        variables: dict[str, Any] = {"params": {**jax.lax.stop_gradient(dict(frozen)), **own}}
        if LORA in params:
            assert adapter is not None
            variables[LORA] = adapter.variables(params[LORA])
        tokens = jnp.where(inputs.attention_mask, inputs.tokens, 0)
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        scores: Any = encoder.apply(variables, tokens, inputs.attention_mask, rngs=rngs)
        return scores[:, 0]

    return score


def split_scorer(
    params: Params,
    model: Classifier,
    *,
    num_layers_unfrozen: int = -1,
    adapter: Lora | None = None,
    key: PRNGKey | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a whole classifier into what trains and what is frozen: (trainable, frozen), as `split_params` does.

    Args:
      params: The whole model, and perhaps an adapter that was loaded.
      model: What they belong to.
      num_layers_unfrozen: As in `make_scorer`.
      adapter: As in `make_scorer`.
      key: For a fresh adapter, where `params` holds none.
    """
    heads = {name: value for name, value in params.items() if name in HEADS}
    body = {name: value for name, value in params.items() if name not in HEADS}
    trainable, frozen = split_params(
        body, model.body, num_layers_unfrozen=num_layers_unfrozen, adapter=adapter, key=key
    )
    return trainable | heads, frozen
