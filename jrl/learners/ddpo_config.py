# SPDX-License-Identifier: Apache-2.0
"""DDPO's section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from jrl.learners.config import check_fields
from jrl.learners.diffusion_config import DiffusionConfig

ADVANTAGES = ("auto", "global", "per_prompt_buffer", "group")
OLD_LOGPROBS = ("sampling", "recompute")


@dataclass(kw_only=True)
class DDPOConfig(DiffusionConfig):
    """Denoising diffusion policy optimisation, at a `sample_eta` above 0: else a step has no density.

    Sizes are global, over all devices and processes. `train.batch_size` is the samples of an optimizer step and
    `train.minibatch_size` those of one forward pass, which sees one denoising step of each.

    Attributes:
      sample_batch_size: Samples of one sampling call.
      sample_num_batches_per_epoch: Sampling calls of an epoch.
      train_num_inner_epochs: Passes over the samples of an epoch.
      train_cfg: Whether the update guides as sampling does; without, it trains another policy than the one that acted.
      train_adv_clip_max: Advantages are clipped to ± this.
      train_clip_range: ε of the ratio. Log-probabilities are means over latent elements, so it is tiny; for D elements
        in place of 16,384 take about 1e-4·√(16384/D).
      train_timestep_fraction: Share of the steps that each sample trains on in each pass, its own random ones.
      per_prompt_stat_tracking: Whether rewards are judged by the latest ones of the same prompt.
      per_prompt_stat_tracking_buffer_size: Rewards kept of each prompt.
      per_prompt_stat_tracking_min_count: A prompt with fewer kept is judged by the whole epoch.
      async_reward_computation: Whether rewards are computed beside the device.
      max_workers: Threads that compute them.
      sample_images_per_prompt: Samples drawn of each prompt, one group.
      advantage: "global", "per_prompt_buffer", "group", or "auto": as `per_prompt_stat_tracking` says.
      advantage_std: Deviation that divides a group's advantages: of the "group", or "global".
      share_initial_noise: Whether the samples of a group start from the same noise.
      beta_kl: Weight β of the KL from the model as it was before training, per latent element and step.
      kl_to_go: Whether a step is also charged, in its advantage, with the KL of the steps after it, for another forward
        pass of all samples by the model and its reference. Without, as published, the optimum is not p·exp(r/β).
      old_log_probs: "sampling": those of the sampler; "recompute": computed anew in the shapes of training.
      train_skip_last_steps: Steps at the end that are never trained on: their σ is tiny.
      train_timestep_range: (first, end) of the steps trained on, from the noisiest, the end left out; None: all.
      ema_decay: Of an average of the trained weights, by which the model is evaluated and saved; 0: none.
      loss_scaling: First factor of dynamic loss scaling, for float16 (4096 is a good one); 0: none.
      loss_scaling_growth_every: Optimizer steps without overflow after which the factor is doubled.
    """

    name: str = "DDPOConfig"
    sample_batch_size: int = 1
    sample_num_batches_per_epoch: int = 2
    train_num_inner_epochs: int = 1
    train_cfg: bool = True
    train_adv_clip_max: float = 5.0
    train_clip_range: float = 1e-4
    train_timestep_fraction: float = 1.0
    per_prompt_stat_tracking: bool = False
    per_prompt_stat_tracking_buffer_size: int = 16
    per_prompt_stat_tracking_min_count: int = 16
    async_reward_computation: bool = False
    max_workers: int = 2
    sample_images_per_prompt: int = 1
    advantage: str = "auto"
    advantage_std: str = "group"
    share_initial_noise: bool = False
    beta_kl: float = 0.0
    kl_to_go: bool = False
    old_log_probs: str = "sampling"
    train_skip_last_steps: int = 0
    train_timestep_range: tuple[int, int] | list[int] | None = None
    ema_decay: float = 0.0
    loss_scaling: float = 0.0
    loss_scaling_growth_every: int = 2000

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.sample_batch_size * self.sample_num_batches_per_epoch

    @property
    def trained_steps(self) -> range:
        """Numbers of the denoising steps that may be trained on."""
        first, end = self.train_timestep_range or (0, self.sample_num_steps)
        return range(first, min(end, self.sample_num_steps - self.train_skip_last_steps))

    @property
    def num_trained_steps(self) -> int:
        """T', the steps that each sample trains on in one pass."""
        return int(len(self.trained_steps) * self.train_timestep_fraction)

    @property
    def advantage_kind(self) -> str:
        """`advantage`, with "auto" resolved."""
        by_tracking = "per_prompt_buffer" if self.per_prompt_stat_tracking else "global"
        return by_tracking if self.advantage == "auto" else self.advantage

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        self._check_counts()
        self._check_sampling()
        self._check_trained_steps()
        self._check_advantages()
        check_fields(
            self,
            ("train_adv_clip_max", self.train_adv_clip_max > 0, "positive"),
            ("train_clip_range", self.train_clip_range > 0, "positive"),
            ("beta_kl", self.beta_kl >= 0, "at least 0"),
            (
                "kl_to_go",
                self.beta_kl > 0 or not self.kl_to_go,
                "False where `beta_kl` is 0: there is nothing to charge",
            ),
            ("old_log_probs", self.old_log_probs in OLD_LOGPROBS, f"one of {OLD_LOGPROBS}"),
            ("ema_decay", 0 <= self.ema_decay < 1, "in [0, 1)"),
            ("loss_scaling", self.loss_scaling >= 0, "at least 0"),
        )

    def _check_counts(self) -> None:
        for name, count in (
            ("sample_batch_size", self.sample_batch_size),
            ("sample_num_batches_per_epoch", self.sample_num_batches_per_epoch),
            ("train_num_inner_epochs", self.train_num_inner_epochs),
            ("per_prompt_stat_tracking_buffer_size", self.per_prompt_stat_tracking_buffer_size),
            ("per_prompt_stat_tracking_min_count", self.per_prompt_stat_tracking_min_count),
            ("max_workers", self.max_workers),
            ("sample_images_per_prompt", self.sample_images_per_prompt),
            ("loss_scaling_growth_every", self.loss_scaling_growth_every),
        ):
            check_fields(self, (name, count >= 1, "at least 1"))

    def _check_sampling(self) -> None:
        check_fields(
            self,
            (
                "sample_eta",
                self.sample_eta > 0,
                "in (0, 1]: without noise a step has no density to train",
            ),
            (
                "sample_images_per_prompt",
                self.num_samples % self.sample_images_per_prompt == 0,
                f"a divisor of the {self.num_samples} samples of an epoch",
            ),
        )

    def _check_trained_steps(self) -> None:
        window = self.train_timestep_range
        check_fields(
            self,
            ("train_timestep_fraction", 0 < self.train_timestep_fraction <= 1, "in (0, 1]"),
            (
                "train_skip_last_steps",
                0 <= self.train_skip_last_steps < self.sample_num_steps,
                f"in 0..{self.sample_num_steps - 1}, so that a step is left",
            ),
            (
                "train_timestep_range",
                window is None or (len(window) == 2 and 0 <= window[0] < window[1] <= self.sample_num_steps),
                f"two numbers of steps in 0..{self.sample_num_steps}, the first one below the second, or None",
            ),
        )
        check_fields(
            self,
            (
                "train_timestep_fraction",
                self.num_trained_steps >= 1,
                f"so large that one of {len(self.trained_steps)} steps is trained",
            ),
        )

    def _check_advantages(self) -> None:
        check_fields(
            self,
            ("advantage", self.advantage in ADVANTAGES, f"one of {ADVANTAGES}"),
            (
                "advantage",
                self.advantage != "group" or self.sample_images_per_prompt > 1,
                "other than 'group' where `sample_images_per_prompt` is 1: a sample alone has advantage 0",
            ),
            ("advantage_std", self.advantage_std in ("group", "global"), "'group' or 'global'"),
            (
                "per_prompt_stat_tracking_min_count",
                self.per_prompt_stat_tracking_min_count <= self.per_prompt_stat_tracking_buffer_size
                or self.advantage_kind != "per_prompt_buffer",
                f"at most `per_prompt_stat_tracking_buffer_size` = {self.per_prompt_stat_tracking_buffer_size}, or no "
                "prompt is ever judged by its own rewards",
            ),
        )
