# SPDX-License-Identifier: Apache-2.0
"""A whole PPO iteration as a training run does it: sampling, scoring, text, rewards, update."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jrl.bench.counts import Counts
from jrl.bench.models import Shapes, Subject
from jrl.bench.work import Work
from jrl.data.prompts import PromptSet
from jrl.learners.ppo import PPOConfig
from jrl.trainers.config.trl_config import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.trainers.ppo import PPOTrainer


def ppo_iteration(subject: Subject, shapes: Shapes) -> Work:
    """Benchmark of an iteration of `PPOTrainer`: its loop without logs, evaluations and checkpoints.

    The reward is the completion's length in letters: what a real one takes is the user's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _words(subject.lm.vocab_size, Path(folder)) if subject.is_random else subject.source
        trainer = PPOTrainer(_config(subject, shapes, str(tokenizer), folder), reward_fn=_letters)
    rows = np.asarray(subject.tokens(4 * shapes.rows, shapes.prompt, seed=1)).tolist()
    prompts = PromptSet.from_tokens(rows, {}, trainer.tokenizer, max_length=shapes.prompt, seed=0)
    trainer.add_prompt_set(prompts, _letters)
    parts: dict[str, list[float]] = {}
    done = [0]

    def iterate() -> Any:
        stopwatch, number = Stopwatch(), done[0]
        done[0] += 1
        with jax.set_mesh(trainer.mesh):
            rollout_key, update_key = trainer.keys(number)
            experience = trainer.collect(
                trainer.params,
                trainer.frozen,
                trainer.ref_params,
                number,
                rollout_key,
                while_sampling=lambda: None,
                stopwatch=stopwatch,
            )
            with stopwatch("update"):
                trainer.state, metrics = trainer.update(
                    trainer.state, trainer.frozen, experience.rollouts, update_key
                )
                jax.block_until_ready((trainer.state, metrics))
        for name, seconds in stopwatch.take().items():
            parts.setdefault(name.removeprefix("time/"), []).append(seconds)
        return metrics

    counts = Counts(subject)
    return Work(
        call=iterate,
        tokens=shapes.rows * shapes.response,
        samples=shapes.rows,
        phases=(*counts.decode(shapes), *counts.score(shapes), *counts.update(shapes)),
        parts=parts,
    )


def _letters(outputs: list[str]) -> list[float]:
    return [float(len(output)) for output in outputs]


def _config(subject: Subject, shapes: Shapes, tokenizer: str, folder: str) -> TRLConfig:
    options = subject.options
    return TRLConfig(
        method=PPOConfig(
            num_rollouts=shapes.rows,
            chunk_size=shapes.rows,
            ppo_epochs=shapes.epochs,
            gen_kwargs={"max_new_tokens": shapes.response, "eos_token_id": []},
        ),
        model=ModelConfig(
            model_path=subject.source if subject.is_random else str(subject.source),
            num_layers_unfrozen=options.num_layers_unfrozen,
            peft_config=options.peft_config,
            frozen_dtype=options.frozen_dtype,
            attn_implementation=options.attn_implementation,
        ),
        optimizer=OptimizerConfig(name="adamw", kwargs={"lr": 1e-6}),
        scheduler=SchedulerConfig(name="constant", kwargs={}),
        tokenizer=TokenizerConfig(tokenizer_path=tokenizer),
        train=TrainConfig(
            trainer="PPOTrainer",
            total_steps=shapes.ppo_steps,
            epochs=1,
            eval_interval=shapes.ppo_steps,
            checkpoint_interval=shapes.ppo_steps,
            seq_length=shapes.length,
            batch_size=shapes.batch_size,
            minibatch_size=shapes.minibatch_size,
            compute_dtype=options.compute_dtype,
            remat=options.remat,
            logprob_chunk_bytes=shapes.logprob_chunk_bytes,
            checkpoint_dir=f"{folder}/run",
            mesh={"data": 1, "fsdp": 1, "tensor": 1},
        ),
    )


def _words(vocab_size: int, folder: Path) -> Path:
    """A tokenizer of as many words as the model has ids, in a folder of its own."""
    vocabulary = {f"w{number}": number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w0", pad_token="w0", bos_token="w0"
    )
    wrapped.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"
