# SPDX-License-Identifier: Apache-2.0
"""`RewardConfig`, `SFTConfig` and `DPOConfig` as TRL has them today, with the fields that it has given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jrl.trl.arguments import FlatArguments
from jrl.trl.field_table import FIELD_TABLE, TRAINER_FIELDS, Meaning

__all__ = ["DPOConfig", "RewardConfig", "SFTConfig"]


@dataclass
class RewardConfig(FlatArguments):
    """A reward model's run. Fields that are not described here are transformers'.

    Attributes:
      learning_rate: Peak of the schedule.
      model_init_kwargs: Arguments of `from_pretrained` where `model` is a name, as JSON.
      chat_template_path: A .jinja file, or a model whose chat template is taken.
      disable_dropout: Whether training is without dropout.
      dataset_num_proc: Processes that tokenise.
      eos_token: The tokenizer's end of text.
      pad_token: The tokenizer's padding.
      max_length: Pairs with a longer side are dropped, not cut; None: the model's positions.
      pad_to_multiple_of: No effect.
      center_rewards_coefficient: Weight of (r_chosen + r_rejected)²; 0.01 is usual.
      activation_offloading: No effect.
      trust_remote_code: No effect.
    """

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {**TRAINER_FIELDS, **FIELD_TABLE["reward"]}

    learning_rate: float = 1e-4

    model_init_kwargs: dict[str, Any] | str | None = None
    chat_template_path: str | None = None
    disable_dropout: bool = True
    dataset_num_proc: int | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    max_length: int | None = 1024
    pad_to_multiple_of: int | None = None
    center_rewards_coefficient: float | None = None
    activation_offloading: bool = False
    trust_remote_code: bool = False


@dataclass
class SFTConfig(FlatArguments):
    """A run of supervised fine-tuning. Fields that are not described here are transformers'.

    Attributes:
      learning_rate: Peak of the schedule.
      model_init_kwargs: Arguments of `from_pretrained` where `model` is a name, as JSON.
      router_aux_loss_coef: No effect.
      trust_remote_code: No effect.
      chat_template_path: A .jinja file, or a model whose chat template is taken.
      dataset_text_field: The column of texts.
      dataset_kwargs: `skip_prepare_dataset`: rows have `input_ids`. `append_concat_token`: whether texts get an EOS.
      dataset_num_proc: Processes that tokenise.
      eos_token: The tokenizer's end of text.
      max_length: Most tokens of a row; longer ones are cut, or as `packing_strategy` says.
      truncation_mode: "keep_start" or "keep_end" of a row that is cut.
      shuffle_dataset: No effect: rows always come in a random order.
      packing: Whether several samples share a row.
      packing_strategy: "bfd", "bfd_split" or "wrapped".
      padding_free: No effect.
      pad_to_multiple_of: No effect.
      eval_packing: Of the evaluation data; None: as `packing`.
      completion_only_loss: None: where rows have `prompt` and `completion`.
      assistant_only_loss: Whether only what assistants say is learned.
      loss_type: "nll" (None, "chunked_nll") or "dft".
      activation_offloading: No effect.
      pad_token: The tokenizer's padding.
      max_seq_length: Older name of `max_length`.
      num_of_sequences: No effect.
      chars_per_token: No effect.
      dataset_batch_size: No effect.
    """

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {**TRAINER_FIELDS, **FIELD_TABLE["sft"]}
    DICTIONARIES: ClassVar[tuple[str, ...]] = (*FlatArguments.DICTIONARIES, "dataset_kwargs")

    learning_rate: float = 2e-5

    model_init_kwargs: dict[str, Any] | str | None = None
    router_aux_loss_coef: float = 0.001
    trust_remote_code: bool = False
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    dataset_kwargs: dict[str, Any] | str | None = None
    dataset_num_proc: int | None = None
    eos_token: str | None = None
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    shuffle_dataset: bool = False
    packing: bool = False
    packing_strategy: str = "bfd"
    padding_free: bool = False
    pad_to_multiple_of: int | None = None
    eval_packing: bool | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str | None = None
    activation_offloading: bool = False
    pad_token: str | None = None
    max_seq_length: int | None = None
    num_of_sequences: int | None = None
    chars_per_token: float | None = None
    dataset_batch_size: int | None = None


@dataclass
class DPOConfig(FlatArguments):
    """A run of direct preference optimisation. Fields that are not described here are transformers'.

    Attributes:
      learning_rate: Peak of the schedule.
      model_init_kwargs: Arguments of `from_pretrained` where `model` is a name, as JSON.
      trust_remote_code: No effect.
      router_aux_loss_coef: No effect.
      disable_dropout: Whether training is without dropout.
      dataset_num_proc: Processes that tokenise.
      max_length: Most tokens of prompt and completion together.
      truncation_mode: "keep_start" or "keep_end" of a sequence that is cut.
      padding_free: No effect.
      pad_to_multiple_of: No effect.
      precompute_ref_log_probs: Whether the reference scores the data before training; jrl does so wherever it is
        frozen.
      precompute_ref_batch_size: Pairs of one such scoring call.
      loss_type: Names of `jrl.losses.dpo.LOSSES`, one or several.
      loss_weights: Weight of each loss; None: 1.
      ld_alpha: Weight of what one completion is longer than the other.
      f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence".
      f_alpha_divergence_coef: α of the alpha divergence.
      label_smoothing: Share of pairs taken to be labelled the wrong way round.
      beta: β of the implicit reward.
      use_weighting: WPO: pairs weigh by how likely their completions are.
      discopop_tau: Temperature of the discovered loss.
      activation_offloading: No effect.
      sync_ref_model: TR-DPO: the reference moves towards the policy.
      ref_model_mixup_alpha: Share of the policy in such a move.
      ref_model_sync_steps: Optimizer steps between two such moves.
      pad_token: The tokenizer's padding.
      eos_token: The tokenizer's end of text.
      max_prompt_length: Most tokens of a prompt.
      max_completion_length: Most tokens of a completion.
      reference_free: Takes the reference to be uniform.
      label_pad_token_id: In labels of the collator, what is not learned.
      padding_value: In ids of the collator; None: the tokenizer's padding.
      generate_during_eval: No effect.
      model_adapter_name: No effect.
      ref_adapter_name: Refused.
      rpo_alpha: Refused; `loss_type=["sigmoid", "sft"]`.
      ref_model_init_kwargs: Arguments of `from_pretrained` where `ref_model` is a name.
      is_encoder_decoder: No effect.
      max_target_length: Older name of `max_completion_length`.
      dataset_batch_size: No effect.
    """

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {**TRAINER_FIELDS, **FIELD_TABLE["dpo"]}
    DICTIONARIES: ClassVar[tuple[str, ...]] = (*FlatArguments.DICTIONARIES, "ref_model_init_kwargs")

    learning_rate: float = 1e-6

    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float = 0.001
    disable_dropout: bool = True
    dataset_num_proc: int | None = None
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    padding_free: bool = False
    pad_to_multiple_of: int | None = None
    precompute_ref_log_probs: bool = False
    precompute_ref_batch_size: int | None = None
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    ld_alpha: float | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    label_smoothing: float = 0.0
    beta: float = 0.1
    use_weighting: bool = False
    discopop_tau: float = 0.05
    activation_offloading: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    pad_token: str | None = None
    eos_token: str | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    reference_free: bool = False
    label_pad_token_id: int = -100
    padding_value: int | None = None
    generate_during_eval: bool = False
    model_adapter_name: str | None = None
    ref_adapter_name: str | None = None
    rpo_alpha: float | None = None
    ref_model_init_kwargs: dict[str, Any] | str | None = None
    is_encoder_decoder: bool | None = None
    max_target_length: int | None = None
    dataset_batch_size: int | None = None

    def __post_init__(self) -> None:
        """Makes a list of a single loss that is named without one."""
        super().__post_init__()
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
