# SPDX-License-Identifier: Apache-2.0
"""DDPO from nothing: a toy text-to-image model learns to draw shapes, then to please a reward.

    python examples/ddpo_shapes.py --task brightness
    python examples/ddpo_shapes.py --task jpeg --seed 0 1 2
    python examples/ddpo_shapes.py --task flow --seed 0 1 2

downloads nothing. Pictures of circles and squares are generated, and a small U-Net learns to denoise them under prompts
such as "red circle". Then DDPO trains it on a reward of its images alone: `brightness`, the mean of all pixels, of
16 x 16 pixels, or `jpeg`, minus the size of the JPEG file in thousands of bytes, of 32 x 32. `flow` is brightness by
Flow-GRPO: a rectified flow, groups of eight pictures a prompt, a KL to the model as it was, 8 noisy steps to learn from
and 20 without noise to be judged by. What it leaves in the
run's folder: `report.png` with the reward of every epoch and images before and after from equal noise, `results.jsonl`
with the figures, `model.npz`, the pretrained weights, which the same command with the same `--output-dir` uses again,
and a folder for each seed.

Every field of `jrl.DDPOConfig` is a flag (`--train_learning_rate 1e-4`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from shapes.networks import DDIM, FLOW, load_weights, save_weights, toy_model
from shapes.pictures import PROMPTS
from shapes.pretrain import Pretraining, pretrain
from shapes.report import Outcome, draw_report, print_table

import jrl
from jrl.image_rewards import ImageReward, brightness, jpeg_compressibility
from jrl.models.diffusion import DiffusionModel
from jrl.ops import FlowSchedule, NoiseSchedule
from jrl.trl import TrlParser

SETTINGS: Mapping[str, Any] = {
    "sample_batch_size": 32,
    # The model predicts clean pictures, of which the mean of these steps changes 24 standard deviations a unit.
    "train_skip_last_steps": 2,
    "save_freq": 0,
}
"""What both tasks share."""
GRID_ROWS = 4
"""Noises shown for each prompt."""
EVALUATION_SEED = 12345


@dataclass(frozen=True)
class Task:
    """What is rewarded.

    Attributes:
      size: Pixels of a picture's side.
      reward: The reward function.
      label: What it measures, with its unit.
      settings: Fields of `jrl.DDPOConfig`. A `train_clip_range` of 1e-4·√(16384 / D), where D is the numbers of a
        picture, allows steps as long as 1e-4 does for Stable Diffusion; a toy may take ten times that.
      schedule: Process by which noise becomes a picture.
    """

    size: int
    reward: ImageReward
    label: str
    settings: Mapping[str, Any]
    schedule: NoiseSchedule | FlowSchedule = DDIM


TASKS = {
    "brightness": Task(
        16,
        brightness,
        "mean brightness",
        {
            "num_epochs": 10,
            "sample_num_steps": 10,
            "sample_guidance_scale": 2.0,
            "sample_num_batches_per_epoch": 2,
            "train_batch_size": 16,
            "train_learning_rate": 3e-4,
            "train_clip_range": 4.6e-3,
        },
    ),
    # The size of a file says little of each of its pixels: twice the samples, each judged by others of its prompt, and
    # fewer steps among which to divide the praise. More epochs at this rate are not safe: see examples/README.md.
    "jpeg": Task(
        32,
        jpeg_compressibility,
        "minus kB of JPEG",
        {
            "num_epochs": 8,
            "sample_num_steps": 6,
            "sample_guidance_scale": 1.0,
            "sample_num_batches_per_epoch": 4,
            "train_batch_size": 32,
            "train_learning_rate": 2e-4,
            "train_clip_range": 2.3e-3,
            "per_prompt_stat_tracking": True,
            "per_prompt_stat_tracking_buffer_size": 32,
            "per_prompt_stat_tracking_min_count": 8,
        },
    ),
    "flow": Task(
        16,
        brightness,
        "mean brightness",
        {
            "num_epochs": 16,
            "sample_num_steps": 8,
            "sample_eta": 0.7,
            "sample_guidance_scale": 1.0,
            "sample_num_batches_per_epoch": 2,
            "sample_images_per_prompt": 8,
            "advantage": "group",
            "advantage_std": "global",
            "beta_kl": 0.01,
            "train_batch_size": 16,
            # Of all samples of an epoch: of a part of them, groups are broken up, and one seed of three went dark.
            "train_gradient_accumulation_steps": 4,
            "train_learning_rate": 6e-4,
            "train_clip_range": 4.6e-3,
            "train_skip_last_steps": 1,
            "eval_num_steps": 20,
        },
        FLOW,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    flags, settings = parse(sys.argv[1:] if argv is None else list(argv))
    console, folder, task = Console(), Path(flags.output_dir), TASKS[flags.task]
    folder.mkdir(parents=True, exist_ok=True)
    console.rule("A model of shapes")
    model = pretrained(console, folder, task, Pretraining(steps=flags.pretraining_steps))
    outcomes = []
    for seed in flags.seed:
        console.rule(f"DDPO on {flags.task}, seed {seed}")
        config = dataclasses.replace(settings, seed=seed, logdir=str(folder / f"seed_{seed}"))
        outcomes.append(tune(model, task.reward, config, lora=flags.lora, count=flags.evaluation_samples))
        with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
            named = {name: vars(settings)[name] for name in {**SETTINGS, **task.settings}}
            file.write(json.dumps({"task": flags.task, **outcomes[-1].record(), "settings": named}) + "\n")
    samples = settings.sample_batch_size * settings.sample_num_batches_per_epoch
    draw_report(folder / "report.png", outcomes, reward=task.label, samples_per_epoch=samples)
    print_table(console, outcomes, reward=task.label)
    console.print(f"{folder / 'report.png'}", highlight=False, soft_wrap=True)
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, jrl.DDPOConfig]:
    """The flags, and what the others make of the settings."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.epilog = "Any field of jrl.DDPOConfig is a flag too, such as --num_epochs 10."
    top.add_argument("--task", choices=TASKS, default="brightness")
    top.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="of DDPO; several run one after another"
    )
    top.add_argument(
        "--output-dir", default=time.strftime("runs/ddpo_shapes/%Y%m%d-%H%M%S"), help="run folder"
    )
    top.add_argument("--pretraining-steps", type=int, default=Pretraining.steps, help="of the toy model")
    top.add_argument("--evaluation-samples", type=int, default=128, help="judged before and after")
    top.add_argument("--lora", action="store_true", help="train an adapter and not the whole U-Net")
    flags, rest = top.parse_known_args(argv)
    parser = TrlParser(jrl.DDPOConfig)
    parser.set_defaults_with_config(**{**SETTINGS, **TASKS[flags.task].settings})
    (settings,) = parser.parse_args_and_config(rest)
    return flags, settings


