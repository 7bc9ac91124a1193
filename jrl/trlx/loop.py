# SPDX-License-Identifier: Apache-2.0
"""trlX's loop for trainers that bring a loss of their own: epochs of passes over a store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.compilation import COMPILER_OPTIONS
from jrl.interop import tracing
from jrl.learners.accumulate import Loss, Rows, accumulate, optimizer_step, take_rows
from jrl.learners.config import LanguageConfig, OnlineConfig
from jrl.learners.state import TrainState, init_train_state
from jrl.placement import place_rows
from jrl.trainers.base import TRAINING_STREAM
from jrl.trainers.loading import PolicyBundle
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.typing import Frozen, Mean, Metrics, Params, PRNGKey, Update

if TYPE_CHECKING:
    from jrl.trlx.trainer.accelerate_base_trainer import AccelerateRLTrainer


@dataclasses.dataclass(frozen=True)
class Position:
    """Position of the loop; a checkpoint holds it.

    Attributes:
      epochs: Done, their callback included.
      passes: Of the epoch, done, their callbacks included.
      batches: Of the pass, learned.
    """

    epochs: int = 0
    passes: int = 0
    batches: int = 0


class LossTrainer(PolicyTrainer):
    """Model, state and run of a trainer that learns from `loss`. `state` is a `TrainState`.

    Args:
      config: The run's configuration.
      owner: Whose `get_arch` loads the model.
      **options: Of `PolicyTrainer`.
    """

    state: TrainState

    def __init__(self, config: Any, *, owner: AccelerateRLTrainer, **options: Any) -> None:
        self._owner = owner
        super().__init__(config, **options)

    def load_model(self) -> PolicyBundle:
        """Loads the model by the owner's `get_arch`."""
        return self._owner.get_arch(self.config)

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """The first state; the update is made of the loss once there is a batch."""
        del make_reference
        optimizer = self.make_optimizer()
        self.compile_learner(lambda p: init_train_state(p, optimizer), _no_update, params)

    def add_data(self, **data: Any) -> None:
        """Refused: the owner makes its store."""
        raise ValueError(f"{type(self._owner).__name__} takes its data through `make_experience`.")

    def learn(self) -> None:
        """The owner's loop."""
        run_loop(self._owner)

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.params

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.step


def run_loop(trainer: AccelerateRLTrainer) -> None:
    """Passes over `create_train_dataloader`, one optimizer step a batch, with the callbacks in between.

    A resumed run goes on at the batch where the checkpoint was written. It draws the batches before it again and skips
    them, so it repeats itself where loaders depend on the seed alone; no callback of what is skipped is called again.

    Args:
      trainer: Whose loss is learned.
    """
    native, train = trainer.native, trainer.config.train
    update = jax.jit(make_loss_update(trainer), donate_argnums=0, compiler_options=COMPILER_OPTIONS)
    num_steps = min(train.total_steps, trainer.total_steps)
    root_key = jax.random.fold_in(native.root_key, TRAINING_STREAM)
    trainer.position = Position()
    with native.running(num_steps=num_steps) as run:
        run.begin()
        if run.iteration == run.num_iterations:
            return
        trainer.begin_loop()
        begun = trainer.position
        for _ in range(begun.epochs * trainer.n_inner_epochs + begun.passes):
            for _ in trainer.create_train_dataloader():
                pass
        for epoch in range(begun.epochs, train.epochs):
            for number in range(trainer.position.passes, trainer.n_inner_epochs):
                learned = trainer.position.batches
                for batch in islice(trainer.create_train_dataloader(), learned, None):
                    placed = place_rows(native.mesh, as_pytree(batch))
                    key = jax.random.fold_in(root_key, run.iteration)
                    trained, metrics = update(_train_state(native.state), native.frozen, placed, key)
                    native.state = _with_train_state(native.state, trained)
                    learned += 1
                    trainer.position = Position(epoch, number, learned)
                    run.after({}, metrics)
                    if run.stopped or run.iteration == run.num_iterations:
                        return
                trainer.post_backward_callback()
                trainer.position = Position(epoch, number + 1)
            trainer.post_epoch_callback()
            trainer.position = Position(epoch + 1)


