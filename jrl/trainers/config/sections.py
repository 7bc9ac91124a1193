# SPDX-License-Identifier: Apache-2.0
"""The sections of a configuration that all algorithms share; an algorithm's own is beside its learner.

Fields and defaults are trlX's. Where jrl departs from them, the field says so. Sections are mutable, because
scripts assign to them; a trainer works on a validated copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jrl.learners.config import check_numbers
from jrl.learners.optimizers import check_optimizer, check_schedule
from jrl.models.adapters.config import plain_peft_config, read_adapter_config
from jrl.models.fused_attention import AttnImplementation
from jrl.models.hub import read_config


class Section:
    """A section that can check itself again after it was edited."""

    def __post_init__(self) -> None:
        """Validates a new section."""
        self.validate()

    def validate(self) -> None:
        """Checks the fields' values.

        Raises:
          ValueError: Naming the field, what it must be, and what it is.
        """


@dataclass
class ModelConfig(Section):
    """The policy.

    Attributes:
      model_path: Directory or hub id of a Hugging Face checkpoint, or a transformers or PEFT model object of torch,
        whose tensors are read where they lie; a transformers config object means random weights. A folder that a run
        with an adapter wrote: that adapter trains on, unless `peft_config` is given.
      model_arch_type: "causal", or "seq2seq" for an encoder-decoder; it must be what the checkpoint is.
      num_layers_unfrozen: −1 trains everything; k > 0 the last k (decoder) layers, which also makes the reference cheap
        (it shares the layers below); 0 only the value head, where the algorithm has one.
      peft_config: An adapter trains and the whole model is frozen: a dict of PEFT's keys, `peft_type` (LORA,
        PREFIX_TUNING or PROMPT_TUNING) among them, or a PEFT config object. It overrides `num_layers_unfrozen`.
      frozen_dtype: What does not train is kept in this: "float32", "bfloat16", or, where an adapter trains, the
        matrices of the layers rounded to "int8" or "nf4" (4 bits) and the rest in bfloat16. A whole model is never
        written from int8 or nf4; what was frozen in bfloat16 is bfloat16 in an export. The reference's copy of what
        trains is float32 whatever this says. Where all layers train nothing is frozen, and this must be "float32".
      model_extra_configs: Fields that replace those of the checkpoint's own config.
      value_head: "mlp" (two layers, trlX's) or "linear" (TRL's), for a checkpoint that brings none.
      attn_implementation: How scoring, training and prompts attend. "auto": by cuDNN's fused kernel on NVIDIA GPUs, in
        bfloat16 or float16, and by the splash kernel on TPUs, for models that they serve; by einsums with a mask
        elsewhere. "einsum", "xla", "cudnn" and "splash" ask for one by name. Attention dropout and virtual tokens go
        through einsums in any case; so do packed rows, but on TPUs. So do the tokens that are sampled, but under
        "cudnn": in bfloat16 one reads the cache by a kernel of jrl's own there, if heads are 16, 32, 64, 128 or 256
        wide.
    """

    model_path: Any
    model_arch_type: Literal["causal", "seq2seq"] = "causal"
    num_layers_unfrozen: int = -1
    peft_config: Any = None
    frozen_dtype: Literal["float32", "bfloat16", "int8", "nf4"] = "float32"
    model_extra_configs: dict[str, Any] = field(default_factory=dict)
    value_head: Literal["mlp", "linear"] = "mlp"
    attn_implementation: AttnImplementation = "auto"

    def validate(self) -> None:
        """Refuses values outside their range."""
        check_numbers(self, "model")
        self.model_path = read_config(self.model_path)
        _require(
            self.num_layers_unfrozen >= -1,
            "model.num_layers_unfrozen",
            "at least -1 (-1: all)",
            self.num_layers_unfrozen,
        )
        if self.peft_config is not None:
            self.peft_config = plain_peft_config(self.peft_config)
            read_adapter_config(self.peft_config)


@dataclass
class TokenizerConfig(Section):
    """The tokenizer.

    Attributes:
      tokenizer_path: Directory or hub id; None: the model's own, of `model.model_path` (of the base model, where an
        adapter's folder has none). Another one is compared with the model's own, and differences are warned of.
      padding_side: Of prompts in files that say so; sampling itself always pads on the left.
      truncation_side: The side on which prompts and samples that are too long lose tokens.
      tokenizer_extra_configs: Keyword arguments of the tokenizer's constructor.
      add_special_tokens: Whether a decoder's prompts and samples begin with what the tokenizer puts before every text
        (BOS of Llama and Gemma), the same in all algorithms. False is trlX's rule; DPO and reward models have none.
    """

    tokenizer_path: str | None = None
    padding_side: Literal["left", "right"] = "left"
    truncation_side: Literal["left", "right"] = "right"
    tokenizer_extra_configs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True

    def validate(self) -> None:
        """Refuses an empty path, with which trlX 0.2 meant samples of ids."""
        _require(
            self.tokenizer_path != "",
            "tokenizer.tokenizer_path",
            "a folder or hub id, or null for the model's own (samples are texts)",
            self.tokenizer_path,
        )


def _require_named(section: str, name: Any, kwargs: Any) -> None:
    """Refuses a section whose name is no text, or whose arguments are no mapping."""
    _require(isinstance(name, str), f"{section}.name", "a text", name)
    _require(isinstance(kwargs, Mapping), f"{section}.kwargs", "a mapping", kwargs)


@dataclass
class OptimizerConfig(Section):
    """The optimizer.

    Attributes:
      name: A key of `jrl.learners.optimizers.OPTIMIZERS`, such as "adamw".
      kwargs: torch's names: `lr`, `betas`, `eps`, `weight_decay`, ...
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Refuses unknown names, before a model is read."""
        _require_named("optimizer", self.name, self.kwargs)
        check_optimizer(self.name, self.kwargs)


@dataclass
class SchedulerConfig(Section):
    """The learning rate over optimizer steps.

    Attributes:
      name: A key of `jrl.learners.optimizers.SCHEDULES`, such as "cosine_annealing" or "constant".
      kwargs: Such as `T_max` and `eta_min`.
    """

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Refuses unknown names, before a model is read."""
        _require_named("scheduler", self.name, self.kwargs)
        check_schedule(self.name, self.kwargs)


