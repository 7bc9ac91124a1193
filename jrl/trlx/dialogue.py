# SPDX-License-Identifier: Apache-2.0
"""trlX's functions from samples to stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from jrl.data.demonstrations import DialogueRow
from jrl.data.demonstrations import tokenize_dialogue as tokenize_messages
from jrl.data.offline import RewardedSet, check_rewards, earned_at_end, index_arrays, standardized
from jrl.data.tokenizer import cut, tokenize
from jrl.ops.alignment import learned_targets
from jrl.trlx.stores import DialogMessage, ILQLRolloutStorage, ILQLSeq2SeqRolloutStorage


def tokenize_dialogue(
    dialogue: str | Iterable[str], tokenizer: Any, max_length: int = 2048
) -> list[DialogMessage]:
    """A sample as messages, prompts and outputs in turn, of at most `max_length` tokens together.

    EOS follows the last output. What is too long is cut on the tokenizer's `truncation_side`, EOS like any token;
    messages of which nothing is left disappear, and BOS stands before an output that comes first.

    Args:
      dialogue: An even number of texts; a single text is the output of a prompt that holds nothing but BOS.
      tokenizer: With an EOS token.
      max_length: Most tokens.
    Raises:
      ValueError: If the number of texts is odd or 0.
    """
    bos = tokenizer.bos_token or tokenizer.eos_token
    texts = [bos, dialogue] if isinstance(dialogue, str) else list(dialogue)
    if not texts or len(texts) % 2:
        raise ValueError(
            f"`dialogue` must alternate prompts and outputs, so have an even number of texts, got {len(texts)}."
        )
    messages = tokenize(tokenizer, texts)
    row, _ = tokenize_messages(messages, tokenizer, max_length=max_length)
    # The same cuts on the message of each token; an EOS that was added belongs to the last one.
    owners = [number for number, message in enumerate(messages) for _ in message]
    side = tokenizer.truncation_side
    owners += [len(messages) - 1] * (not messages[-1] or messages[-1][-1] != tokenizer.eos_token_id)
    owners = cut(owners, max_length, side)
    if owners[0] % 2:
        owners = [-2, *cut(owners, max_length - 1, side)]
    found = []
    for owner, tokens in groupby(zip(owners, row.tokens, strict=True), key=lambda pair: pair[0]):
        found.append(DialogMessage(owner % 2 == 1, tuple(token for _, token in tokens)))
    return found


def split_samples(samples: Sequence[Any], split_token: str) -> list[Any]:
    """Texts as pairs: the prompt ends with the first occurrence of the token. Pairs and dialogues stay as they are.

    Raises:
      ValueError: If a text does not hold the token; the message names its index.
    """
    found: list[Any] = []
    for index, sample in enumerate(samples):
        if isinstance(sample, str):
            prompt, token, output = sample.partition(split_token)
            if not token:
                raise ValueError(f"`samples`: sample {index} ({sample!r}) does not hold {split_token!r}.")
            sample = [prompt + token, output]
        found.append(sample)
    return found


def messages_of(row: DialogueRow) -> list[DialogMessage]:
    """A tokenised sample as messages: one for each run of tokens that are all learned, or all not."""
    runs = groupby(zip(row.learned, row.tokens, strict=True), key=lambda pair: pair[0])
    return [DialogMessage(bool(learned), tuple(token for _, token in run)) for learned, run in runs]


def row_of(messages: Sequence[DialogMessage]) -> DialogueRow:
    """Messages as one row."""
    return DialogueRow(
        [token for message in messages for token in message.tokens],
        [message.is_output for message in messages for _ in message.tokens],
    )


def make_experience(
    samples: Sequence[Any],
    rewards: Sequence[float],
    tokenizer: Any = None,
    max_length: int = 2048,
    verbose: bool = True,
) -> ILQLRolloutStorage:
    """Rewarded samples as a store.

    Args:
      samples: Texts or dialogues; lists of `DialogMessage` where there is no tokenizer.
      rewards: One a sample; standardised over the samples.
      tokenizer: With an EOS token.
      max_length: Most tokens of a sample; of the others, see `tokenize_dialogue`.
      verbose: Accepted; nothing is printed.
    Raises:
      ValueError: If a sample is malformed or has no output, or a reward is missing or not finite; the message names its
        index.
    """
    del verbose
    if tokenizer is not None:
        found = RewardedSet(
            samples, rewards, tokenizer, max_length=max_length, seed=0, add_special_tokens=False
        )
        return ilql_store(found.rows, found.earned)
    rows = [row_of(messages) for messages in samples]
    for index, row in enumerate(rows):
        if not learned_targets(row.learned).any():
            raise ValueError(f"`samples`: sample {index} has no output tokens after its first one.")
    returns = standardized(check_rewards(rewards, num_samples=len(rows)))
    return ilql_store(rows, earned_at_end(rows, returns))


def ilql_store(rows: Sequence[DialogueRow], earned: Sequence[np.ndarray]) -> ILQLRolloutStorage:
    """Rows and what each of their actions earned as a store."""
    return ILQLRolloutStorage(
        [np.asarray(row.tokens, np.int32) for row in rows],
        [np.ones(len(row.tokens), np.int32) for row in rows],
        *_indexed(rows, earned),
    )


def ilql_seq2seq_store(
    contexts: Sequence[Sequence[int]], rows: Sequence[DialogueRow], earned: Sequence[np.ndarray]
) -> ILQLSeq2SeqRolloutStorage:
    """Store of rewarded samples of a seq2seq model, from encoder inputs and decoder rows."""
    return ILQLSeq2SeqRolloutStorage(
        [np.asarray(context, np.int32) for context in contexts],
        [np.ones(len(context), np.int32) for context in contexts],
        [np.asarray(row.tokens, np.int32) for row in rows],
        *_indexed(rows, earned),
    )


def _indexed(rows: Sequence[DialogueRow], earned: Sequence[np.ndarray]) -> tuple[Sequence[np.ndarray], ...]:
    """(rewards, states_ixs, actions_ixs, dones) of every row."""
    actions, states, dones = zip(*map(index_arrays, rows), strict=True)
    return earned, states, actions, dones
