# SPDX-License-Identifier: Apache-2.0
"""`RewardConfig`, `SFTConfig` and `DPOConfig` as TRL has them today, with the fields that it has given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jrl.trl.arguments import FlatArguments, described
from jrl.trl.meanings import DPO, REWARD, SFT, Meaning

__all__ = ["DPOConfig", "RewardConfig", "SFTConfig"]

_INIT = "Arguments of from_pretrained where the model is a name, as JSON."
_TEMPLATE = "A .jinja file, or a model whose chat template is taken."
_DROPOUT = "Train without dropout."
_PROCESSES = "Processes that tokenise."
_EOS = "The tokenizer's end of text; it must be in the vocabulary."
_PAD = "The tokenizer's padding; it must be in the vocabulary."
_WIDTHS = "Has no effect: rows are padded to a few widths."
_OFFLOADING = "Has no effect; use gradient_checkpointing."
_REMOTE = "Has no effect: no code of a checkpoint is run."
_ROUTER = "Has no effect: routers get no loss of their own."
_SINGLY = "Has no effect: rows are tokenised one by one."


@dataclass
class RewardConfig(FlatArguments):
    """A reward model's run. Fields that are not described here are transformers'.

    Attributes:
      learning_rate: Peak of the schedule.
      model_init_kwargs: Arguments of `from_pretrained` where `model` is a name.
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

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {**FlatArguments.MEANINGS, **REWARD}

    learning_rate: float = described(1e-4, "Peak of the learning rate.")

    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": _INIT})
    chat_template_path: str | None = described(None, _TEMPLATE)
    disable_dropout: bool = described(True, _DROPOUT)
    dataset_num_proc: int | None = described(None, _PROCESSES)
    eos_token: str | None = described(None, _EOS)
    pad_token: str | None = described(None, _PAD)
    max_length: int | None = described(1024, "Pairs with a longer side are dropped.")
    pad_to_multiple_of: int | None = described(None, _WIDTHS)
    center_rewards_coefficient: float | None = described(
        None, "Weight of the squared sum of a pair's scores; 0.01 is usual."
    )
    activation_offloading: bool = described(False, _OFFLOADING)
    trust_remote_code: bool = described(False, _REMOTE)


