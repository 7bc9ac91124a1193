# SPDX-License-Identifier: Apache-2.0
"""Base of trainers that learn from the policy's own samples: prompts to start from, and their reward function."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jrl.data.prompts import PromptSet
from jrl.rollout.sampler import GenerationSettings
from jrl.trainers.loggers.description import describe_size
from jrl.trainers.policy_trainer import PolicyTrainer


class SamplingTrainer(PolicyTrainer):
    """Samples from prompts, and learns from what a reward function says of the samples.

    Attributes:
      prompts: Set by `add_data`.
    """

    prompts: PromptSet
    refusal: ClassVar[str]
    """How this algorithm learns, for what is said to data of another kind."""

    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes prompts; the evaluation prompts default to the first `batch_size` of them."""
        if self.reward_fn is None or samples is not None or rewards is not None:
            given = {"reward_fn": self.reward_fn, "samples": samples, "rewards": rewards, "prompts": prompts}
            got = [f"`{name}`" for name, value in given.items() if value is not None]
            raise ValueError(
                f"{type(self).__name__} {self.refusal}: give `reward_fn` or `environment`, and `prompts`, not "
                f"`samples` or `rewards`; got {', '.join(got) or 'none of these'}. To learn from samples, take the "
                "configuration of another algorithm, such as `jrl.default_sft_config()`."
            )
        prompts = list(prompts) if prompts is not None else self.default_prompts()
        self.add_prompts(prompts, self.reward_fn)
        if eval_prompts is None:
            self.add_eval_prompts(prompts[: self.config.train.batch_size], of_training=True)
        else:
            self.add_eval_prompts(eval_prompts)

    def add_prompts(
        self, prompts: Sequence[Any], reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]]
    ) -> None:
        """Sets what is sampled from and who scores it."""
        max_new_tokens = self.rollout_settings().max_new_tokens
        self.add_prompt_set(self.prompt_set(prompts, max_new_tokens=max_new_tokens), reward_fn)

    @abc.abstractmethod
    def add_prompt_set(
        self, prompts: PromptSet, reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]]
    ) -> None:
        """Takes prompts that are tokenised already, and their reward function."""

    def rollout_settings(self) -> GenerationSettings:
        """Sampling settings of the rollouts: `gen_kwargs` at the first value of a sweep."""
        return self.settings

    def describe_data(self) -> dict[str, str]:
        """Describes the prompts."""
        return {"prompts": describe_size(self.prompts)} if "prompts" in vars(self) else {}

    def data_sha256(self) -> dict[str, str]:
        """The prompts', beside what every trainer has."""
        return super().data_sha256() | {"prompts": self.prompts.sha256()}
