# SPDX-License-Identifier: Apache-2.0
"""PPO against a frozen reference: sample, score, reward, update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from jrl.data.prompts import PromptSet
from jrl.learners.ppo import PPOConfig, PPOState, init_ppo_state, make_ppo_update
from jrl.trainers.base import TRAINING_STREAM
from jrl.trainers.generation import GenerationSettings
from jrl.trainers.loop import Run
from jrl.trainers.online import OnlineTrainer
from jrl.trainers.ppo_experience import Collector, Experience
from jrl.trainers.registry import register_trainer
from jrl.trainers.setup import PolicyBundle, load_policy
from jrl.typing import Params, PRNGKey


@register_trainer("PPOTrainer")
class PPOTrainer(OnlineTrainer):
    """Online PPO. `state` is a `PPOState`: policy and optimizer, KL coefficient, running score moments."""

    state: PPOState
    refusal = "PPOTrainer learns online"
    keep_ratios: ClassVar[bool] = False
    """Whether the update's metrics hold the ratio of every action."""

    @property
    def method(self) -> PPOConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(PPOConfig)

    def load_model(self) -> PolicyBundle:
        """The model with a value head."""
        return load_policy(
            self.config,
            self.mesh,
            with_value_head=True,
            num_value_layers_unfrozen=self.method.num_value_layers_unfrozen,
        )

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """The reference is copied before the state may be donated; the update is one compiled call an iteration."""
        train, method = self.config.train, self.method
        rollouts = self.rollout_settings()
        if rollouts.filtered or self.logit_mask is not None:
            warnings.warn(
                "Rollouts are filtered (`logit_mask`, top_k, top_p or repetition_penalty), but log-probabilities count "
                "the whole vocabulary: ratio and KL refer to the unfiltered policy.",
                stacklevel=4,
            )
        optimizer = self.make_optimizer()
        self.ref_params = make_reference()
        update = make_ppo_update(
            self.policy,
            optimizer,
            method,
            batch_size=train.batch_size,
            minibatch_size=train.minibatch_size or train.batch_size,
            logprob_chunk_bytes=train.logprob_chunk_bytes,
            temperature=rollouts.temperature,
            keep_ratios=self.keep_ratios,
        )
        self.compile_learner(lambda p: init_ppo_state(p, optimizer, method), update, params)

    def add_prompt_set(self, prompts: PromptSet, reward_fn: Callable[..., Any]) -> None:
        """The same for prompts that are tokenised already."""
        self.prompts, self.reward_fn = prompts, reward_fn
        self.collect: Callable[..., Experience] = self.make_collector(self.method.num_rollouts)

    def make_collector(self, num_rollouts: int) -> Collector:
        """Collects so many rollouts a call, from the prompts and with the reward function that were added."""
        train, method = self.config.train, self.method
        assert self.reward_fn is not None, "prompts come with a reward function"
        return Collector(
            self.policy,
            self.sampler,
            self.prompts,
            self.tokenizer,
            self.rollout_settings(),
            stop_sequences=self.stop_sequences,
            rewards=self.reward_call(self.reward_fn),
            mesh=self.mesh,
            num_rollouts=num_rollouts,
            chunk_size=method.chunk_size,
            logprob_chunk_bytes=train.logprob_chunk_bytes,
            missing_eos_penalty=method.missing_eos_penalty,
            with_full_kl=method.kl_penalty == "full",
        )

    def keys(self, iteration: int) -> tuple[PRNGKey, PRNGKey]:
        """Of an iteration: one for its rollouts, one for its update."""
        root_key = jax.random.fold_in(self.root_key, TRAINING_STREAM)
        rollout_key, update_key = jax.random.split(jax.random.fold_in(root_key, iteration))
        return rollout_key, update_key

    def learn(self) -> None:
        """Runs PPO up to `total_steps` or `epochs` iterations, whichever ends first."""
        with (
            jax.set_mesh(self.mesh),
            Run(
                self, steps_per_iteration=self.steps_per_iteration, num_iterations=self.num_iterations
            ) as run,
        ):
            if run.iteration == 0:
                run.evaluate()
            for iteration in run.remaining():
                rollout_key, update_key = self.keys(iteration)
                experience = self.collect(
                    self.params,
                    self.frozen,
                    self.ref_params,
                    iteration,
                    rollout_key,
                    while_sampling=run.flush,
                    stopwatch=run.stopwatch,
                )
                self.state, metrics = self.update(self.state, self.frozen, experience.batch, update_key)
                run.after(experience.metrics, metrics | experience.agreement, experience.rows)
            self.interrupted = run.stopped

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one update: passes times optimizer batches."""
        method = self.method
        return method.ppo_epochs * math.ceil(method.num_rollouts / self.config.train.batch_size)

    @property
    def num_iterations(self) -> int:
        """`epochs`, or as many as `total_steps` needs, rounded up: an update is atomic."""
        return min(
            self.config.train.epochs, math.ceil(self.config.train.total_steps / self.steps_per_iteration)
        )

    def rollout_settings(self) -> GenerationSettings:
        """`gen_experience_kwargs` where given, else `gen_kwargs` at the first value of a sweep."""
        if self.method.gen_experience_kwargs is None:
            return self.settings
        settings, sweep = self.parse_generation(self.method.gen_experience_kwargs)
        if sweep:
            raise ValueError(
                f"gen_experience_kwargs: `{sweep[0]}` is a list; only `gen_kwargs` may be swept."
            )
        return settings

    @property
    def params(self) -> Params:
        """Trainable parameters, the value head included."""
        return self.state.train.params

    def untrained(self) -> Any:
        """The frozen layers and the reference: rewards depend on both."""
        return self.frozen, self.ref_params

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.train.step

    @property
    def eval_chunk_size(self) -> int:
        """Evaluation samples as many rows a call as a rollout does."""
        return self.method.chunk_size
