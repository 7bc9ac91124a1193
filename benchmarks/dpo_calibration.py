# SPDX-License-Identifier: Apache-2.0
"""Does DPO find in preferences what a reward model finds? The same pairs as `reward_calibration.py`, one core.

    python benchmarks/dpo_calibration.py [--out benchmarks/dpo_calibration.json]

DPO's policy is its own reward model: β·log π/π_ref of a completion, up to a number of the prompt alone. It is held
against the same known score, by the same measures. Policy and reference start from one set of random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reward_calibration import draw_pairs, hidden_weights, make_gpt2, make_tokenizer, measure, one_pass

import jrl
from jrl.data.batching import pad_right
from jrl.models.checkpoint import save_checkpoint
from jrl.models.model import make_model

BETA = 0.5
PROMPT = "a"
"""The same for all pairs: a policy needs a token to go on from."""
ROWS = 500


def completion_logprobs(folder: Path, tokenizer: Any, completions: list[str]) -> np.ndarray:
    """Log-probability of each completion and its end under a checkpoint, (N,)."""
    model, params = jrl.load_model(folder)
    rows = [
        [*row, tokenizer.eos_token_id]
        for row in tokenizer([PROMPT + text for text in completions])["input_ids"]
    ]
    width = max(map(len, rows))

    @jax.jit
    def score(tokens: jax.Array, mask: jax.Array) -> jax.Array:
        logits = model.logits(params, tokens, mask)[:, :-1]
        logprobs = jrl.ops.logprobs_from_logits(logits, tokens[:, 1:])
        return jnp.sum(jnp.where(mask[:, 1:], logprobs, 0.0), axis=1)

    found = []
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        full = part + [part[-1]] * (ROWS - len(part))
        tokens, mask = pad_right(full, pad_token_id=tokenizer.pad_token_id, width=width)
        found.append(np.asarray(score(jnp.asarray(tokens), jnp.asarray(mask)))[: len(part)])
    return np.concatenate(found)


def train_and_measure(
    folder: Path, *, num_pairs: int, held_out: int, batch_size: int, width: int, lr: float, seed: int
) -> dict[str, Any]:
    """One pass over fresh pairs, and what `measure` finds of the implicit rewards on others."""
    weights = hidden_weights()
    pairs, _ = draw_pairs(seed + 1, num_pairs, weights)
    held, true_log_odds = draw_pairs(seed + 2, held_out, weights)
    tokenizer, start = make_tokenizer(), folder / "start"
    model = make_model(make_gpt2(width))
    save_checkpoint(start, model, model.init(jax.random.key(seed)), tokenizer=tokenizer)
    config = one_pass(
        jrl.default_dpo_config().evolve(method={"beta": BETA, "gen_kwargs": {"max_new_tokens": 12}}),
        folder,
        model=str(start),
        tokenizer=start,
        steps=len(pairs) // batch_size,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
    )
    began = time.perf_counter()
    trainer = jrl.train(samples=[pair | {"prompt": PROMPT} for pair in pairs], config=config)
    seconds = time.perf_counter() - began
    policy = trainer.save_pretrained(folder / "policy")
    rewards = {
        side: BETA
        * (
            completion_logprobs(policy, tokenizer, [pair[side] for pair in held])
            - completion_logprobs(start, tokenizer, [pair[side] for pair in held])
        )
        for side in ("chosen", "rejected")
    }
    return {
        "pairs": len(pairs),
        "held_out_pairs": len(held),
        "batch_size": batch_size,
        "width": width,
        "lr": lr,
        "beta": BETA,
        "seed": seed,
        "seconds": round(seconds, 1),
    } | measure(rewards["chosen"] - rewards["rejected"], true_log_odds)


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    flags.add_argument("--pairs", type=int, default=120_000)
    flags.add_argument("--held-out", type=int, default=20_000)
    flags.add_argument("--batch-size", type=int, default=64)
    flags.add_argument("--width", type=int, default=64)
    flags.add_argument("--lr", type=float, default=2e-3)
    flags.add_argument("--seed", type=int, default=0)
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = train_and_measure(
            Path(folder),
            num_pairs=given.pairs,
            held_out=given.held_out,
            batch_size=given.batch_size,
            width=given.width,
            lr=given.lr,
            seed=given.seed,
        )
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}"
    given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print({name: value for name, value in found.items() if name != "bins"})


if __name__ == "__main__":
    main()
