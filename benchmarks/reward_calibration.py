# SPDX-License-Identifier: Apache-2.0
"""Is a trained reward model as right, and as sure, as its data allows? One core, a few minutes.

    python benchmarks/reward_calibration.py [--out benchmarks/reward_calibration.json] [--plot reliability.png]

Texts are short rows of letters. A hidden score is the sum of a weight for each letter, and which of two texts is chosen
is drawn from the Bradley-Terry model of that score: P(a ≻ b) = σ(r*(a) − r*(b)). So the best attainable accuracy on
held-out pairs is known, and so is each pair's true probability, against which the model's own, σ(r(a) − r(b)), is held.
A decoder is trained by `RewardTrainer` from random weights in one pass.
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

import numpy as np

LETTERS = "abcdefghijklmnopqrst"
SHORTEST, LONGEST = 4, 12
SPREAD = 0.6
"""Standard deviation of the letters' weights: the best attainable accuracy is then about 0.80."""
BINS = 10


def hidden_weights(seed: int = 0) -> np.ndarray:
    """Weight of each letter, mean 0."""
    weights = np.random.default_rng(seed).normal(size=len(LETTERS))
    return SPREAD * (weights - weights.mean()) / weights.std()


def draw_texts(rng: np.random.Generator, count: int, weights: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Random texts of random lengths, and their hidden scores."""
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=count)
    letters = rng.integers(len(LETTERS), size=(count, LONGEST))
    counted = np.arange(LONGEST)[None, :] < lengths[:, None]
    scores = np.where(counted, weights[letters], 0.0).sum(axis=1)
    alphabet = np.array(list(LETTERS))
    return ["".join(alphabet[row[:n]]) for row, n in zip(letters, lengths, strict=True)], scores


def draw_pairs(seed: int, count: int, weights: np.ndarray) -> tuple[list[dict[str, str]], np.ndarray]:
    """Comparisons, and the true log-odds that the text which was chosen is chosen."""
    rng = np.random.default_rng(seed)
    (first, first_scores), (second, second_scores) = (draw_texts(rng, count, weights) for _ in range(2))
    wins = rng.random(count) < sigmoid(first_scores - second_scores)
    # Equal texts are no comparison.
    records, odds = [], []
    for a, b, a_score, b_score, a_wins in zip(first, second, first_scores, second_scores, wins, strict=True):
        if a != b:
            chosen, rejected = (a, b) if a_wins else (b, a)
            records.append({"prompt": "", "chosen": chosen, "rejected": rejected})
            odds.append(a_score - b_score if a_wins else b_score - a_score)
    return records, np.array(odds)


def sigmoid(x: Any) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def bin_of(confidence: np.ndarray) -> np.ndarray:
    """Number of each confidence's bin; they are equally wide from 0.5 to 1."""
    return np.clip((2 * BINS * (confidence - 0.5)).astype(int), 0, BINS - 1)


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Σ_bins n/N·|mean of `right` − mean confidence|; `right` may be probabilities."""
    index = bin_of(confidence)
    return sum(
        inside.mean() * abs(float(right[inside].mean() - confidence[inside].mean()))
        for inside in (index == number for number in range(BINS))
        if inside.any()
    )


def measure(log_odds: np.ndarray, true_log_odds: np.ndarray) -> dict[str, Any]:
    """Accuracy and calibration on held-out pairs.

    Args:
      log_odds: The model's r(chosen) − r(rejected).
      true_log_odds: The hidden score's.
    Returns:
      `best_accuracy` and `accuracy`: expected shares of pairs ranked as they were drawn, by the hidden score and by the
      model, over all draws of the labels; `drawn_best_accuracy` and `drawn_accuracy`: shares for the labels that were
      drawn; `ece`: calibration error of the model's choices by the drawn labels, `best_ece`: that of the hidden score
      itself, which is the noise of so many labels, `true_ece`: the model's against the true probabilities;
      `probability_error`: mean |σ(Δr) − σ(Δr*)|; `loss` and `best_loss` in nats; `bins`: the reliability table.
    """
    confidence, right = sigmoid(np.abs(log_odds)), log_odds > 0
    # Of the text that the model prefers, whichever was drawn as the chosen one.
    truth = sigmoid(np.where(right, true_log_odds, -true_log_odds))
    edges, index = np.linspace(0.5, 1.0, BINS + 1), bin_of(confidence)
    bins = []
    for number in range(BINS):
        inside = index == number
        if inside.any():
            means = {"confidence": confidence, "right": right, "true_probability": truth}
            bins.append(
                {
                    "from": round(edges[number], 2),
                    "to": round(edges[number + 1], 2),
                    "pairs": int(inside.sum()),
                }
                | {name: round(float(values[inside].mean()), 4) for name, values in means.items()}
            )
    numbers = {
        "best_accuracy": sigmoid(np.abs(true_log_odds)).mean(),
        "accuracy": truth.mean(),
        "drawn_best_accuracy": (true_log_odds > 0).mean(),
        "drawn_accuracy": right.mean(),
        "ece": expected_calibration_error(confidence, right),
        "best_ece": expected_calibration_error(sigmoid(np.abs(true_log_odds)), true_log_odds > 0),
        "true_ece": expected_calibration_error(confidence, truth),
        "probability_error": np.abs(sigmoid(log_odds) - sigmoid(true_log_odds)).mean(),
        "loss": np.logaddexp(0.0, -log_odds).mean(),
        "best_loss": np.logaddexp(0.0, -true_log_odds).mean(),
    }
    return {name: round(float(value), 5) for name, value in numbers.items()} | {"bins": bins}


def make_tokenizer() -> Any:
    """One id a letter, with pad and EOS of their own."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def make_gpt2(width: int) -> Any:
    """The config of a decoder of two layers."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=len(LETTERS) + 2,
        n_embd=width,
        n_layer=2,
        n_head=4,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=1,
    )


def one_pass(
    config: Any,
    folder: Path,
    *,
    model: Any,
    tokenizer: Path,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> Any:
    """A configuration that sees every pair once, at a rate that falls to 0, and keeps the last model alone."""
    return config.evolve(
        model={"model_path": model},
        tokenizer={"tokenizer_path": str(tokenizer)},
        optimizer={"kwargs": {"lr": lr, "weight_decay": 0.0}},
        scheduler={"name": "cosine_annealing", "kwargs": {"T_max": steps, "eta_min": 0.0}},
        train={
            "seq_length": 16,
            "epochs": 1,
            "total_steps": steps,
            "batch_size": batch_size,
            "eval_interval": 0,
            "checkpoint_interval": 0,
            "checkpoint_dir": str(folder / "run"),
            "save_optimizer": False,
            "seed": seed,
        },
    )


def train_and_measure(
    folder: Path,
    *,
    num_pairs: int,
    held_out: int,
    batch_size: int,
    width: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
) -> dict[str, Any]:
    """One pass over fresh pairs, and what `measure` finds on others, scored by the folder that the run wrote."""
    import jrl

    weights = hidden_weights()
    pairs, _ = draw_pairs(seed + 1, num_pairs, weights)
    held, true_log_odds = draw_pairs(seed + 2, held_out, weights)
    tokenizer_folder = folder / "tokenizer"
    make_tokenizer().save_pretrained(tokenizer_folder)
    config = one_pass(
        jrl.default_reward_config(),
        folder,
        model=make_gpt2(width),
        tokenizer=tokenizer_folder,
        steps=len(pairs) // batch_size,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
    )
    began = time.perf_counter()
    trainer = jrl.train(samples=pairs, config=config)
    seconds = time.perf_counter() - began
    reward = jrl.load_reward_model(trainer.save_pretrained(folder / "reward"), batch_size=256)
    chosen, rejected = (
        np.array(reward(samples=[pair[side] for pair in held])) for side in ("chosen", "rejected")
    )
    return {
        "pairs": len(pairs),
        "held_out_pairs": len(held),
        "batch_size": batch_size,
        "width": width,
        "lr": lr,
        "seed": seed,
        "seconds": round(seconds, 1),
    } | measure(chosen - rejected, true_log_odds)


def plot(found: dict[str, Any], path: Path) -> None:
    """The reliability diagram."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.5, 4.5))
    axes.plot([0.5, 1.0], [0.5, 1.0], color="grey", linewidth=1, label="calibrated")
    confidence = [row["confidence"] for row in found["bins"]]
    axes.plot(confidence, [row["right"] for row in found["bins"]], "o-", label="share ranked as drawn")
    axes.plot(confidence, [row["true_probability"] for row in found["bins"]], "x--", label="true probability")
    axes.set(xlabel="confidence σ(|Δr|)", ylabel="right", title=f"ECE {found['ece']:.4f}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=120_000)
    parser.add_argument("--held-out", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JRL_CACHE"] = str(Path(folder) / "cache")
        found = train_and_measure(
            Path(folder),
            num_pairs=flags.pairs,
            held_out=flags.held_out,
            batch_size=flags.batch_size,
            seed=flags.seed,
        )
    found |= {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    print(json.dumps(found, indent=2))
    if flags.out is not None:
        flags.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if flags.plot is not None:
        plot(found, flags.plot)


if __name__ == "__main__":
    main()
