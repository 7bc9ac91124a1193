# SPDX-License-Identifier: Apache-2.0
"""What every trainer offers: state, history, generation, evaluation, export."""

from __future__ import annotations

import abc
import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jrl.data.fingerprint import fingerprint
from jrl.data.prompts import PromptSet
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.mesh import replicated, tree_shardings
from jrl.trainers.checkpoint import tree_sha256
from jrl.trainers.completing import Completer
from jrl.trainers.config import TRLConfig
from jrl.trainers.description import describe_model
from jrl.trainers.evaluation import Evaluation, Evaluator
from jrl.trainers.export import model_writer
from jrl.trainers.generation import (
    GenerationSettings,
    Sampler,
    Sweep,
    check_logit_mask,
    parse_gen_kwargs,
)
from jrl.trainers.hooks import Hooks
from jrl.trainers.prompting import document_start, make_prompt_set
from jrl.trainers.reward_calls import RewardCall
from jrl.trainers.setup import PolicyBundle, load_policy, mesh_of
from jrl.typing import Params, Update

# Streams of the root key; the trainers fold their iteration numbers into them.
EVALUATION_STREAM, GENERATION_STREAM, TRAINING_STREAM = 1, 2, 3


class Trainer(abc.ABC):
    """A run of one algorithm on one model.

    Args:
      config: Copied and validated once; later changes to the caller's object do nothing.
      reward_fn: Scores completions.
      metric_fn: Evaluation metrics.
      stop_sequences: Texts that end a completion.
      logit_mask: (V, V), True where the column's token may not follow the row's; applies wherever this run samples.

    Attributes:
      config: The run's own configuration.
      state: What trains: an immutable pytree, replaced by every update.
      frozen: What does not.
      history: Training records and evaluations, as in `metrics.jsonl`.
      tokenizer: The transformers tokenizer.
      lm: The architecture.
      adapter: What trains beside the frozen model; None where parts of the model itself do.
      base_model: The model without its adapter, as `model_path` names it.
      mesh: The device mesh.
      run_dir: Folder of checkpoints, metrics and samples (`train.checkpoint_dir`).
      interrupted: Whether `learn` ended early because the process was asked to stop.
      hooks: What is called as the run goes on.
    """

    state: Any

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
        self.reward_fn, self.metric_fn, self.stop_sequences = reward_fn, metric_fn, tuple(stop_sequences)
        self.run_dir = Path(self.config.train.checkpoint_dir)
        self.history: list[dict[str, Any]] = []
        self.interrupted = False
        self.hooks = Hooks()
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

    def make_optimizer(self) -> optax.GradientTransformation:
        """The optimizer and schedule that the configuration names."""
        optimizer, scheduler = self.config.optimizer, self.config.scheduler
        return make_optimizer(
            optimizer.name,
            optimizer.kwargs,
            make_schedule(scheduler.name, scheduler.kwargs),
            max_grad_norm=self.config.train.max_grad_norm,
        )

    def compile_learner(self, init: Callable[[Params], Any], update: Update, params: Params) -> None:
        """Makes the first state on the mesh, and the jitted update that takes it over by donation."""
        shardings, _ = tree_shardings(self.mesh, jax.eval_shape(init, params))
        with jax.set_mesh(self.mesh):
            self.state = jax.jit(init, out_shardings=shardings)(params)
        self.update = jax.jit(update, donate_argnums=0, out_shardings=(shardings, replicated(self.mesh)))

    @abc.abstractmethod
    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes what `jrl.train` was given; refuses what this algorithm does not learn from."""

    @abc.abstractmethod
    def learn(self) -> None:
        """The algorithm."""

    @property
    @abc.abstractmethod
    def params(self) -> Params:
        """Trainable parameters of the current state."""

    @property
    def sampling_params(self) -> Params:
        """What samplers read: the trainable parameters, unless an algorithm steers by others."""
        return self.params

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the state: plain JSON of what this run keeps on the host."""
        return {}

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts back what `host_state` gave."""
        del found

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
        lengths = [self.settings.max_new_tokens]
        if self.sweep is not None and self.sweep[0] == "max_new_tokens":
            lengths += self.sweep[1]
        self.eval_prompts = self.prompt_set(prompts, max_new_tokens=max(lengths))

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
        key = jax.random.fold_in(jax.random.fold_in(self.root_key, EVALUATION_STREAM), step)
        with jax.set_mesh(self.mesh):
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
        key = jax.random.fold_in(jax.random.fold_in(self.root_key, GENERATION_STREAM), seed)
        complete = self.completer(len(found))
        with jax.set_mesh(self.mesh):
            indices = np.arange(len(found))
            return complete(self.sampling_params, self.frozen, found, indices, settings, key).outputs

    def save_pretrained(
        self, directory: str | os.PathLike[str] | None = None, *, merge_adapter: bool = False
    ) -> Path:
        """Writes a Hugging Face checkpoint: safetensors, config, generation config, tokenizer, and the value head.

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
            self.params,
            self.frozen,
            adapter=self.adapter,
            base_model=self.base_model,
            tokenizer=self.tokenizer,
            merge_adapter=merge_adapter,
        )

    def frozen_sha256(self) -> str:
        """Fingerprint of the frozen arrays, computed once: a checkpoint belongs to one base model."""
        return self._frozen_sha256

    @functools.cached_property
    def _frozen_sha256(self) -> str:
        return tree_sha256(self.untrained())

    def untrained(self) -> Any:
        """All arrays that the run depends on and that no checkpoint holds."""
        return self.frozen

    def data_sha256(self) -> dict[str, str]:
        """Fingerprints, by argument of `jrl.train`, of all that decides what the run does and no checkpoint holds.

        Of the model that is what its files say beside the weights: the folder at `model_path` may have changed.
        """
        adapter = None if self.adapter is None else self.adapter.config
        found = {
            "model_path": fingerprint(repr(self.lm.config), repr(adapter)),
            "stop_sequences": fingerprint(self.stop_sequences),
        }
        if self.logit_mask is not None:
            found["logit_mask"] = fingerprint(np.packbits(np.asarray(self.logit_mask)).tobytes().hex())
        if self.eval_prompts is not None:
            found["eval_prompts"] = self.eval_prompts.sha256()
        return found

    def state_is_deleted(self) -> bool:
        """Whether an update failed half-way, after the donated state was gone."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def description(self) -> dict[str, Any]:
        """What a run prints at its start."""
        found = {"algorithm": type(self).__name__} | describe_model(
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
        found["folder"] = str(self.run_dir)
        return found | ({"replicated": "; ".join(self.replicated)} if self.replicated else {})
