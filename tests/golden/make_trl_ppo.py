# SPDX-License-Identifier: Apache-2.0
"""Writes down what the real TRL computes in a PPO step on random ragged batches, padded on either side.

With the release whose interface jrl takes over, and with the last one of its line:

    python3.11 -m venv trl-classic
    trl-classic/bin/pip install trl==0.7.1 transformers==4.33.3 torch==2.13.0 numpy==1.26.4
    trl-classic/bin/python tests/golden/make_trl_ppo.py tests/golden/trl_ppo_071.npz

    python3.11 -m venv trl-last
    trl-last/bin/pip install trl==0.7.11 transformers==4.37.2 torch==2.13.0 numpy==1.26.4
    trl-last/bin/python tests/golden/make_trl_ppo.py tests/golden/trl_ppo_0711.npz

The model is a table: logits and values of a position depend on its token alone, so both sides know them.
`tests/trl/test_ppo_parity.py` reads the files.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl import PPOConfig, PPOTrainer
from trl.core import logprobs_from_logits, stack_dicts
from trl.trainer.utils import RunningMoments

VOCAB, PAD, ROWS = 13, 12, 5
KL_COEF, GAMMA, LAM = 0.3, 0.9, 0.85
LATER = tuple(map(int, trl.__version__.split(".")[:3])) >= (0, 7, 11)


def random_batch(seed: int = 0) -> dict[str, Any]:
    """Ragged queries and responses, response masks with holes, scores, and the tables of the models."""
    rng = np.random.default_rng(seed)
    queries = [rng.integers(0, VOCAB - 1, size) for size in rng.integers(1, 6, ROWS)]
    responses = [rng.integers(0, VOCAB - 1, size) for size in rng.integers(2, 7, ROWS)]
    masks = [np.where(rng.random(len(row)) < 0.6, 1, 0) for row in responses]
    for mask in masks:
        mask[0] = 1
    tables = {name: rng.normal(size=(VOCAB, VOCAB)).astype(np.float32) for name in ("old", "ref", "move")}
    return {
        "queries": queries,
        "responses": responses,
        "response_masks": masks,
        "scores": rng.normal(size=ROWS).astype(np.float32),
        "old_table": tables["old"],
        "new_table": tables["old"] + 0.3 * tables["move"],
        "ref_table": tables["ref"],
        "old_values": rng.normal(size=VOCAB).astype(np.float32),
        "new_values": rng.normal(size=VOCAB).astype(np.float32),
    }


def padded(batch: dict[str, Any], side: str) -> dict[str, torch.Tensor]:
    """Queries and responses in rows of one width."""
    rows = [np.concatenate(pair) for pair in zip(batch["queries"], batch["responses"], strict=True)]
    width = max(map(len, rows))
    ids, mask = np.full((ROWS, width), PAD), np.zeros((ROWS, width), np.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        ids[index, place], mask[index, place] = row, 1
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def trainer(**options: Any) -> Any:
    """TRL's trainer without a model: its methods read the configuration and the KL coefficient alone."""
    found = PPOTrainer.__new__(PPOTrainer)
    found.config = PPOConfig(
        batch_size=ROWS, mini_batch_size=ROWS, gamma=GAMMA, lam=LAM, log_with=None, **options
    )
    found.kl_ctl = SimpleNamespace(value=KL_COEF)
    found.is_encoder_decoder = False
    found.tokenizer = SimpleNamespace(padding_side="right")
    found.current_device = "cpu"
    return found


class Table(torch.nn.Module):
    """A model whose answer depends on the present token alone."""

    def __init__(self, table: np.ndarray, values: np.ndarray) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table))
        self.values = torch.nn.Parameter(torch.tensor(values))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None, torch.Tensor]:
        return self.table[input_ids], None, self.values[input_ids]


def forward(batch: dict[str, Any], side: str, masked: bool) -> dict[str, np.ndarray]:
    """`batched_forward_pass`: log-probabilities, values and masks."""
    ppo, inputs = trainer(), padded(batch, side)
    ppo.tokenizer.padding_side = side
    queries, responses = ([torch.tensor(row) for row in batch[name]] for name in ("queries", "responses"))
    masks = [torch.tensor(mask) for mask in batch["response_masks"]] if masked else None
    model = Table(batch["old_table"], batch["old_values"])
    with torch.no_grad():
        logprobs, _, values, mask = ppo.batched_forward_pass(
            model, queries, responses, inputs, response_masks=masks
        )
    return {"logprobs": logprobs.numpy(), "values": values.numpy(), "masks": mask.numpy()}


