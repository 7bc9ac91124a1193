# SPDX-License-Identifier: Apache-2.0
"""A CLIP tokenizer's folder of a few hundred tokens: all bytes, all bytes that end a word, and a few merges."""

from __future__ import annotations

import json
from pathlib import Path

START, END = "<|startoftext|>", "<|endoftext|>"
MERGES = (
    "r e",
    "re d</w>",
    "c a",
    "ca t</w>",
    "d o",
    "do g</w>",
    "a n",
    "b l",
    "bl u",
    "blu e</w>",
    "t h",
    "th e</w>",
)


def byte_symbols() -> list[str]:
    """What byte-level BPE writes for each byte: the printable ones as they are, the others from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def save_toy_tokenizer(folder: Path, *, pad_token: str = END, length: int = 77) -> Path:
    """Writes the folder as old transformers did: vocab.json, merges.txt and the two configs."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols = byte_symbols()
    # "!" comes first, as in the true vocabulary: Stable Diffusion 2 pads with id 0.
    symbols.remove("!")
    symbols.insert(0, "!")
    words = [
        *symbols,
        *(f"{symbol}</w>" for symbol in symbols),
        *(merge.replace(" ", "") for merge in MERGES),
    ]
    vocabulary = {word: number for number, word in enumerate([*words, START, END])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad_token}
    (folder / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    config = {
        **special,
        "model_max_length": length,
        "tokenizer_class": "CLIPTokenizer",
        "do_lower_case": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
