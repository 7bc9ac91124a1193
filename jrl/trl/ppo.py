# SPDX-License-Identifier: Apache-2.0
"""TRL's step-by-step PPO trainer: `generate`, score by whatever means, `step`. The learner is `jrl.train`'s."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.data.tokenizer import load_tokenizer
from jrl.interop import (
    Accelerator,
    DataLoader,
    RunningMoments,
    read_checkpoint,
    refuse_assigned,
    refuse_overrides,
    refuse_while_traced,
    seed_generators,
    torch_in_torch_out,
    write_checkpoint,
)
from jrl.learners.online import OnlineState
from jrl.ops.metrics import finalize
from jrl.placement import place_rows
from jrl.trainers.cards import model_card
from jrl.trainers.loop import says_what_takes_long
from jrl.trl.handles import same_source, say_untrained
from jrl.trl.loaded_model import TemporaryFolder
from jrl.trl.models import ModelHandle
from jrl.trl.ppo_config import (
    Optimizer,
    PPOConfig,
    Schedule,
    checked_schedule,
    native_config,
    policy_handle,
    reference_handle,
    with_optimizer,
)
from jrl.trl.ppo_data import (
    RolloutMethods,
    RolloutRows,
    make_sequences,
    read_rollouts,
    reward_columns,
    spread,
)
from jrl.trl.ppo_manual import ManualSteps, kl_penalty
from jrl.trl.ppo_native import KLControl, StepwisePPO
from jrl.trl.ppo_overrides import LIVE
from jrl.trl.ppo_stats import Clock, StatsLog, reward_stats, step_stats, train_stats
from jrl.trl.refusals import PPO
from jrl.typing import Rollouts
from jrl.upload import push_to_hub

__all__ = ["PPOConfig", "PPOTrainer"]


class PPOTrainer(RolloutMethods, ManualSteps):
    """PPO whose rollouts a script brings.

    A subclass may override `compute_rewards`, `compute_advantages` and `loss`: `step` learns from what they return.
    They are traced into the compiled update, so they compute with jax arrays (`docs/migrating/trl_ppo.md`).
    Methods that nothing would call are refused.

    Args:
      config: TRL's `PPOConfig`.
      model: What trains: a handle with a value head, or whatever `resolve_model` takes.
      ref_model: The frozen reference: None or a handle of the same source: the model as it is now; one of
        `create_reference_model`: with shared layers; one of another checkpoint of the same architecture: that. Beside
        an adapter the reference is always the base model.
      tokenizer: A transformers tokenizer.
      dataset: Rows for `dataloader`; None: there is none.
      optimizer: None: Adam at `config.learning_rate`; a name, or a pair (name, arguments); an optax transformation;
        an optimizer of torch, whose method and arguments are taken over.
      data_collator: Makes the loader's batches; default: one list a column.
      num_shared_layers: Layers from the bottom, embeddings with them, that do not train and that the reference shares.
      lr_scheduler: Call of `step` → learning rate, traceable as optax schedules are; or one of torch, whose rates of
        `config.steps` calls are taken over.

    Attributes:
      config: As given, with what the trainer fills in.
      model: The handle; it generates and saves with the parameters as they are now.
      ref_model: A handle that stands for the reference.
      tokenizer: A copy that has a pad token.
      dataloader: Shuffled batches of the data set.
      optimizer: optax's transformation.
      lr_scheduler: As given.
      kl_ctl: Its `value` is the KL coefficient.
      accelerator: Who this process is.
      native: jrl's own trainer, with `state`, `history` and `config`.
      is_encoder_decoder: Whether an encoder reads the queries.
      is_peft_model: Whether an adapter trains.
      current_device: That of `accelerator`: where a script may put tensors.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Optimizer = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Schedule | None = None,
    ) -> None:
        refuse_overrides(type(self), PPOTrainer, PPO)
        if not isinstance(config, PPOConfig):
            raise ValueError(f"`config` must be a jrl.trl.PPOConfig, got {type(config).__name__}.")
        if tokenizer is None or not callable(getattr(tokenizer, "get_vocab", None)):
            raise ValueError(f"`tokenizer` must be a transformers tokenizer, got {type(tokenizer).__name__}.")
        self.config = replace(config)
        seed_generators(config.seed)
        handle = policy_handle(model)
        reference = reference_handle(ref_model, handle, num_shared_layers)
        shared = num_shared_layers if reference is None else reference.num_shared_layers
        self.tokenizer = load_tokenizer(
            tokenizer, padding_side=tokenizer.padding_side, truncation_side=tokenizer.truncation_side
        )
        self.lr_scheduler = checked_schedule(lr_scheduler, optimizer, config.steps)
        self.data_collator = data_collator
        self.dataloader = self._loader(dataset)
        self._temporary = TemporaryFolder("jrl_ppo_")
        other = None if reference is None or same_source(reference, handle) else reference.source
        with says_what_takes_long("loading model and data"):
            self.native = self._make_native(handle, shared, optimizer, other)
        for one in (model, handle):  # the script's own handle saves what was trained, too
            if isinstance(one, ModelHandle):
                one.attach(self.native)
        self.model: ModelHandle = handle
        self.ref_model: ModelHandle = replace(reference or handle, trainer=None)
        self.optimizer = self.native.optimizer
        self.kl_ctl = KLControl(self.native)
        self.accelerator = Accelerator()
        self.current_device = self.accelerator.device
        self.is_encoder_decoder = self.native.lm.decoder_start_token_id is not None
        self.is_peft_model = self.native.adapter is not None
        self._fill_in()
        self._log = StatsLog(self.config, self.native)

    def _make_native(
        self, handle: ModelHandle, shared: int | None, optimizer: Optimizer, reference: Any
    ) -> StepwisePPO:
        folder = self._temporary.path / "tokenizer"
        self.tokenizer.save_pretrained(folder)
        native = native_config(
            self.config,
            handle,
            str(folder),
            num_shared_layers=shared,
            run_dir=self.config.output_dir or str(self._temporary.path),
        )
        native, given = with_optimizer(native, optimizer)
        return StepwisePPO(
            native,
            owner=self,
            base=PPOTrainer,
            tokenizer=self.tokenizer,
            v_head_std=handle.v_head_init_std,
            reference_path=reference,
            optimizer=given,
            lr_schedule=self.lr_scheduler,
        )

    def _fill_in(self) -> None:
        config = self.config
        config.is_encoder_decoder, config.is_peft_model = self.is_encoder_decoder, self.is_peft_model
        # Counts of rows are global: one program runs on all devices.
        config.world_size = 1
        config.global_batch_size = config.batch_size
        config.global_backward_batch_size = config.backward_batch_size

    def _loader(self, dataset: Any) -> DataLoader | None:
        if dataset is None:
            return None
        return self.prepare_dataloader(dataset, self.data_collator)

    @property
    def state(self) -> OnlineState:
        """Parameters, optimizer, KL coefficient and moments of the scores: replaced by every step."""
        refuse_while_traced("state", LIVE)
        return self.native.state

    @property
    def running(self) -> RunningMoments:
        """Moments of all scores so far."""
        refuse_while_traced("running", LIVE)
        return RunningMoments(self.native.state.moments.running)

    @property
    def current_step(self) -> int:
        """Calls of `step` so far."""
        refuse_while_traced("current_step", LIVE)
        return self.native.calls

    @property
    def history(self) -> list[dict[str, Any]]:
        """Records of the steps: jrl's own figures, under jrl's names; the watch's findings stand behind their step."""
        refuse_while_traced("history", LIVE)
        return self.native.history

    def step(
        self,
        queries: Sequence[Any],
        responses: Sequence[Any],
        scores: Sequence[Any],
        response_masks: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Runs an iteration of PPO on these rollouts: `ppo_epochs` passes, then the KL coefficient.

        Args:
          queries: `batch_size` arrays of ids.
          responses: What the policy wrote after each.
          scores: One number a response, or a vector with one number for each of its tokens.
          response_masks: 0 on response tokens that the policy did not choose, such as a tool's; None: all are its own.
        Returns:
          Statistics by TRL's names; `docs/migrating/trl_ppo.md` lists them.
        Raises:
          ValueError: Naming the argument and the row that cannot be used. Nothing has been computed then.
        """
        clock = Clock()
        native, start = self.native, self.native.lm.decoder_start_token_id
        if native.calls == 0:
            say_untrained(self.model, "trainer.save_pretrained(folder)")
        rollouts = read_rollouts(
            queries,
            responses,
            scores,
            response_masks,
            batch_size=self.config.batch_size,
            decoder_start_token_id=start,
        )
        self._check_overrides(scores)
        sequences = make_sequences(
            rollouts,
            pad_token_id=self.tokenizer.pad_token_id,
            decoder_start_token_id=start,
            max_positions=native.lm.max_positions,
        )
        placed, scored = native.score(sequences)
        clock.lap("forward_pass", scored)
        rewards: Any = reward_columns(rollouts, sequences.mask.shape[1])
        batch = Rollouts(placed, scored, place_rows(native.mesh, rewards))
        estimates = native.estimates(batch)
        clock.lap("compute_rewards", estimates)
        clock.lap("compute_advantages", ())
        fixed, kept, kl_coef = jax.device_get(
            (estimates, (scored.logprobs, scored.ref_logprobs), self.state.kl_coef)
        )
        if fixed["moved"] > 0:
            raise ValueError(
                f"`{type(self).__name__}.compute_advantages` must return `values` as they were given, got others: the "
                "values of the rollouts are what the value loss is clipped around."
            )
        rate = native.learning_rate
        self._push_if_best(fixed["scores"].sum(axis=1))
        metrics = native.learn_from(batch)
        clock.lap("optimize_step", metrics)
        stats = self._stats(rollouts, np.asarray(sequences.mask), fixed, kept, metrics, float(kl_coef))
        stats["ppo/learning_rate"] = rate
        clock.lap("calc_stats", ())
        steps = native.calls * native.steps_per_iteration
        native.records.add({"step": steps, "iteration": native.calls, **finalize(metrics)})
        return stats | clock.times()

    def _step_safety_checker(
        self, batch_size: int, queries: Any, responses: Any, scores: Any, masks: Any = None
    ) -> tuple[list[Any], list[Any], list[Any], list[Any] | None]:
        """TRL's name of the check that `step` begins with; the rows as they are, as lists.

        Raises:
          ValueError: As of `step`.
        """
        start = self.native.lm.decoder_start_token_id
        options = {"batch_size": batch_size, "decoder_start_token_id": start}
        read_rollouts(queries, responses, scores, masks, **options)
        return list(queries), list(responses), list(scores), None if masks is None else list(masks)

    def _kl_penalty(self, logprob: Any, ref_logprob: Any) -> Any:
        """TRL's name of `config.kl_penalty`'s estimate at each token, for looking: torch in, torch out.

        Args:
          logprob: Of the policy, (B, T); with "full" of the whole vocabulary, (B, T, V).
          ref_logprob: Of the reference.
        """
        return torch_in_torch_out(kl_penalty)(logprob, ref_logprob, self.config.kl_penalty)

    def _check_overrides(self, scores: Any) -> None:
        """Checks that the overridden methods leave a step possible.

        Raises:
          ValueError: If `compute_rewards` is overridden and a score is dense, or the penalty needs whole distributions.
        """
        refuse_assigned(self, PPO)
        self.native.trace_anew()
        if "compute_rewards" not in self.native.maths.own:
            return
        dense = [row for row, score in enumerate(scores) if np.size(score) != 1]
        if dense:
            raise ValueError(
                f"`scores[{dense[0]}]` must be one number where `compute_rewards` is overridden, which gets one a row, "
                f"got {np.size(scores[dense[0]])}."
            )
        if self.config.kl_penalty == "full":
            raise ValueError(
                '`kl_penalty` must not be "full" where `compute_rewards` is overridden: whole distributions are never '
                'held in memory. Set "kl", and compute the penalty from the log-probabilities.'
            )

    def _stats(
        self,
        rollouts: RolloutRows,
        mask: np.ndarray,
        fixed: Mapping[str, Any],
        kept: Sequence[np.ndarray],
        metrics: Any,
        kl_coef: float,
    ) -> dict[str, Any]:
        encoded = self.is_encoder_decoder
        rows = [
            spread(x, rollouts, encoded=encoded)
            for x in (*kept, fixed["non_score_reward"], fixed["kls"], mask)
        ]
        return self.record_step_stats(
            kl_coef,
            scores=fixed["scores"],
            logprobs=rows[0],
            ref_logprobs=rows[1],
            non_score_reward=rows[2],
            kls=rows[3],
            masks=rows[4],
            queries=rollouts.queries,
            responses=rollouts.responses,
            train_stats=train_stats(metrics, fixed["targets"], mask, vf_coef=self.config.vf_coef),
        )

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """The statistics of a step.

        Args:
          kl_coef: Of this step.
          **data: `scores`, `logprobs`, `ref_logprobs`, `non_score_reward`, `masks` (B, T), `queries`, `responses`,
            `train_stats` (name → array with a leading axis of minibatches), and `kls` (B, T) where the penalty is not
            the plain difference.
        """
        return step_stats(kl_coef, **data)

    def gather_stats(self, stats: dict[str, Any]) -> dict[str, Any]:
        """The statistics as they are: one program runs on all devices, and its figures are global."""
        return stats

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: Sequence[Any],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> None:
        """Sends a step's numbers, and a table of texts, to the tracker.

        Args:
          stats: From `step`.
          batch: Column → rows.
          rewards: As the script scored the rows.
          columns_to_log: Columns of the table, the reward beside them.
        Raises:
          ValueError: If a column is missing while the others are there.
        """
        self._log.write({**stats, **reward_stats(rewards)}, batch, rewards, columns_to_log)

    def _push_if_best(self, scores: np.ndarray) -> None:
        options, native = dict(self.config.push_to_hub_if_best_kwargs), self.native
        if not options or native.calls % self.config.compare_steps:
            return
        mean = float(scores.mean())
        if native.best_score is None or mean > native.best_score:
            native.best_score = mean
            self.push_to_hub(options.pop("repo_id"), **options)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *, merge_adapter: bool = False) -> None:
        """Writes model, value head, tokenizer and card as a Hugging Face folder.

        As TRL does: its own classes load the head again. `trainer.native.save_pretrained(folder)` leaves it out, for
        servers that refuse it.
        """
        self.native.save_pretrained(save_directory, merge_adapter=merge_adapter, heads=True)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Uploads what `save_pretrained` writes; returns the address. Options of `jrl.push_to_hub`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_to_hub(folder, repo_id, **options)

    def create_model_card(self, path: str | os.PathLike[str], model_name: str | None = "TRL Model") -> None:
        """Writes the model card, `README.md`, into a folder.

        Args:
          path: Made if missing.
          model_name: Title; None: what the model is.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        model_card(self.native).write(folder, name=model_name)

    def save_state(self, directory: str | os.PathLike[str]) -> Path:
        """Writes all that the next step depends on: model, optimizer, KL coefficient, moments, counters, the watch.

        Args:
          directory: Folder that gets `checkpoint_<optimizer steps>`; made if missing.
        """
        return write_checkpoint(
            self.native, directory, steps_per_iteration=self.native.steps_per_iteration, evaluations=0
        )

    def load_state(self, directory: str | os.PathLike[str]) -> None:
        """Goes on where `save_state` was called, in a trainer of the same model and configuration.

        Args:
          directory: A checkpoint, or a folder of which the newest is taken.
        Raises:
          CheckpointError: If it belongs to another model or configuration.
        """
        read_checkpoint(self.native, directory)