def fresh_optimizer_state(native: PolicyTrainer, optimizer: optax.GradientTransformation) -> Any:
    """A trainer's state with that of another optimizer, before its first step."""
    train = _train_state(native.state)
    with jax.set_mesh(native.mesh):
        opt_state = jax.jit(optimizer.init, compiler_options=COMPILER_OPTIONS)(train.params)
    return _with_train_state(
        native.state, TrainState(step=train.step, params=train.params, opt_state=opt_state)
    )


def make_loss_update(trainer: AccelerateRLTrainer) -> Update:
    """Builds the update that descends the gradient of `trainer.loss`, which may call `trainer.model`.

    A batch is cut into microbatches where `minibatch_size` divides it; their losses are averaged by rows. `loss(batch)`
    of a script takes no key, so none is used.

    Raises:
      ValueError: If the configuration asks for a balance of experts, which a loss of the script's own does not count,
        or for routing replay, of which trlX's rows have no record.
    """
    method = trainer.config.method
    if isinstance(method, LanguageConfig) and method.router_aux_loss_coef:
        raise ValueError(
            "`method.router_aux_loss_coef` must be 0 where a method of the trainer is replaced, got "
            f"{method.router_aux_loss_coef}: the script's own loss does not count the experts."
        )
    if isinstance(method, OnlineConfig) and method.routing_replay:
        raise ValueError(
            "`method.routing_replay` must be False where a method of the trainer is replaced, got True: trlX's rows "
            "hold no record of experts."
        )
    optimizer: optax.GradientTransformation = trainer.opt
    size = trainer.mb_size

    def update(state: TrainState, frozen: Frozen, batch: Any, key: PRNGKey) -> tuple[TrainState, Metrics]:
        del key
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        rows = size if num_rows % size == 0 else num_rows

        def objective(params: Params, taken: Rows) -> Loss:
            with trainer.model.bound(params, frozen), tracing(f"{type(trainer).__name__}.loss"):
                loss, stats = trainer.loss(take_rows(batch, taken.ids))
            one = jnp.float32(rows)
            metrics: Metrics = {name: Mean(jnp.float32(value) * one, one) for name, value in stats.items()}
            return jnp.asarray(loss, jnp.float32) * one, one, metrics

        ids = jnp.arange(num_rows, dtype=jnp.int32).reshape(-1, rows)
        return optimizer_step(
            state, optimizer, accumulate(objective, state.params, Rows(ids, jnp.ones_like(ids, bool)))
        )

    return update


def as_pytree(batch: Any) -> Any:
    """A batch as compiled functions take it: a tokenizer's mapping as a dict, without what is no array."""
    if isinstance(batch, Mapping):
        return {name: column for name, column in batch.items() if _is_numeric(column)}
    return batch


def _is_numeric(column: Any) -> bool:
    if isinstance(column, jax.Array):  # a traced one too: a loss may call the one that it replaces
        return True
    return not isinstance(column, Sequence) and np.asarray(column).dtype.kind in "biuf"


def _no_update(state: Any, frozen: Frozen, batch: Any, key: PRNGKey) -> tuple[Any, Metrics]:
    """Never compiled: the owner's loop makes an update of its loss."""
    del frozen, batch, key
    return state, {}


def _train_state(state: Any) -> TrainState:
    """The `TrainState` that the optimizer moves, itself or within an algorithm's own state."""
    found: TrainState = state if isinstance(state, TrainState) else state.train
    return found


def _with_train_state(state: Any, trained: TrainState) -> Any:
    return trained if isinstance(state, TrainState) else state.replace(train=trained)
