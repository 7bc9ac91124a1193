# SPDX-License-Identifier: Apache-2.0
"""Sampling settings, and the wrapper around the compiled sampler that rollouts and evaluation share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jrl.compilation import COMPILER_OPTIONS
from jrl.placement import rows_sharding
from jrl.rollout.generate import make_generate
from jrl.typing import Completions, Frozen, ModelInputs, Params, PolicyFns, PRNGKey, SamplingKnobs

Program = Callable[[Params, Frozen, ModelInputs, jax.Array, SamplingKnobs, PRNGKey], Completions]


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of the sampler, under Hugging Face's names; unless set, `do_sample` is on and `top_k` off.

    Attributes:
      max_new_tokens: Longest completion, the EOS included; of an episode, all behind its prompt.
      min_new_tokens: EOS is suppressed before that many tokens, of a completion or of a turn.
      do_sample: False takes the most probable token.
      temperature: Divides the logits; > 0. Log-probabilities of the rollout use it too.
      top_k: Keeps the k most probable tokens; 0 keeps all.
      top_p: Keeps the smallest set of tokens with at least this mass; 1 keeps all.
      repetition_penalty: Divides positive and multiplies negative logits of tokens already seen; 1 is off.
      suppress_tokens: Ids that are never sampled.
      beta: Weight of Q − V beside the log-probabilities, at least 0; None: Q heads are not read. ILQL only.
      max_turns: Most turns of an episode; None: as many as there are tokens for. With an environment alone.
      max_turn_tokens: Most tokens of one turn of the policy; None: likewise.
      eos_token_id: Ends a completion; defaults to the tokenizer's and those of generation_config.json. Several are
        allowed.
      pad_token_id: Fills rows after their end; defaults to the tokenizer's.
    """

    max_new_tokens: int
    eos_token_id: tuple[int, ...]
    pad_token_id: int
    min_new_tokens: int = 0
    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    beta: float | None = None
    max_turns: int | None = None
    max_turn_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        checks = (
            (self.max_new_tokens >= 1, "max_new_tokens", "at least 1", self.max_new_tokens),
            (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "min_new_tokens",
                "in [0, max_new_tokens]",
                self.min_new_tokens,
            ),
            (
                self.max_turn_tokens is None or self.min_new_tokens <= self.max_turn_tokens,
                "min_new_tokens",
                f"at most `max_turn_tokens`, {self.max_turn_tokens}, as it counts the tokens of each turn",
                self.min_new_tokens,
            ),
            (
                self.temperature > 0,
                "temperature",
                "positive (greedy is do_sample: false, without a temperature)",
                self.temperature,
            ),
            (self.top_k >= 0, "top_k", "at least 0 (0 keeps all)", self.top_k),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p),
            (self.repetition_penalty > 0, "repetition_penalty", "positive", self.repetition_penalty),
            (
                self.beta is None or 0 <= self.beta < math.inf,
                "beta",
                "at least 0 and finite, or null (off)",
                self.beta,
            ),
            *(
                (value is None or value >= 1, name, "at least 1, or null (no limit)", value)
                for name, value in (
                    ("max_turns", self.max_turns),
                    ("max_turn_tokens", self.max_turn_tokens),
                )
            ),
        )
        for holds, name, expected, got in checks:
            if not holds:
                raise ValueError(f"`gen_kwargs.{name}` must be {expected}, got {got}.")

    @property
    def filtered(self) -> bool:
        """True where sampling excludes tokens that the log-probabilities of training still count."""
        if not self.do_sample:
            return False
        reshaped = self.repetition_penalty != 1 or self.min_new_tokens > 0 or len(self.suppress_tokens) > 0
        return reshaped or self.top_k > 0 or self.top_p < 1

    @property
    def knobs(self) -> SamplingKnobs:
        """The traced part."""
        top_p = None if self.top_p == 1 else jnp.float32(self.top_p)
        beta = None if self.beta is None else jnp.float32(self.beta)
        return SamplingKnobs(jnp.float32(self.temperature), top_p, beta)


