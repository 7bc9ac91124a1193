# SPDX-License-Identifier: Apache-2.0
"""A policy as a run holds it: loaded, sampled from, evaluated, exported. Nothing here learns."""

from __future__ import annotations

import abc
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.prompts import PromptSet
from jrl.trainers.completing import Completer
from jrl.trainers.config import TRLConfig
from jrl.trainers.evaluation import Evaluation, Evaluator
from jrl.trainers.export import model_writer
from jrl.trainers.generation import (
    GenerationSettings,
    Sampler,
    Sweep,
    check_logit_mask,
    parse_gen_kwargs,
)
from jrl.trainers.loggers_trackers import check_tracker
from jrl.trainers.prompting import document_start, make_prompt_set
from jrl.trainers.reward_calls import RewardCall
from jrl.trainers.setup import PolicyBundle, load_policy, mesh_of
from jrl.typing import Params

# Streams of the root key; the trainers fold their iteration numbers into them.
EVALUATION_STREAM, GENERATION_STREAM, TRAINING_STREAM = 1, 2, 3


class PolicyHolder(abc.ABC):
    """A loaded policy and what it is sampled, scored and written with.

    Args:
      config: Copied and validated once; later changes to the caller's object do nothing.
      reward_fn: Scores completions.
      metric_fn: Evaluation metrics.
      stop_sequences: Texts that end a completion.
      logit_mask: (V, V), True where the column's token may not follow the row's; applies wherever this run samples.

    Attributes:
      config: The run's own configuration.
      frozen: What does not train.
      tokenizer: The transformers tokenizer.
      lm: The architecture.
      adapter: What trains beside the frozen model; None where parts of the model itself do.
      base_model: The model without its adapter, as `model_path` names it.
      mesh: The device mesh.
      run_dir: Folder of checkpoints, metrics and samples (`train.checkpoint_dir`).
    """

    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        stop_sequences: Sequence[str] = (),
        logit_mask: Any = None,
    ) -> None:
        self.config = copy.deepcopy(config)
        self.config.validate()
        check_tracker(self.config.train.tracker)
        self.reward_fn, self.metric_fn, self.stop_sequences = reward_fn, metric_fn, tuple(stop_sequences)
        self.run_dir = Path(self.config.train.checkpoint_dir)
        self.mesh = mesh_of(self.config)
        with jax.set_mesh(self.mesh):
            bundle = self.load_policy()
        self.lm, self.policy, self.tokenizer = bundle.lm, bundle.policy, bundle.tokenizer
        self.adapter, self.base_model = bundle.adapter, bundle.base_model
        self.frozen, self.replicated = bundle.frozen, bundle.replicated
        self.logit_mask = logit_mask
        self.sampler = Sampler(self.policy, forbidden=check_logit_mask(logit_mask, self.lm.vocab_size))
        self.settings, self.sweep = self.parse_generation(self.config.method.gen_kwargs)
        self.root_key = jax.random.key(self.config.train.seed)
        self.eval_prompts: PromptSet | None = None
        self.build(bundle.params, bundle.reference)

    def load_policy(self) -> PolicyBundle:
        """The model, without a value head unless an algorithm says otherwise."""
        return load_policy(self.config, self.mesh, with_value_head=False)

    @abc.abstractmethod
    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """Makes optimizer, state and the compiled update from the trainable parameters."""

    @property
    @abc.abstractmethod
    def params(self) -> Params:
        """Trainable parameters of the current state."""

    @property
    def sampling_params(self) -> Params:
        """What samplers read: the trainable parameters, unless an algorithm steers by others."""
        return self.params

    @property
    def exported_params(self) -> Params:
        """What `save_pretrained` writes beside the frozen part: the trainable parameters, unless a state holds more."""
        return self.params

    def parse_generation(self, gen_kwargs: Mapping[str, Any]) -> tuple[GenerationSettings, Sweep | None]:
        """`gen_kwargs` with the tokenizer's special tokens filled in: (settings, sweep)."""
        return parse_gen_kwargs(
            gen_kwargs, eos_token_id=self.tokenizer.eos_token_id, pad_token_id=self.tokenizer.pad_token_id
        )

    def prompt_set(
        self, prompts: Sequence[Any], *, max_new_tokens: int, long_prompts: str | None = None
    ) -> PromptSet:
        """Prompts (strings, or dicts with metadata) within the budget `seq_length - max_new_tokens`.

        Args:
          prompts: Left untouched.
          max_new_tokens: The longest completion that will follow them.
          long_prompts: Default: `train.long_prompts`.
        """
        return make_prompt_set(
            prompts,
            self.tokenizer,
            self.config.train,
            max_new_tokens=max_new_tokens,
            long_prompts=long_prompts,
            decoder_start_token_id=self.lm.decoder_start_token_id,
        )

    def reward_call(self, reward_fn: Callable[..., Any]) -> RewardCall:
        """The reward function under `train.reward_errors` and `train.reward_timeout`."""
        train = self.config.train
        return RewardCall(
            reward_fn,
            self.tokenizer,
            skip_errors=train.reward_errors == "skip",
            timeout=train.reward_timeout,
            failures=self.run_dir / "failed_rollouts",
        )

    def default_prompts(self) -> list[str]:
        """One optimizer batch of the text that starts a document."""
        return [document_start(self.tokenizer)] * self.config.train.batch_size

    def add_eval_prompts(self, prompts: Sequence[Any]) -> None:
        """Sets what `evaluate` samples on."""
        self.eval_prompts = self.prompt_set(prompts, max_new_tokens=self.longest_evaluation)

    @property
    def longest_evaluation(self) -> int:
        """Most tokens of a completion in an evaluation, over all values of a sweep."""
        swept = self.sweep[1] if self.sweep is not None and self.sweep[0] == "max_new_tokens" else ()
        return max((self.settings.max_new_tokens, *swept))

    def evaluate(self) -> dict[str, float]:
        """Samples on the evaluation prompts and returns `reward/mean`, `metrics/<name>`, ..."""
        found = self.run_evaluation(int(jax.device_get(self.optimizer_steps())))
        return {} if found is None else found.metrics

    @abc.abstractmethod
    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""

    def run_evaluation(self, step: int) -> Evaluation | None:
        """One evaluation with the keys of this step; None where there is nothing to evaluate on."""
        if self.eval_prompts is None:
            return None
        evaluator = Evaluator(
            complete=self.completer(self.eval_chunk_size),
            prompts=self.eval_prompts,
            tokenizer=self.tokenizer,
            settings=self.settings,
            sweep=self.sweep,
            rewards=None if self.reward_fn is None else self.reward_call(self.reward_fn),
            metric_fn=self.metric_fn,
            label=f"evaluation_at_step_{step:06d}",
        )
        with jax.set_mesh(self.mesh):
            key = jax.random.fold_in(jax.random.fold_in(self.root_key, EVALUATION_STREAM), step)
            return evaluator(self.sampling_params, self.frozen, key)

    def completer(self, chunk_size: int) -> Completer:
        """Samples and decodes, so many rows a call."""
        return Completer(self.sampler, self.tokenizer, self.stop_sequences, self.mesh, chunk_size)

    @property
    def eval_chunk_size(self) -> int:
        """Rows of a sampling call in evaluation."""
        return self.config.train.batch_size

    def generate(
        self, prompts: Sequence[str], *, gen_kwargs: Mapping[str, Any] | None = None, seed: int = 0
    ) -> list[str]:
        """Completions of the prompts, as text.

        Args:
          prompts: Texts, at most `seq_length - max_new_tokens` tokens each.
          gen_kwargs: Replaces entries of `method.gen_kwargs`.
          seed: Same seed, same samples.
        """
        settings, _ = self.parse_generation({**self.config.method.gen_kwargs, **(gen_kwargs or {})})
        # One completion a prompt: none may be dropped here.
        long_prompts = "error" if self.config.train.long_prompts == "drop" else None
        found = self.prompt_set(
            list(prompts), max_new_tokens=settings.max_new_tokens, long_prompts=long_prompts
        )
        complete = self.completer(len(found))
        with jax.set_mesh(self.mesh):
            key = jax.random.fold_in(jax.random.fold_in(self.root_key, GENERATION_STREAM), seed)
            indices = np.arange(len(found))
            return complete(self.sampling_params, self.frozen, found, indices, settings, key).outputs

    def save_pretrained(
        self, directory: str | os.PathLike[str] | None = None, *, merge_adapter: bool = False
    ) -> Path:
        """Writes a Hugging Face checkpoint: safetensors, config, generation config, tokenizer, and the heads.

        Where an adapter trains, that is PEFT's folder, which holds the adapter and names the base model.

        Args:
          directory: Defaults to `hf_model` in the run's folder.
          merge_adapter: Writes the whole model instead, with the adapter in its weights.
        Raises:
          ValueError: If there is no adapter that can be merged into these weights.
        """
        target = Path(directory) if directory is not None else self.run_dir / "hf_model"
        self.model_writer(merge_adapter=merge_adapter)(target)
        return target

    def model_writer(self, *, merge_adapter: bool = False) -> Callable[[Path], None]:
        """A function that writes the parameters as they are now: copied to the host here, written whenever called."""
        return model_writer(
            self.lm,
            self.exported_params,
            self.frozen,
            adapter=self.adapter,
            base_model=self.base_model,
            tokenizer=self.tokenizer,
            merge_adapter=merge_adapter,
        )
