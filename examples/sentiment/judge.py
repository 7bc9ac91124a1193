# SPDX-License-Identifier: Apache-2.0
"""How completions are judged: the reward, and what a policy may have paid for it in variety and fluency."""

from __future__ import annotations

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
        self._logits = jax.jit(self.model.logits)

    def complete(
        self, prompts: Sequence[str], *, seed: int, gen_kwargs: dict[str, Any], rows: int = 128
    ) -> list[str]:
        """Samples one completion a prompt.

        Args:
          prompts: Texts.
          seed: Same seed, same samples.
          gen_kwargs: The recipe's; `max_new_tokens`, `temperature`, `top_k` and `top_p` are used.
          rows: Prompts of one call.
        Returns:
          Texts without special tokens.
        """
        options = {name: gen_kwargs[name] for name in ("temperature", "top_k", "top_p") if name in gen_kwargs}
        key = jax.random.key(seed)
        outputs: list[str] = []
        encoded = self._encode(prompts)
        width = max(map(len, encoded))
        for start in range(0, len(encoded), rows):
            chunk = encoded[start : start + rows]
            chunk += [chunk[0]] * (rows - len(chunk))
            tokens, mask = pad_rows(chunk, width, self.tokenizer.pad_token_id, left=True)
            completions = self.model.generate(
                self.params, tokens, mask, jax.random.fold_in(key, start),
                max_new_tokens=gen_kwargs["max_new_tokens"],
                eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id, **options,
            )  # fmt: skip
            outputs += self.tokenizer.batch_decode(np.asarray(completions), skip_special_tokens=True)
        return outputs[: len(encoded)]

    def perplexity(self, prompts: Sequence[str], outputs: Sequence[str], *, rows: int = 64) -> float:
        """exp of the mean negative log-likelihood of a completion token, given what stands before it."""
        heads, tails = self._encode(prompts), self._encode(outputs)
        pairs = [(head, tail) for head, tail in zip(heads, tails, strict=True) if tail]
        width = max((len(head) + len(tail) for head, tail in pairs), default=0)
        total = count = 0.0
        for start in range(0, len(pairs), rows):
            chunk = pairs[start : start + rows]
            tokens, mask = pad_rows([h + t for h, t in chunk], width, self.tokenizer.pad_token_id, left=False)
            positions = np.arange(1, width)
            written = mask[:, 1:] & (positions >= np.array([[len(head)] for head, _ in chunk]))
            total += float(_nll(self._logits(self.params, tokens, mask), tokens, written))
            count += float(written.sum())
        return math.exp(total / count) if count else float("nan")

    def mean_length(self, outputs: Sequence[str]) -> float:
        """Tokens of a completion, on average."""
        return float(np.mean([len(ids) for ids in self._encode(outputs)]))

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@jax.jit
def _nll(logits: jax.Array, tokens: jax.Array, written: jax.Array) -> jax.Array:
    """Summed negative log-likelihood of the tokens where `written` (B, T − 1) is True."""
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(written, chosen, 0.0))


def pad_rows(
    rows: Sequence[Sequence[int]], width: int, pad_token_id: int, *, left: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one array (B, width), padded on one side, and the mask of real tokens."""
    tokens = np.full((len(rows), width), pad_token_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        tokens[i, at], mask[i, at] = row, True
    return tokens, mask


def judge(
    prompts: Sequence[str],
    outputs: Sequence[str],
    reward_fn: Callable[[list[str]], list[float]],
    reference: Checkpoint,
) -> Judgement:
    """Judges one completion a prompt.

    Args:
      prompts: Held-out prompts.
      outputs: Completions.
      reward_fn: From whole texts (prompt and completion) to one number each.
      reference: The checkpoint that PPO starts from.
    """
    samples = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    return Judgement(
        prompts=list(prompts),
        outputs=list(outputs),
        rewards=[float(reward) for reward in reward_fn(samples)],
        distinct_2=distinct_2(outputs),
        length=reference.mean_length(outputs),
        perplexity=reference.perplexity(prompts, outputs),
    )
