# SPDX-License-Identifier: Apache-2.0
"""`GRPOConfig` and `RLOOConfig` as TRL 1.16 has them: its fields, under its names and with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jrl.trl.arguments import FlatArguments
from jrl.trl.field_table import FIELD_TABLE, TRAINER_FIELDS, Meaning

__all__ = ["GRPOConfig", "RLOOConfig"]


@dataclass
class GroupArguments(FlatArguments):
    """Fields that `GRPOConfig` and `RLOOConfig` share. What is not described here is transformers'.

    Attributes:
      learning_rate: Peak of the schedule.
      remove_unused_columns: No effect: every column of the data goes to the reward functions.
      model_init_kwargs: Arguments of `from_pretrained` where `model` is a name, as JSON.
      trust_remote_code: No effect.
      router_aux_loss_coef: No effect.
      disable_dropout: No effect: there is no dropout in any case.
      num_generations: Completions of each prompt.
      num_generations_eval: In evaluations; None: as many.
      max_completion_length: Most tokens of a completion.
      ds3_gather_for_generation: No effect.
      shuffle_dataset: No effect: prompts always come in a random order.
      pad_to_multiple_of: No effect.
      generation_batch_size: Completions of one set of rollouts; None: as `steps_per_generation` says.
      steps_per_generation: Microbatches of one set; None: `gradient_accumulation_steps`.
      temperature: Divides the logits, in sampling and learning.
      top_p: Mass of the tokens that are sampled from.
      top_k: Number of them; 0: all.
      min_p: Refused.
      generation_kwargs: Further arguments of the sampler.
      chat_template_kwargs: Variables of the chat template.
      repetition_penalty: Of the sampler.
      cache_implementation: No effect.
      use_vllm: Refused; the other fields of vLLM have no effect.
      vllm_mode: No effect.
      vllm_model_impl: No effect.
      vllm_enable_sleep_mode: No effect.
      vllm_structured_outputs_regex: No effect.
      vllm_server_base_url: No effect.
      vllm_server_host: No effect.
      vllm_server_port: No effect.
      vllm_server_timeout: No effect.
      vllm_group_port: No effect.
      vllm_gpu_memory_utilization: No effect.
      vllm_max_model_length: No effect.
      vllm_tensor_parallel_size: No effect.
      beta: Weight of the KL to the reference; 0: there is none.
      num_iterations: Passes over each set of rollouts.
      epsilon: Lower half-width of the clip.
      epsilon_high: Upper half-width; None: `epsilon`.
      reward_weights: Of the reward functions; None: 1 each.
      mask_truncated_completions: Leaves out completions that `max_completion_length` cut.
      sync_ref_model: Refused; the two fields behind it have no effect.
      ref_model_mixup_alpha: No effect.
      ref_model_sync_steps: No effect.
      log_completions: No effect: `rollouts.jsonl` always has them.
      log_multimodal: No effect.
      num_completions_to_print: No effect.
      log_unique_prompts: No effect.
      use_transformers_continuous_batching: No effect.
      transformers_continuous_batching_config: No effect.
      use_transformers_paged: No effect.
    """

    DICTIONARIES: ClassVar[tuple[str, ...]] = (
        *FlatArguments.DICTIONARIES,
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    )

    learning_rate: float = 1e-6
    remove_unused_columns: bool | None = False  # type: ignore[assignment]

    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_weights: list[float] | None = None
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    use_transformers_paged: bool = False

    def __post_init__(self) -> None:
        """Checks what does not need the devices to be known."""
        super().__post_init__()
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError(
                "`generation_batch_size` and `steps_per_generation` must not both be given: each follows from the "
                f"other, got {self.generation_batch_size} and {self.steps_per_generation}."
            )
        for name, value, least in (
            ("num_generations", self.num_generations, 2),
            ("num_generations_eval", self.num_generations_eval, 1),
            ("max_completion_length", self.max_completion_length, 1),
        ):
            if (value is None and name != "num_generations_eval") or (value is not None and value < least):
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")


@dataclass
class GRPOConfig(GroupArguments):
    """A run of GRPO. Fields that are not described here are those of `RLOOConfig`, too, or transformers'.

    Attributes:
      cast_lm_head_to_fp32: No effect: log-probabilities are always computed in float32.
      delta: Cap of the ratio in the unclipped term; None: there is none.
      sapo_temperature_neg: τ of actions with A <= 0.
      sapo_temperature_pos: τ of the others.
      vespo_k_pos: k of actions with A >= 0.
      vespo_lambda_pos: λ of them.
      vespo_k_neg: k of the others.
      vespo_lambda_neg: λ of the others.
      importance_sampling_level: "token" or "sequence" (GSPO).
      multi_objective_aggregation: "sum_then_normalize", or "normalize_then_sum" (GDPO).
      scale_rewards: "group", "batch" or "none"; True and False stand for the first and the last.
      loss_type: "dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo" or "vespo".
      top_entropy_quantile: Refused.
      entropy_coef: Weight of the entropy bonus, in the losses that are a mean over tokens.
      use_adaptive_entropy: Refused; the four fields behind it have no effect.
      entropy_coef_min: No effect.
      entropy_coef_max: No effect.
      entropy_coef_delta: No effect.
      entropy_target: No effect.
      max_tool_calling_iterations: Turns of an episode whose calls of tools are answered; None: no limit.
      vllm_importance_sampling_correction: No effect.
      vllm_importance_sampling_mode: No effect.
      vllm_importance_sampling_clip_max: No effect.
      vllm_importance_sampling_clip_min: No effect.
      vllm_importance_sampling_cap: No effect.
      off_policy_mask_threshold: Drops bad rows that the policy finds less likely than the sampler by more than this.
      use_bias_correction_kl: Multiplies the KL term by the ratio.
      log_completions_hub_repo: Refused.
    """

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {
        **TRAINER_FIELDS,
        **FIELD_TABLE["groups"],
        **FIELD_TABLE["grpo"],
    }

    cast_lm_head_to_fp32: bool = False
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    max_tool_calling_iterations: int | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    log_completions_hub_repo: str | None = None

    def __post_init__(self) -> None:
        """Reads truth values of `scale_rewards` as its words."""
        super().__post_init__()
        spelled: Any = {True: "group", "True": "group", False: "none", "False": "none"}
        self.scale_rewards = spelled.get(self.scale_rewards, self.scale_rewards)


@dataclass
class RLOOConfig(GroupArguments):
    """A run of RLOO. Fields that are not described here are those of `GRPOConfig`, too, or transformers'.

    Attributes:
      num_generations: Completions of each prompt.
      beta: Weight of the KL in the rewards; 0: there is none.
      normalize_advantages: Whether advantages are divided by their deviation over the batch.
      reward_clip_range: (−c, c), to which scores are clipped; None: they are not.
    """

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {
        **TRAINER_FIELDS,
        **FIELD_TABLE["groups"],
        **FIELD_TABLE["rloo"],
    }

    num_generations: int | None = 2
    beta: float = 0.05
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuses a range that is not symmetric."""
        super().__post_init__()
        found = self.reward_clip_range
        if found is not None and not (len(found) == 2 and -found[0] == found[1] > 0):
            raise ValueError(
                f"`reward_clip_range` must be (-c, c) with a positive c, got {found}: scores are clipped "
                "symmetrically here. Clip them in the reward function."
            )
