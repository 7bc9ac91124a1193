# SPDX-License-Identifier: Apache-2.0
"""Rollouts of one iteration of an online algorithm: sampled, scored, judged, and brought together for the learner.

The device samples and scores while the host decodes and calls the reward function (`jrl.rollout.collect`).

Where groups without contrast are replaced by others (DAPO's dynamic sampling), prompts come from one endless stream:
an iteration asks for them in rounds, from where the one before stopped, and learns from the first mixed groups in the
order of the stream. What completes prompt j is drawn with a key of j and the sample alone. So a restart does not
change what is learned, nor does the size of a round where there are rounds enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.prompts import PromptSet
from jrl.mesh import replicated
from jrl.ops.alignment import join
from jrl.placement import rows_sharding
from jrl.rollout.assemble import Chunk, Overlong, assemble, hold_rows, put_rows
from jrl.rollout.collect import Call, Clock, Collected, Collector
from jrl.rollout.episodes import episode_figures
from jrl.rollout.gathering import totals
from jrl.rollout.generate import repeat_rows
from jrl.rollout.group_scores import GroupScores, pass_rates
from jrl.rollout.reward_columns import RewardColumns, mean_and_std
from jrl.rollout.rewards import RewardError, to_reward_matrix
from jrl.rollout.sampler import GenerationSettings
from jrl.rollout.score import make_score
from jrl.rollout.text import Texts, sample_rows, variety
from jrl.typing import (
    Completions,
    Frozen,
    Metrics,
    ModelInputs,
    Params,
    PolicyFns,
    PRNGKey,
    Rollouts,
    SamplingRules,
    Scored,
    Sequences,
)

_ALL = SamplingRules()


@dataclass(frozen=True)
class Experience:
    """Result of collecting an iteration's rollouts.

    Attributes:
      rollouts: For the learner.
      metrics: Host-side figures of the rollouts.
      agreement: How well sampler and learner agree; still on the device.
      rows: One dict a completion, for the samples' log: prompt, output, reward, tokens; all of them in every process.
      num_prompts: Prompts of the stream that are used up: the next iteration begins behind them.
      degenerate: Whether there were groups, and none was mixed.
    """

    rollouts: Rollouts
    metrics: dict[str, float]
    agreement: Metrics
    rows: list[dict[str, Any]]
    num_prompts: int
    degenerate: bool


class _Judged(NamedTuple):
    """Completions of whole groups, in order and in every process.

    Attributes:
      texts: What was written.
      rewards: Of the actions (R, T); NaN where there is none.
      columns: What each reward function said.
      scores: Raw, one a row; NaN likewise.
      failed: True where there is no reward, or no baseline for it.
      ended: False where the length limit cut the row.
      valid: False on rows that are left out.
      groups: The same by group.
    """

    texts: Texts
    rewards: np.ndarray
    columns: RewardColumns
    scores: np.ndarray
    failed: np.ndarray
    ended: np.ndarray
    valid: np.ndarray
    groups: GroupScores

    @staticmethod
    def concatenate(rounds: Sequence[_Judged]) -> _Judged:
        """The groups of all rounds, in order; at least one round."""
        return _Judged(
            texts=Texts.concatenate([found.texts for found in rounds]),
            rewards=np.concatenate([found.rewards for found in rounds]),
            columns=RewardColumns.concatenate([found.columns for found in rounds]),
            scores=np.concatenate([found.scores for found in rounds]),
            failed=np.concatenate([found.failed for found in rounds]),
            ended=np.concatenate([found.ended for found in rounds]),
            valid=np.concatenate([found.valid for found in rounds]),
            groups=GroupScores.concatenate([found.groups for found in rounds]),
        )


class _Filled(NamedTuple):
    """An iteration's rollouts where they come from as many rounds as it takes.

    Attributes:
      judged: All that was asked.
      held: Rows of the batch on the device; those that were not filled hold any prompt.
      rows: Which of the judged rows they are, in order.
      num_rounds: Rounds that it took.
      num_prompts: Prompts up to the last group that was kept; all that were asked, where the rounds ended before.
    """

    judged: _Judged
    held: Chunk
    rows: np.ndarray
    num_rounds: int
    num_prompts: int


class ExperienceCollector:
    """Collects `num_rollouts` rollouts an iteration, a sampling call at a time.

    Args:
      policy: The model.
      collector: Samples and judges; its `as_array` is not read.
      prompts: Training prompts, in an order that is a pure function of (seed, index).
      settings: How to sample.
      num_rollouts: Rollouts an iteration, global.
      logprob_chunk_bytes: Largest logits array of the scoring pass.
      num_generations: Samples of each prompt; must divide `num_rollouts` and the rows of a call.
      missing_eos_penalty: Subtracted from the score of a completion that `max_new_tokens` cut; None: nothing.
      sampling: Which completions become rollouts.
      with_full_kl: Whether the scoring pass compares whole distributions with the reference's.
      with_greedy: Whether each prompt is completed greedily, too, for its score alone.
      by_function: Whether the learner gets the scores of each reward function, beside their weighted sum.
      compare_scores: Whether the learner compares the scores of a prompt's samples and reads nothing else of rewards.
      with_scoring: Whether policy and reference read the completions; False takes the sampler's log-probabilities.
    """

    def __init__(
        self,
        policy: PolicyFns,
        collector: Collector,
        prompts: PromptSet,
        settings: GenerationSettings,
        *,
        num_rollouts: int,
        num_generations: int = 1,
        logprob_chunk_bytes: int,
        missing_eos_penalty: float | None,
        sampling: SamplingRules = _ALL,
        with_full_kl: bool = False,
        with_greedy: bool = False,
        by_function: bool = False,
        with_scoring: bool = True,
        compare_scores: bool = False,
    ) -> None:
        self._num_prompts, self._rules = num_rollouts // num_generations, sampling
        self._prompts_per_round = sampling.prompts_per_round or self._num_prompts
        chunk_size = min(collector.chunk_size, self._prompts_per_round * num_generations)
        # One call ahead: behind it, scoring keeps the device busy.
        self._collect = replace(
            collector,
            chunk_size=chunk_size,
            as_array=self._as_matrix,
            num_generations=num_generations,
            ahead=1,
        )
        self._num_generations = num_generations
        if num_generations > 1:
            pass_rates(num_generations)  # now: later the device has other work before it
        self._complete_greedily = (
            replace(collector, chunk_size=chunk_size, as_array=totals) if with_greedy else None
        )
        self._prompts, self._settings, self._by_function = prompts, settings, by_function
        self._widest = prompts.width(np.arange(len(prompts))) if sampling.refills else None
        self._num_rollouts, self._missing_eos_penalty = num_rollouts, missing_eos_penalty
        self._with_scoring, self._compare_scores = with_scoring, compare_scores
        mesh = collector.mesh
        self._join_and_score = scoring_program(
            policy,
            mesh,
            num_rows=chunk_size,
            num_generations=num_generations,
            pad_token_id=settings.pad_token_id,
            logprob_chunk_bytes=logprob_chunk_bytes,
            with_full_kl=with_full_kl,
            with_scoring=with_scoring,
        )
        self._assemble = jax.jit(
            assemble,
            static_argnames=("counts", "pad_token_id", "eos_penalty", "overlong", "compare"),
            out_shardings=(rows_sharding(mesh, num_rollouts), replicated(mesh)),
        )
        self._hold = jax.jit(
            hold_rows, static_argnames="num_rows", out_shardings=rows_sharding(mesh, num_rollouts)
        )
        self._put = jax.jit(put_rows, donate_argnums=0, out_shardings=rows_sharding(mesh, num_rollouts))

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        ref_params: Params | None,
        iteration: int,
        key: PRNGKey,
        *,
        first_prompt: int | None = None,
        while_sampling: Callable[[], None],
        stopwatch: Clock,
    ) -> Experience:
        """Samples, scores and rewards the rollouts of an iteration.

        Args:
          params: Of the policy.
          frozen: Shared by policy and reference.
          ref_params: Of the reference; None: the algorithm has none.
          iteration: Decides which prompts come, whatever happened before, unless `first_prompt` does.
          key: Of this iteration's samples; where rounds are refilled, of the run's.
          first_prompt: Place in the stream of prompts at which this iteration begins; None: as if every iteration
            before had used as many prompts as it learns from.
          while_sampling: Called once the first sampling call is on its way: the host is free then.
          stopwatch: Receives `rollout` (waiting for samples), `decode` and `reward`.
        Raises:
          RewardError: If the reward function fails and errors are not skipped; the rollouts are on disk by then.
        """

        def follow(inputs: ModelInputs, completions: Completions) -> tuple[Sequences, Scored]:
            temperature = jnp.float32(self._settings.temperature)
            return self._join_and_score(params, frozen, ref_params, inputs, completions, temperature)

        first = iteration * self._num_prompts if first_prompt is None else first_prompt
        label = f"iteration_{iteration:06d}"

        def ask(number: int) -> tuple[_Judged, list[Call]]:
            """Completions of a round's prompts, judged."""
            places = first + number * self._prompts_per_round + np.arange(self._prompts_per_round)
            several = self._rules.refills
            collected = self._collect(
                params,
                frozen,
                self._prompts,
                self._prompts.order(np.repeat(places, self._num_generations)),
                self._settings,
                key,
                label=f"{label}_round_{number:02d}" if several else label,
                # Of one shape in every round and iteration, and drawn by their place in the stream.
                first=int(places[0]) * self._num_generations if several else 0,
                width=self._widest if several else None,
                follow=follow,
                meanwhile=while_sampling if number == 0 else lambda: None,
                clock=stopwatch,
            )
            return self._judge(collected), collected.calls

        if self._rules.refills:
            return self._refilled(self._fill(ask))
        judged, calls = ask(0)
        greedy, num_greedy_tokens = None, 0
        if self._complete_greedily is not None:
            places = first + np.arange(self._num_prompts)
            ordered = self._prompts.order(places)
            greedy, num_greedy_tokens = self._greedy_scores(params, frozen, ordered, key, label, stopwatch)
            # A prompt without a baseline teaches nothing.
            lost = judged.failed | np.isnan(greedy)
            judged = judged._replace(failed=lost, valid=judged.valid & ~lost)
            greedy = np.where(lost, 0.0, greedy).astype(np.float32)
        return self._once(judged, calls, greedy, num_greedy_tokens)

    def _greedy_scores(
        self,
        params: Params,
        frozen: Frozen,
        prompts: np.ndarray,
        key: PRNGKey,
        label: str,
        stopwatch: Clock,
    ) -> tuple[np.ndarray, int]:
        """Score of each prompt's greedy completion, one a rollout and NaN where the reward failed; tokens of all."""
        assert self._complete_greedily is not None, "asked for in the constructor"
        found = self._complete_greedily(
            params,
            frozen,
            self._prompts,
            prompts,
            replace(self._settings, do_sample=False),
            key,
            label=f"{label}_greedy",
            clock=stopwatch,
        )
        assert found.rewards is not None, "there is a reward function"
        cut = ~found.texts.ended(self._settings.eos_token_id)
        scores = found.rewards - cut * (self._missing_eos_penalty or 0.0)
        return np.repeat(scores, self._num_generations), int(np.sum(found.texts.lengths))

    def _as_matrix(self, rewards: Sequence[float | np.ndarray], texts: Texts) -> np.ndarray:
        """Rewards placed on the actions that earned them, (rows, T); rows that failed under "skip" are NaN.

        Where scores are compared, each is one number: float32 sums of the same rewards at other places differ.
        """
        if self._compare_scores:
            rewards = [math.fsum(np.atleast_1d(reward)) for reward in rewards]
        return to_reward_matrix(rewards, texts.lengths, width=self._settings.max_new_tokens)

    def _judge(self, collected: Collected) -> _Judged:
        """Completions of whole groups, with all that the host decides by."""
        texts, rewards, columns = collected.texts, collected.rewards, collected.columns
        assert rewards is not None and columns is not None, "there is a reward function"
        failed = np.isnan(rewards).any(axis=1)
        scores = np.asarray(
            [np.nan if lost else math.fsum(row) for lost, row in zip(failed, rewards, strict=True)]
        )
        if self._rules.refuse_negative and np.nanmin(scores, initial=0.0) < 0:
            raise RewardError(
                f"Scores must not be negative for this algorithm, which divides by their mean, got {np.nanmin(scores)}."
                " Reward right answers with 1 and others with 0, or choose another `method.estimator`."
            )
        ended = texts.ended(self._settings.eos_token_id)
        valid = ~failed & (ended | (not self._rules.mask_truncated))
        shape = (-1, self._num_generations)
        groups = GroupScores(scores.reshape(shape), valid.reshape(shape), texts.lengths.reshape(shape))
        return _Judged(texts, rewards, columns, scores, failed, ended, valid, groups)

    def _fill(self, ask: Callable[[int], tuple[_Judged, list[Call]]]) -> _Filled:
        """Rounds of prompts, until there are enough mixed groups or the last round is over.

        They end early where no prompt has a reward, of as many in a row as an iteration learns from: a reward function
        that is down would be asked again and again. A round to which no function applies says nothing of that.
        """
        size, wanted = self._num_generations, self._num_prompts
        rounds: list[_Judged] = []
        kept: list[int] = []
        held: Chunk | None = None
        silent = 0
        while len(rounds) < self._rules.max_rounds and len(kept) < wanted and silent < wanted:
            judged, calls = ask(len(rounds))
            if not judged.failed.all():
                silent = 0
            elif not judged.columns.not_applicable.all():
                silent += self._prompts_per_round
            mixed = np.flatnonzero(judged.groups.mixed)[: wanted - len(kept)]
            # Where each row of the round goes; those behind the end of the batch are dropped.
            places = np.full(len(judged.scores), self._num_rollouts, np.int32)
            for place, group in enumerate(mixed, start=len(kept)):
                places[group * size : (group + 1) * size] = np.arange(place * size, (place + 1) * size)
            kept += (len(rounds) * self._prompts_per_round + mixed).tolist()
            rounds.append(judged)
            row = 0
            for call in calls:
                chunk = (*call.followed(), call.completions.logprobs)
                if held is None:
                    held = self._hold(chunk, num_rows=self._num_rollouts)
                own = np.full(len(call.completions.lengths), self._num_rollouts, np.int32)
                own[: call.count] = places[row : row + call.count]
                held = self._put(held, chunk, own)
                row += call.count
        assert held is not None, "there is a first round"
        rows = (np.asarray(kept, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        asked = len(rounds) * self._prompts_per_round
        used = kept[-1] + 1 if len(kept) == wanted else asked
        return _Filled(_Judged.concatenate(rounds), held, rows, len(rounds), used)

    def _refilled(self, filled: _Filled) -> Experience:
        """Rollouts of the groups that were kept; rows that nothing filled have no action."""
        judged, rows = filled.judged, filled.rows
        self._refuse_silence(judged.failed)

        def padded(x: np.ndarray, fill: Any) -> np.ndarray:
            missing = self._num_rollouts - len(rows)
            return np.concatenate([x[rows], np.full((missing, *x.shape[1:]), fill, x.dtype)])

        rollouts, agreement = self._assembled(
            [filled.held],
            padded(judged.rewards, 0.0),
            padded(judged.texts.lengths, 0),
            padded(judged.failed, True),
            padded(judged.ended, True),
            by_function=padded(judged.columns.scores, np.nan) if self._by_function else None,
            kept=padded(judged.valid, False) if self._rules.mask_truncated else None,
            counts=(self._num_rollouts,),
        )
        is_kept = np.isin(np.arange(len(judged.scores)), rows)
        known, lengths = judged.scores[~judged.failed], judged.texts.lengths[~judged.failed]
        mean, std = mean_and_std(known)
        metrics = self._metrics(judged) | {
            # Of all that was asked: over mixed groups alone a policy that solves everything would look like half of it.
            "reward/mean": mean,
            "reward/std": std,
            "completion/length_mean": float(np.mean(lengths)),
            "group/asked": float(len(judged.scores) // self._num_generations),
            "group/kept": float(len(rows) // self._num_generations),
            "group/sampling_rounds": float(filled.num_rounds),
        }
        return Experience(
            rollouts,
            metrics,
            agreement,
            self._rows(judged, kept=is_kept.tolist()),
            num_prompts=filled.num_prompts,
            degenerate=not len(rows),
        )

    def _once(
        self, judged: _Judged, calls: list[Call], greedy: np.ndarray | None, num_greedy_tokens: int
    ) -> Experience:
        """Rollouts of all that was sampled, with the groups marked that the rules leave out."""
        self._refuse_silence(judged.failed)
        mixed, size = judged.groups.mixed, self._num_generations
        kept = judged.valid & np.repeat(mixed, size) if self._rules.mixed_only else judged.valid
        rollouts, agreement = self._assembled(
            [(*call.followed(), call.completions.logprobs) for call in calls],
            judged.rewards,
            judged.texts.lengths,
            judged.failed,
            judged.ended,
            greedy=greedy,
            by_function=judged.columns.scores if self._by_function else None,
            kept=kept if self._rules.mixed_only or self._rules.mask_truncated else None,
            counts=tuple(call.count for call in calls),
        )
        metrics = self._metrics(judged)
        metrics["completion/tokens"] += num_greedy_tokens
        if self._rules.mixed_only:
            metrics |= {"group/asked": float(len(mixed)), "group/kept": float(np.sum(mixed))}
        return Experience(
            rollouts,
            metrics,
            agreement,
            self._rows(judged),
            num_prompts=self._num_prompts,
            degenerate=(self._rules.mixed_only and not mixed.any()) or self._is_silent(judged),
        )

    def _is_silent(self, judged: _Judged) -> bool:
        """True where scores are all that is compared, nothing shapes them, and they are equal in every group."""
        shaped = bool(self._missing_eos_penalty) or self._rules.overlong_buffer is not None
        if not self._compare_scores or shaped:
            return False
        if not self._by_function:
            return not judged.groups.mixed.any()
        valid, shape = judged.valid, judged.groups.scores.shape
        return not any(
            GroupScores(
                said.reshape(shape), (valid & ~np.isnan(said)).reshape(shape), judged.groups.lengths
            ).mixed.any()
            for said in judged.columns.scores.T
        )

    def _refuse_silence(self, failed: np.ndarray) -> None:
        if failed.all():
            raise RewardError(
                "No rollout of the iteration has a reward, so there is nothing to learn from: `reward_fn` failed on "
                "each (`reward_errors: skip`) or answered None (not applicable). Is a service it calls down? Give a "
                "reward function that applies to every prompt."
            )

    def _assembled(
        self,
        chunks: list[Chunk],
        rewards: np.ndarray,
        lengths: np.ndarray,
        failed: np.ndarray,
        ended: np.ndarray,
        *,
        counts: tuple[int, ...],
        greedy: np.ndarray | None = None,
        by_function: np.ndarray | None = None,
        kept: np.ndarray | None = None,
    ) -> tuple[Rollouts, Metrics]:
        buffer = self._rules.overlong_buffer
        found: tuple[Rollouts, Metrics] = self._assemble(
            chunks,
            np.where(failed[:, None], 0.0, rewards).astype(np.float32),
            np.where(failed, 0, lengths).astype(np.int32),
            ended,
            None if self._num_generations == 1 else np.arange(self._num_rollouts) // self._num_generations,
            greedy,
            None if by_function is None else by_function.astype(np.float32),
            kept,
            counts=counts,
            pad_token_id=self._settings.pad_token_id,
            eos_penalty=self._missing_eos_penalty,
            overlong=None
            if buffer is None
            else Overlong(self._settings.max_new_tokens, buffer, self._rules.overlong_penalty),
            compare=self._with_scoring,
        )
        return found

    def _metrics(self, judged: _Judged) -> dict[str, float]:
        found = {
            "completion/truncated_fraction": float(np.mean(~judged.ended)),
            "completion/tokens": float(sum(map(len, judged.texts.sampled()))),
            **variety(judged.texts, self._settings.eos_token_id),
            "reward/failed": float(np.sum(judged.failed)),
            "reward/failed_fraction": float(np.mean(judged.failed)),
            **judged.columns.metrics(),
            **({} if judged.texts.turns is None else episode_figures(judged.texts)),
        }
        if self._num_generations == 1:
            return found
        if not self._rules.mask_truncated and self._rules.overlong_buffer is None:
            found["group/truncated_fraction"] = found["completion/truncated_fraction"]
        return found | judged.groups.figures()

    def _rows(self, judged: _Judged, **more: Sequence[Any]) -> list[dict[str, Any]]:
        """Rows of the samples' log, with what each of several reward functions said."""
        scores = [None if lost else score for lost, score in zip(judged.failed, judged.scores, strict=True)]
        return sample_rows(judged.texts, scores, **judged.columns.cells(), **more)


def scoring_program(
    policy: PolicyFns,
    mesh: Mesh,
    *,
    num_rows: int,
    num_generations: int,
    pad_token_id: int,
    logprob_chunk_bytes: int,
    with_full_kl: bool,
    with_scoring: bool,
) -> Callable[..., tuple[Sequences, Scored]]:
    """Compiles the call after sampling: prompts and completions become rows, which policy and reference read.

    Args:
      policy: The model.
      mesh: Where the rows are.
      num_rows: Of a call.
      num_generations: Samples of each prompt.
      pad_token_id: Fills rows behind their end.
      logprob_chunk_bytes: Largest logits array.
      with_full_kl: As `ExperienceCollector` takes it.
      with_scoring: Likewise.
    Returns:
      `(params, frozen, ref_params, prompts, completions, temperature) -> (rows, their scores)`, jitted.
    """
    score = make_score(policy, logprob_chunk_bytes=logprob_chunk_bytes, with_full_kl=with_full_kl)

    def join_and_score(
        params: Params,
        frozen: Frozen,
        ref_params: Params | None,
        inputs: ModelInputs,
        completions: Completions,
        temperature: jax.Array,
    ) -> tuple[Sequences, Scored]:
        rows = repeat_rows(inputs, num_generations)
        sequences = join(rows, completions, pad_token_id=pad_token_id)
        if not with_scoring:
            return sequences, Scored(completions.logprobs, None)
        return sequences, score(params, frozen, ref_params, sequences, temperature)

    return jax.jit(
        join_and_score, out_shardings=rows_sharding(mesh, num_rows), compiler_options=COMPILER_OPTIONS
    )
