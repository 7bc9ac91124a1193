# SPDX-License-Identifier: Apache-2.0
"""Reads a language model on completion windows: the one forward pass that scoring and every learner share.

Sampler and learner can only agree if the same function computes both sides of a ratio, so nobody else cuts windows
or reads logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TypeVar

import jax
from jaxtyping import Array, Float, Int

from jrl.mesh import logits_parts, settle_heads
from jrl.ops.alignment import states_at, window_columns, window_targets
from jrl.ops.checks import Scalar
from jrl.ops.chunks import map_positions, positions_of
from jrl.ops.logprobs import TokenLogprobs, kl_from_logits, token_logprobs
from jrl.ops.masking import at_least_float32
from jrl.typing import (
    ExpertLoad,
    Features,
    Frozen,
    ModelInputs,
    Params,
    PolicyFns,
    Predictions,
    PRNGKey,
    Sequences,
    Trunk,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reader:
    """Reads the windows of rows with one model, one temperature and one limit of memory: bound once, called anywhere.

    Attributes:
      policy: The model.
      temperature: Of the rollouts; divides the logits as it did in the sampler.
      chunk_bytes: Most bytes of float32 logits held at a time.
    """

    policy: PolicyFns
    temperature: Scalar = 1.0
    _: KW_ONLY
    chunk_bytes: int

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        sequences: Sequences,
        *,
        trunk: Trunk = None,
        with_entropy: bool = False,
        ref_params: Params | None = None,
    ) -> Predictions:
        """Runs the model on the rows and returns its predictions for the window's actions.

        Args:
          params: Trainable parameters.
          frozen: The rest.
          sequences: The rows.
          trunk: The frozen trunk's output of these rows, as `trunk_of` gives it; None: it is computed here.
          with_entropy: Whether to compute the entropy as well.
          ref_params: The reference's own parameters, {} where it has none: whose KL to compute as well. None: nobody's.
        """
        trunk = self.trunk_of(frozen, sequences) if trunk is None else trunk
        features = window_features(self.policy, params, frozen, trunk, sequences)
        params, features = _heads_with(params, features)
        found = window_logprobs(
            self.policy,
            params,
            frozen,
            features.policy,
            sequences,
            temperature=self.temperature,
            chunk_bytes=self.chunk_bytes,
            with_entropy=with_entropy,
        )
        return Predictions(
            found.logprobs,
            self.policy.heads(params, features.value).get("values"),
            found.entropy,
            lambda: at_least_float32(self.policy.logits(params, frozen, features.policy)) / self.temperature,
            None
            if ref_params is None
            else self._kl_to(ref_params, params, frozen, features.policy, sequences, trunk=trunk),
            features.load,
        )

    def read(
        self,
        read: Callable[[Float[Array, "b t V"], Int[Array, "b t"]], Result],
        params: Params,
        frozen: Frozen,
        sequences: Sequences,
        *,
        dropout_key: PRNGKey | None = None,
    ) -> tuple[Result, ExpertLoad | None]:
        """`read(logits, actions)` at every position of a window, for what a loss wants beside log-probabilities.

        Args:
          read: Treats every position alike: (b, t) of them to a tree of (b, t, ...); see `jrl.ops.token_reads`. Its
            logits are not divided by the temperature.
          params: Trainable parameters.
          frozen: The rest.
          sequences: The rows.
          dropout_key: None: the pass is deterministic.
        Returns:
          A tree of (B, T, ...), unmasked: what stands at mask 0 means nothing. And the load of the experts; see
          `Features`.
        """
        trunk = self.trunk_of(frozen, sequences)
        features = window_features(self.policy, params, frozen, trunk, sequences, dropout_key=dropout_key)
        params, features = _heads_with(params, features)
        hidden, logits_fn = features.policy, partial(self.policy.logits, params, frozen)
        targets = window_targets(sequences.inputs.tokens, sequences.starts, width=sequences.mask.shape[1])
        vocab_size = jax.eval_shape(logits_fn, hidden[:, 0]).shape[-1]
        found = map_positions(
            lambda states, actions: read(logits_fn(states), actions),
            (hidden, targets),
            positions=positions_of(
                self.chunk_bytes,
                vocab_size=vocab_size,
                num_parts=logits_parts(hidden.shape[0], vocab_size),
            ),
        )
        return found, features.load

    def kl(
        self, params: Params, ref_params: Params, frozen: Frozen, sequences: Sequences, *, trunk: Trunk = None
    ) -> Float[Array, "B T"]:
        """KL(π ‖ π_ref) of the whole distributions at every state of the window, in nats; see `window_kl`."""
        trunk = self.trunk_of(frozen, sequences) if trunk is None else trunk
        hidden = window_features(self.policy, params, frozen, trunk, sequences).policy
        return self._kl_to(ref_params, params, frozen, hidden, sequences, trunk=trunk)

    def _kl_to(
        self,
        ref_params: Params,
        params: Params,
        frozen: Frozen,
        hidden: Float[Array, "B T D"],
        sequences: Sequences,
        *,
        trunk: Trunk,
    ) -> Float[Array, "B T"]:
        """KL(π ‖ π_ref) from the policy's features; a gradient reaches the policy alone."""
        ref_params = jax.lax.stop_gradient(ref_params)
        ref_hidden = window_features(self.policy, ref_params, frozen, trunk, sequences).policy
        return window_kl(
            self.policy,
            params,
            ref_params,
            frozen,
            hidden,
            ref_hidden,
            temperature=self.temperature,
            chunk_bytes=self.chunk_bytes,
        )

    def trunk_of(self, frozen: Frozen, sequences: Sequences) -> Trunk:
        """Output of the frozen layers, which is independent of the trainable parameters."""
        return self.policy.trunk(frozen, sequences.inputs)


