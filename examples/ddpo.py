# SPDX-License-Identifier: Apache-2.0
"""Steers Stable Diffusion by a reward of its images: DDPO as in TRL's example, with a reward that needs no download.

    python examples/ddpo.py --pretrained_model stable-diffusion-v1-5/stable-diffusion-v1-5
    python examples/ddpo.py --pretrained_model path/to/folder --reward my_rewards:aesthetic --num_epochs 50

A folder in the layout of diffusers, or a name on the hub. The reward is a function of `(images, prompts, metadata)`;
by default images are rewarded for small JPEG files. An adapter trains unless `--use_lora False` is given, which wants
`--train_learning_rate 1e-5`. Prompts are animals, or the lines of `--prompts`. Flags and files (`--config`) are those
of `jrl ddpo`, every field of `jrl.DDPOConfig` among them; the settings below are sized for one GPU: 24 samples and 8
updates an epoch. The folder `--logdir` receives checkpoints, metrics, and the trained model.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jrl
from jrl.trl import ddpo_parser

SETTINGS = {
    "pretrained_model": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "reward": "jpeg_compressibility",
    "num_epochs": 200,
    "sample_num_steps": 50,
    "sample_batch_size": 6,
    "sample_num_batches_per_epoch": 4,
    "train_batch_size": 3,
    "train_gradient_accumulation_steps": 1,
    "per_prompt_stat_tracking": True,
    "per_prompt_stat_tracking_buffer_size": 32,
    "logdir": "runs/ddpo",
}
ANIMALS = (
    "cat", "dog", "horse", "monkey", "rabbit", "zebra", "spider", "bird", "sheep", "deer", "cow", "goat", "lion",
    "tiger", "bear", "raccoon", "fox", "wolf", "lizard", "beetle", "ant", "butterfly", "fish", "shark", "whale",
    "dolphin", "squirrel", "mouse", "rat", "snake", "turtle", "frog", "chicken", "duck", "goose", "bee", "pig",
    "turkey", "fly", "llama", "camel", "bat", "gorilla", "hedgehog", "kangaroo",
)  # fmt: skip
"""The animals of the paper's experiments on aesthetic quality."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example."""
    parser = ddpo_parser()
    parser.set_defaults_with_config(**SETTINGS)
    script, config = parser.parse_args_and_config(sys.argv[1:] if argv is None else argv)
    config.num_epochs = script.epochs or config.num_epochs
    prompts = ANIMALS if script.prompts is None else read_lines(Path(script.prompts))
    hook = script.image_samples_hook
    pipeline = jrl.DefaultDDPOStableDiffusionPipeline(
        script.pretrained_model,
        pretrained_model_revision=script.pretrained_revision,
        use_lora=script.use_lora,
    )

    def random_prompt() -> tuple[str, dict[str, Any]]:
        return random.choice(prompts), {}

    trainer = jrl.DDPOTrainer(
        config,
        jrl.load_image_reward(script.reward),
        random_prompt,
        pipeline,
        image_samples_hook=log_last_batch if hook is None else jrl.load_function(hook),
    )
    trainer.train()
    folder = Path(config.logdir) / "model"
    trainer.save_pretrained(folder)
    print(f"the trained model is in {folder}")
    return 0


def log_last_batch(data: Sequence[Sequence[Any]], global_step: int, tracker: Any) -> None:
    """Shows the epoch's last sampling batch: each image under the beginning of its prompt and its reward."""
    images, prompts, _, rewards, _ = data[-1]
    tracker.log_images(
        {
            f"{prompt:.25} | {reward:.2f}": image
            for image, prompt, reward in zip(images, prompts, rewards, strict=True)
        },
        step=global_step,
    )


def read_lines(path: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
      ValueError: If there are none.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(
            f"`prompts` must name a file with a prompt on each line, got {path}, which has none."
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
