# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation on pairs of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.preferences.preference_set import PreferenceSet
from jrl.data.sources.fingerprint import fingerprint
from jrl.distributed import gather, is_main
from jrl.forward import Reader
from jrl.learners.dpo import (
    DPOState,
    PairsLoss,
    dpo_objective,
    init_dpo_state,
    make_dpo_update,
    reference_logprobs,
)
from jrl.learners.dpo_config import DPOConfig
from jrl.mesh import replicated
from jrl.models.policy import init_reference
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.dpo_reference import (
    CACHE,
    Reference,
    check_reference,
    load_logprobs,
    load_reference,
    save_logprobs,
    score_samples,
    starting_from,
)
from jrl.trainers.loading.setup import PolicyBundle
from jrl.trainers.offline import OfflineTrainer, SampleSet
from jrl.trainers.plan.model_part import LanguageShapes, ModelShapes
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.programs import (
    Program,
    array_of,
    optimizer_of,
    rows_on,
    sequence_shapes,
    update_program,
    weights_on,
)
from jrl.typing import Params, PreferenceBatch, Update


@register_trainer("DPOTrainer")
class DPOTrainer(OfflineTrainer, PolicyTrainer):
    """Learning from preferences without a reward model. `state` is a `DPOState`; one iteration is one optimizer step.

    A reference that stands still scores the data once, before the first step, and then leaves memory; what it said is
    kept in the run's folder. One that follows the policy is part of the state.

    Attributes:
      reference: What the policy is compared with; None once everything was scored.
    """

    state: DPOState
    samples: PreferenceSet
    reference: Reference | None
    tokens_metric = "dpo/tokens"
    loss_metric = "dpo/loss"

    @property
    def method(self) -> DPOConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(DPOConfig)

    @property
    def own_loss(self) -> PairsLoss | None:
        """The loss of a minibatch of pairs in the place of the configured one; None: that one."""
        return None

    @property
    def precomputes(self) -> bool:
        """True where the reference scores the data before training."""
        return not self.method.asks_reference

    def load_model(self) -> PolicyBundle:
        """The model; a reference of its own is looked at before."""
        if self.method.ref_model_path is not None:
            check_reference(self.config, self.method.ref_model_path)
        return super().load_model()

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """The reference is made before the state may be donated, and copied only where it must outlive that."""
        method, optimizer = self.method, self.make_optimizer()
        update = _make_update(self.config, method, self.reader, optimizer, self.own_loss)
        self.reference = self._make_reference(make_reference)
        self._scored: list[SampleSet] = []
        follows = method.sync_ref_model

        def init(params: Params) -> DPOState:
            # A copy, because the state is donated and no buffer can be given away twice.
            return init_dpo_state(params, optimizer, jax.tree.map(jnp.copy, params) if follows else None)

        given = self.reference.params() if follows and method.ref_model_path is not None else None
        self.compile_learner(init, update, params)
        if follows:
            architecture = self.reference.architecture
            if given is not None:
                self.state = DPOState(self.state.train, starting_from(given, self.params))
            self.reference = Reference(self.policy, self._moving_reference, self.frozen, architecture)
        read = replace(self.reader, policy=self.reference.policy)
        self._score = _score_program(self.config, read, self.mesh)
        self.compile_evaluation(partial(dpo_objective, self.reader, config=method, loss=self.own_loss))

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """The update of an optimizer batch, and what a reference says of one where it is the model as it began."""
        method, train, optimizer = config.method, config.train, optimizer_of(config)
        assert isinstance(method, DPOConfig), "the registry saw to it"
        assert isinstance(model, LanguageShapes), "the method saw to it"
        reader = Reader(model.policy, chunk_bytes=train.logprob_chunk_bytes)
        sequences = sequence_shapes(model, train.batch_size, train.seq_length)
        logprobs = array_of(*sequences.mask.shape)
        valid = array_of(train.batch_size, dtype=jnp.bool_)
        batch = PreferenceBatch(sequences, sequences, valid, logprobs, logprobs)

        def init(params: Params) -> DPOState:
            return init_dpo_state(params, optimizer, params if method.sync_ref_model else None)

        update = _make_update(config, method, reader, optimizer)
        step = update_program(model, mesh, init, update, batch)
        own = jax.eval_shape(init_reference, model.params)
        arguments = weights_on(mesh, own), weights_on(mesh, model.frozen), rows_on(mesh, batch)
        score = Program("score", _score_program(config, reader, mesh), arguments)
        return [step] if method.ref_model_path is not None else [score, step]

    def _make_reference(self, make_reference: Callable[[], Params]) -> Reference:
        """The one that stands still, or that a moving one starts from."""
        path, architecture = self.method.ref_model_path, repr(self.architecture)
        if path is not None:
            with jax.set_mesh(self.mesh):
                bundle = load_reference(self.config, path, self.mesh)
            return Reference(bundle.policy, lambda: bundle.params, bundle.frozen, repr(bundle.lm.config))
        if self.adapter is not None:
            if self.method.sync_ref_model:
                raise ValueError(
                    "`method.sync_ref_model` must be False under `model.peft_config`: the reference is the model "
                    "without its adapter, and a mean of two adapters is no adapter of a mean."
                )
            own = make_reference()
            return Reference(self.policy, lambda: own, self.frozen, architecture)
        if self.precomputes or self.method.sync_ref_model:
            # What trains is the reference until the first step, and no copy of it is needed before.
            return Reference(self.policy, lambda: self.params, self.frozen, architecture)
        copied = make_reference()
        return Reference(self.policy, lambda: copied, self.frozen, architecture)

    def _moving_reference(self) -> Params:
        assert self.state.ref_params is not None, "a reference that moves is in the state"
        return self.state.ref_params

    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes samples: mappings with `chosen` and `rejected`, and `prompt` unless both begin with it."""
        if samples is None or rewards is not None or prompts is not None:
            raise ValueError(
                "DPOTrainer learns from `samples` with `chosen` and `rejected`: give those, and neither `rewards` nor "
                "`prompts` (`eval_prompts` are what evaluation samples from, `add_eval_samples` takes held-out pairs)."
            )
        self.add_samples(samples)
        if eval_prompts is not None:
            self.add_eval_prompts(eval_prompts)

    def add_samples(self, samples: Sequence[Any]) -> None:
        """Sets what is learned: mappings as `PreferenceSet` takes them; left untouched."""
        self.samples = self._preferences(samples)

    def add_eval_samples(self, samples: Sequence[Any]) -> None:
        """Sets what evaluations measure the loss and the implicit rewards on; like the samples."""
        self.eval_samples = self._preferences(samples)

    def _preferences(self, samples: Sequence[Any]) -> PreferenceSet:
        train, method = self.config.train, self.method
        return PreferenceSet(
            samples,
            self.tokenizer,
            max_length=train.seq_length,
            seed=train.seed,
            max_prompt_length=method.max_prompt_length,
            max_completion_length=method.max_completion_length,
            truncation_mode=method.truncation_mode,
            decoder_start_token_id=self.lm.decoder_start_token_id,
        )

    def learn(self) -> None:
        """Scores what is to be scored once, then runs up to `total_steps`, or `epochs` passes over the samples."""
        if self.precomputes:
            self.score_reference(self.samples)
            if self.eval_samples is not None:
                self.score_reference(self.eval_samples)
            if self.adapter is None or self.method.ref_model_path is not None:
                self.reference = None  # the frozen base stays in any case
        super().learn()

    def score_reference(self, samples: SampleSet) -> None:
        """Makes sure that a set knows the reference's log-probabilities: from the run's folder, or by computing them.

        A file there is known by the tokens and which of them are learned, all weights of the reference, its
        architecture, and the dtype it computes in.

        Raises:
          ValueError: If the reference is gone.
        """
        if any(samples is known for known in self._scored):
            return
        assert isinstance(samples, PreferenceSet), "made by `add_samples` and `add_eval_samples`"
        if self.reference is None:
            raise ValueError(
                "`samples` must be added before `learn`, which lets go of the reference when it has scored them; or "
                "set `method.precompute_ref_log_probs` to False."
            )
        key = fingerprint(
            samples.sha256(),
            self.frozen_sha256(),
            self.reference.architecture,
            self.config.train.compute_dtype,
        )
        path = self.run_dir / CACHE / f"{key[:32]}.npz"
        found = load_logprobs(path)
        everywhere = all(word.plain for word in gather(found is not None))
        if found is None or not everywhere:
            batch_size = self.method.precompute_ref_batch_size or self.config.train.batch_size
            with jax.set_mesh(self.mesh):
                found = score_samples(samples, self._scores, batch_size=batch_size)
            if is_main():
                save_logprobs(path, *found)
        samples.set_reference(*found)
        self._scored.append(samples)

    def _scores(self, batch: PreferenceBatch) -> tuple[jax.Array, jax.Array]:
        """The reference's log-probabilities of a host batch."""
        return self._scores_of_rows(super().place(batch))

    def _scores_of_rows(self, rows: PreferenceBatch) -> tuple[jax.Array, jax.Array]:
        assert self.reference is not None, "the reference was let go of"
        found: tuple[jax.Array, jax.Array] = self._score(self.reference.params(), self.reference.frozen, rows)
        return found

    def place(self, batch: PreferenceBatch) -> PreferenceBatch:
        """Host rows on the mesh, with the log-probabilities of a reference that was not asked before."""
        rows: PreferenceBatch = super().place(batch)
        if self.precomputes:
            return rows
        chosen, rejected = self._scores_of_rows(rows)
        return rows._replace(ref_chosen_logprobs=chosen, ref_rejected_logprobs=rejected)

    def measure_samples(self, samples: SampleSet) -> dict[str, float]:
        """The objective's metrics over all pairs of a set, each counted once."""
        if self.precomputes:
            self.score_reference(samples)
        return super().measure_samples(samples)

    def count_tokens(self, batch: PreferenceBatch) -> float:
        """Tokens of both completions of every pair that counts."""
        both = batch.chosen.mask.sum(axis=1) + batch.rejected.mask.sum(axis=1)
        return float((both * batch.valid).sum())

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.train.params

    def untrained(self) -> Any:
        """The frozen layers, and a reference that stands still."""
        if self.reference is None or self.method.sync_ref_model:
            return self.frozen
        whole = self.frozen, self.reference.params()
        return whole if self.reference.frozen is self.frozen else (*whole, self.reference.frozen)

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.train.step


def _make_update(
    config: TRLConfig,
    method: DPOConfig,
    reader: Reader,
    optimizer: optax.GradientTransformation,
    loss: PairsLoss | None = None,
) -> Update:
    """The update of an optimizer batch, as a configuration asks for it."""
    return make_dpo_update(
        reader,
        optimizer,
        method,
        batch_size=config.train.batch_size,
        minibatch_size=config.train.rows_per_pass,
        loss=loss,
    )


def _score_program(config: TRLConfig, reader: Reader, mesh: Mesh) -> Callable[..., Any]:
    """What a reference says of pairs, jitted: `(params, frozen, batch) -> log-probabilities of both completions`."""
    minibatch_size = config.train.rows_per_pass
    return jax.jit(
        partial(reference_logprobs, reader, minibatch_size=minibatch_size),
        out_shardings=replicated(mesh),  # every process reads all of them
        compiler_options=COMPILER_OPTIONS,
    )
