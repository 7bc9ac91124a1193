# SPDX-License-Identifier: Apache-2.0
"""Worker: optimizer steps of GPT-2 124M by the newest trl: `SFTTrainer`, `DPOTrainer` or `RewardTrainer`.

    .peers/trlnew/bin/python benchmarks/peers/steps_trl.py sft|dpo|reward

Speaks as `line_protocol.py` does, after a first step. A step is forward and backward of 4 microbatches of 8
rows (pairs of DPO and of the reward model), clipping, AdamW. Every layer is trained, in float32, without dropout, on as
many threads as there are cores; rows have 16 + 48 tokens and no padding. DPO's reference has been computed before.
Checkpoints, logs and evaluations are off.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from line_protocol import is_asked, say_ready, say_seconds
from sizes import MINIBATCH, PROMPT, RESPONSE, ROWS, VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


class Stopwatch(TrainerCallback):
    """Takes two steps when it is told to, and says how long the second one took."""

    def __init__(self) -> None:
        self._done = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits for a line before every second step; the first one is the warm-up."""
        if self._done % 2 == 1 and not is_asked():
            os._exit(0)
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints the seconds, or that the warm-up is done."""
        if self._done == 0:
            say_ready()
        elif self._done % 2 == 0:
            say_seconds(time.perf_counter() - self._begin)
        self._done += 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word an id; the last one ends a text and fills rows up."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    last = f"w{VOCABULARY - 1}"
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=last))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=last, pad_token=last)


def make_data(what: str) -> Dataset:
    """Full rows, nothing to pad: random ids where the trainer takes ids, else words to the same number of ids."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY - 1) for _ in range(count)]

    def words(count: int) -> str:
        return "".join(f" w{number}" for number in ids(count))

    def row() -> dict[str, Any]:
        if what == "sft":
            return {
                "input_ids": ids(PROMPT + RESPONSE),
                "completion_mask": [0] * PROMPT + [1] * RESPONSE,
            }
        if what == "dpo":
            # `DPOTrainer` adds the EOS.
            return {
                "prompt": words(PROMPT),
                "chosen": words(RESPONSE - 1),
                "rejected": words(RESPONSE - 1),
            }
        return {"chosen_ids": ids(PROMPT + RESPONSE), "rejected_ids": ids(PROMPT + RESPONSE)}

    return Dataset.from_list([row() for _ in range(2 * ROWS)])


def main() -> None:
    """Builds the trainer, then steps on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("sft", "dpo", "reward"))
    what = parser.parse_args().what
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    special = dict(
        bos_token_id=VOCABULARY - 1, eos_token_id=VOCABULARY - 1, pad_token_id=VOCABULARY - 1, num_labels=1
    )
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **special)
    model = (GPT2ForSequenceClassification if what == "reward" else GPT2LMHeadModel)(config)
    trainer_class, config_class = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
        "reward": (RewardTrainer, RewardConfig),
    }[what]
    more = {"sft": {"completion_only_loss": True}, "dpo": {"precompute_ref_log_probs": True}}.get(what, {})
    with tempfile.TemporaryDirectory() as folder:
        arguments = config_class(
            output_dir=folder,
            per_device_train_batch_size=MINIBATCH,
            gradient_accumulation_steps=ROWS // MINIBATCH,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_steps=10**6,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            max_length=PROMPT + RESPONSE,
            disable_tqdm=True,
            dataloader_drop_last=True,
            **more,
        )
        trainer_class(
            model,
            args=arguments,
            train_dataset=make_data(what),
            processing_class=make_tokenizer(),
            callbacks=[Stopwatch()],
        ).train()


if __name__ == "__main__":
    main()
