# SPDX-License-Identifier: Apache-2.0
"""Preference records as ids: where a prompt ends (`jrl.data.seam`) and where a completion does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jrl.data.chat.rendering import end_of_turn
from jrl.data.chat.templates import render_answer, render_dialogue
from jrl.data.preferences.preference_records import ASSISTANT, Preference, common_beginning
from jrl.data.seam import tokenize_split
from jrl.data.tokenizer import begun, special_tokens_around, tokenize


class TokenPair(NamedTuple):
    """The ids of a pair, before anything is cut.

    Attributes:
      prompt: Ids of the prompt, special tokens included.
      chosen: Ids of the preferred completion, its end included.
      rejected: Ids of the other one.
      chosen_learned: One flag a token of `chosen`: False on what a tool wrote. None: all are learned.
      rejected_learned: The same of `rejected`.
      merged: Whether a token would span the seam of either completion.
    """

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_learned: list[bool] | None = None
    rejected_learned: list[bool] | None = None
    merged: bool = False


def tokenize_pairs(tokenizer: Any, pairs: Sequence[Preference], *, is_seq2seq: bool) -> list[TokenPair]:
    """Prompts and completions of checked records.

    Texts: BOS comes first where the tokenizer puts it before ordinary text, once; EOS ends a completion that lacks it;
    the seam is that of `jrl.data.seam`. Without a prompt, it is what both texts begin with, in whole tokens. An empty
    prompt is BOS, or EOS where there is none: a model needs something to go on from. Of an empty completion
    EOS is left, of a pair with one without messages nothing. Messages: the chat template says all of it, and what it
    writes after the last special token is no part of a completion.

    Args:
      tokenizer: With an EOS token.
      pairs: The records.
      is_seq2seq: The encoder reads the prompt, with all special tokens of its tokenizer, and completions stand alone.
    Raises:
      ValueError: If messages cannot be rendered. The message does not name the row.
    """
    texts = [number for number, pair in enumerate(pairs) if isinstance(pair.chosen, str)]
    found = dict(
        zip(texts, _text_pairs(tokenizer, [pairs[number] for number in texts], is_seq2seq), strict=True)
    )
    return [
        found[number] if number in found else _dialogue_pair(tokenizer, pair, is_seq2seq)
        for number, pair in enumerate(pairs)
    ]


def tokenize_whole(tokenizer: Any, pairs: Sequence[Preference]) -> list[tuple[list[int], list[int]]]:
    """Ids of the chosen and of the rejected texts with their prompts, as a reward model reads them.

    A text and its prompt are tokenised together. What the tokenizer puts before and behind ordinary text is there once,
    and EOS at the end where it puts nothing. Messages are as in `tokenize_pairs`.

    Args:
      tokenizer: A transformers tokenizer.
      pairs: The records.
    """
    flat: list[list[int] | str] = []
    for pair in pairs:
        prompt = pair.prompt or type(pair.chosen)()
        for completion in (pair.chosen, pair.rejected):
            whole: Any = prompt + completion  # type: ignore[operator]
            flat.append(whole if isinstance(whole, str) else _dialogue(tokenizer, whole, pair))
    texts = [text for text in flat if isinstance(text, str)]
    prefix, suffix = special_tokens_around(tokenizer) if texts else ([], [])
    if not suffix and tokenizer.eos_token_id is not None:
        suffix = [tokenizer.eos_token_id]
    rows = (begun(prefix, ids) for ids in tokenize(tokenizer, texts))
    ended = (ids if ids[len(ids) - len(suffix) :] == suffix else ids + suffix for ids in rows)
    ids = [next(ended) if isinstance(one, str) else one for one in flat]
    return list(zip(ids[0::2], ids[1::2], strict=True))


def _text_pairs(tokenizer: Any, pairs: Sequence[Preference], is_seq2seq: bool) -> list[TokenPair]:
    if not pairs:
        return []
    prefix, suffix = special_tokens_around(tokenizer)
    if is_seq2seq:
        missing = next((pair for pair in pairs if pair.prompt is None), None)
        if missing is not None:
            raise ValueError("the column 'prompt' is missing: a seq2seq model's encoder reads it.")
        contexts, better, worse = (
            tokenize(tokenizer, [getattr(pair, name) for pair in pairs])
            for name in ("prompt", "chosen", "rejected")
        )
        return [
            TokenPair([*prefix, *prompt, *suffix], _ended(good, tokenizer), _ended(bad, tokenizer))
            for prompt, good, bad in zip(contexts, better, worse, strict=True)
        ]
    # One call for all texts: fast tokenizers work on many at once.
    splits = tokenize_split(
        tokenizer,
        [str(pair.prompt or "") for pair in pairs for _ in range(2)],
        [str(text) for pair in pairs for text in (pair.chosen, pair.rejected)],
    )
    start = [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    found = []
    for pair, good, bad in zip(pairs, splits[0::2], splits[1::2], strict=True):
        prompt = good.prompt
        chosen, rejected = _ended(good.completion, tokenizer), _ended(bad.completion, tokenizer)
        if pair.prompt is None:
            shared = min(common_beginning(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        merged = good.spanned or bad.spanned
        found.append(TokenPair(begun(prefix, prompt) or start, chosen, rejected, merged=merged))
    return found


def _dialogue_pair(tokenizer: Any, pair: Preference, is_seq2seq: bool) -> TokenPair:
    if is_seq2seq:
        raise ValueError(
            "messages need a causal model: give texts, with the column 'prompt', to a seq2seq model."
        )
    if not pair.chosen or not pair.rejected:
        return TokenPair([], [], [])
    if not pair.prompt:
        raise ValueError(
            "`chosen` and `rejected` begin with no message in common that an assistant could answer, and there is no "
            "column 'prompt'."
        )
    prompt: list[int] = []
    found: list[tuple[list[int], list[bool] | None]] = []
    for completion in (pair.chosen, pair.rejected):
        # Only tools need a mask, which refuses more templates: those that render earlier turns differently.
        with_mask = any(message["role"] != ASSISTANT for message in completion)  # type: ignore[index]
        ids, length, mask = render_answer(
            tokenizer,
            pair.prompt,  # type: ignore[arg-type]
            completion,  # type: ignore[arg-type]
            tools=pair.tools,
            template_kwargs=pair.template_kwargs,
            with_mask=with_mask,
        )
        end = end_of_turn(ids, length, tokenizer)
        prompt = ids[:length]
        found.append((ids[length:end], None if mask is None else mask[length:end]))
    (chosen, chosen_learned), (rejected, rejected_learned) = found
    return TokenPair(prompt, chosen, rejected, chosen_learned, rejected_learned)


def _dialogue(tokenizer: Any, messages: list[dict[str, Any]], pair: Preference) -> list[int]:
    ids, _ = render_dialogue(
        tokenizer, messages, tools=pair.tools, template_kwargs=pair.template_kwargs, with_mask=False
    )
    return ids[: end_of_turn(ids, 0, tokenizer)]


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Appends EOS, unless the ids end with one."""
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]
