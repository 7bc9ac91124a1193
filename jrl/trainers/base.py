# SPDX-License-Identifier: Apache-2.0
"""Base class of all trainers: a loaded model, state, optimizer, data, history, fingerprints."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import jax
import optax
from jax.sharding import Mesh

from jrl.compilation import use_compilation_cache
from jrl.data.sources.fingerprint import fingerprint
from jrl.device_memory import noting_out_of_memory
from jrl.distributed import join, on_main
from jrl.learners.config import MethodConfig
from jrl.learners.guards import clip_by_global_norm, skip_nonfinite
from jrl.models.adapters.bind import Adapter
from jrl.models.heads import HEADS, HeadsPlace
from jrl.placement import introduce
from jrl.trainers.cards.card import model_card
from jrl.trainers.cards.citations import citations
from jrl.trainers.checkpoints.checkpointer import tree_sha256
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.setup import ModelBundle, compute_dtype, mesh_of
from jrl.trainers.loggers.trackers import check_tracker
from jrl.trainers.loop.hooks import Hooks, current_hooks
from jrl.trainers.loop.run import Run
from jrl.trainers.plan.model_part import ModelShapes
from jrl.trainers.programs import Program, jit_update, optimizer_of
from jrl.trainers.rollouts.draws import Draws
from jrl.trainers.rollouts.evaluation import Evaluation
from jrl.trainers.rollouts.rehearsal import Rehearsal
from jrl.typing import Frozen, Params, Update
from jrl.upload import push_to_hub

Method = TypeVar("Method", bound=MethodConfig)

# Streams of the root key; the trainers fold their iteration numbers into them.
EVALUATION_STREAM, TRAINING_STREAM = 1, 3  # sampling calls of a script have `draws.GENERATION_STREAM`


class Trainer(abc.ABC):
    """A run of one algorithm on one model.

    Args:
      config: Copied and validated once; later changes to the caller's object do nothing.
      optimizer: Used instead of the one that the configuration names, on gradients clipped to `train.max_grad_norm`.

    Attributes:
      config: The run's own configuration.
      loaded: The model as it was read, without the parameters, which the state has taken over.
      mesh: The device mesh.
      run_dir: Folder of checkpoints, metrics and samples (`train.checkpoint_dir`).
      state: What trains: an immutable pytree, replaced by every update.
      history: Training records and evaluations, as in `metrics.jsonl`; a run writes into it.
      hooks: What is called as the run goes on.
      dataset_names: What the data are called, for the model card; whoever read them by name sets it.
      tags: Of the model card, beside its own.
      resume_argument: What a command calls the checkpoint that a run goes on from; a flat one has another name for it.
      epoch: What `train.epochs` counts.
      unplanned: What `jrl plan` does not count of a model whose layers it does not know.
    """

    state: Any
    loaded: ModelBundle
    dataset_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    resume_argument: str = "train.resume_from_checkpoint"
    epoch: ClassVar[Literal["pass", "iteration"]] = "pass"
    unplanned: ClassVar[str] = "activations, weights gathered, what is sent"

    def __init__(self, config: TRLConfig, *, optimizer: optax.GradientTransformation | None = None) -> None:
        join()  # before anything of JAX is computed
        use_compilation_cache()
        self.history: list[dict[str, Any]] = []
        self._run: Run | None = None
        self.hooks = current_hooks()
        self.config = copy.deepcopy(config)
        self.config.validate()
        citations(self.config.method)  # a paper that is none must not end the run when its card is written
        check_tracker(self.config.train.tracker)
        self.run_dir = Path(self.config.train.checkpoint_dir)
        self.mesh = mesh_of(self.config)
        introduce(self.mesh)
        with jax.set_mesh(self.mesh):  # a checkpoint says what its run computed in, not "auto"
            self.config = self.config.evolve(train={"compute_dtype": compute_dtype(self.config)})
        self._given_optimizer = optimizer
        with jax.set_mesh(self.mesh):
            bundle = self.load_model()
        # Without the parameters: the state holds them, and nobody else may keep a copy in memory.
        self.loaded = dataclasses.replace(bundle, params={})
        self.prepare()
        self.build(bundle.params, bundle.reference)

    @abc.abstractmethod
    def load_model(self) -> ModelBundle:
        """The model on the mesh, split into what trains and what does not."""

    def prepare(self) -> None:
        """Makes what stands beside the model, before anything is compiled."""
        self.root_key = jax.random.key(self.config.train.seed)
        self.draws = Draws(self.config.train.seed)

    @abc.abstractmethod
    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """Makes optimizer, state and the compiled update from the trainable parameters."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.loaded.tokenizer

    @property
    def frozen(self) -> Frozen:
        """Parameters that do not train."""
        return self.loaded.frozen

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that trains beside the frozen model; None where parts of the model itself do."""
        return self.loaded.adapter

    @property
    def base_model(self) -> Any:
        """The model without its adapter, as `model_path` names it."""
        return self.loaded.base_model

    @property
    def interrupted(self) -> bool:
        """True where `learn` ended early because the process was asked to stop."""
        return self._run is not None and self._run.interrupted

    @property
    def unsaved(self) -> bool:
        """True where `learn` ended without its last checkpoint, because the disk refused it."""
        return self._run is not None and self._run.unsaved

    @property
    @abc.abstractmethod
    def params(self) -> Params:
        """Trainable parameters of the current state."""

    @property
    def exported_params(self) -> Params:
        """Parameters for `save_pretrained`, beside the frozen part: the trainable ones, unless a state holds more."""
        return self.params

    @abc.abstractmethod
    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""

    def method_as(self, expected: type[Method]) -> Method:
        """The algorithm's section of the configuration.

        Raises:
          ValueError: If it is another algorithm's.
        """
        if not isinstance(self.config.method, expected):
            raise ValueError(
                f"`train.trainer: {type(self).__name__}` needs `method.name: {expected.__name__}`, got "
                f"{self.config.method.name!r}."
            )
        return self.config.method

    def make_optimizer(self) -> optax.GradientTransformation:
        """The optimizer and schedule that the configuration names, unless one was given; either is clipped alike."""
        norm, given = self.config.train.max_grad_norm, self._given_optimizer
        if given is None:
            return optimizer_of(self.config)
        return skip_nonfinite(given if norm is None else optax.chain(clip_by_global_norm(norm), given))

    def compile_learner(self, init: Callable[[Params], Any], update: Update, params: Params) -> None:
        """Makes the first state on the mesh, and the jitted update that takes it over by donation."""
        self.update, shardings = jit_update(init, update, params, self.mesh)
        with jax.set_mesh(self.mesh), noting_out_of_memory():
            self.state = jax.jit(init, out_shardings=shardings)(params)

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """The compiled calls of a run, as `jrl plan --compile` asks for them.

        Args:
          config: The run's.
          model: As shapes.
          mesh: Where the run would be; its devices may be absent.
        Raises:
          ValueError: If this algorithm's programs are not known before a run.
        """
        del model, mesh
        raise ValueError(
            f"`method.name` must be that of an algorithm whose programs are known before a run, got "
            f"{config.method.name!r}."
        )

    @classmethod
    def activations(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> int | None:
        """Bytes that a device keeps of a microbatch for the backward pass, for `jrl plan`; None: not counted.

        Only models whose layers are not counted are asked for here.

        Args:
          config: The run's.
          model: As shapes.
          mesh: Where the run would be; its devices may be absent.
        """
        del config, model, mesh
        return None

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
        """Runs the algorithm to its end."""

    def rehearse(self) -> Rehearsal:
        """Makes one iteration outside of a run, with the data that were added; the trainer is used up by it.

        Raises:
          ValueError: If this algorithm cannot.
        """
        raise ValueError(f"{type(self).__name__} has no `rehearse`, so one iteration cannot be tried alone.")

    @contextlib.contextmanager
    def running(
        self, *, num_steps: int, steps_per_iteration: int = 1, max_iterations: int | None = None
    ) -> Iterator[Run]:
        """All that surrounds the loop of one `learn`, on the mesh; the arguments are those of `Run`.

        Args:
          num_steps: Optimizer steps in all.
          steps_per_iteration: Optimizer steps of an iteration.
          max_iterations: Iterations in all; None: the steps alone end the run.
        """
        run = Run(
            self,
            num_steps=num_steps,
            steps_per_iteration=steps_per_iteration,
            max_iterations=max_iterations,
        )
        with jax.set_mesh(self.mesh), run:
            self._run = run
            yield run

    @contextlib.contextmanager
    def watched(self, hooks: Hooks) -> Iterator[None]:
        """Inside, these hooks are called instead of the trainer's own."""
        own, self.hooks = self.hooks, hooks
        try:
            yield
        finally:
            self.hooks = own

    def evaluate(self) -> dict[str, float]:
        """Evaluates the present state; returns its metrics."""
        found = self.run_evaluation(int(jax.device_get(self.optimizer_steps())))
        return {} if found is None else found.metrics

    def run_evaluation(self, step: int) -> Evaluation | None:
        """Evaluates with the keys of this step; returns None where there is nothing to evaluate on."""
        del step
        return None

    def save_pretrained(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        merge_adapter: bool = False,
        heads: bool = False,
    ) -> Path:
        """Writes a Hugging Face checkpoint: safetensors, config, tokenizer, and a model card.

        Of several processes all call it, and process 0 writes.

        Where an adapter trains, that is PEFT's folder, which holds the adapter and names the base model.

        Args:
          directory: Defaults to `hf_model` in the run's folder.
          merge_adapter: Writes the whole model instead, with the adapter in its weights.
          heads: Writes the value head and Q heads into the model's file, where trlX, TRL and jrl find them and servers
            such as vLLM refuse them. Checkpoints have them in any case.
        Raises:
          ValueError: If there is no adapter that can be merged into these weights, or no head to write.
        """
        if heads and not self.has_heads:
            raise ValueError(
                f"`heads` must be False for {type(self).__name__}: it trains no value head and no Q heads."
            )
        target = Path(directory) if directory is not None else self.run_dir / "hf_model"
        write = self.export_writer(merge_adapter=merge_adapter, heads="inside" if heads else "left_out")
        on_main(lambda: write(target))
        return target

    def push_to_hub(
        self,
        repo_id: str,
        *,
        merge_adapter: bool = False,
        private: bool | None = None,
        token: Any = None,
        commit_message: str = "End of training",
        revision: str | None = None,
    ) -> str:
        """Uploads what `save_pretrained` writes, the model card included; returns the address on the hub.

        Of several processes all call it, and process 0 uploads.

        Args:
          repo_id: "organisation/name"; made if missing.
          merge_adapter: Uploads the whole model instead of the adapter.
          private: Whether a repository that is made is private.
          token: Of the hub; None: the one of this machine.
          commit_message: Of the upload.
          revision: Branch that gets it, made if missing; None: the main one.
        Raises:
          ValueError: If there is no adapter that can be merged.
          RuntimeError: If the hub cannot be reached, or refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, merge_adapter=merge_adapter)
            options = {"private": private, "token": token, "revision": revision}
            return on_main(lambda: push_to_hub(folder, repo_id, commit_message=commit_message, **options))

    @property
    def has_heads(self) -> bool:
        """True where a value head or Q heads train, which `save_pretrained` can write."""
        return any(name in self.exported_params for name in HEADS)

    def export_writer(
        self,
        *,
        merge_adapter: bool = False,
        heads: HeadsPlace = "apart",
        data_sha256: Mapping[str, str] | None = None,
    ) -> Callable[[Path], None]:
        """Writer of `model_writer` and of the model card beside it; all that either needs is copied here.

        All processes call this one; what it returns only process 0.

        Args:
          merge_adapter: As for `save_pretrained`.
          heads: Where heads go: apart in checkpoints, so that their models can be served.
          data_sha256: As the method of that name gives it, where it is at hand.
        """
        write_model = self.model_writer(merge_adapter=merge_adapter, heads=heads)
        left_out = sorted(set(HEADS) & self.exported_params.keys()) if heads == "left_out" else []
        card = model_card(self, merged=merge_adapter, data_sha256=data_sha256, left_out=left_out)

        def write(directory: Path) -> None:
            write_model(directory)
            card.write(directory)

        return write

    @abc.abstractmethod
    def model_writer(
        self, *, merge_adapter: bool = False, heads: HeadsPlace = "apart"
    ) -> Callable[[Path], None]:
        """A function that writes the parameters as they are now: copied to the host here, written whenever called."""

    def host_state(self) -> dict[str, Any]:
        """Host state of a checkpoint, beside the arrays: plain JSON of this run's."""
        return {"draws": self.draws.state(), "caller": self.hooks.host_state()}

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts back what `host_state` gave; one of an earlier release may lack the counter of sampling calls."""
        if "draws" in found:
            self.draws.load(found["draws"])
        self.hooks.load_host_state(found.get("caller", {}))

    @property
    def kept_arrays(self) -> Any:
        """Arrays of a checkpoint: the state, and whatever else a run needs to go on as if it had never stopped."""
        return self.state

    def restore(self, arrays: Any, host_state: Mapping[str, Any]) -> None:
        """Goes on from where a checkpoint was written.

        Args:
          arrays: As `kept_arrays`, on the mesh.
          host_state: What `host_state` gave then.
        """
        self.state = arrays
        self.load_host_state(host_state)

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
        return {"model_path": fingerprint(repr(self.architecture), repr(adapter))}

    @property
    @abc.abstractmethod
    def architecture(self) -> Any:
        """The model's configuration as jrl sees it."""

    def state_is_deleted(self) -> bool:
        """True where an update failed half-way, after the donated state was gone."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def description(self) -> dict[str, Any]:
        """Description of the run, printed at its start."""
        found = {"algorithm": type(self).__name__} | self.describe_model()
        found["folder"] = str(self.run_dir)
        found |= {"replicated": "; ".join(self.loaded.replicated)} if self.loaded.replicated else {}
        return found | self.describe_data()

    def describe_data(self) -> dict[str, str]:
        """Size of the data, and what became of those that were too long, one line a kind; {} before there are any.

        A line is Markdown, for it stands in the model's card too: a name that a user chose goes through `code_span`.
        """
        return {}

    @abc.abstractmethod
    def describe_model(self) -> dict[str, str]:
        """Size, mesh and memory of the model, each as one line."""