def window_features(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    trunk: Trunk,
    sequences: Sequences,
    *,
    dropout_key: PRNGKey | None = None,
) -> Features:
    """Features of the states from which the window's actions were chosen, rows (B T).

    The window is cut out before any head, so the language-model head never runs on prompt positions. Without a
    `dropout_key` the pass is deterministic, which every pass must be that is compared with another one.
    """
    length, width = sequences.inputs.tokens.shape[1], sequences.mask.shape[1]
    columns = window_columns(sequences.starts, width=width, length=length)
    return column_features(policy, params, frozen, trunk, sequences.inputs, columns, dropout_key=dropout_key)


def column_features(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    trunk: Trunk,
    inputs: ModelInputs,
    columns: Int[Array, "B T"],
    *,
    dropout_key: PRNGKey | None = None,
) -> Features:
    """Features of the states at these columns, rows (B T). `window_features` is its plain case."""
    features = policy.branch(params, frozen, trunk, inputs, dropout_key)
    # One array serves both heads unless the value function has a branch of its own.
    policy_states = states_at(features.policy, columns)
    shared = features.value is features.policy
    value_states = policy_states if shared else states_at(features.value, columns)
    return Features(policy_states, value_states, features.load)


def _heads_with(params: Params, features: Features) -> tuple[Params, Features]:
    """Parameters and features for heads to read, whose gradients are then settled before those of layers are made.

    See `jrl.mesh.settle_heads`. One array for both heads stays one.
    """
    if features.value is features.policy:
        params, policy = settle_heads(params, features.policy)
        return params, features._replace(policy=policy, value=policy)
    params, (policy, value) = settle_heads(params, (features.policy, features.value))
    return params, features._replace(policy=policy, value=value)


def window_logprobs(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    hidden: Float[Array, "B T D"],
    sequences: Sequences,
    *,
    temperature: Scalar,
    chunk_bytes: int,
    with_entropy: bool = False,
) -> TokenLogprobs:
    """Log-probabilities of the window's actions under unfiltered logits divided by the temperature.

    Args:
      policy: The model.
      params: Its trainable parameters.
      frozen: The rest.
      hidden: `window_features(...).policy`.
      sequences: The rows.
      temperature: Of the rollouts; > 0.
      chunk_bytes: Most bytes of float32 logits held at a time; see `token_logprobs`.
      with_entropy: Whether to return the entropy as well.
    Returns:
      Unmasked: what stands at mask 0 is finite and means nothing.
    """
    logits_fn = partial(policy.logits, params, frozen)
    vocab_size = jax.eval_shape(logits_fn, hidden[:, 0]).shape[-1]
    return token_logprobs(
        logits_fn,
        hidden,
        window_targets(sequences.inputs.tokens, sequences.starts, width=sequences.mask.shape[1]),
        temperature=temperature,
        chunk_bytes=chunk_bytes,
        vocab_size=vocab_size,
        num_parts=logits_parts(hidden.shape[0], vocab_size),
        with_entropy=with_entropy,
    )


def window_kl(
    policy: PolicyFns,
    params: Params,
    ref_params: Params,
    frozen: Frozen,
    hidden: Float[Array, "B T D"],
    ref_hidden: Float[Array, "B T D"],
    *,
    temperature: Scalar,
    chunk_bytes: int,
) -> Float[Array, "B T"]:
    """KL(π ‖ π_ref) of the whole next-token distributions at every state of a window, in nats.

    Both models' logits are held for a chunk of positions at a time, never for all of them, and so in the backward pass.

    Args:
      policy: The model.
      params: Of the policy.
      ref_params: Of the reference.
      frozen: Shared by both.
      hidden: `window_features(...).policy` of the policy.
      ref_hidden: The same of the reference.
      temperature: Divides both logits; > 0.
      chunk_bytes: Most bytes of float32 logits held at a time.
    Returns:
      Unmasked: what stands at mask 0 is finite and means nothing.
    """
    logits_fn, ref_logits_fn = (partial(policy.logits, weights, frozen) for weights in (params, ref_params))

    def read(hidden: Float[Array, "b t D"], ref_hidden: Float[Array, "b t D"]) -> Float[Array, "b t"]:
        logits, ref_logits = logits_fn(hidden), ref_logits_fn(ref_hidden)
        return kl_from_logits(
            at_least_float32(logits) / temperature, at_least_float32(ref_logits) / temperature
        )

    vocab_size = jax.eval_shape(logits_fn, hidden[:, 0]).shape[-1]
    num_parts = logits_parts(hidden.shape[0], vocab_size)
    positions = positions_of(chunk_bytes, vocab_size=vocab_size, num_reads=2, num_parts=num_parts)
    return map_positions(read, (hidden, ref_hidden), positions=positions)
