# SPDX-License-Identifier: Apache-2.0
"""What every trainer is beside its policy: state, optimizer, data, history, fingerprints."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jrl.data.fingerprint import fingerprint
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.mesh import replicated, tree_shardings
from jrl.trainers.checkpoint import tree_sha256
from jrl.trainers.config import TRLConfig
from jrl.trainers.description import describe_model
from jrl.trainers.hooks import current_hooks
from jrl.trainers.policy_holder import PolicyHolder
from jrl.typing import Params, Update


class Trainer(PolicyHolder):
    """A run of one algorithm on one model. Arguments and further attributes are those of `PolicyHolder`.

    Attributes:
      state: What trains: an immutable pytree, replaced by every update.
      history: Training records and evaluations, as in `metrics.jsonl`.
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
        self.history: list[dict[str, Any]] = []
        self.interrupted = False
        self.hooks = current_hooks()
        super().__init__(
            config,
            reward_fn=reward_fn,
            metric_fn=metric_fn,
            stop_sequences=stop_sequences,
            logit_mask=logit_mask,
        )

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

    def host_state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the state: plain JSON of what this run keeps on the host."""
        return {}

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts back what `host_state` gave."""
        del found

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