def pretrained(console: Console, folder: Path, task: Task, options: Pretraining) -> DiffusionModel:
    """The toy model, as an earlier call with this folder left it or trained now."""
    path = folder / ("model_flow.npz" if isinstance(task.schedule, FlowSchedule) else "model.npz")
    if path.exists():
        model = toy_model(task.size, seed=None, schedule=task.schedule)
        return dataclasses.replace(model, weights=load_weights(path, model.weights))
    model = pretrain(
        toy_model(task.size, seed=options.seed, schedule=task.schedule),
        options,
        report=lambda step, loss: console.print(f"step {step}: loss {loss:.4f}", highlight=False),
    )
    save_weights(path, model.weights)
    return model


def tune(
    model: DiffusionModel, reward: ImageReward, config: jrl.DDPOConfig, *, lora: bool, count: int
) -> Outcome:
    """Runs DDPO, and judges `count` samples of the same prompts and noises before and after it."""
    began, processor = time.perf_counter(), time.process_time()
    pipeline = jrl.DefaultDDPOStableDiffusionPipeline(model, use_lora=lora)
    trainer = jrl.DDPOTrainer(config, reward, random_prompt, pipeline)
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(count)]
    draw = sampler(pipeline, config, prompts)
    images_before = draw()
    trainer.train()
    images_after = draw()
    before, after = (reward(images, prompts, [{}] * count)[0] for images in (images_before, images_after))
    epochs = [record for record in trainer.native.history if "reward/mean" in record]
    return Outcome(
        seed=config.seed,
        curve=[record["reward/mean"] for record in epochs],
        before=before,
        after=after,
        images_before=grid(images_before),
        images_after=grid(images_after),
        seconds=time.perf_counter() - began,
        processor_seconds=time.process_time() - processor,
        figures={
            "std_first_epoch": round(epochs[0]["reward/std"], 5),
            "pre_update_ratio_max_dev": max(record["ddpo/pre_update_ratio_max_dev"] for record in epochs),
            "pre_update_clip_fraction": max(record["ddpo/pre_update_clip_fraction"] for record in epochs),
        },
    )


def random_prompt() -> tuple[str, dict[str, Any]]:
    """One of the eight, and nothing else to say of it."""
    return random.choice(PROMPTS), {}


def sampler(
    pipeline: jrl.DefaultDDPOStableDiffusionPipeline, config: jrl.DDPOConfig, prompts: Sequence[str]
) -> Callable[[], np.ndarray]:
    """Draws images of these prompts, always from the same noise, (count, 3, height, width).

    Where evaluation has steps of its own, they are taken, at the η of evaluation.
    """
    size = config.sample_batch_size
    num_steps, eta = config.sample_num_steps, config.sample_eta
    if config.eval_num_steps is not None:
        num_steps, eta = config.eval_num_steps, config.eval_eta

    def draw() -> np.ndarray:
        parts = [
            pipeline(
                prompts[start : start + size],
                num_inference_steps=num_steps,
                guidance_scale=config.sample_guidance_scale,
                eta=eta,
                generator=EVALUATION_SEED + start,
                output_type="np",
            ).images
            for start in range(0, len(prompts), size)
        ]
        return np.concatenate(parts)

    return draw


def grid(images: np.ndarray) -> np.ndarray:
    """The first images as (rows, prompts, height, width, 3): each row has all prompts."""
    rows = min(GRID_ROWS, len(images) // len(PROMPTS))
    shown = np.moveaxis(images[: rows * len(PROMPTS)], 1, -1)
    return shown.reshape(rows, len(PROMPTS), *shown.shape[1:])


if __name__ == "__main__":
    raise SystemExit(main())
