# SPDX-License-Identifier: Apache-2.0
"""trlX's working trainer: every method of its page, over a trainer of jrl's own that holds model, state and run.

A subclass that defines `loss` is a trainer of its own: the gradient is taken of whatever `loss(batch)` computes with
`self.model`, on the batches of `create_train_dataloader`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import numpy as np
import optax

from jrl.compilation import compiled
from jrl.data.prompts import PromptSet
from jrl.interop import (
    IGNORED_ON_SAVE,
    Accelerator,
    TrainedModel,
    check_keywords,
    generate_ids,
    jrl_class,
    own_methods,
    read_checkpoint,
    refuse_overrides,
    refuse_while_traced,
    write_checkpoint,
)
from jrl.learners.accumulate import Loss
from jrl.learners.optimizers import make_schedule
from jrl.ops.reductions import LossOut
from jrl.trainers.checkpoints import CheckpointError, checkpoints_in, read_manifest
from jrl.trainers.config import TRLConfig
from jrl.trainers.loading import PolicyBundle, load_policy, mesh_of
from jrl.trainers.loggers import SAMPLING
from jrl.trainers.loop import says_what_takes_long
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.rollouts import prompt_budget
from jrl.trlx.decoding import decode_samples
from jrl.trlx.functions import seed_metrics, seed_rewards
from jrl.trlx.loop import LossTrainer, Position, fresh_optimizer_state, run_loop
from jrl.trlx.maths import stats_of
from jrl.trlx.pipeline.offline_pipeline import prompt_set_of
from jrl.trlx.refusals import ASSIGNED, COMPILED, COUNTS, EVERY, check_unchanged
from jrl.trlx.registry import register_trainer
from jrl.trlx.seed_defaults import with_seed_prompts, without_missing_tracker
from jrl.trlx.trainer import BaseRLTrainer
from jrl.typing import Frozen, Params

BEST = "best_checkpoint"
IGNORED_ON_CHECKPOINT = {
    "safe_serialization": "checkpoints have jrl's own layout",
    "output_dir": "the first argument names the folder",
}
_COUNTERS = ("step", "evaluation")
_CALLBACKS = ("post_backward_callback", "post_epoch_callback")


@register_trainer
class AccelerateRLTrainer(BaseRLTrainer):
    """A trainer over jrl's.

    Args:
      config: The run's configuration; a validated copy is used.
      **kwargs: Arguments of `BaseRLTrainer`; `native` is a trainer of jrl's own that exists already, with its data.

    Attributes:
      native: jrl's own trainer, which holds model, state, history and run folder.
      config: The validated copy.
      model: Answers to ids with logits and the heads' values.
      tokenizer: The transformers tokenizer.
      accelerator: Who this process is.
      opt: The optax optimizer.
      scheduler: Learning rate of an optimizer step.
      mb_size: Rows of a microbatch.
      num_mb: Microbatches of an optimizer batch.
      max_length: Tokens of a prompt and its completion together.
      n_inner_epochs: Passes over the store in one epoch.
      nth_evaluation: Evaluations so far.
      position: Where the loop of this module stands.
    """

    native_class: ClassVar[type[PolicyTrainer] | None] = None
    """jrl's trainer of this algorithm; None: the loop of this module learns from `loss`."""
    with_value_head: ClassVar[bool] = False
    """Whether `get_arch` loads a value head."""
    REFUSED: ClassVar[Mapping[str, str]] = EVERY
    """Methods that a subclass must not override, with what to do instead."""
    HOOKS: ClassVar[Sequence[str]] = (
        "loss",
        "prepare_learning",
        "create_train_dataloader",
        "post_backward_callback",
        "post_epoch_callback",
    )
    """Methods of a script with which the loop of this module learns in place of jrl's trainer."""
    _made = False

    def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
        self._refuse_overrides()
        native: PolicyTrainer | None = kwargs.pop("native", None)
        super().__init__(config, **kwargs)
        self._direct_evaluations = 0
        self._eval_pipeline_read: Any = None
        if native is None:
            with says_what_takes_long("loading model and data"):
                native = self._make_native()
        self.native = native
        self.position = Position()
        self.native.hooks = dataclasses.replace(
            self.native.hooks, host_state=self._host_state, load_host_state=self._load_host_state
        )
        self.n_inner_epochs = self._passes_of_epoch()
        self.config = self.native.config
        self.tokenizer = self.native.tokenizer
        self.accelerator = Accelerator()
        self.model = self.setup_model()
        self.opt = self.setup_optimizer()
        if type(self).setup_optimizer is not AccelerateRLTrainer.setup_optimizer:
            self.native.state = fresh_optimizer_state(self.native, self.opt)
        self.scheduler = self.setup_scheduler()
        train = self.config.train
        self.max_length = train.seq_length
        self.mb_size = train.rows_per_pass
        self.num_mb = train.batch_size // self.mb_size
        self._config_read = self.config.to_dict()
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; of a trainer that is made, none of trlX's that nothing here would read.

        Raises:
          AttributeError: Naming it and what to do instead.
        """
        if self._made and (cure := self._unread().get(name)) is not None:
            raise AttributeError(
                f"{type(self).__name__}: `{name}` must not be set on a trainer that is made: nothing here reads it "
                f"again, so it would change nothing. {cure}"
            )
        super().__setattr__(name, value)

    def _unread(self) -> Mapping[str, str]:
        """Names that may not be set on a trainer that is made, with what to do instead."""
        found = {**self.REFUSED, **COMPILED, **ASSIGNED}
        return found if self._learns_here() else {**found, **COUNTS}

    def _make_native(self) -> PolicyTrainer:
        options: dict[str, Any] = {
            "reward_fn": seed_rewards(self.reward_fn),
            "metric_fn": seed_metrics(self.metric_fn),
            "stop_sequences": tuple(self.stop_sequences),
            "logit_mask": self.logit_mask,
        }
        config = with_seed_prompts(without_missing_tracker(self.config)).evolve(
            train={"pipeline": "PromptPipeline"}
        )
        if self.native_class is not None:
            return self.native_class(config, **options)
        return LossTrainer(config, owner=self, **options)

    # What a trainer is made of.

    def get_arch(self, config: TRLConfig) -> PolicyBundle:
        """The model of a configuration: what trains, what is frozen, and the functions that read both.

        A trainer of its own may load more here, such as Q heads.
        """
        mesh = mesh_of(config)
        with jax.set_mesh(mesh):
            return load_policy(config, mesh, with_value_head=self.with_value_head)

    def setup_model(self) -> TrainedModel:
        """The trainer's `model`."""
        return TrainedModel(self.native)

    def setup_optimizer(self) -> optax.GradientTransformation:
        """The optimizer that the configuration names, its schedule included."""
        return self.native.make_optimizer()

    def setup_scheduler(self) -> Callable[[Any], Any]:
        """Optimizer step → learning rate."""
        optimizer, scheduler = self.config.optimizer, self.config.scheduler
        return make_schedule(scheduler.name, scheduler.kwargs)(optimizer.kwargs["lr"])

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Sets what evaluations sample on."""
        super().add_eval_pipeline(eval_pipeline)
        self._hand_over()

    def _hand_over(self) -> None:
        """Gives jrl's own trainer what a script may have set since."""
        self.native.reward_fn, self.native.metric_fn = (
            seed_rewards(self.reward_fn),
            seed_metrics(self.metric_fn),
        )
        self.native.stop_sequences = tuple(self.stop_sequences)
        if self.eval_pipeline is not self._eval_pipeline_read:
            self.native.eval_prompts = self._prompt_set(self.eval_pipeline, self.native.longest_evaluation)
            self._eval_pipeline_read = self.eval_pipeline

    def _prompt_set(self, pipeline: Any, max_new_tokens: int) -> PromptSet:
        return prompt_set_of(
            pipeline,
            self.tokenizer,
            max_length=prompt_budget(self.config.train, max_new_tokens),
            seed=self.config.train.seed,
            decoder_start_token_id=self.native.lm.decoder_start_token_id,
        )

    @property
    def iter_count(self) -> int:
        """Optimizer steps so far."""
        refuse_while_traced("iter_count")
        return int(jax.device_get(self.native.optimizer_steps()))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        self._require_data()
        return self._total_steps()

    @property
    def nth_evaluation(self) -> int:
        """Evaluations so far."""
        return self._direct_evaluations + sum("evaluation" in record for record in self.native.history)

    def evaluate(self) -> dict[str, float]:
        """Samples on the evaluation prompts: `reward/mean`, `metrics/<name>`, each with a suffix in a sweep."""
        self._direct_evaluations += 1
        self._hand_over()
        return self.native.evaluate()

    def loss(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The loss of a batch, a scalar, and what to log of it.

        Args:
          batch: As the loader of the store makes them.
        """
        raise NotImplementedError(
            f"{type(self).__name__} defines no `loss`, so there is nothing to learn by."
        )

    @functools.cached_property
    def _compiled_loss(self) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """`(params, frozen, targets, batch) -> (mean, stats)` of an algorithm of jrl's own."""

        def mean(params: Params, frozen: Frozen, targets: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
            out = LossOut(*self._loss_of(params, frozen, targets, batch))
            return out.mean, stats_of(out.metrics)

        return compiled(mean)

    def _loss_of(self, params: Params, frozen: Frozen, targets: Any, batch: Any) -> Loss:
        """(sum, weight, metrics) of a batch of the store."""
        raise NotImplementedError

    def prepare_learning(self) -> None:
        """Called before the first step."""

    def create_train_dataloader(self) -> Any:
        """Batches of one pass; default: those of the store, in an order of their own."""
        if self.store is None:
            raise ValueError(
                f"{type(self).__name__} has no store to learn from: `make_experience` fills one."
            )
        return self.store.create_loader(self.config.train.batch_size, shuffle=True)

    def post_backward_callback(self) -> None:
        """Called after every pass."""

    def post_epoch_callback(self) -> None:
        """Called after every epoch of `n_inner_epochs` passes."""

    def learn(
        self,
        log_fn: Callable[[dict[str, Any]], Any] | None = None,
        save_fn: Callable[[dict[str, Any]], Any] | None = None,
        eval_fn: Callable[[Any], Any] | None = None,
    ) -> dict[str, float] | None:
        """Trains up to `total_steps` or `epochs`; arguments as in `BaseRLTrainer`.

        Returns:
          What the last evaluation found; None where the run was stopped or does not evaluate.
        Raises:
          ValueError: If there is nothing to learn from.
        """
        check_unchanged(self._config_read, self.config.to_dict())
        self._hand_over()
        self.prepare_learning()
        self._require_data()
        watched = self.native.hooks
        self.native.hooks = dataclasses.replace(
            watched,
            log=_both(watched.log, log_fn),
            evaluate=_both(watched.evaluate, None if eval_fn is None else lambda _: eval_fn(self)),
            save=_both(
                watched.save, None if save_fn is None else lambda path: save_fn(self._components(path))
            ),
        )
        try:
            self._learn()
        finally:
            self.native.hooks = watched
        if self.config.train.save_best:
            link_best(self.native.run_dir)
        found = [record for record in self.native.history if "evaluation" in record]
        if self.native.interrupted or not found:
            return None
        return {
            name: value
            for name, value in found[-1].items()
            if name not in _COUNTERS and not name.startswith(SAMPLING)
        }

    def _learn(self) -> None:
        if self._learns_here():
            run_loop(self)
        else:
            self.native.learn()

    def begin_loop(self) -> None:
        """Called by the loop of this module when a checkpoint is restored, before the first batch.

        What callbacks of a script changed on the host is in no checkpoint, so a run that resumes warns of them.
        """
        callbacks = own_methods(self, jrl_class(self), _CALLBACKS)
        if callbacks and self.position != Position():
            warnings.warn(
                f"The run goes on in epoch {self.position.epochs + 1}: {sorted(callbacks)} are not called again for "
                "what is done. What they changed beside the parameters and PPO's rollouts is not restored.",
                stacklevel=2,
            )

    def _host_state(self) -> dict[str, Any]:
        """State of this module's loop in a checkpoint; empty where jrl's own trainer learns."""
        return {"position": dataclasses.asdict(self.position)} if self._learns_here() else {}

    def _load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts back what `_host_state` gave.

        Raises:
          CheckpointError: If the checkpoint is of another loop than the one that is to go on.
        """
        if bool(found) != self._learns_here():
            raise CheckpointError(
                f"The checkpoint must be of a run that learned as {type(self).__name__} does, got one "
                f"{'with' if found else 'without'} methods of its own in the loop ({', '.join(self.HOOKS)}), or of an "
                "earlier release. To begin with its parameters, set `model.model_path` to its `hf_model`."
            )
        if found:
            self.position = Position(**found["position"])

    def _learns_here(self) -> bool:
        """True where this module's loop learns, in place of jrl's own trainer."""
        return isinstance(self.native, LossTrainer) or bool(self._replaced_hooks())

    def _replaced_hooks(self) -> Iterable[str]:
        """Hooks of the class that jrl's own trainer stands behind which a script replaced."""
        return own_methods(self, jrl_class(self), self.HOOKS)

    def _refuse_overrides(self) -> None:
        """Refuses methods of a subclass that nothing would call."""
        refuse_overrides(type(self), jrl_class(self), self.REFUSED)
        if self.native_class is not None and not self._replaced_hooks():
            refuse_overrides(type(self), jrl_class(self), COMPILED)

    # Samples and texts of them.

    @property
    def generate_kwargs(self) -> Mapping[str, Any]:
        """Sampling options of evaluation; read-only."""
        return MappingProxyType(self.config.method.gen_kwargs)

    @property
    def generate_experience_kwargs(self) -> Mapping[str, Any] | None:
        """Sampling options of rollouts, where they differ from evaluation's; read-only."""
        return None

    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> np.ndarray:
        """Prompts with what the policy writes after them, as rollouts sample.

        Args:
          input_ids: Prompts (B P), padded on either side.
          attention_mask: 1 on real tokens; default: all are.
          **kwargs: Replace entries of `gen_experience_kwargs`, or of `gen_kwargs` where there are none.
        Returns:
          Ids (B, P + longest completion), padded after each row's end; of a seq2seq model, the decoder's rows.
        """
        return self._generate(
            input_ids, attention_mask, self.generate_experience_kwargs or self.generate_kwargs, kwargs
        )

    def generate_eval(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> np.ndarray:
        """Samples completions with evaluation's options."""
        return self._generate(input_ids, attention_mask, self.generate_kwargs, kwargs)

    def _generate(
        self, input_ids: Any, attention_mask: Any, base: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> np.ndarray:
        # Tokenizers return it beside the ids, and no language model here has a table for it.
        values = {name: value for name, value in {**base, **changes}.items() if name != "token_type_ids"}
        if "max_length" in changes and "max_new_tokens" not in changes:
            values.pop("max_new_tokens", None)
        return generate_ids(self.native, input_ids, attention_mask, values, self.native.draws.key())

    def sample(self, prompts: Sequence[str], length: int, n_samples: int) -> list[str]:  # type: ignore[override]
        """Completions of the prompts as texts, the list repeated as often as `n_samples` needs."""
        prompts = [prompts[number % len(prompts)] for number in range(n_samples)]
        return self.native.generate(
            prompts, gen_kwargs={"max_new_tokens": length}, key=self.native.draws.key()
        )

    def decode(
        self,
        prompts: Sequence[Any],
        samples: Sequence[Any],
        prompt_sizes: Sequence[int] | None = None,
        append_eos_token: bool = False,
    ) -> tuple[list[str], list[str], list[str]]:
        """Texts of what `generate` returned: (samples, prompts, outputs), outputs cut at the first stop sequence.

        Args:
          prompts: Ids of the prompts (B P).
          samples: Ids as `generate` returned them.
          prompt_sizes: Columns of each prompt; default: all P.
          append_eos_token: Whether EOS's text follows outputs that ended by themselves.
        """
        return decode_samples(
            self.native,
            prompts,
            samples,
            prompt_sizes,
            stop_sequences=tuple(self.stop_sequences),
            append_eos_token=append_eos_token,
        )

    # Checkpoints of a run, and Hugging Face folders of its model.

    def save(self, directory: str | None = None, **kwargs: Any) -> Path:
        """Writes a checkpoint of state and model, `checkpoint_<step>`, which a run may resume from.

        Args:
          directory: The folder it stands in; default: the run's.
          **kwargs: Of accelerate; without effect.
        Returns:
          The checkpoint.
        Raises:
          ValueError: If there are no data yet: a checkpoint says which it belongs to.
        """
        check_keywords("save", kwargs, IGNORED_ON_CHECKPOINT)
        self._require_data()
        return write_checkpoint(
            self.native,
            directory or self.native.run_dir,
            steps_per_iteration=self._steps_per_iteration(),
            evaluations=self.nth_evaluation,
        )

    def load(self, directory: str | None = None, **kwargs: Any) -> None:
        """Restores a checkpoint; `learn` goes on from it.

        Args:
          directory: A checkpoint, or a folder of which the newest is taken; default: the run's.
          **kwargs: Of accelerate; without effect.
        Raises:
          ValueError: If there is no checkpoint.
          CheckpointError: If it belongs to another model or configuration.
        """
        check_keywords("load", kwargs, IGNORED_ON_CHECKPOINT)
        read_checkpoint(self.native, directory or self.native.run_dir)

    def save_pretrained(self, directory: str | None = None, **kwargs: Any) -> Path:
        """Writes model, heads and tokenizer as a Hugging Face checkpoint, as trlX does.

        `trainer.native.save_pretrained(folder)` leaves the heads out, for servers that refuse them.

        Args:
          directory: Default: `hf_model` in the run's folder.
          **kwargs: `merge_adapter` writes an adapter into the model; those of transformers' method have no effect.
        Returns:
          The folder.
        """
        merge_adapter = bool(kwargs.pop("merge_adapter", False))
        check_keywords("save_pretrained", kwargs, IGNORED_ON_SAVE)
        return self.native.save_pretrained(
            directory, merge_adapter=merge_adapter, heads=self.native.has_heads
        )

    def _components(self, path: Path) -> dict[str, Any]:
        step = int(path.name.rpartition("_")[2])
        return {"directory": str(path), "step": step, "model": self.model, "tokenizer": self.tokenizer}

    def _require_data(self) -> None:
        """Raises where `learn` would have nothing to learn from."""

    def _total_steps(self) -> int:
        train = self.config.train
        if self.store is None:
            return train.total_steps
        batches = math.ceil(len(self.store) / train.batch_size)
        return min(train.total_steps, train.epochs * self.n_inner_epochs * batches)

    def _steps_per_iteration(self) -> int:
        return 1

    def _passes_of_epoch(self) -> int:
        return 1

    @property
    def params(self) -> Params:
        """Trainable parameters of the current state."""
        return self.native.params


def _both(first: Callable[[Any], Any], second: Callable[[Any], Any] | None) -> Callable[[Any], None]:
    """Calls the first, then the second where there is one."""

    def call(argument: Any) -> None:
        first(argument)
        if second is not None:
            second(argument)

    return call


def link_best(folder: Path) -> None:
    """Makes `best_checkpoint`, as trlX names it, lead to the checkpoint of the best evaluation, where there is one.

    Args:
      folder: Of the run.
    """
    counted = []
    for step, path in checkpoints_in(folder).items():
        with suppress(CheckpointError):  # a damaged one is not the best
            score = read_manifest(path)["best_score"]
            counted += [] if score is None else [(-score, step, path.name)]
    if not counted or jax.process_index() != 0:
        return
    link = folder / BEST
    if link.exists() and not link.is_symlink():
        return  # somebody's own
    fresh = folder / f".{BEST}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(min(counted)[2], target_is_directory=True)
    fresh.replace(link)
