# SPDX-License-Identifier: Apache-2.0
"""TRL's flat configuration of DDPO; `ddpo_native` says which configuration of jrl's own it stands for."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from jrl.interop import warn_ignored
from jrl.trainers.loggers import PACKAGES, check_tracker
from jrl.trl.field_table import FIELD_TABLE, Meaning

__all__ = ["DDPOConfig"]

TRACKED = ("entity", "group", "name", "tags")
PROJECT = FIELD_TABLE["project"]
PRECISIONS = (None, "no", "fp16", "bf16")


def _script_name() -> str:
    """The running script's name; only a `.py` at its end is dropped."""
    return Path(sys.argv[0]).name.removesuffix(".py")


@dataclass
class DDPOConfig:
    """Configuration of DDPO; fields, order and defaults are TRL's, and further options stand behind them.

    Attributes:
      exp_name: The tracker's name of runs that belong together; default: the script's name.
      run_name: The tracker's name of the run.
      seed: Of samples, orders, fresh adapters, and of the generators that a prompt function finds.
      log_with: "wandb", "tensorboard" or None; metrics.jsonl is always written.
      tracker_kwargs: For wandb `entity`, `group`, `name` and `tags`, as given or under "wandb".
      accelerator_kwargs: No effect.
      project_kwargs: `project_dir` replaces `logdir`, `total_limit` replaces `num_checkpoint_limit`, and `logging_dir`
        is the folder of the tracker's files.
      tracker_project_name: The tracker's project.
      logdir: The run's folder: checkpoints, metrics.jsonl, images and the model.
      num_epochs: Epochs of the run.
      save_freq: Epochs between checkpoints; 0 writes only the last.
      num_checkpoint_limit: Newest checkpoints that are kept.
      mixed_precision: "bf16", "fp16" or "no" (float32); None: bf16 on an accelerator, no on a CPU.
      allow_tf32: Whether float32 products may be computed from TF32 factors on a GPU.
      resume_from: A run's folder, or one checkpoint of it.
      sample_num_steps: Denoising steps T.
      sample_eta: η of DDIM: 1 is the noise of ancestral sampling; above 0.
      sample_guidance_scale: Weight w of classifier-free guidance; 1 and below sample without.
      sample_batch_size: Images of one sampling call on each device.
      sample_num_batches_per_epoch: Sampling calls of an epoch.
      train_batch_size: Samples of one forward and backward pass on each device.
      train_use_8bit_adam: Refused.
      train_learning_rate: Of AdamW. The default is an adapter's; a whole UNet needs about 1e-5.
      train_adam_beta1: Decay of the first moment.
      train_adam_beta2: Decay of the second moment.
      train_adam_weight_decay: Decoupled; not on norms and biases.
      train_adam_epsilon: Added to the root of the second moment.
      train_gradient_accumulation_steps: Batches of samples of one optimizer step; timesteps are always accumulated.
      train_max_grad_norm: The gradient's global norm is clipped to this.
      train_num_inner_epochs: Passes over the samples of an epoch.
      train_cfg: Whether the density that is trained is the guided one.
      train_adv_clip_max: Advantages are clipped to ± this.
      train_clip_range: Half-width of the ratio's clip.
      train_timestep_fraction: Share of each sample's steps that is trained on.
      per_prompt_stat_tracking: Whether advantages are taken within each prompt's last rewards.
      per_prompt_stat_tracking_buffer_size: How many rewards of a prompt are kept.
      per_prompt_stat_tracking_min_count: How many there must be before they count.
      async_reward_computation: Whether rewards are computed on threads, while the device samples on.
      max_workers: Such threads.
      negative_prompts: One prompt, which guidance leads away from.
      push_to_hub: Refused; `trainer.push_to_hub` uploads when asked.
      sample_images_per_prompt: Images of every prompt that is drawn, beside each other.
      advantage: "auto" (as `per_prompt_stat_tracking` says), "global", "per_prompt_buffer" or "group".
      advantage_std: Of groups: divide by the deviation of the "group", or of all rewards, "global".
      share_initial_noise: Whether the images of a prompt start from the same noise.
      beta_kl: Weight of the KL divergence to the model as it was.
      kl_to_go: Whether a step is also charged with the KL of the steps after it.
      old_log_probs: "sampling", or "recompute" them at the shapes of training before the first update.
      train_skip_last_steps: So many of the last denoising steps are never trained on.
      train_timestep_range: First step and the one behind the last that are trained on; None: all.
      sample_height: Of the images, in pixels; None: as the model has it.
      sample_width: Likewise.
      guidance_rescale: φ, how much of the guided output's deviation is put back to the unguided one's.
      gradient_checkpointing: Whether activations are recomputed in the backward pass.
      ema_decay: Of a running mean of what trains, which is then evaluated and saved; 0: none.
      lora_rank: Rank of the adapter that `use_lora` trains.
      lora_alpha: The adapter's scale is alpha / rank.
      lora_targets: Ends of names of the linear maps that it changes.
      eval_every: Epochs between evaluations; 0 evaluates only before and after.
      eval_prompts: Prompts that are always sampled with the same noise, so that images can be compared.
      eval_eta: η of these.
      eval_num_steps: Denoising steps of these; None: as many as in sampling.
      lr_warmup_steps: Optimizer steps in which the rate rises from 0.
      mesh: Devices along the axes data, fsdp and tensor, as JSON on the command line; None: all on data.
      overwrite: Whether a new run may delete the checkpoints in its folder.
    """

    MEANINGS: ClassVar[Mapping[str, Meaning]] = FIELD_TABLE["ddpo"]

    exp_name: str = field(default_factory=_script_name)
    run_name: str = ""
    seed: int = 42
    log_with: str | None = None
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    tracker_project_name: str = "jrl"
    logdir: str = "logs"
    num_epochs: int = 100
    save_freq: int = 1
    num_checkpoint_limit: int = 5
    mixed_precision: str | None = None
    allow_tf32: bool = True
    resume_from: str = ""
    sample_num_steps: int = 50
    sample_eta: float = 1.0
    sample_guidance_scale: float = 5.0
    sample_batch_size: int = 1
    sample_num_batches_per_epoch: int = 2
    train_batch_size: int = 1
    train_use_8bit_adam: bool = False
    train_learning_rate: float = 3e-4
    train_adam_beta1: float = 0.9
    train_adam_beta2: float = 0.999
    train_adam_weight_decay: float = 1e-4
    train_adam_epsilon: float = 1e-8
    train_gradient_accumulation_steps: int = 1
    train_max_grad_norm: float = 1.0
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
    negative_prompts: str = ""
    push_to_hub: bool = False
    sample_images_per_prompt: int = 1
    advantage: str = "auto"
    advantage_std: str = "group"
    share_initial_noise: bool = False
    beta_kl: float = 0.0
    kl_to_go: bool = False
    old_log_probs: str = "sampling"
    train_skip_last_steps: int = 0
    train_timestep_range: list[int] | None = None
    sample_height: int | None = None
    sample_width: int | None = None
    guidance_rescale: float = 0.0
    gradient_checkpointing: bool = False
    ema_decay: float = 0.0
    lora_rank: int = 4
    lora_alpha: float = 4.0
    lora_targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    eval_every: int = 0
    eval_prompts: list[str] = field(default_factory=list)
    eval_eta: float = 0.0
    eval_num_steps: int | None = None
    lr_warmup_steps: int = 0
    mesh: dict[str, Any] | str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Checks what does not need the devices to be known; `DDPOTrainer` checks the rest.

        Raises:
          ValueError: On a value out of range.
          ImportError: If the tracker's package is missing.
        """
        self.negative_prompts = _one_prompt(self.negative_prompts)
        self.lora_targets, self.eval_prompts = _texts(self.lora_targets), _texts(self.eval_prompts)
        for name in ("tracker_kwargs", "accelerator_kwargs", "project_kwargs"):
            setattr(self, name, dict(vars(self)[name] or {}))
        self.mesh = _as_mesh(self.mesh)
        self.check()
        check_tracker(self.log_with)
        for name, why in self.MEANINGS.items():
            if why.kind == "ignored" and vars(self)[name]:
                warn_ignored(f"DDPOConfig.{name}", why.text)
        for name in sorted(tracker_fields(self.tracker_kwargs).keys() - set(TRACKED)):
            warn_ignored(f"DDPOConfig.tracker_kwargs: {name}", f"a tracker gets {', '.join(TRACKED)}")
        for name in self.project_kwargs.keys() & PROJECT.keys():
            if PROJECT[name].kind == "ignored":
                warn_ignored(f"DDPOConfig.project_kwargs: {name}", PROJECT[name].text)

    def check(self) -> None:
        """Refuses values out of range.

        Raises:
          ValueError: Naming the field, what it must be, and what it is.
        """
        refused = [name for name, meaning in self.MEANINGS.items() if meaning.kind == "refused"]
        unknown = sorted(self.project_kwargs.keys() - PROJECT.keys())
        for name, holds, expected in (
            *((name, not vars(self)[name], f"False: {self.MEANINGS[name].text}") for name in refused),
            ("log_with", self.log_with in (None, *PACKAGES), f"one of {sorted(PACKAGES)} or None"),
            ("mixed_precision", self.mixed_precision in PRECISIONS, "'no', 'fp16', 'bf16' or None"),
            ("project_kwargs", not unknown, f"a mapping of {sorted(PROJECT)}"),
            *((name, vars(self)[name] >= 1, "at least 1") for name in _POSITIVE),
            *((name, vars(self)[name] >= 0, "at least 0") for name in _NOT_NEGATIVE),
            ("train_learning_rate", self.train_learning_rate > 0, "positive"),
            ("train_max_grad_norm", self.train_max_grad_norm > 0, "positive"),
            (
                "sample_batch_size",
                self.sample_batch_size >= self.train_batch_size,
                f"at least `train_batch_size` = {self.train_batch_size}",
            ),
            (
                "sample_batch_size",
                self.sample_batch_size % max(self.train_batch_size, 1) == 0,
                f"divisible by `train_batch_size` = {self.train_batch_size}",
            ),
            (
                "train_gradient_accumulation_steps",
                self.samples_of_a_device % self.samples_of_a_step == 0,
                "such that `sample_batch_size` * `sample_num_batches_per_epoch` = "
                f"{self.samples_of_a_device} is divisible by `train_batch_size` * "
                f"`train_gradient_accumulation_steps` = {self.samples_of_a_step}",
            ),
        ):
            if not holds:
                raise ValueError(f"`{name}` must be {expected}, got {vars(self)[name]!r}.")

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the axes that `mesh` names."""
        return dict(self.mesh) if isinstance(self.mesh, dict) else {}

    @property
    def samples_of_a_device(self) -> int:
        """Images of an epoch on each device."""
        return self.sample_batch_size * self.sample_num_batches_per_epoch

    @property
    def samples_of_a_step(self) -> int:
        """Samples of an optimizer step on each device."""
        return max(self.train_batch_size * self.train_gradient_accumulation_steps, 1)

    def to_dict(self) -> dict[str, Any]:
        """Field → value, a deep copy."""
        return {entry.name: copy.deepcopy(vars(self)[entry.name]) for entry in fields(self)}


