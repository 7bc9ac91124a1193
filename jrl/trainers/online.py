# SPDX-License-Identifier: Apache-2.0
"""Online policy gradients, whatever their recipe: sample, score, reward, update."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.prompts import PromptSet
from jrl.learners.config import MethodConfig, OnlineConfig
from jrl.learners.online import OnlineState, init_online_state
from jrl.learners.online_tokens import TokenFigures, token_figures
from jrl.learners.recipe import Recipe
from jrl.mesh import replicated
from jrl.placement import DISPATCH
from jrl.rollout.collect import Clock
from jrl.rollout.experience import Experience, ExperienceCollector
from jrl.rollout.keywords import reward_functions
from jrl.rollout.reward_columns import check_weights
from jrl.rollout.sampler import GenerationSettings
from jrl.trainers.base import TRAINING_STREAM
from jrl.trainers.config.method import entry_of
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.setup import PolicyBundle, load_policy, sampling_mesh_of
from jrl.trainers.loggers.description import join_warnings, warn_of_batches, warn_of_slow_controller
from jrl.trainers.loop.run import Run, run_length
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.trainers.online_programs import make_update, online_programs
from jrl.trainers.plan.model_part import LanguageShapes, ModelShapes
from jrl.trainers.programs import Program
from jrl.trainers.rollouts.ahead import Ahead, Policies
from jrl.trainers.rollouts.rehearsal import Rehearsal, rehearsed
from jrl.trainers.rollouts.token_log import ROWS, is_kept
from jrl.trainers.sampling_trainer import SamplingTrainer
from jrl.typing import Metrics, Params, PRNGKey, Rollouts

STREAM_OF_PROMPTS = 7
"""What the seed's key is folded with for completions whose keys depend on their prompts' places alone."""


@register_trainer("OnlineTrainer")
class OnlineTrainer(SamplingTrainer):
    """Runs the recipe of its method. `state` is an `OnlineState`: parameters, optimizer, KL coefficient, moments."""

    _next_prompt: int | None = None
    _num_degenerate: int = 0
    _restored: tuple[Params, ...] = ()
    state: OnlineState
    ref_params: Params | None
    sampling_mesh: Mesh
    policies: Policies | None
    refusal = "learns online"
    epoch = "iteration"
    keep_ratios: ClassVar[bool] = False
    """Whether the update's metrics hold the ratio of every action."""

    @property
    def method(self) -> OnlineConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(OnlineConfig)

    def make_recipe(self) -> Recipe:
        """The algorithm, as its entry makes it of the configuration; a subclass may replace parts of it.

        Raises:
          ValueError: If the method has no recipe.
        """
        return _recipe_of(self.method)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The algorithm that this run compiles."""
        return self.make_recipe()

    def load_model(self) -> PolicyBundle:
        """The model, with a value head where the algorithm has a critic."""
        if self.reward_fn is not None:  # before anything is read
            check_weights(self.reward_weights, len(reward_functions(self.reward_fn)))
        if self.method.routing_replay and self.environment is not None:
            raise ValueError(
                "`method.routing_replay` must be False with an environment, got True: an episode is written on slots, "
                "which keep no record of experts."
            )
        return load_policy(
            self.config,
            self.mesh,
            with_value_head=self.recipe.critic,
            num_value_layers_unfrozen=self.recipe.num_value_layers_unfrozen,
        )

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """The reference is copied before the state may be donated; the update is one compiled call an iteration."""
        recipe, rollouts = self.recipe, self.rollout_settings()
        self._prepare_ahead(recipe)
        if rollouts.filtered or self.logit_mask is not None:
            warnings.warn(
                "Rollouts are filtered (`logit_mask`, top_k, top_p or repetition_penalty), but log-probabilities count "
                "the whole vocabulary: ratio and KL refer to the unfiltered policy.",
                stacklevel=4,
            )
            if recipe.select is not None and recipe.select.needs_sampler:
                raise ValueError(
                    "`logit_mask`, top_k, top_p or repetition_penalty must not shape rollouts whose sampler is "
                    "corrected for: its log-probabilities would be of what they leave."
                )
        optimizer = self.make_optimizer()
        self.ref_params = None if recipe.kl is None else make_reference()
        update = make_update(
            self.config,
            recipe,
            self.policy,
            optimizer,
            temperature=rollouts.temperature,
            keep_ratios=self.keep_ratios,
        )
        self.compile_learner(lambda p: init_online_state(p, optimizer, recipe), update, params)

    def _prepare_ahead(self, recipe: Recipe) -> None:
        """Where rollouts are sampled, and the policies that sample them where they are ahead of the updates."""
        ahead, apart = self.config.train.rollouts_ahead, sampling_mesh_of(self.config)
        self.sampling_mesh = apart or self.mesh
        self.policies = Policies(ahead, apart) if ahead else None
        if not ahead:
            return
        recipe.check_stale()
        if jax.process_count() > 1:
            raise ValueError(
                f"`train.rollouts_ahead` must be 0 where there are several processes, got {ahead} and "
                f"{jax.process_count()}: each would send its programs in an order of its own."
            )

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """Sampling call, what follows it, and the update of an iteration.

        Raises:
          ValueError: If the method has no recipe.
        """
        assert isinstance(model, LanguageShapes), "the method saw to it"
        return online_programs(config, _recipe_of(config.method), model, mesh)

    @property
    def reward_weights(self) -> Sequence[float] | None:
        """Weights of the reward functions, as the recipe has them."""
        return self.recipe.reward_weights

    def add_prompt_set(
        self, prompts: PromptSet, reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]]
    ) -> None:
        """Takes prompts that are tokenised already, and their reward function."""
        self.prompts, self.reward_fn = prompts, reward_fn
        self.collect: Callable[..., Experience] = self.make_collector(self.method.num_rollouts)

    def make_collector(self, num_rollouts: int) -> ExperienceCollector:
        """Collects so many rollouts a call, from the prompts and with the reward function that were added."""
        method, kl = self.method, self.recipe.kl
        assert self.reward_fn is not None, "prompts come with a reward function"
        return ExperienceCollector(
            self.policy,
            self.collector(
                method.chunk_size,
                self.reward_call(self.reward_fn),
                slots=method.rollout_slots,
                mesh=None if self.sampling_mesh is self.mesh else self.sampling_mesh,
            ),
            self.prompts,
            self.rollout_settings(),
            num_rollouts=num_rollouts,
            num_generations=method.num_generations,
            logprob_chunk_bytes=self.config.train.logprob_chunk_bytes,
            missing_eos_penalty=method.missing_eos_penalty,
            sampling=self.recipe.sampling,
            with_full_kl=kl is not None and kl.penalty == "full",
            with_greedy=self.recipe.greedy_baseline,
            with_scoring=self.recipe.needs_scoring(
                self.steps_per_iteration, is_stale=self.policies is not None
            ),
            compare_scores=self.recipe.compares_scores,
            by_function=self.recipe.aggregate is not None,
        )

    def keys(self, iteration: int) -> tuple[PRNGKey, PRNGKey]:
        """Random keys of an iteration: for its rollouts, and for its update."""
        root_key = jax.random.fold_in(self.root_key, TRAINING_STREAM)
        rollout_key, update_key = jax.random.split(jax.random.fold_in(root_key, iteration))
        if self.recipe.sampling.refills:  # a completion's key is of its prompt's place in the stream alone
            rollout_key = jax.random.fold_in(self.root_key, STREAM_OF_PROMPTS)
        return rollout_key, update_key

    def learn(self) -> None:
        """Runs the algorithm up to `total_steps` or `epochs` iterations, whichever ends first."""
        train = self.config.train
        with self.running(
            num_steps=train.total_steps,
            steps_per_iteration=self.steps_per_iteration,
            max_iterations=train.epochs,
        ) as run:
            run.begin()
            with self._rollouts(run) as rollouts:
                for iteration in run.remaining():
                    experience = rollouts(iteration)
                    # Once, and before the update: a warning may be an error.
                    if experience.degenerate and (iteration == 0 or not self._num_degenerate):
                        self._warn_of_equal_scores(iteration)
                    tokens = self._token_figures(experience.rollouts) if is_kept(iteration) else None
                    metrics = self._learn_from(experience, iteration, run.end_of_state)
                    host = experience.metrics | self.count(experience, iteration)
                    # Of what was sampled and left out the update knows nothing.
                    device = {name: value for name, value in metrics.items() if name not in host}
                    run.after(host, device | experience.agreement, experience.rows, tokens)

    @functools.cached_property
    def _compiled_figures(self) -> Callable[..., TokenFigures]:
        found = partial(token_figures, self.recipe, num_rows=ROWS)
        return jax.jit(found, out_shardings=replicated(self.mesh), compiler_options=COMPILER_OPTIONS)

    def _token_figures(self, rollouts: Rollouts) -> TokenFigures:
        """Figures of the tokens of a few rollouts, on their way; before the update, which donates the state."""
        with DISPATCH:
            return self._compiled_figures(self.state.moments, self.state.kl_coef, rollouts)

    def _learn_from(self, experience: Experience, iteration: int, end_of_state: np.int32 | None) -> Metrics:
        """Sends the update of an iteration on its way, and takes over the state that it will give."""
        with DISPATCH:
            self.state, metrics = self.update(
                self.state,
                self.frozen,
                experience.rollouts,
                self.keys(iteration)[1],
                end_of_state,
                self.ref_params if self.recipe.reads_reference else None,
            )
        found: Metrics = metrics
        return found

    def rehearse(self) -> Rehearsal:
        """Samples, scores and learns from one iteration's rollouts.

        Raises:
          ValueError: If rollouts are collected ahead, for which there must be a run.
        """
        if self.policies is not None:
            raise ValueError(
                f"`train.rollouts_ahead` must be 0 to try one iteration, got {self.config.train.rollouts_ahead}."
            )
        with jax.set_mesh(self.mesh):
            experience = self._collect_now(0, while_sampling=lambda: None, stopwatch=Stopwatch())
            metrics = self._learn_from(experience, 0, None)
            device = metrics | experience.agreement
            return rehearsed(
                experience.rollouts.sequences, device, rows=experience.rows, host=experience.metrics
            )

    def _collect_now(
        self, iteration: int, *, while_sampling: Callable[[], None], stopwatch: Clock
    ) -> Experience:
        """Rollouts of an iteration by the present policy."""
        return self.collect(
            self.params,
            self.frozen,
            self.ref_params,
            iteration,
            self.keys(iteration)[0],
            first_prompt=self.first_prompt(iteration),
            while_sampling=while_sampling,
            stopwatch=stopwatch,
        )

    @contextlib.contextmanager
    def _rollouts(self, run: Run) -> Iterator[Callable[[int], Experience]]:
        """Gives the rollouts of an iteration by its number, made then or ahead."""
        if self.policies is None:
            yield lambda iteration: self._collect_now(
                iteration, while_sampling=run.flush, stopwatch=run.stopwatch
            )
            return
        frozen, ref_params = self.policies.move((self.frozen, self.ref_params))

        def collect(iteration: int, params: Params, first_prompt: int | None, clock: Clock) -> Experience:
            return self.collect(
                params,
                frozen,
                ref_params,
                iteration,
                self.keys(iteration)[0],
                first_prompt=first_prompt,
                while_sampling=lambda: None,
                stopwatch=clock,
            )

        refills = self.recipe.sampling.refills
        ahead = Ahead(
            run,
            self.config.train.rollouts_ahead,
            self.policies,
            collect,
            mesh=self.mesh,
            sampling_mesh=self.sampling_mesh,
            in_turn=refills,
        )
        place = lambda iteration: self.first_prompt(iteration) if refills else None  # noqa: E731
        try:
            restored, self._restored = self._restored, ()
            ahead.begin(run.iteration, restored, place(run.iteration))
            yield lambda iteration: ahead(iteration, self.params, place(iteration))
        finally:
            ahead.close()

    def first_prompt(self, iteration: int) -> int:
        """Place in the stream of prompts at which an iteration begins."""
        if iteration == 0 or self._next_prompt is None:
            return iteration * (self.method.num_rollouts // self.method.num_generations)
        return self._next_prompt

    def count(self, experience: Experience, iteration: int) -> dict[str, float]:
        """Takes an iteration's prompts off the stream, and counts it where it had no lesson.

        Args:
          experience: Of the iteration, whose update is on its way: from here on a checkpoint has both or neither.
          iteration: Its number.
        """
        if iteration == 0:
            self._num_degenerate = 0
        if self.recipe.sampling.refills:
            self._next_prompt = self.first_prompt(iteration) + experience.num_prompts
        found: dict[str, float] = {}
        if self.policies is not None:
            self.policies.done(iteration)
            found["rollout/staleness"] = float(min(iteration, self.config.train.rollouts_ahead))
        if self.method.num_generations == 1:
            return found
        self._num_degenerate += experience.degenerate
        return found | {"group/degenerate_iterations": float(self._num_degenerate)}

    def _warn_of_equal_scores(self, iteration: int) -> None:
        what = "The update is skipped." if self.recipe.sampling.mixed_only else "Advantages of groups are 0."
        warnings.warn(
            f"Iteration {iteration}: no prompt has two samples that count and differ in their scores, so nothing can "
            f"be learned from comparing them. {what} This is said once; `group/degenerate_iterations` counts on, and "
            "the end of the run says how often it was so. If it goes on, take prompts that are neither too easy nor "
            "too hard, more samples of each (`method.num_generations`), or a reward that tells completions apart; "
            "where `mask_truncated_completions` leaves most of them out, raise `max_new_tokens`.",
            stacklevel=3,
        )

    @property
    def kept_arrays(self) -> Any:
        """The state; where rollouts are ahead, the policies that sample the next ones, too."""
        if self.policies is None:
            return self.state
        # Until the run has begun, those that a checkpoint held stand for what is on its way.
        return {"state": self.state, "policies": self._restored or self.policies.of_next(self.params)}

    def restore(self, arrays: Any, host_state: Mapping[str, Any]) -> None:
        """Goes on from where a checkpoint was written, with the rollouts that were on their way."""
        if self.policies is None:
            super().restore(arrays, host_state)
            return
        super().restore(arrays["state"], host_state)
        self._restored = arrays["policies"]

    def host_state(self) -> dict[str, Any]:
        """The place in the stream of prompts, beside what every trainer keeps."""
        own = {"next_prompt": self._next_prompt, "degenerate_iterations": self._num_degenerate}
        return super().host_state() | {"sampling": own}

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts back what `host_state` gave; in an older checkpoint every iteration used as many prompts."""
        super().load_host_state(found)
        own = found.get("sampling", {})
        self._next_prompt = own.get("next_prompt")
        self._num_degenerate = own.get("degenerate_iterations", 0)

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one update: passes times optimizer batches."""
        return self.recipe.num_steps(self.method.num_rollouts, self.config.train.batch_size)

    def describe_data(self) -> dict[str, str]:
        """The prompts, and whether optimizer batches and the KL controller fit the rollouts."""
        rows, train, kl = self.method.num_rollouts, self.config.train, self.recipe.kl
        slow: dict[str, str] = {}
        if kl is not None and kl.target is not None and kl.horizon is not None:
            iterations, _ = run_length(
                train.total_steps, steps_per_iteration=self.steps_per_iteration, max_iterations=train.epochs
            )
            slow = warn_of_slow_controller(kl.target, kl.horizon, iterations=iterations, rollouts=rows)
        batches = warn_of_batches(train.batch_size, rows, "`method.num_rollouts`", ragged=True)
        return super().describe_data() | join_warnings(batches, slow)

    def description(self) -> dict[str, Any]:
        """Description of the run, under the algorithm's own title where this class runs it."""
        entry = entry_of(self.method)
        titled = {"algorithm": entry.title} if type(self) is OnlineTrainer and entry is not None else {}
        return super().description() | titled

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
        """Trainable parameters, a value head included."""
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


def _recipe_of(method: MethodConfig) -> Recipe:
    entry = entry_of(method)
    if entry is None or entry.recipe is None:
        raise ValueError(
            f"`method.name` must be that of an online algorithm with a recipe, got {method.name!r}. "
            "`jrl.register(jrl.Method(...))` makes one known."
        )
    return entry.recipe(method)
