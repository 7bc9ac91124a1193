# SPDX-License-Identifier: Apache-2.0
"""A trainer whose model writes text: sampled from, evaluated on prompts, exported as a language model."""

from __future__ import annotations

import copy
import functools
import json
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jrl.data.chat.rendering import check_role, reply_text
from jrl.data.prompts import PromptSet
from jrl.data.sources.fingerprint import fingerprint
from jrl.forward import Reader
from jrl.models.heads import HeadsPlace
from jrl.models.model import LanguageModel
from jrl.placement import DISPATCH
from jrl.rollout.collect import Collector
from jrl.rollout.environments import EnvironmentFailure, check_environment
from jrl.rollout.episodes import Player, recorded
from jrl.rollout.episodes import environment as environment_rewards
from jrl.rollout.keywords import refuse_async, reward_functions
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.sampler import GenerationSettings, Sampler, check_logit_mask
from jrl.rollout.slot_collector import SlotCollector
from jrl.rollout.text import Texts
from jrl.trainers.base import EVALUATION_STREAM, Trainer
from jrl.trainers.config.gen_kwargs import Sweep, parse_gen_kwargs
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.export import model_writer
from jrl.trainers.loading.setup import PolicyBundle, load_policy
from jrl.trainers.loading.tokenizers import warn_of_bare_prompts
from jrl.trainers.loggers.description import describe_policy
from jrl.trainers.rollouts.draws import GENERATION_STREAM
from jrl.trainers.rollouts.evaluation import Evaluation, Evaluator
from jrl.trainers.rollouts.prompt_sets import document_start, make_prompt_set
from jrl.typing import Params, PolicyFns, PRNGKey


