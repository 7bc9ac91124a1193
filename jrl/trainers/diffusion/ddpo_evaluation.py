# SPDX-License-Identifier: Apache-2.0
"""Images of the same prompts from the same noise, evaluation after evaluation: what training changes, they show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.learners.diffusion_config import DiffusionConfig
from jrl.rollout.reward_columns import known_or_none, mean_and_std, prompt_means, standard_error
from jrl.trainers.diffusion.ddpo_sampling import Sampler, to_host
from jrl.trainers.diffusion.image_judging import ComputeRewards, OwnImages, judge_images
from jrl.trainers.rollouts.evaluation import Evaluation, count_samples
from jrl.typing import Frozen, Params, PRNGKey


class Judged(NamedTuple):
    """Images of an evaluation.

    Attributes:
      images: (B 3 Y X), in [0, 1].
      prompts: One an image.
      rewards: Likewise.
    """

    images: np.ndarray
    prompts: tuple[str, ...]
    rewards: np.ndarray

    def as_evaluation(self, method: DiffusionConfig) -> Evaluation:
        """Converts to the form that a run logs: rewards that are missing are in no mean."""
        rewards = self.rewards.astype(np.float64)
        mean, std = mean_and_std(rewards[~np.isnan(rewards)])
        means = prompt_means(rewards, self.prompts)
        error = standard_error(means)
        metrics = {"reward/mean": mean, "reward/std": std}
        metrics |= {} if error is None else {"reward/standard_error": error}
        sampling = count_samples(self.prompts) | {
            "num_steps": method.eval_num_steps or method.sample_num_steps,
            "eta": method.eval_eta,
            "guidance_scale": method.sample_guidance_scale,
            "reward_means": known_or_none(means),
        }
        rows = [[prompt, float(reward)] for prompt, reward in zip(self.prompts, self.rewards, strict=True)]
        return Evaluation(metrics, mean, ["prompt", "reward"], rows, sampling)


def evaluate_prompts(
    sampler: Sampler,
    params: Params,
    frozen: Frozen,
    prompts: Sequence[str],
    key: PRNGKey,
    compute_rewards: ComputeRewards,
    *,
    skip_errors: bool,
    own_images: OwnImages = np.arange,
) -> Judged:
    """Samples and rewards an image for each prompt; the reward function gets {} as metadata of each.

    Args:
      sampler: So many rows a call; the last call repeats its last prompt as far as it must.
      params: Of the policy.
      frozen: The rest.
      prompts: Row i is always sampled with key i.
      key: The same in every evaluation.
      compute_rewards: As of a trainer.
      skip_errors: Whether rewards may be missing.
      own_images: Which images of a sampling call this process judges.
    Raises:
      RewardError: If the reward function fails and errors are not skipped.
    """
    negative = sampler.negative(frozen)
    batches: list[list[Any]] = []
    for start in range(0, len(prompts), sampler.rows):
        numbers = np.arange(start, start + sampler.rows, dtype=np.int32)
        texts = [prompts[min(int(number), len(prompts) - 1)] for number in numbers]
        _, images = sampler(params, frozen, negative, texts, key, starts=numbers, steps=numbers)
        count = min(sampler.rows, len(prompts) - start)
        batches.append([to_host(images)[:count], tuple(texts[:count]), ({},) * count])
    rewards, _ = judge_images(
        compute_rewards,
        batches,
        False,
        counts=[len(batch[1]) for batch in batches],
        own=own_images(sampler.rows),
        name_batch=lambda number: "evaluation",
        skip_errors=skip_errors,
    )
    return Judged(np.concatenate([batch[0] for batch in batches]), tuple(prompts), np.concatenate(rewards))
