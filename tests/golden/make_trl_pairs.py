# SPDX-License-Identifier: Apache-2.0
"""Writes trl_pairs.json: which ids trl 1.16.0's DPO trainer makes of preference rows, whole and cut.

    python tests/golden/make_trl_pairs.py TOKENIZER

Runs where trl 1.16.0, torch and datasets are. TOKENIZER is the folder in which `golden_tokenizer()` of
tests/data/preferences/test_preference_set.py was saved by `save_pretrained`. Rows are such that no token spans a
seam: there the two differ on purpose. A case is [whole ids, ids of the completion] of both halves of each row that
trl keeps.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl import DPOConfig, DPOTrainer

CASES = (
    ("texts", "keep_start", 256),
    ("texts", "keep_start", 12),
    ("texts", "keep_end", 12),
    ("messages", "keep_start", 256),
)


def make_rows() -> dict[str, list[dict]]:
    """The same rows as texts and as messages."""
    draw = random.Random(0)

    def text() -> str:
        return "".join(draw.choice("bcdxyz ") for _ in range(draw.randint(1, 12))).strip() or "q"

    texts = [{"prompt": text(), "chosen": f" {text()}1", "rejected": f" {text()}2"} for _ in range(16)]
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    messages = [{name: [{"role": roles[name], "content": row[name]}] for name in row} for row in texts]
    return {"texts": texts, "messages": messages}


def main(folder: str) -> None:
    """Runs trl's preparation and collator on every case."""
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), make_rows()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=97, n_positions=256)
        GPT2LMHeadModel(config).save_pretrained(f"{scratch}/model")
        for kind, mode, max_length in CASES:
            options = {
                "max_length": max_length,
                "truncation_mode": mode,
                "report_to": [],
                "use_cpu": True,
                "bf16": False,
            }
            trainer = DPOTrainer(
                model=f"{scratch}/model",
                args=DPOConfig(output_dir=f"{scratch}/out", **options),
                processing_class=tokenizer,
                train_dataset=Dataset.from_list(rows[kind]),
            )
            batches = [trainer.data_collator([example]) for example in trainer.train_dataset]
            found[f"{kind} {mode} {max_length}"] = [
                [
                    [ids[real.bool()].tolist(), ids[learned.bool()].tolist()]
                    for ids, real, learned in zip(
                        batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True
                    )
                ]
                for batch in batches
            ]
    path = Path(__file__).parent / "trl_pairs.json"
    path.write_text(json.dumps({"rows": rows, "cases": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