class PolicyTrainer(Trainer):
    """A run that trains a language model. Further arguments and attributes are those of `Trainer`.

    Args:
      config: The run's configuration.
      reward_fn: Scores completions; a list of functions: their weighted sum does.
      metric_fn: Evaluation metrics.
      stop_sequences: Texts that end a completion.
      environment: Answers the policy's turns: a class, or a function; see `jrl.rollout.environments`. None: the policy
        writes one completion a prompt. Its rewards are added to those of `reward_fn`, which may be missing then.
      logit_mask: (V, V), True where the column's token may not follow the row's; applies wherever this run samples.
      optimizer: Used instead of the one that the configuration names.

    """

    loaded: PolicyBundle

    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        stop_sequences: Sequence[str] = (),
        environment: Any = None,
        logit_mask: Any = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        if metric_fn is not None:
            refuse_async(metric_fn, "metric_fn")
        if reward_fn is not None:
            reward_functions(reward_fn)  # what could never be called is refused before a model is read
        if environment is not None:
            check_environment(environment)
            functions = () if reward_fn is None else reward_functions(reward_fn)
            reward_fn = (environment_rewards, *functions) if functions else environment_rewards
        self.reward_fn, self.metric_fn, self.stop_sequences = reward_fn, metric_fn, tuple(stop_sequences)
        self.environment = environment
        self.logit_mask = logit_mask
        self.eval_prompts: PromptSet | None = None
        self._evaluates_on_training = False
        super().__init__(config, optimizer=optimizer)

    def load_model(self) -> PolicyBundle:
        """The model, without a value head unless an algorithm says otherwise."""
        return load_policy(self.config, self.mesh, with_value_head=False)

    def prepare(self) -> None:
        """Makes the sampler, and reads how it is to sample."""
        super().prepare()
        self.forbidden = check_logit_mask(self.logit_mask, self.lm.vocab_size)
        warn_of_bare_prompts(self.config.tokenizer, self.tokenizer, self.lm.decoder_start_token_id)
        self.sampler = Sampler(self.policy, forbidden=self.forbidden, mesh=self.mesh)
        self.settings, self.sweep = self.parse_generation(self.config.method.gen_kwargs)
        if self.environment is not None:
            role = self.environment.role if hasattr(self.environment, "role") else None
            if role is not None:
                check_role(self.tokenizer, role)
            self.player  # noqa: B018  what it refuses shows here

    @functools.cached_property
    def player(self) -> Player:
        """Plays episodes, or completes prompts, on slots of the run's own mesh."""
        return self.make_player(self.mesh)

    def make_player(self, mesh: Mesh) -> Player:
        """Plays episodes, or completes prompts, on slots of a mesh."""
        return Player(
            self.policy,
            self.tokenizer,
            mesh,
            self.stop_sequences,
            forbidden=self.forbidden,
            reply=functools.partial(reply_text, self.tokenizer),
            workers=self.environment.workers if hasattr(self.environment, "workers") else 1,
        )

    @property
    def lm(self) -> LanguageModel:
        """Architecture of the language model."""
        return self.loaded.lm

    @property
    def policy(self) -> PolicyFns:
        """The model as algorithms see it, for rows that are padded on the right."""
        return self.loaded.policy

    @property
    def lenient_policy(self) -> PolicyFns:
        """The model as algorithms see it, for rows that are padded anywhere."""
        return self.loaded.lenient_policy

    @property
    def reader(self) -> Reader:
        """The model as learners read it, at temperature 1."""
        return Reader(self.policy, chunk_bytes=self.config.train.logprob_chunk_bytes)

    @property
    def sampling_params(self) -> Params:
        """Parameters that samplers read: the trainable ones, unless an algorithm steers by others."""
        return self.params

    def parse_generation(self, gen_kwargs: Mapping[str, Any]) -> tuple[GenerationSettings, Sweep | None]:
        """`gen_kwargs` with the ids filled in that end and pad a row: (settings, sweep)."""
        return self.with_environment(
            parse_gen_kwargs(
                gen_kwargs, eos_token_id=self.eos_token_ids, pad_token_id=self.tokenizer.pad_token_id
            )
        )

    def with_environment(
        self, parsed: tuple[GenerationSettings, Sweep | None]
    ) -> tuple[GenerationSettings, Sweep | None]:
        """Checks that settings limit turns only where there are any, and returns them.

        Raises:
          ValueError: If they limit turns, and there is no environment.
        """
        settings, sweep = parsed
        limits = {"max_turns": settings.max_turns, "max_turn_tokens": settings.max_turn_tokens}
        for name, value in limits.items():
            is_swept = sweep is not None and sweep[0] == name
            if (value is not None or is_swept) and self.environment is None:
                raise ValueError(
                    f"gen_kwargs: `{name}` limits the turns of an episode, got {value}, and there is no environment: "
                    "give `environment`, or leave it out."
                )
        return parsed

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a row unless `gen_kwargs` say otherwise: the tokenizer's EOS and those of the checkpoint."""
        own = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        return tuple(dict.fromkeys((*own, *self.lm.eos_token_ids)))

    def prompt_set(
        self, prompts: Sequence[Any], *, max_new_tokens: int, long_prompts: str | None = None
    ) -> PromptSet:
        """Prompts (strings, or dicts with metadata) within the budget `seq_length - max_new_tokens`.

        Args:
          prompts: Left untouched.
          max_new_tokens: The longest completion that will follow them.
          long_prompts: Default: `train.long_prompts`.
        """
        found = make_prompt_set(
            prompts,
            self.tokenizer,
            self.config,
            max_new_tokens=max_new_tokens,
            long_prompts=long_prompts,
            decoder_start_token_id=self.lm.decoder_start_token_id,
        )
        if self.environment is not None:
            check_environment(self.environment, list(found.metadata(np.arange(0))))
        return found

    @functools.cached_property
    def handed_tokenizer(self) -> Any:
        """Tokenizer for reward and metric functions: a copy, for their changes must not be exported."""
        try:
            return copy.deepcopy(self.tokenizer)
        except Exception as error:  # of a tokenizer with parts of the user's own: anything may come
            warnings.warn(
                f"The tokenizer cannot be copied ({error}): reward and metric functions get the run's own, and what "
                "they change in it is exported.",
                stacklevel=4,
            )
            return self.tokenizer

    @property
    def reward_weights(self) -> Sequence[float] | None:
        """Weights of several reward functions; None: 1 each, for algorithms that have no field for them."""
        return None

    def reward_call(self, reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]]) -> RewardCall:
        """The reward function under `train.reward_errors` and `train.reward_timeout`."""
        train = self.config.train
        return RewardCall(
            reward_fn,
            self.handed_tokenizer,
            skip_errors=train.reward_errors == "skip",
            timeout=train.reward_timeout,
            failures=self.failures,
            on_main=train.rewards_on == "main",
            weights=self.reward_weights,
            asking=self._asking,
        )

    @functools.cached_property
    def _asking(self) -> AbstractContextManager[Any]:
        """Held by each reward call of this run."""
        return threading.RLock()

    @property
    def failures(self) -> Path:
        """Folder of the completions that a reward or metric function failed on."""
        return self.run_dir / "failed_rollouts"

    def default_prompts(self) -> list[str]:
        """Default prompts: an optimizer batch of the text that starts a document."""
        return [document_start(self.tokenizer)] * self.config.train.batch_size

    def add_eval_prompts(self, prompts: Sequence[Any], *, of_training: bool = False) -> None:
        """Sets what `evaluate` samples on.

        Args:
          prompts: As `jrl.train` takes them.
          of_training: Whether the run trains on them, too, which is said beside its scores.
        """
        self._evaluates_on_training = of_training
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
        """Evaluates with the keys of this step; returns None where there is nothing to evaluate on."""
        if self.eval_prompts is None:
            return None
        evaluator = Evaluator(
            collect=self.collector(self.eval_chunk_size),
            prompts=self.eval_prompts,
            tokenizer=self.tokenizer,
            settings=self.settings,
            sweep=self.sweep,
            rewards=None if self.reward_fn is None else self.reward_call(self.reward_fn),
            metric_fn=self.metric_fn,
            step=step,
            skip_errors=self.config.train.reward_errors == "skip",
            failures=self.failures,
            handed_tokenizer=self.handed_tokenizer,
            of_training=self._evaluates_on_training,
        )
        with jax.set_mesh(self.mesh):
            key = jax.random.fold_in(jax.random.fold_in(self.root_key, EVALUATION_STREAM), step)
            return evaluator(self.sampling_params, self.frozen, key)

    def collector(
        self,
        chunk_size: int,
        rewards: RewardCall | None = None,
        *,
        slots: int | None = None,
        mesh: Mesh | None = None,
    ) -> Collector:
        """Samples and decodes, so many rows a call, and judges where there are rewards to judge by.

        Args:
          chunk_size: Rows of a call.
          rewards: Judges; None: nothing does.
          slots: Rows that are written together, each for as long as it is; None: those of a call.
          mesh: Where to sample; None: where the run learns.
        """
        on_main, sampler = self.config.train.rewards_on == "main", self.sampler
        if mesh is not None:
            sampler = Sampler(self.policy, forbidden=self.forbidden, mesh=mesh)
        parts = (sampler, self.tokenizer, self.stop_sequences, mesh or self.mesh, chunk_size)
        if self.environment is None and slots is None:
            return Collector(*parts, rewards=rewards, on_main=on_main)
        return SlotCollector(
            *parts,
            rewards=rewards,
            on_main=on_main,
            player=self.player if mesh is None else self.make_player(mesh),
            environment=self.environment,
            slots=slots,
        )

    @property
    def eval_chunk_size(self) -> int:
        """Rows of a sampling call in evaluation."""
        return self.config.train.batch_size

    def generate(
        self,
        prompts: Sequence[str],
        *,
        gen_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        key: PRNGKey | None = None,
    ) -> list[str]:
        """Completions of the prompts, as text.

        Args:
          prompts: Texts, at most `seq_length - max_new_tokens` tokens each.
          gen_kwargs: Replaces entries of `method.gen_kwargs`.
          seed: Same seed, same samples.
          key: Used instead of the seed.
        """
        settings, _ = self.parse_generation({**self.config.method.gen_kwargs, **(gen_kwargs or {})})
        # One completion a prompt: none may be dropped here.
        long_prompts = "error" if self.config.train.long_prompts == "drop" else None
        found = self.prompt_set(
            list(prompts), max_new_tokens=settings.max_new_tokens, long_prompts=long_prompts
        )
        collect = self.collector(len(found))
        with DISPATCH, jax.set_mesh(self.mesh):
            if key is None:
                key = jax.random.fold_in(jax.random.fold_in(self.root_key, GENERATION_STREAM), seed)
            indices = np.arange(len(found))
            texts = collect.texts(self.sampling_params, self.frozen, found, indices, settings, key)
        _refuse_failures(texts)
        return texts.outputs

    def record_episodes(
        self,
        prompts: Sequence[Any],
        path: str | Path,
        *,
        gen_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> int:
        """Plays an episode from each prompt and writes them as JSON lines, from which offline trainers learn.

        Args:
          prompts: Texts, or mappings with metadata.
          path: File to write.
          gen_kwargs: Replaces entries of `method.gen_kwargs`.
          seed: Same seed, same episodes.
        Returns:
          Number of episodes.
        Raises:
          ValueError: If there is no environment.
          EnvironmentFailure: If the environment fails; the episodes of the calls before are in the file.
        """
        if self.environment is None:
            raise ValueError(
                "`environment` must be given to record episodes: without one there are no turns."
            )
        settings, _ = self.parse_generation({**self.config.method.gen_kwargs, **(gen_kwargs or {})})
        long_prompts = "error" if self.config.train.long_prompts == "drop" else None
        found = self.prompt_set(
            list(prompts), max_new_tokens=settings.max_new_tokens, long_prompts=long_prompts
        )
        collect = self.collector(min(len(found), self.eval_chunk_size))
        count = 0
        with DISPATCH, jax.set_mesh(self.mesh), open(path, "w", encoding="utf-8") as file:
            key = jax.random.fold_in(jax.random.fold_in(self.root_key, GENERATION_STREAM), seed)
            indices = np.arange(len(found))
            for call, part in collect.parts(self.sampling_params, self.frozen, found, indices, settings, key):
                rows = call.batch.token_lists[: len(part.numbers)]
                _refuse_failures(part.texts)
                for record in recorded(self.tokenizer, rows, part.texts):
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    count += 1
        return count

    def model_writer(
        self, *, merge_adapter: bool = False, heads: HeadsPlace = "apart"
    ) -> Callable[[Path], None]:
        """A function that writes the parameters as they are now: copied to the host here, written whenever called."""
        return model_writer(
            self.lm,
            self.exported_params,
            self.frozen,
            adapter=self.adapter,
            base_model=self.base_model,
            tokenizer=self.tokenizer,
            merge_adapter=merge_adapter,
            heads=heads,
        )

    @property
    def architecture(self) -> Any:
        """The language model's."""
        return self.lm.config

    def data_sha256(self) -> dict[str, str]:
        """Fingerprints of the data on which samples depend, beside those of every trainer."""
        found = super().data_sha256() | {"stop_sequences": fingerprint(self.stop_sequences)}
        if self.logit_mask is not None:
            found["logit_mask"] = fingerprint(np.packbits(np.asarray(self.logit_mask)).tobytes().hex())
        if self.eval_prompts is not None:
            found["eval_prompts"] = self.eval_prompts.sha256()
        return found

    def describe_model(self) -> dict[str, str]:
        """Describes the model, with the cache of a sampling call."""
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


def _refuse_failures(texts: Texts) -> None:
    """Raises what the first environment failed with, where one did."""
    for row, failure in enumerate(texts.failures or ()):
        if failure is not None:
            raise EnvironmentFailure(f"Episode {row}, of the prompt {texts.prompts[row]!r:.80}: {failure}")