def whole_step(batch: dict[str, Any], side: str, **options: Any) -> dict[str, np.ndarray]:
    """Rewards, advantages, loss with its gradients, and statistics of one minibatch with response holes left out."""
    ppo, inputs = trainer(**options), padded(batch, side)
    ids = inputs["input_ids"]
    mask = torch.tensor(forward(batch, side, masked=False)["masks"])
    tables = {name: torch.tensor(batch[f"{name}_table"]) for name in ("old", "ref", "new")}
    full = ppo.config.kl_penalty == "full"
    logprobs, ref = (
        logprobs_from_logits(tables[name][ids[:, :-1]], ids[:, 1:], gather=not full)
        for name in ("old", "ref")
    )
    taken = logprobs_from_logits(tables["old"][ids[:, :-1]], ids[:, 1:])
    taken_ref = logprobs_from_logits(tables["ref"][ids[:, :-1]], ids[:, 1:])
    rewards, non_score, *kls = ppo.compute_rewards(torch.tensor(batch["scores"]), logprobs, ref, mask)
    old_values = torch.tensor(batch["old_values"])[ids[:, :-1]]
    values, advantages, returns = ppo.compute_advantages(old_values, rewards, mask)
    logits = tables["new"][ids[:, :-1]].clone().requires_grad_(True)
    vpreds = torch.tensor(batch["new_values"])[ids[:, :-1]].clone().requires_grad_(True)
    now = logprobs_from_logits(logits, ids[:, 1:])
    policy, value, stats = ppo.loss(taken, values, logits, vpreds, now, mask, advantages, returns)
    (policy + value).backward()
    found = {
        "rewards": rewards,
        "non_score": non_score,
        "values": values,
        "advantages": advantages,
        "returns": returns,
        "policy_loss": policy,
        "value_loss": value,
        "logits_grad": logits.grad,
        "vpreds_grad": vpreds.grad,
    } | {f"stats/{name}": number for name, number in stats.items()}
    train = stack_dicts([stats])
    for name in ("policy/advantages", "policy/ratio"):
        train[name] = torch.flatten(train[name]).unsqueeze(0)
    data = {"kls": kls[0]} if kls else {}
    recorded = ppo.record_step_stats(
        KL_COEF,
        scores=torch.tensor(batch["scores"]),
        logprobs=taken,
        ref_logprobs=taken_ref,
        non_score_reward=non_score,
        masks=mask,
        queries=batch["queries"],
        responses=batch["responses"],
        train_stats=train,
        **data,
    )
    found |= {f"recorded/{name}": number for name, number in recorded.items()}
    return {name: np.asarray(torch.as_tensor(value).detach()) for name, value in found.items()}


def scaled_scores(norm: bool) -> dict[str, np.ndarray]:
    """Three batches of scores through the running moments, and clipped, as the beginning of `step` does it."""
    rng, running, found = np.random.default_rng(3), RunningMoments(SimpleNamespace(use_distributed=False)), {}
    for index in range(3):
        given = torch.tensor((rng.normal(size=ROWS) * 3 + 1).astype(np.float32))
        running.update(given)
        std = running.std + (torch.finfo(torch.float32).eps if LATER else 0.0)
        scores = (given - running.mean) / std if norm else given / std
        found |= {f"given{index}": given.numpy(), f"out{index}": torch.clip(scores, -1.2, 1.2).numpy()}
    return found


def main(path: str) -> None:
    """Writes all cases into one file."""
    batch, found = random_batch(), {}
    for side in ("right", "left"):
        cases = {f"forward_{side}": forward(batch, side, masked=False)}
        for kind in ("kl", "abs", "mse", "full"):
            cases[f"step_{kind}_{side}"] = whole_step(batch, side, kl_penalty=kind)
        cases[f"step_guarded_{side}"] = whole_step(batch, side, ratio_threshold=0.5)
        if LATER:
            cases[f"step_whitened_{side}"] = whole_step(batch, side, whiten_rewards=True)
        found |= {f"{case}/{name}": value for case, values in cases.items() for name, value in values.items()}
    cases = {"forward_masked_right": forward(batch, "right", masked=True)}
    cases |= {"scores_scaled": scaled_scores(norm=False), "scores_normed": scaled_scores(norm=True)}
    found |= {f"{case}/{name}": value for case, values in cases.items() for name, value in values.items()}
    ragged = ("queries", "responses", "response_masks")
    for name, value in batch.items():
        if name in ragged:
            found[f"batch/{name}/lengths"] = np.asarray([len(row) for row in value])
            value = np.concatenate(value)
        found[f"batch/{name}"] = value
    np.savez_compressed(path, **{name: np.asarray(value) for name, value in found.items()})


if __name__ == "__main__":
    main(sys.argv[1])
