# SPDX-License-Identifier: Apache-2.0
"""Tiny runs of the real trainers: a checkpoint on disk, a config, a reward, and what of a history must repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jrl
from jrl.learners.grpo_algorithms import algorithm
from jrl.models.checkpoint import save_checkpoint
from tests.tiny import tiny_lm, tiny_t5_tokenizer, tiny_tokenizer

PROMPTS = ["the cat", "a dog is", "we", "so it goes", "rain", "one more"]
CLOCKS = ("time/", "perf/")


def save_tiny_checkpoint(directory: Path, family: str = "gpt2") -> str:
    """A Hugging Face checkpoint with its tokenizer."""
    lm, params = tiny_lm(family)
    tokenizer = tiny_t5_tokenizer() if family == "t5" else tiny_tokenizer()
    save_checkpoint(directory, lm, params, tokenizer=tokenizer)
    return str(directory)


def count_vowels(outputs: list[str], **others: Any) -> list[float]:
    """Share of vowels: cheap, dense enough to learn from, and a function of its arguments only."""
    del others
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in outputs]


def tiny_run(config: jrl.TRLConfig, checkpoint: Any, run_dir: Path) -> jrl.TRLConfig:
    """24 steps on batches of 4 in microbatches of 2, evaluated and saved at the end."""
    return config.evolve(
        model={"model_path": checkpoint},
        tokenizer={"tokenizer_path": checkpoint},
        optimizer={"kwargs": {"lr": 1e-3}},
        scheduler={"name": "constant", "kwargs": {}},
        train={
            "seq_length": 32,
            "total_steps": 24,
            "epochs": 100,
            "batch_size": 4,
            "minibatch_size": 2,
            "eval_interval": 100,
            "checkpoint_interval": 100,
            "checkpoint_dir": str(run_dir),
            "tracker": None,
            "seed": 3,
        },
    )


def ppo_config(checkpoint: str, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """8 rollouts an iteration in chunks of 4, two epochs of two steps of two microbatches."""
    return (
        tiny_run(jrl.default_ppo_config(), checkpoint, run_dir)
        .evolve(
            model={"num_layers_unfrozen": 1},
            train={"total_steps": 12, "eval_interval": 8},
            method={
                "num_rollouts": 8,
                "chunk_size": 4,
                "ppo_epochs": 2,
                "target": 1.0,
                "scale_reward": "running",
                "gen_kwargs": {"max_new_tokens": 8},
            },
        )
        .evolve(**sections)
    )


def grpo_config(
    checkpoint: str, run_dir: Path, name: str = "grpo", **sections: dict[str, Any]
) -> jrl.TRLConfig:
    """8 rollouts of 2 prompts an iteration, in one step of microbatches of 2, which split groups."""
    method = algorithm(
        name, num_rollouts=8, chunk_size=4, num_generations=4, gen_kwargs={"max_new_tokens": 6}
    )
    sizes = {
        "batch_size": 8,
        "minibatch_size": 2,
        "total_steps": 4,
        "eval_interval": 2,
        "checkpoint_interval": 2,
    }
    return tiny_run(jrl.default_config(method), checkpoint, run_dir).evolve(train=sizes).evolve(**sections)


def dynamic_config(checkpoint: str, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """DAPO, a prompt a round: iterations use up different numbers of prompts."""
    method = {"max_sampling_rounds": 20, "prompts_per_round": 1}
    return grpo_config(checkpoint, run_dir, "dapo", method=method).evolve(**sections)


def odd_vowels(outputs: list[str], **others: Any) -> list[float]:
    """1 for an odd number of vowels, and for every third length: some groups are mixed, and some are not."""
    del others
    return [
        float(sum(letter in "aeiou" for letter in text) % 2) if len(text) % 3 else 1.0 for text in outputs
    ]


def sft_config(checkpoint: str, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """Batches of 4 in microbatches of 2."""
    return (
        tiny_run(jrl.default_sft_config(), checkpoint, run_dir)
        .evolve(
            method={"gen_kwargs": {"max_new_tokens": 8}},
        )
        .evolve(**sections)
    )


# All of 9 to 16 tokens with at least 9 actions: every batch has the same shape.
REWARDED = [
    ("the cat sat", 1.0),
    (["a", " dog ran off"], -2.0),
    (["who", "me", "no", " you then"], 0.5),
    ("so it goes on", 3.0),
    (["rain", " falls here"], 0.0),
]


def _episode(prompt: str, *turns: tuple[str, float, str], done: bool = True) -> dict[str, Any]:
    names = ("output", "reward", "observation")
    return {
        "prompt": prompt,
        "turns": [dict(zip(names, turn, strict=True)) for turn in turns],
        "done": done,
    }


# Returns 1, -2, 0.5 and 3; each turn alone has at most 8 tokens, and so has what follows it.
EPISODES = [
    _episode("a?", ("up", -1.0, "b?"), ("to", 2.0, "")),
    _episode("b?", ("no", -1.0, "b?"), ("no", -1.0, "b?"), done=False),
    _episode("a?", ("so", 0.5, "end")),
    _episode("c?", ("go", 1.0, "a?"), ("up", 1.0, "b?"), ("to", 1.0, "")),
]


def episodes_config(checkpoint: str, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """ILQL on turns that stand alone."""
    method = {"context_turns": 0, "reward_scale": 0.5}
    method |= sections.pop("method", {})
    return ilql_config(checkpoint, run_dir, method=method, **sections)


def ilql_config(checkpoint: str, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """Batches of 4 in microbatches of 2; the target heads move every third step."""
    return (
        tiny_run(jrl.default_ilql_config(), checkpoint, run_dir)
        .evolve(
            method={
                "alpha": 0.5,
                "steps_for_target_q_sync": 3,
                "gen_kwargs": {"max_new_tokens": 8, "top_k": 0},
            },
        )
        .evolve(**sections)
    )


# Completions of at most 8 tokens in rows of 9 to 16: every batch has the same shape.
PREFERENCES = [
    {"prompt": "the cat", "chosen": " sat up", "rejected": " flew"},
    {"prompt": "a dog", "chosen": " ran on", "rejected": " sat"},
    {"prompt": "who else", "chosen": " me", "rejected": " you"},
    {"prompt": "so it", "chosen": " goes", "rejected": " stops"},
    {"prompt": "rain", "chosen": " falls", "rejected": " rises"},
    {"prompt": "one two", "chosen": " more", "rejected": " less"},
]


def dpo_config(checkpoint: str, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """Batches of 4 pairs in microbatches of 2."""
    return (
        tiny_run(jrl.default_dpo_config(), checkpoint, run_dir)
        .evolve(
            train={"total_steps": 12},
            method={"beta": 0.5, "gen_kwargs": {"max_new_tokens": 8}},
        )
        .evolve(**sections)
    )


def rft_config(checkpoint: str, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """4 samples of each prompt a round in calls of 8 rows, two passes over what is kept, batches of 4."""
    return (
        tiny_run(jrl.default_rft_config(), checkpoint, run_dir)
        .evolve(
            train={"total_steps": 12},
            method={
                "n_generations_per_prompt": 4,
                "n_improve_steps": 2,
                "start_percentile": 0.5,
                "end_percentile": 0.75,
                "chunk_size": 8,
                "gen_kwargs": {"max_new_tokens": 8},
            },
        )
        .evolve(**sections)
    )


# Pairs with a text of 9 to 16 tokens each, so that every batch has the same shape; one has a margin.
COMPARISONS = [
    {"prompt": "the cat", "chosen": " sat", "rejected": " ran off", "margin": 0.0},
    {"prompt": "a dog is", "chosen": " good", "rejected": " bad", "margin": 0.5},
    {"prompt": "we", "chosen": " go on", "rejected": " stop here", "margin": 0.0},
    {"prompt": "so it", "chosen": " goes", "rejected": " goes not", "margin": 0.0},
    {"prompt": "rain", "chosen": " falls", "rejected": " rises", "margin": 0.0},
    {"prompt": "one", "chosen": " more", "rejected": " less of it", "margin": 0.0},
]


def reward_config(checkpoint: Any, run_dir: Path, **sections: dict[str, Any]) -> jrl.TRLConfig:
    """A reward model from a language model: batches of 4 in microbatches of 2."""
    return tiny_run(jrl.default_reward_config(), checkpoint, run_dir).evolve(**sections)


def repeatable(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A history without its clocks."""
    return [
        {name: value for name, value in record.items() if not name.startswith(CLOCKS)} for record in history
    ]
