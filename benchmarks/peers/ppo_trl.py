# SPDX-License-Identifier: Apache-2.0
"""Worker: one PPO iteration of GPT-2 124M by trl 0.7.4's `PPOTrainer`: sampling and `step`.

    .peers/trl074/bin/python benchmarks/peers/ppo_trl.py

Answers by `line_protocol.py`, after a first iteration. Every layer is trained, in float32, without dropout, against a
full reference on as many threads as there are cores.

How its sizes map: `batch_size` = 32 are the rollouts of an iteration, `mini_batch_size` = 8 with
`gradient_accumulation_steps` = 1 the rows of an optimizer step, so 4 epochs are 16 steps; in jrl `num_rollouts` = 32
and `batch_size` = `minibatch_size` = 8.
"""

from __future__ import annotations

import os

import torch
from line_protocol import answer
from sizes import EPOCHS, MINIBATCH, PROMPT, RESPONSE, ROWS, VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """What `PPOTrainer` asks of a tokenizer here: how rows are padded. It reads no text."""
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<pad>", pad_token="<pad>")


def main() -> None:
    """Builds the trainer, then measures on demand."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    shape = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLMWithValueHead(GPT2LMHeadModel(shape), summary_dropout_prob=0.0)
    model.is_peft_model = False
    trainer = PPOTrainer(
        PPOConfig(
            batch_size=ROWS,
            mini_batch_size=MINIBATCH,
            gradient_accumulation_steps=1,
            ppo_epochs=EPOCHS,
            learning_rate=1e-6,
            max_grad_norm=1.0,
        ),
        model,
        create_reference_model(model),
        make_tokenizer(),
    )

    def iterate() -> None:
        queries = list(torch.randint(2, VOCABULARY, (ROWS, PROMPT)))
        responses = trainer.generate(
            queries,
            batch_size=ROWS,
            return_prompt=False,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            # No row ends early: all have the same work.
            min_new_tokens=RESPONSE,
            max_new_tokens=RESPONSE,
            pad_token_id=0,
        )
        scores = [torch.tensor(float(response.float().mean() / VOCABULARY)) for response in responses]
        trainer.step(queries, responses, scores)
        assert {len(response) for response in responses} == {RESPONSE}

    iterate()
    answer(iterate)


if __name__ == "__main__":
    main()
