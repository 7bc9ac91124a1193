# SPDX-License-Identifier: Apache-2.0
"""Worker: a PPO iteration on random walks, trlX's recipe, with transformers and torch and no trainer around them.

    python benchmarks/peers/ppo_torch.py [--iterations 5]

What cannot be left out of an iteration, so that a trainer built of the same parts takes longer: `generate` with its
cache, one pass of policy and value head, one of the reference, and 8 steps (4 epochs in batches of 100 and 28) with
clipped objectives, gradients clipped, AdamW. No text, no rewards, no logs. Answers by `line_protocol.py`.
"""

from __future__ import annotations

import argparse
import copy
import os

import torch
from line_protocol import answer
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

NUM_LETTERS, WIDTH, ROLLOUTS, BATCH, EPOCHS, RESPONSE = 23, 144, 128, 100, 4, 9
CLIP, VALUE_COEF, LAM = 0.2, 1.2, 0.95


class Policy(nn.Module):
    """The language model and trlX's value head."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model
        self.value = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 1))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values of the sampled tokens."""
        out = self.model(tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
        values = self.value(out.hidden_states[-1])[:, :-1, 0]
        return logprobs(out.logits, tokens), values


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of every token but the first."""
    return torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]


def advantages(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Whitened generalised advantages with gamma 1, and returns."""
    found, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(len(rewards))
        last = rewards[:, t] + following - values[:, t] + LAM * last
        found[:, t] = last
    return (found - found.mean()) / found.std(), found + values


def loss(policy: Policy, rows: tuple[Tensor, ...]) -> Tensor:
    """PPO's, of policy and value."""
    tokens, old, old_values, targets, returns = rows
    now, values = policy(tokens)
    ratio = torch.exp(now - old)
    surrogate = torch.maximum(-targets * ratio, -targets * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    clipped = torch.clamp(values, old_values - CLIP, old_values + CLIP)
    return (
        surrogate + 0.5 * VALUE_COEF * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
    )


def main() -> None:
    """Builds the model, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=5, help="iterations of a run")
    flags = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    shape = dict(n_layer=6, n_embd=WIDTH, n_head=12, vocab_size=NUM_LETTERS, n_positions=1024)
    silent = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = GPT2Config(**shape, **silent, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    policy = Policy(GPT2LMHeadModel(config))
    reference = copy.deepcopy(policy.model).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=1e-6)

    def iterate() -> None:
        with torch.no_grad():
            prompts = torch.randint(2, NUM_LETTERS, (ROLLOUTS, 1))
            tokens = policy.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                use_cache=True,
                max_new_tokens=RESPONSE,
            )
            old, values = policy(tokens)
            ref = logprobs(reference(tokens, attention_mask=torch.ones_like(tokens)).logits, tokens)
            rewards = -0.0 * (old - ref)
            rewards[:, -1] += torch.rand(ROLLOUTS)
            rows = tokens, old, values, *advantages(rewards, values)
        for _ in range(EPOCHS):
            for ids in torch.randperm(ROLLOUTS).split(BATCH):
                optimizer.zero_grad()
                loss(policy, tuple(x[ids] for x in rows)).backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()

    def run() -> None:
        for _ in range(flags.iterations):
            iterate()

    run()
    answer(run)


if __name__ == "__main__":
    main()