class Sampler:
    """Compiled samplers, one for each static setting; temperature, top-p and beta are traced and share one program.

    A nucleus (top-p below 1) makes a second one of it.

    Args:
      policy: The model.
      forbidden: A transition mask, as `check_logit_mask` gives it.
      mesh: Of the model; completions lie on it as their prompts do, so that every process finds its rows. None: the
        model is on one device.
    """

    def __init__(
        self, policy: PolicyFns, *, forbidden: jax.Array | None = None, mesh: Mesh | None = None
    ) -> None:
        self._policy, self._forbidden, self._mesh = policy, forbidden, mesh
        self._programs: dict[tuple[GenerationSettings, NamedSharding | None, int], Program] = {}

    def program(self, settings: GenerationSettings, num_rows: int, num_generations: int = 1) -> Program:
        """The jitted `generate` for these settings and so many rows, made on first use.

        Args:
          settings: How to sample.
          num_rows: Samples of a call.
          num_generations: Samples of each prompt.
        """
        steered = None if settings.beta is None else 0.0
        static = replace(
            settings, temperature=1.0, top_p=1.0, beta=steered, max_turns=None, max_turn_tokens=None
        )
        place = None if self._mesh is None else rows_sharding(self._mesh, num_rows)
        if (static, place, num_generations) not in self._programs:
            if self._forbidden is not None:
                check_successors(np.asarray(self._forbidden), settings)
            self._programs[static, place, num_generations] = jax.jit(
                make_generate(
                    self._policy,
                    max_new_tokens=settings.max_new_tokens,
                    min_new_tokens=settings.min_new_tokens,
                    eos_token_ids=settings.eos_token_id,
                    pad_token_id=settings.pad_token_id,
                    top_k=settings.top_k,
                    do_sample=settings.do_sample,
                    repetition_penalty=settings.repetition_penalty,
                    suppress_token_ids=settings.suppress_tokens,
                    num_generations=num_generations,
                ),
                out_shardings=place,
                compiler_options=COMPILER_OPTIONS,
            )
        return self._programs[static, place, num_generations]

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        prompts: ModelInputs,
        row_ids: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
    ) -> Completions:
        """Dispatches one sampling call; nothing is waited for.

        Args:
          params: Trainable parameters.
          frozen: The rest.
          prompts: Left-padded rows, already on the mesh.
          row_ids: Global number of each sample, which depends on it and on `key` alone. Where there are more of them
            than prompts, each prompt has so many in a row, and they share one pass over it.
          settings: How to sample.
          key: Of this iteration.
        """
        knobs = settings.knobs._replace(forbidden=self._forbidden)
        program = self.program(settings, len(row_ids), len(row_ids) // prompts.tokens.shape[0])
        return program(params, frozen, prompts, jnp.asarray(row_ids), knobs, key)


def check_successors(forbidden: np.ndarray, settings: GenerationSettings) -> None:
    """Refuses settings that, beside a transition mask, leave nothing to draw after some token.

    Args:
      forbidden: The mask.
      settings: How to sample.
    Raises:
      ValueError: If they do.
    """
    tokens, ends = np.arange(len(forbidden)), settings.eos_token_id
    never = np.isin(tokens, [*settings.suppress_tokens, *(ends if settings.min_new_tokens else ())])
    stuck = (forbidden | never).all(axis=1) & ~np.isin(tokens, ends)  # nothing is drawn after an EOS
    if stuck.any():
        raise ValueError(
            "gen_kwargs: `suppress_tokens` or `min_new_tokens` forbids all that `logit_mask` lets follow token "
            f"{int(stuck.argmax())}: nothing would be left to draw."
        )


def check_logit_mask(logit_mask: Any, vocab_size: int) -> jax.Array | None:
    """A transition mask as samplers read it: True where the column's token may not follow the row's.

    Args:
      logit_mask: Boolean array-like (V, V), or None.
      vocab_size: V, without padding.
    Raises:
      ValueError: If it has another shape or another type, or a token that none may follow: a row that ends with it has
        nothing to draw from.
    """
    if logit_mask is None:
        return None
    if isinstance(logit_mask, str):
        raise ValueError(
            f"`logit_mask` must be an array, got the text {logit_mask!r}. Is the configuration that of a checkpoint? "
            "It holds a fingerprint alone: give the mask again."
        )
    mask = np.asarray(logit_mask)
    if mask.dtype != bool or mask.shape != (vocab_size, vocab_size):
        raise ValueError(
            f"`logit_mask` must be boolean, ({vocab_size}, {vocab_size}) as the vocabulary, True where the column's "
            f"token may not follow the row's; got {mask.dtype} {mask.shape}."
        )
    if mask.all(axis=1).any():
        raise ValueError(
            f"`logit_mask` must leave every token a successor, such as EOS, but row {int(mask.all(axis=1).argmax())} "
            "forbids all. Is True meant to be an edge? It is what is forbidden."
        )
    return jnp.asarray(mask)