@dataclass
class SFTConfig(FlatArguments):
    """A run of supervised fine-tuning. Fields that are not described here are transformers'.

    Attributes:
      learning_rate: Peak of the schedule.
      model_init_kwargs: Arguments of `from_pretrained` where `model` is a name.
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

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {**FlatArguments.MEANINGS, **SFT}
    DICTIONARIES: ClassVar[tuple[str, ...]] = (*FlatArguments.DICTIONARIES, "dataset_kwargs")

    learning_rate: float = described(2e-5, "Peak of the learning rate.")

    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": _INIT})
    router_aux_loss_coef: float = described(0.001, _ROUTER)
    trust_remote_code: bool = described(False, _REMOTE)
    chat_template_path: str | None = described(None, _TEMPLATE)
    dataset_text_field: str = described("text", "The column of texts.")
    dataset_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "append_concat_token, skip_prepare_dataset; as JSON."}
    )
    dataset_num_proc: int | None = described(None, _PROCESSES)
    eos_token: str | None = described(None, _EOS)
    max_length: int | None = described(1024, "Most tokens of a row.")
    truncation_mode: str = described(
        "keep_start", "The end of a long row that is kept: keep_start or keep_end."
    )
    shuffle_dataset: bool = described(False, "Has no effect: rows always come in a random order.")
    packing: bool = described(False, "Put several samples into one row.")
    packing_strategy: str = described("bfd", "bfd, bfd_split or wrapped.")
    padding_free: bool = described(False, "Has no effect.")
    pad_to_multiple_of: int | None = described(None, _WIDTHS)
    eval_packing: bool | None = described(None, "Packing of the evaluation data; by default as packing.")
    completion_only_loss: bool | None = described(
        None, "Learn completions alone; by default where rows have prompt and completion."
    )
    assistant_only_loss: bool = described(False, "Learn only what assistants say.")
    loss_type: str | None = described(None, "nll or dft.")
    activation_offloading: bool = described(False, _OFFLOADING)
    pad_token: str | None = described(None, _PAD)
    max_seq_length: int | None = described(None, "Older name of max_length.")
    num_of_sequences: int | None = described(None, "Has no effect: rows are packed by tokens.")
    chars_per_token: float | None = described(None, "Has no effect: rows are packed by tokens.")
    dataset_batch_size: int | None = described(None, _SINGLY)


@dataclass
class DPOConfig(FlatArguments):
    """A run of direct preference optimisation. Fields that are not described here are transformers'.

    Attributes:
      learning_rate: Peak of the schedule.
      model_init_kwargs: Arguments of `from_pretrained` where `model` is a name.
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
      loss_weights: One a loss.
      ld_alpha: Weight of what one completion is longer than the other.
      f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence".
      f_alpha_divergence_coef: α of the last.
      label_smoothing: Share of pairs taken to be labelled the wrong way round.
      beta: β of the implicit reward.
      use_weighting: WPO.
      discopop_tau: Temperature of the discovered loss.
      activation_offloading: No effect.
      sync_ref_model: TR-DPO.
      ref_model_mixup_alpha: Its α.
      ref_model_sync_steps: Optimizer steps between two moves.
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

    MEANINGS: ClassVar[Mapping[str, Meaning]] = {**FlatArguments.MEANINGS, **DPO}
    DICTIONARIES: ClassVar[tuple[str, ...]] = (*FlatArguments.DICTIONARIES, "ref_model_init_kwargs")

    learning_rate: float = described(1e-6, "Peak of the learning rate.")

    model_init_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": _INIT})
    trust_remote_code: bool = described(False, _REMOTE)
    router_aux_loss_coef: float = described(0.001, _ROUTER)
    disable_dropout: bool = described(True, _DROPOUT)
    dataset_num_proc: int | None = described(None, _PROCESSES)
    max_length: int | None = described(1024, "Most tokens of prompt and completion together.")
    truncation_mode: str = described(
        "keep_start", "The end of a long row that is kept: keep_start or keep_end."
    )
    padding_free: bool = described(False, "Has no effect.")
    pad_to_multiple_of: int | None = described(None, _WIDTHS)
    precompute_ref_log_probs: bool = described(False, "Score the data under the reference before training.")
    precompute_ref_batch_size: int | None = described(None, "Pairs of one such scoring call.")
    loss_type: list[str] = field(
        default_factory=lambda: ["sigmoid"], metadata={"help": "Names of losses; several are added up."}
    )
    loss_weights: list[float] | None = field(
        default=None, metadata={"help": "Their weights; by default 1 each."}
    )
    ld_alpha: float | None = described(None, "Weight of what one completion is longer than the other.")
    f_divergence_type: str = described("reverse_kl", "Divergence from the reference.")
    f_alpha_divergence_coef: float = described(0.5, "Alpha of the alpha divergence.")
    label_smoothing: float = described(0.0, "Share of pairs taken to be labelled the wrong way round.")
    beta: float = described(0.1, "Strength of the pull to the reference.")
    use_weighting: bool = described(False, "Weigh pairs by how likely their completions are.")
    discopop_tau: float = described(0.05, "Temperature of the discovered loss.")
    activation_offloading: bool = described(False, _OFFLOADING)
    sync_ref_model: bool = described(False, "Move the reference towards the policy.")
    ref_model_mixup_alpha: float = described(0.6, "Share of the policy in such a move.")
    ref_model_sync_steps: int = described(512, "Optimizer steps between two moves.")
    pad_token: str | None = described(None, _PAD)
    eos_token: str | None = described(None, _EOS)
    max_prompt_length: int | None = described(None, "Most tokens of a prompt.")
    max_completion_length: int | None = described(None, "Most tokens of a completion.")
    reference_free: bool = described(False, "Take the reference to be uniform.")
    label_pad_token_id: int = described(-100, "In the collator's labels, what is not learned.")
    padding_value: int | None = described(None, "In the collator's ids; by default the tokenizer's padding.")
    generate_during_eval: bool = described(False, "Has no effect.")
    model_adapter_name: str | None = described(None, "Has no effect.")
    ref_adapter_name: str | None = described(None, "Refused.")
    rpo_alpha: float | None = described(None, "Refused; use loss_type sigmoid and sft.")
    ref_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Arguments of from_pretrained where the reference is a name, as JSON."},
    )
    is_encoder_decoder: bool | None = described(None, "Has no effect.")
    max_target_length: int | None = described(None, "Older name of max_completion_length.")
    dataset_batch_size: int | None = described(None, _SINGLY)

    def __post_init__(self) -> None:
        """One loss may be named without a list."""
        super().__post_init__()
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
