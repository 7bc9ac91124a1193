# SPDX-License-Identifier: Apache-2.0
"""A trainer whose model writes text: sampled from, evaluated on prompts, exported as a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jrl.data.fingerprint import fingerprint
from jrl.data.prompts import PromptSet
from jrl.trainers.base import EVALUATION_STREAM, GENERATION_STREAM, Trainer
from jrl.trainers.completing import Completer
from jrl.trainers.config import TRLConfig
from jrl.trainers.description import describe_policy
from jrl.trainers.evaluation import Evaluation, Evaluator
from jrl.trainers.export import model_writer
from jrl.trainers.generation import (
    GenerationSettings,
    Sampler,
    Sweep,
    check_logit_mask,
    parse_gen_kwargs,
)
from jrl.trainers.prompting import document_start, make_prompt_set
from jrl.trainers.reward_calls import RewardCall
from jrl.trainers.setup import PolicyBundle, load_policy
from jrl.typing import Params


class PolicyTrainer(Trainer):
    """A run that trains a language model. Further arguments and attributes are those of `Trainer`.

    Args:
      config: The run's configuration.
      reward_fn: Scores completions.
      metric_fn: Evaluation metrics.
      stop_sequences: Texts that end a completion.
      logit_mask: (V, V), True where the column's token may not follow the row's; applies wherever this run samples.
      optimizer: Used instead of the one that the configuration names.

    Attributes:
      lm: The architecture.
      policy: The model as algorithms see it, for rows that are padded on the right.
      lenient_policy: The same for rows that are padded anywhere.
    """

    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        stop_sequences: Sequence[str] = (),
        logit_mask: Any = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        self.reward_fn, self.metric_fn, self.stop_sequences = reward_fn, metric_fn, tuple(stop_sequences)
        self.logit_mask = logit_mask
        self.eval_prompts: PromptSet | None = None
        super().__init__(config, optimizer=optimizer)

    def load_model(self) -> PolicyBundle:
        """The model, without a value head unless an algorithm says otherwise."""
        return load_policy(self.config, self.mesh, with_value_head=False)

    def use_model(self, bundle: PolicyBundle) -> None:
        """Makes the sampler."""
        self.lm, self.policy, self.lenient_policy = bundle.lm, bundle.policy, bundle.lenient_policy
        forbidden = check_logit_mask(self.logit_mask, self.lm.vocab_size)
        self.sampler = Sampler(self.policy, forbidden=forbidden, mesh=self.mesh)
        self.settings, self.sweep = self.parse_generation(self.config.method.gen_kwargs)

    @property
    def sampling_params(self) -> Params:
        """What samplers read: the trainable parameters, unless an algorithm steers by others."""
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
            on_main=train.rewards_on == "main",
        )

    def default_prompts(self) -> list[str]:
        """One optimizer batch of the text that starts a document."""
        return [document_start(self.tokenizer)] * self.config.train.batch_size

    def add_eval_prompts(self, prompts: Sequence[Any]) -> None:
        """Sets what `evaluate` samples on."""
        self.eval_prompts = self.prompt_set(prompts, max_new_tokens=self.longest_evaluation)

    def add_default_eval_prompts(self, samples: Sequence[Any], eval_prompts: Sequence[Any] | None) -> None:
        """Sets what `evaluate` samples on: by default the BOS text, for seq2seq models the first samples' prompts."""
        if eval_prompts is None and self.lm.decoder_start_token_id is not None:
            eval_prompts = [sample[0] for sample in samples[: self.config.train.batch_size]]
        self.add_eval_prompts(self.default_prompts() if eval_prompts is None else eval_prompts)

    @property
    def longest_evaluation(self) -> int:
        """Most tokens of a completion in an evaluation, over all values of a sweep."""
        swept = self.sweep[1] if self.sweep is not None and self.sweep[0] == "max_new_tokens" else ()
        return max((self.settings.max_new_tokens, *swept))

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
        on_main = self.config.train.rewards_on == "main"
        return Completer(
            self.sampler, self.tokenizer, self.stop_sequences, self.mesh, chunk_size, on_main=on_main
        )

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

    @property
    def architecture(self) -> Any:
        """The language model's."""
        return self.lm.config

    def data_sha256(self) -> dict[str, str]:
        """What samples depend on, beside what every trainer has."""
        found = super().data_sha256() | {"stop_sequences": fingerprint(self.stop_sequences)}
        if self.logit_mask is not None:
            found["logit_mask"] = fingerprint(np.packbits(np.asarray(self.logit_mask)).tobytes().hex())
        if self.eval_prompts is not None:
            found["eval_prompts"] = self.eval_prompts.sha256()
        return found

    def describe_model(self) -> dict[str, str]:
        """With the cache of one sampling call."""
        return describe_policy(
            self.lm,
            self.policy,
            self.params,
            self.frozen,
            state=self.state,
            untrained=self.untrained(),
            mesh=self.mesh,
            rows=self.eval_chunk_size,
            length=self.config.train.seq_length,
        )
