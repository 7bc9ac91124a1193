# SPDX-License-Identifier: Apache-2.0
"""Data of supervised fine-tuning as a set of rows: texts, dialogues, records, a stream; packed or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jrl.data.demonstrations.demonstration_records import check_demonstration
from jrl.data.demonstrations.demonstration_set import DemonstrationFormat, DemonstrationSet
from jrl.data.demonstrations.dialogue import DialogueSet
from jrl.data.demonstrations.packing import PackedRecords, PackedSet, collate_packed
from jrl.data.demonstrations.pairs import PairSet
from jrl.data.demonstrations.rows import RowSet
from jrl.data.episodes import (
    EpisodeSet,
    best_episodes,
    check_causal,
    check_unset,
    has_episodes,
    make_windows,
    read_episodes,
)
from jrl.data.sources.records import RecordStream
from jrl.data.sources.streams import StreamSet
from jrl.learners.sft import SFTConfig

UNLIMITED = 1 << 30
"""Most tokens of a sample that packing will divide."""
SHUFFLE_BUFFER = 1000
"""Records of a stream among which the next one is drawn."""
SFTSamples = RowSet | StreamSet[Any, Any]


def make_samples(
    samples: Any,
    tokenizer: Any,
    method: SFTConfig,
    *,
    packing: bool,
    max_length: int,
    seed: int,
    decoder_start_token_id: int | None,
    text_field: str = "text",
    formatting_fn: Callable[[Mapping[str, Any]], str] | None = None,
    append_eos: bool = True,
    add_special_tokens: bool = True,
    num_proc: int | None = None,
) -> SFTSamples:
    """Samples as rows and batches.

    Recorded episodes are read as `jrl.data.episodes` says.

    Texts and lists of texts are read as `DialogueSet` and, of seq2seq models, `PairSet` say; mappings as
    `DemonstrationFormat` says, as are all samples with a `formatting_fn`.

    Args:
      samples: A list, or a `RecordStream` of mappings or texts.
      tokenizer: With an EOS token.
      method: The algorithm's section of the configuration.
      packing: Whether rows are packed.
      max_length: Most tokens of a row.
      seed: Of the order.
      decoder_start_token_id: Of a seq2seq model.
      text_field: As in `DemonstrationFormat`.
      formatting_fn: As in `DemonstrationFormat`.
      append_eos: As in `DemonstrationFormat`.
      add_special_tokens: As in `DemonstrationFormat` and `DialogueSet`.
      num_proc: Worker processes that tokenise.
    Raises:
      ValueError: If the samples are of several kinds, or not of the kind that the method or the model needs.
    """
    if packing and decoder_start_token_id is not None:
        raise ValueError(
            "`method.packing` must be False for a seq2seq model: its encoder reads one prompt a row."
        )
    # What is divided in packing is not cut before.
    divided = packing and method.packing_strategy != "bfd"
    row_format = DemonstrationFormat(
        tokenizer=tokenizer,
        max_length=None if divided else max_length,
        text_field=text_field,
        formatting_fn=formatting_fn,
        completion_only_loss=method.completion_only_loss,
        assistant_only_loss=method.assistant_only_loss,
        append_eos=append_eos,
        add_special_tokens=add_special_tokens,
    )
    limits: dict[str, int] = {"max_length": UNLIMITED if divided else max_length, "seed": seed}
    packed = partial(
        _packed,
        strategy=method.packing_strategy,
        capacity=max_length,
        seed=seed,
        pad_id=tokenizer.pad_token_id,
    )
    if formatting_fn is None and has_episodes(samples):
        check_causal(decoder_start_token_id)
        _check_old_samples(method)
        episodes = _episodes(samples, tokenizer, method, add_special_tokens=add_special_tokens, **limits)
        return packed(episodes) if packing else episodes
    check_unset(
        best_share=method.best_share == 1.0,
        context_turns=method.context_turns is None,
        keep_prompt=not method.keep_prompt,
    )
    if isinstance(samples, RecordStream):
        if decoder_start_token_id is not None:
            raise ValueError("`samples` must be a list for a seq2seq model, got a stream.")
        return _streamed(samples, row_format, method, packing=packing, capacity=max_length, seed=seed)
    if formatting_fn is None and not _has_mappings(samples):
        _check_old_samples(method)
        if decoder_start_token_id is not None:
            return PairSet(samples, tokenizer, decoder_start_token_id=decoder_start_token_id, **limits)
        found: RowSet = DialogueSet(samples, tokenizer, add_special_tokens=add_special_tokens, **limits)
    elif decoder_start_token_id is not None:
        pairs = [_pair(record, row, text_field) for row, record in enumerate(samples)]
        return PairSet(pairs, tokenizer, decoder_start_token_id=decoder_start_token_id, **limits)
    else:
        found = DemonstrationSet(samples, row_format, seed=seed, num_proc=num_proc)
    return packed(found) if packing else found


def _episodes(
    records: Sequence[Any],
    tokenizer: Any,
    method: SFTConfig,
    *,
    max_length: int,
    seed: int,
    add_special_tokens: bool,
) -> EpisodeSet:
    """Rows of the best of the episodes."""
    windows = make_windows(
        tokenizer,
        max_length=max_length,
        context_turns=method.context_turns,
        keep_prompt=method.keep_prompt,
        add_special_tokens=add_special_tokens,
    )
    episodes = best_episodes(read_episodes(records, tokenizer), method.best_share)
    return EpisodeSet(episodes, windows, pad_token_id=tokenizer.pad_token_id, seed=seed)


def prompts_of(samples: Any, count: int) -> list[str]:
    """The prompts of the first samples of a seq2seq model: what evaluation samples on by default."""
    return [sample["prompt"] if isinstance(sample, Mapping) else sample[0] for sample in samples[:count]]


def _packed(found: RowSet, *, strategy: str, capacity: int, seed: int, pad_id: int) -> PackedSet:
    return PackedSet(found, capacity=capacity, strategy=strategy, pad_token_id=pad_id, seed=seed)


def _streamed(
    stream: RecordStream,
    row_format: DemonstrationFormat,
    method: SFTConfig,
    *,
    packing: bool,
    capacity: int,
    seed: int,
) -> StreamSet[Any, Any]:
    """Packed so many records at a time, where rows are packed."""
    if not packing:
        return StreamSet(
            stream, row_format.encode, row_format.collate, seed=seed, shuffle_buffer=SHUFFLE_BUFFER
        )
    rows = PackedRecords(stream, row_format.encode, capacity=capacity, strategy=method.packing_strategy)
    collate = partial(collate_packed, pad_token_id=row_format.tokenizer.pad_token_id, capacity=capacity)
    identity = f"{stream.fingerprint} {method.packing_strategy} {capacity}"
    return StreamSet(
        RecordStream(rows, identity=identity),
        lambda row, number: row,
        collate,
        seed=seed,
        shuffle_buffer=SHUFFLE_BUFFER,
    )


def _has_mappings(samples: Any) -> bool:
    """True where the samples are records; a mixture is refused."""
    if isinstance(samples, str | Mapping) or not isinstance(samples, Sequence):
        raise ValueError(f"`samples` must be a list of samples, got a {type(samples).__name__}.")
    kinds = [isinstance(sample, Mapping) for sample in samples]
    if any(kinds) and not all(kinds):
        row = kinds.index(not kinds[0])
        raise ValueError(
            f"`samples` must be all mappings, or all texts and lists of texts: row 0 is a {type(samples[0]).__name__}, "
            f"row {row} a {type(samples[row]).__name__}."
        )
    return any(kinds)


def _check_old_samples(method: SFTConfig) -> None:
    """Texts learn all, lists their outputs: nothing is left to choose."""
    if method.completion_only_loss is not None or method.assistant_only_loss:
        raise ValueError(
            "`method.completion_only_loss` and `method.assistant_only_loss` need samples that are mappings with the "
            "columns 'prompt' and 'completion', or 'messages'; of lists of texts the outputs are always learned alone."
        )


def _pair(record: Any, row: int, text_field: str) -> list[str]:
    found = check_demonstration(record, row, text_field=text_field)
    if not isinstance(found.prompt, str) or not isinstance(found.text, str):
        raise ValueError(
            f"`samples`: row {row} must have the texts 'prompt' and 'completion' for a seq2seq model, it has "
            f"{sorted(record)}."
        )
    return [found.prompt, found.text]