_POSITIVE = (
    "num_epochs",
    "num_checkpoint_limit",
    "sample_num_steps",
    "sample_batch_size",
    "sample_num_batches_per_epoch",
    "train_batch_size",
    "train_gradient_accumulation_steps",
    "train_num_inner_epochs",
    "max_workers",
    "lora_rank",
)
_NOT_NEGATIVE = ("seed", "save_freq", "eval_every", "lr_warmup_steps")


def tracker_fields(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of a wandb run in `tracker_kwargs`: as given, under "wandb", or there under "init_kwargs"."""
    found = given.get("wandb") or ({} if "wandb" in given else given)
    return found.get("init_kwargs") or found


def _texts(given: str | Sequence[str] | None) -> list[str]:
    """Several texts; one alone is a list of one."""
    return [given] if isinstance(given, str) else list(given or [])


def _as_mesh(given: Any) -> dict[str, int] | None:
    """A mapping, or one as JSON."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise ValueError(f"`mesh` must be JSON, got {given!r}: {error}.") from error
    return None if found is None else dict(found)


def _one_prompt(given: Any) -> str:
    """The negative prompt: a text is one prompt, commas and all, and so is a list of one."""
    texts = [given] if isinstance(given, str) else list(given or [""])
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError(
            "`negative_prompts` must be one text, which all samples share, commas and all, got "
            f"{len(texts)} of them: {given!r:.80}."
        )
    return texts[0]
