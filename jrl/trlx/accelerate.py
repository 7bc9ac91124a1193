# SPDX-License-Identifier: Apache-2.0
"""trlX's working trainer: every method of its page, over a trainer of jrl's own that holds model, state and run.

A subclass that defines `loss` is a trainer of its own: the gradient is taken of whatever `loss(batch)` computes with
`self.model`, on the batches of `create_train_dataloader`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jrl.data.prompts import PromptSet
from jrl.learners.accumulate import Loss
from jrl.learners.optimizers import make_schedule
from jrl.trainers.config import TRLConfig
from jrl.trainers.hooks import Hooks
from jrl.trainers.loggers_jsonl import SAMPLING
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.prompting import prompt_budget
from jrl.trainers.setup import PolicyBundle, load_policy, mesh_of
from jrl.trlx.accelerator import Accelerator
from jrl.trlx.ignored import without_missing_tracker
from jrl.trlx.loop import LossTrainer, run_loop
from jrl.trlx.model import TrainedModel
from jrl.trlx.pipelines import prompt_set_of
from jrl.trlx.registry import register_trainer
from jrl.trlx.saving import SavingTrainer
from jrl.typing import Frozen, Kept, Mean, Metrics, Params

_COUNTERS = ("step", "evaluation")


@register_trainer
class AccelerateRLTrainer(SavingTrainer):
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
    """

    native_class: ClassVar[type[PolicyTrainer] | None] = None
    """jrl's trainer of this algorithm; None: the loop of this module learns from `loss`."""
    with_value_head: ClassVar[bool] = False
    """Whether `get_arch` loads a value head."""
    may_loop: ClassVar[bool] = True
    """Whether a subclass may replace a hook, and so what jrl's trainer does."""
    HOOKS: ClassVar[Sequence[str]] = (
        "loss",
        "prepare_learning",
        "create_train_dataloader",
        "post_backward_callback",
        "post_epoch_callback",
    )

    def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
        native: PolicyTrainer | None = kwargs.pop("native", None)
        super().__init__(config, **kwargs)
        self._direct_evaluations = 0
        self.n_inner_epochs = 1
        self.native = self._make_native() if native is None else native
        self.config = self.native.config
        self.tokenizer = self.native.tokenizer
        self.accelerator = Accelerator()
        self.model = self.setup_model()
        self.opt = self.setup_optimizer()
        self.scheduler = self.setup_scheduler()
        train = self.config.train
        self.max_length = train.seq_length
        self.mb_size = train.minibatch_size or train.batch_size
        self.num_mb = train.batch_size // self.mb_size

    def _make_native(self) -> PolicyTrainer:
        options: dict[str, Any] = {
            "reward_fn": self.reward_fn,
            "metric_fn": self.metric_fn,
            "stop_sequences": tuple(self.stop_sequences),
            "logit_mask": self.logit_mask,
        }
        config = without_missing_tracker(self.config).evolve(train={"pipeline": "PromptPipeline"})
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
        self.native.eval_prompts = self._prompt_set(eval_pipeline, self.native.longest_evaluation)

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
            total, weight, metrics = self._loss_of(params, frozen, targets, batch)
            return total / jnp.maximum(weight, 1.0), stats_of(metrics)

        return jax.jit(mean)

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
        self.prepare_learning()
        self._require_data()
        watched = self.native.hooks
        self.native.hooks = Hooks(
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
        found = [record for record in self.native.history if "evaluation" in record]
        if self.native.interrupted or not found:
            return None
        return {
            name: value
            for name, value in found[-1].items()
            if name not in _COUNTERS and not name.startswith(SAMPLING)
        }

    def _learn(self) -> None:
        replaced = self._replaced_hooks()
        if not replaced and not isinstance(self.native, LossTrainer):
            self.native.learn()
            return
        if not self.may_loop:
            raise ValueError(
                f"{type(self).__name__} replaces {replaced}, but this algorithm learns by one compiled update: derive "
                f"from {type(self.native).__name__} of jrl, or from AccelerateRLTrainer."
            )
        run_loop(self)

    def _replaced_hooks(self) -> list[str]:
        """Hooks of the class that jrl's own trainer stands behind which a subclass replaced."""
        home = next(cls for cls in type(self).__mro__ if "native_class" in vars(cls))
        return [name for name in self.HOOKS if getattr(type(self), name) is not getattr(home, name)]

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


def stats_of(metrics: Metrics) -> dict[str, Any]:
    """Metrics as numbers, also inside a compiled function."""
    return {
        name: metric.total / jnp.maximum(metric.weight, 1e-9) if isinstance(metric, Mean) else metric.value
        for name, metric in metrics.items()
        if not isinstance(metric, Kept)
    }