@dataclass
class TrainConfig(Section):
    """The run. Counts of rows are global, over all devices and processes; intervals count optimizer steps.

    Attributes:
      total_steps: Cap on optimizer steps, kept exactly: the last update makes only the steps that are left.
      seq_length: Tokens of a prompt and its completion together; longer samples are cut to it.
      epochs: Outer iterations of PPO; passes over the samples of SFT.
      batch_size: Rows of one optimizer step.
      checkpoint_interval: Steps between checkpoints; 0 writes only the last and, with `save_best`, the best.
      eval_interval: Steps between evaluations; 0 evaluates only before and after.
      pipeline: What holds the prompts: "PromptPipeline", or a registered subclass of `PromptSet`.
      trainer: "PPOTrainer", "ILQLTrainer", "SFTTrainer", "RFTTrainer" or a registered one; trlX's "Accelerate..."
        names are the same.
      trainer_kwargs: Further arguments of the trainer's constructor: `logit_mask`, and what a registered one takes.
      project_name: Of the tracker.
      run_name: Of the tracker; None lets it choose.
      entity_name: Of the tracker.
      group_name: Of the tracker.
      checkpoint_dir: The run's folder: checkpoints, metrics.jsonl, samples.
      rollout_logging_dir: Folder of the samples' JSON lines; None: `rollouts` in the run's folder.
      save_best: Whether an evaluation that beats all before is followed by a checkpoint.
      save_optimizer: Whether checkpoints hold the training state beside the model; without it nothing
        resumes.
      resume_from_checkpoint: A run's folder or one checkpoint of it. One that does not exist yet starts a
        fresh run.
      tracker: "tensorboard", "wandb" or None (trlX: "wandb"). metrics.jsonl is always written.
      logging_dir: Folder of the tracker's files; None: the run's folder.
      tags: Of the tracker.
      seed: Root of every random number.
      minibatch_size: Rows of one forward and backward pass; divides `batch_size`. None: all of them.
      mesh: Sizes of the axes `data`, `fsdp`, `expert`, `tensor`; −1 is what the others leave. None: all devices on
        `data`.
      max_grad_norm: The gradient's global norm is clipped to this, before any optimizer; None never clips.
      compute_dtype: Of activations and matrix products; parameters and losses stay float32. "auto" is bfloat16 on a
        GPU or TPU and float32 on a CPU; "float16" is DDPO's alone, which scales its loss.
      remat: Recomputes each layer's activations in the backward pass: a third more time, much less memory.
      keep_checkpoints: Newest checkpoints kept beside the best one.
      overwrite: Whether a fresh run may delete the checkpoints in its folder.
      reward_errors: What a reward function that raises does: "stop" the run, or "skip" that rollout.
      reward_timeout: Seconds one call of the reward function may take; None waits for ever.
      rewards_on: Of several processes, "samples": each calls the reward function on the rows that it sampled; "main":
        process 0 does, on all rows.
      max_bad_steps: Steps in a row with a non-finite loss or gradient before the run stops; each is skipped.
      long_prompts: Prompts over their budget: "truncate" (on `truncation_side`), "drop" or "error".
      logprob_chunk_bytes: Logits of more bytes, on one device, are computed in pieces.
      rollouts_ahead: Iterations of an online algorithm whose rollouts are collected while earlier ones are learned
        from: those of iteration n are sampled by the policy after update n - `rollouts_ahead`, and corrected for
        (docs/rollouts_ahead.md). 0: each waits for the update before.
      sampling_mesh: Sizes of the same axes of devices that sample and do nothing else, the last
        ones; `mesh` has the others. None: all devices do both in turn. Needs `rollouts_ahead`.
      watch: Whether the run says, once each, what its metrics show to be wrong (docs/metrics.md).
    """

    total_steps: int
    seq_length: int
    epochs: int
    batch_size: int
    checkpoint_interval: int
    eval_interval: int
    pipeline: str = "PromptPipeline"
    trainer: str = "PPOTrainer"
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)
    project_name: str = "jrl"
    run_name: str | None = None
    entity_name: str | None = None
    group_name: str | None = None
    checkpoint_dir: str = "ckpts"
    rollout_logging_dir: str | None = None
    save_best: bool = True
    save_optimizer: bool = True
    resume_from_checkpoint: str | None = None
    tracker: Literal["tensorboard", "wandb"] | None = None
    logging_dir: str | None = None
    tags: list[str] = field(default_factory=list)
    seed: int = 1000
    minibatch_size: int | None = None
    mesh: dict[str, int] | None = None
    max_grad_norm: float | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    remat: bool = False
    keep_checkpoints: int = 2
    overwrite: bool = False
    reward_errors: Literal["stop", "skip"] = "stop"
    reward_timeout: float | None = None
    rewards_on: Literal["samples", "main"] = "samples"
    max_bad_steps: int = 3
    long_prompts: Literal["truncate", "drop", "error"] = "truncate"
    logprob_chunk_bytes: int = 256_000_000
    rollouts_ahead: int = 0
    sampling_mesh: dict[str, int] | None = None
    watch: bool = True

    @property
    def rows_per_pass(self) -> int:
        """Rows of one forward and backward pass: `minibatch_size`, or all of an optimizer batch."""
        return self.batch_size if self.minibatch_size is None else self.minibatch_size

    def validate(self) -> None:
        """Refuses values outside their range."""
        check_numbers(self, "train")
        for name, count in (
            ("total_steps", self.total_steps),
            ("seq_length", self.seq_length),
            ("epochs", self.epochs),
            ("batch_size", self.batch_size),
            ("keep_checkpoints", self.keep_checkpoints),
            ("max_bad_steps", self.max_bad_steps),
        ):
            _require(count >= 1, f"train.{name}", "at least 1", count)
        for name, count in (
            ("checkpoint_interval", self.checkpoint_interval),
            ("eval_interval", self.eval_interval),
            ("seed", self.seed),
            ("rollouts_ahead", self.rollouts_ahead),
        ):
            _require(count >= 0, f"train.{name}", "at least 0", count)
        for name, limit in (
            ("max_grad_norm", self.max_grad_norm),
            ("reward_timeout", self.reward_timeout),
            ("logprob_chunk_bytes", self.logprob_chunk_bytes),
        ):
            _require(limit is None or limit > 0, f"train.{name}", "positive", limit)
        size = self.minibatch_size
        _require(
            size is None or (size >= 1 and self.batch_size % size == 0),
            "train.minibatch_size",
            f"a divisor of `train.batch_size` = {self.batch_size}, or null",
            size,
        )
        axes = {"data", "expert", "fsdp", "tensor"}
        sizes = self.mesh or {}
        _require(
            set(sizes) <= axes and all(size >= 1 or size == -1 for size in sizes.values()),
            "train.mesh",
            f"sizes (at least 1, or -1) of the axes {sorted(axes)}, as in `{{data: -1, tensor: 2}}`, or null",
            self.mesh,
        )
        own = self.sampling_mesh
        _require(
            own is None or (bool(own) and set(own) <= axes and all(size >= 1 for size in own.values())),
            "train.sampling_mesh",
            f"sizes (at least 1) of some of the axes {sorted(axes)}, or null",
            own,
        )
        _require(
            own is None or self.rollouts_ahead >= 1,
            "train.rollouts_ahead",
            "at least 1 beside `train.sampling_mesh`: its devices and those that learn would wait for each other",
            self.rollouts_ahead,
        )


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {expected}, got {got!r}.")
