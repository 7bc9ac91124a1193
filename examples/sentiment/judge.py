# SPDX-License-Identifier: Apache-2.0
"""How completions are judged: the reward, and what a policy may have paid for it in variety and fluency."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrl
from jrl.data import bucket_length, encode_prompts, pad_left, pad_right
from jrl.rollout import Texts, call_reward_fn, decode_rows


@dataclass(frozen=True)
class Judgement:
    """Completions of the held-out prompts and what they are worth.

    Attributes:
      prompts: Held-out prompts.
      outputs: One completion each.
      rewards: One a sample.
      distinct_2: Distinct bigrams of words over all bigrams, in (0, 1].
      length: Mean length of a completion in tokens.
      perplexity: Of the completions under the model that PPO started from.
    """

    prompts: list[str]
    outputs: list[str]
    rewards: list[float]
    distinct_2: float
    length: float
    perplexity: float

    @property
    def reward(self) -> float:
        """Mean reward."""
        return float(np.mean(self.rewards))


def distinct_2(texts: Sequence[str]) -> float:
    """Share of distinct bigrams among all bigrams of words (Li et al. 2016, arXiv:1510.03055); 0 where there
    is none.

    It falls when a policy repeats itself, within a text or between texts. It also falls with the amount of
    text, so compare sets of one size.

    Example:
      >>> distinct_2(["a b a b", "a b"])
      0.5
    """
    bigrams = [pair for words in map(str.split, texts) for pair in itertools.pairwise(words)]
    return len(set(bigrams)) / len(bigrams) if bigrams else 0.0


class Checkpoint:
    """A checkpoint in use: completes prompts, and says how likely it finds a text.

    Args:
      path: Directory or hub id.
      tokenizer_path: Where its tokenizer is; default: beside it.
    """

    def __init__(self, path: str | Path, tokenizer_path: str | Path | None = None) -> None:
        self.model, self.params = jrl.load_model(str(path))
        self.tokenizer = jrl.load_tokenizer(str(tokenizer_path or path))

    def complete(
        self, prompts: Sequence[str], *, seed: int, gen_kwargs: dict[str, Any], rows: int = 128
    ) -> Texts:
        """Samples one completion a prompt.

        Args:
          prompts: Texts.
          seed: Same seed, same samples.
          gen_kwargs: The recipe's; `max_new_tokens`, `temperature`, `top_k` and `top_p` are used.
          rows: Prompts of one call.
        Returns:
          Texts without special tokens, and the sampled ids.
        """
        names = ("max_new_tokens", "temperature", "top_k", "top_p")
        options = {name: gen_kwargs[name] for name in names if name in gen_kwargs}
        ends, pad = (self.tokenizer.eos_token_id, *self.model.lm.eos_token_ids), self.tokenizer.pad_token_id
        generate = jax.jit(
            functools.partial(self.model.generate, eos_token_id=ends, pad_token_id=pad, **options)
        )
        encoded = encode_prompts(self.tokenizer, prompts)
        width = max(map(len, encoded))
        parts = []
        for start in range(0, len(encoded), rows):
            chunk = encoded[start : start + rows]
            full = chunk + [chunk[0]] * (rows - len(chunk))  # one shape, one compiled program
            ids, mask = pad_left(full, pad_token_id=pad, width=width)
            tokens = np.asarray(
                generate(self.params, ids, mask, jax.random.fold_in(jax.random.key(seed), start))
            )
            tokens = tokens[: len(chunk)]
            ended = np.isin(tokens, ends)
            lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, tokens.shape[1])
            parts.append(decode_rows(self.tokenizer, chunk, tokens, lengths, eos_token_ids=ends))
        return Texts.concatenate(parts)

    def perplexity(self, texts: Texts, *, rows: int = 64) -> float:
        """exp of the mean negative log-likelihood of a sampled token, EOS included, given what stands before it."""
        heads = encode_prompts(self.tokenizer, texts.prompts)
        longest = max(len(head) + len(tail) for head, tail in zip(heads, texts.output_tokens, strict=True))
        width = bucket_length(longest)  # so that texts of two policies share a compiled program
        total = count = 0.0
        for start in range(0, len(heads), rows):
            chunk = slice(start, start + rows)
            whole = [head + tail for head, tail in zip(heads[chunk], texts.output_tokens[chunk], strict=True)]
            tokens, mask = pad_right(whole, pad_token_id=self.tokenizer.pad_token_id, width=width)
            states = np.arange(width - 1) >= np.array([[len(head) - 1] for head in heads[chunk]])
            sampled = mask[:, 1:] & states
            total += float(self._nll(self.params, tokens, mask, sampled))
            count += float(sampled.sum())
        return math.exp(total / count)

    @functools.cached_property
    def _nll(self) -> Callable[..., jax.Array]:
        def nll(params: Any, tokens: jax.Array, mask: jax.Array, sampled: jax.Array) -> jax.Array:
            """Summed over the tokens after the states where `sampled` (B, T − 1) is True."""
            logprobs = jax.nn.log_softmax(self.model.logits(params, tokens, mask)[:, :-1])
            chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
            return -jnp.sum(jnp.where(sampled, chosen, 0.0))

        return jax.jit(nll)


def judge(texts: Texts, reward_fn: Callable[..., Any], reference: Checkpoint) -> Judgement:
    """Judges one completion a prompt.

    Args:
      texts: From `Checkpoint.complete`.
      reward_fn: As `jrl.train` takes it; of a dense reward the sum counts.
      reference: The checkpoint that PPO starts from.
    """
    rewards = call_reward_fn(reward_fn, texts, tokenizer=reference.tokenizer, metadata={})
    return Judgement(
        prompts=texts.prompts,
        outputs=texts.outputs,
        rewards=[float(np.sum(reward)) for reward in rewards],
        distinct_2=distinct_2(texts.outputs),
        length=float(np.mean(texts.lengths)),
        perplexity=reference.perplexity(texts),
    )
