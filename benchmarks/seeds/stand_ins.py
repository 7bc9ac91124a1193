# SPDX-License-Identifier: Apache-2.0
"""Tiny models, tokenizers and data that stand in for those of the hub, made on the spot by transformers itself.

Models lie in a hub cache, so that a script finds them by the names that it uses; data lie in plain folders, whose paths
replace their names in the copied files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(
    texts: Iterable[str], size: int, special: Sequence[str], *, ends_with: str | None = None
) -> Tokenizer:
    """A byte-level BPE of a text; `ends_with` is written behind every text (T5, BART).

    Args:
      texts: What the merges are learned from.
      size: Ids, special tokens and all bytes among them.
      special: Special tokens, which get the first ids.
      ends_with: One of them, or None.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet)
    )
    if ends_with is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {ends_with}", special_tokens=[(ends_with, made.token_to_id(ends_with))]
        )
    return made


def usual_tokenizers(texts: Sequence[str], size: int) -> tuple[Any, Any, Any]:
    """Three tokenizers as the seeds' models have them: GPT-2's, whose one special token begins and ends texts; one with
    a padding token; T5's, which writes its end behind every text."""
    from transformers import PreTrainedTokenizerFast

    end, usual = "<|endoftext|>", {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return (
        PreTrainedTokenizerFast(
            tokenizer_object=byte_level(texts, size, [end]), bos_token=end, eos_token=end, unk_token=end
        ),
        PreTrainedTokenizerFast(
            tokenizer_object=byte_level(texts, size, ["<pad>", "</s>", "<unk>", "<s>"]),
            bos_token="<s>",
            **usual,
        ),
        PreTrainedTokenizerFast(
            tokenizer_object=byte_level(texts, size, ["<pad>", "</s>", "<unk>"], ends_with="</s>"), **usual
        ),
    )


def in_cache(cache: Path, name: str, save: Callable[[Path], Any]) -> None:
    """Puts what `save(folder)` writes into a hub cache under a repository's name."""
    home = cache / f"models--{name.replace('/', '--')}"
    revision = "0" * 40
    folder = home / "snapshots" / revision
    folder.mkdir(parents=True, exist_ok=True)
    save(folder)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(revision)


def rows_to(folder: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """A folder that `datasets.load_dataset` reads: one JSON-lines file a split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configs_to(folder: Path, configs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Path:
    """The same with named configurations: config → split → rows."""
    head = ["---", "configs:"]
    for name, splits in configs.items():
        rows_to(folder / name, splits)
        head += [f"- config_name: {name}", "  data_files:"]
        for split in splits:
            head += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))
    return folder
