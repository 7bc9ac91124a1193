# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO and RLOO trainers, over jrl's online trainer: rollouts, groups and the update are jrl's own."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from transformers import TrainingArguments

from jrl.data.sources import RecordStream
from jrl.learners.config import MethodConfig
from jrl.rollout.keywords import unique_names
from jrl.trainers.config import TRLConfig
from jrl.trainers.offline import HELD_OUT
from jrl.trainers.rollouts import Evaluation
from jrl.trl.arguments import FlatArguments, data_devices
from jrl.trl.constructor_arguments import Given, shared_fields
from jrl.trl.flat_trainer import MAIN, FlatTrainer
from jrl.trl.group_configs import GroupArguments, GRPOConfig, RLOOConfig
from jrl.trl.group_method import GroupMethod, GRPOMethod, RLOOMethod
from jrl.trl.group_native import LOGGED, GroupNative, checked_rows, encode_rows, prompt_set
from jrl.trl.group_rewards import Given as RewardGiven
from jrl.trl.group_rewards import script_rewards
from jrl.trl.group_tools import EpisodeTools, reward_methods
from jrl.trl.models import AutoModelForCausalLM, ModelHandle
from jrl.trl.refusals import GROUPS
from jrl.trl.run_state import Names, best_name

__all__ = ["GRPOTrainer", "RLOOTrainer"]

_NAMES: Names = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "group/zero_std_fraction": "frac_reward_zero_std",
    "completion/length_mean": "completions/mean_length",
    "completion/truncated_fraction": "completions/clipped_ratio",
}
_OF_LINES = ("num_tokens", "epoch", "step")
"""What a line of the log has beside metrics."""
_CLIPS = {
    "clip_fraction_low_negative": "clip_ratio/low_mean",
    "clip_fraction_high_positive": "clip_ratio/high_mean",
    "clip_fraction": "clip_ratio/region_mean",
    "entropy": "entropy",
    "policy_loss": "loss",
}


class GroupTrainer(FlatTrainer):
    """Base of `GRPOTrainer` and `RLOOTrainer`.

    Attributes:
      reward_funcs: As they were given.
      reward_func_names: Of their metrics.
    """

    native_class: ClassVar[Any] = GroupNative
    model_class = AutoModelForCausalLM
    method_class: ClassVar[type[GroupMethod]]
    REFUSED: ClassVar[Mapping[str, str]] = GROUPS

    def __init__(
        self,
        given: Given,
        reward_funcs: Any,
        processing_classes: Any,
        quantization_config: Any,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Any = None,
    ) -> None:
        if given.args is None and isinstance(given.model, str | os.PathLike):
            kind = self.config_class.__name__.removesuffix("Config")
            given = replace(given, args=self.config_class(f"{Path(given.model).name}-{kind}"))
        self._quantization_config = quantization_config
        self.tools, self.environment_factory = list(tools), environment_factory
        own = reward_methods(environment_factory)
        self._num_own_rewards = len(own)
        if own:
            several = isinstance(reward_funcs, list | tuple)
            reward_funcs = [*(reward_funcs if several else [reward_funcs] if reward_funcs else []), *own]
            if isinstance(processing_classes, list | tuple):
                processing_classes = [*processing_classes, *[None] * len(own)]
        self.reward_funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        self._columns: dict[str, list[Any]] = {}
        self._figures: dict[str, list[float]] = {}
        template_kwargs = {} if given.args is None else vars(given.args).get("chat_template_kwargs") or {}
        self._rewards = script_rewards(
            reward_funcs,
            processing_classes,
            RewardGiven(
                lambda: self.state,
                self._log_extra,
                self._log_metric,
                episodes=(lambda: self.episodes) if self.has_tools else None,
                with_objects=environment_factory is not None,
            ),
            template_kwargs=template_kwargs,
        )
        self.reward_func_names = list(unique_names(self._rewards))
        super().__init__(given)
        for name in self.reward_func_names:
            for figure in ("mean", "std"):
                self._watcher.show(f"reward/{name}/{figure}", f"rewards/{name}/{figure}")

    @property
    def has_tools(self) -> bool:
        """True where rollouts are episodes with tools."""
        return bool(self.tools) or self.environment_factory is not None

    @functools.cached_property
    def episodes(self) -> EpisodeTools:
        """The environment of tools."""
        return EpisodeTools(
            self.tools,
            self.tokenizer,
            factory=self.environment_factory,
            max_rounds=vars(self.config)["max_tool_calling_iterations"],
            template_kwargs=cast(Mapping[str, Any], self.flat.chat_template_kwargs or {}),
        )

    @property
    def flat(self) -> GroupArguments:
        """The configuration."""
        return cast(GroupArguments, self.config)

    def _handle(self, given: Given) -> ModelHandle:
        if self._quantization_config is not None:
            kwargs = dict(vars(self.config)["model_init_kwargs"] or {})
            if not isinstance(given.model, str | os.PathLike) or "quantization_config" in kwargs:
                raise ValueError(
                    "`quantization_config` must be given for a model's name, once: here, or in `model_init_kwargs`."
                )
            self.flat.model_init_kwargs = kwargs | {"quantization_config": self._quantization_config}
        return super()._handle(given)

    def _max_length(self, handle: ModelHandle) -> int:
        """Tokens of a row: none is cut, so the rows say how many."""
        del handle
        return 0

    def _make_samples(self, records: Any, handle: ModelHandle, *, evaluation: bool) -> Any:
        if isinstance(records, RecordStream):
            raise ValueError("`samples` must be a list of rows, got a stream: give it as a list.")
        kwargs = self.flat.chat_template_kwargs or {}
        config, openings = self.flat, None
        copies = (config.num_generations_eval or config.num_generations or 1) if evaluation else 1
        if self.has_tools:
            ids, rows, openings = self.episodes.encode(_repeated(checked_rows(list(records)), copies))
        else:
            ids, rows = encode_rows(list(records), self.tokenizer, cast(Mapping[str, Any], kwargs))
            ids, rows = _repeated(ids, copies), _repeated(rows, copies)
        length = max(map(len, ids)) + int(config.max_completion_length or 0)
        table = vars(handle.config).get("n_positions") or vars(handle.config).get("max_position_embeddings")
        if table is not None and length > table:
            raise ValueError(
                f"`max_completion_length` must leave the longest prompt of {max(map(len, ids))} tokens within the "
                f"model's {table} positions, got {config.max_completion_length}."
            )
        self.max_length = max(self.max_length, length)
        return prompt_set(ids, rows, self.tokenizer, seed=config.seed, openings=openings)

    def _collator(self, given: Any) -> Callable[[list[Any]], Any]:
        return list

    def _sizes(self) -> tuple[int, int]:
        """(completions of a set of rollouts, optimizer steps of one).

        Raises:
          ValueError: If they do not fit each other.
        """
        config = self.flat
        mesh = config.mesh if isinstance(config.mesh, dict) else None
        rows = config.per_device_train_batch_size * data_devices(mesh)
        step = rows * config.gradient_accumulation_steps
        count = config.generation_batch_size or rows * (
            config.steps_per_generation or config.gradient_accumulation_steps
        )
        name = "generation_batch_size" if config.generation_batch_size else "steps_per_generation"
        if count % step:
            raise ValueError(
                f"`{name}` must make sets of rollouts whose size is a multiple of {step}, the completions of an "
                f"optimizer step (`per_device_train_batch_size` × devices × `gradient_accumulation_steps`), got "
                f"{count}."
            )
        assert config.num_generations is not None, "checked by the configuration"
        if count % config.num_generations:
            raise ValueError(
                f"`num_generations` must divide the {count} completions of a set of rollouts, got "
                f"{config.num_generations}."
            )
        return count, count // step

    def _num_rows(self) -> int | None:
        """Completions that a pass over the prompts learns from, once an iteration over them; a last set that is not
        full is left out, as in TRL."""
        if self._samples is None:
            return 1
        count, _ = self._sizes()
        prompts = count // cast(int, self.flat.num_generations)
        return max(len(self._samples) // prompts, 1) * count * self.flat.num_iterations

    def _native_config(self, handle: ModelHandle, *, given_optimizer: bool) -> TRLConfig:
        config = super()._native_config(handle, given_optimizer=given_optimizer)
        _, steps = self._sizes()
        config.train.epochs = math.ceil(config.train.total_steps / (steps * self.flat.num_iterations))
        return config

    def _method(self, handle: ModelHandle) -> MethodConfig:
        del handle
        config, (count, _) = self.flat, self._sizes()
        sampling = {
            "max_new_tokens": config.max_completion_length,
            "do_sample": True,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "repetition_penalty": config.repetition_penalty,
            **cast(Mapping[str, Any], config.generation_kwargs or {}),
        }
        own = {"num_rollouts": count, "chunk_size": count, "gen_kwargs": sampling}
        return self.method_class(**shared_fields(config, self.method_class) | own | self._renamed())

    def _renamed(self) -> dict[str, Any]:
        """Fields of the method that are not the configuration's under the same name."""
        weights = self.flat.reward_weights
        if weights is None or not self._num_own_rewards:
            return {}
        return {"reward_weights": [*weights, *[1.0] * self._num_own_rewards]}

    def _make_native(self, handle: ModelHandle, given: Given) -> Any:
        native: GroupNative = super()._make_native(handle, given)  # type: ignore[assignment]
        native.logged = self._take_logged
        if self._samples is not None:
            native.add_prompt_set(self._samples, self._rewards)
        return native

    def _watched(self, config: TRLConfig, optimizer: Any) -> Any:
        episodes = self.episodes if self.has_tools else None
        made: Any = type("GroupNative", (WatchedOnline, GroupNative), {"owner": self, "episodes": episodes})
        return made(config, reward_fn=self._rewards, optimizer=optimizer)

    def _add_samples(self, native: Any) -> None:
        """Prompts come with the reward functions, and those of evaluations when one is made."""

    # What reward functions log.

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self._columns.setdefault(column, []).extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        native = f"{LOGGED}{name}"
        if native not in self._watcher.names:
            self._watcher.show(native, self._name_in_lines(name))
        self._figures.setdefault(native, []).append(float(value))

    def _name_in_lines(self, name: str) -> str:
        """A script's name of a figure, behind `LOGGED` where the log's lines or evaluations have one of that name."""
        own = {*self._watcher.names.values(), *_OF_LINES}
        families = {native.partition("/")[0] for native in self._watcher.names if "/" in native}
        if name not in own and name.partition("/")[0] not in families:
            return name
        warnings.warn(
            f"`log_metric`: the figure {name!r} has the name of one of jrl's own, or of a family of them, and is "
            f"`{LOGGED}{name}` in the log.",
            stacklevel=3,  # the script's call
        )
        return f"{LOGGED}{name}"

    def _take_logged(self) -> tuple[dict[str, list[Any]], dict[str, float]]:
        if self.has_tools:
            for name, value in self.episodes.figures().items():
                self._log_metric(name, value)
            self.episodes.clear()
        columns, figures = self._columns, self._figures
        self._columns, self._figures = {}, {}
        return columns, {name: sum(values) / len(values) for name, values in figures.items()}

    # Evaluation: completions of the evaluation prompts, judged.

    def _check_best(self) -> None:
        """Refuses a metric that no evaluation has: there is no loss of completions that are only judged."""
        best = best_name(self.config)
        several = self.reward_func_names if len(self.reward_func_names) > 1 else ()
        of_set = ["reward", "completions/mean_length"]
        of_set += [f"rewards/{name}/{figure}" for name in several for figure in ("mean", "std")]
        sets = [f"{name}_" if name != MAIN else "" for name in self._eval_samples] or [""]
        names = sorted(f"{before}{name}" for before in sets for name in of_set)
        if best is not None and best.removeprefix("eval_") not in names:
            raise ValueError(
                f"`metric_for_best_model` must be one of {names}, got {self.config.metric_for_best_model!r}: an "
                "evaluation judges completions and has no loss, which transformers goes by beside "
                "`load_best_model_at_end` where no metric is named."
            )

    def _measured(self, sets: Mapping[str, Any], measure: Callable[[], Evaluation | None]) -> Evaluation:
        """Metrics under TRL's names, of several sets of prompts with the set's name before each."""
        metrics: dict[str, float] = {}
        parts = []
        native = cast(Any, self.native)
        for name, prompts in sets.items():
            native.eval_prompts = prompts
            found = measure()
            assert found is not None, "there are prompts"
            before = HELD_OUT if name == MAIN else f"{HELD_OUT}{name}_"
            metrics |= {
                f"{before}{self._watcher.names.get(key, key)}": value for key, value in found.metrics.items()
            }
            metrics |= {
                f"{before}{self._watcher.names[key]}": value for key, value in self._take_logged()[1].items()
            }
            parts.append(found)
        return replace(parts[0], metrics=metrics)

    def run_evaluation(self, step: int, measure: Callable[[int], Evaluation | None]) -> Evaluation | None:
        """Evaluates between two steps, where jrl's trainer asks for it.

        Args:
          step: Optimizer step.
          measure: jrl's own evaluation.
        """
        if not self._eval_samples or (self._training and not self._evaluates_at(step)):
            return None
        found = self._measured(self._eval_samples, lambda: measure(step))
        best = best_name(self.config)
        if best is None:
            return found
        value = found.metrics.get(f"{HELD_OUT}{best.removeprefix('eval_')}")
        if value is None:  # of a function that applied to no completion: nothing to compare
            return replace(found, score=None)
        return replace(found, score=value if self.args.greater_is_better else -value)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Metrics of completions of the evaluation prompts under the present parameters.

        Args:
          eval_dataset: Rows, or several sets of them by name; None: those of the constructor.
          ignore_keys: Of a torch model's outputs; must be None.
          metric_key_prefix: Before every name.
        Raises:
          ValueError: If there is nothing to evaluate on.
        """
        if ignore_keys is not None:
            raise ValueError("`ignore_keys` must be None: an evaluation keeps no outputs of the model.")
        given = (
            self._eval_samples if eval_dataset is None else self._read_evaluations(eval_dataset, self.model)
        )
        if not given:
            raise ValueError("`eval_dataset` must be given, here or to the constructor.")
        native = cast(Any, self.native)
        found = self._measured(given, lambda: native.measure(int(native.optimizer_steps())))
        metrics = {
            f"{metric_key_prefix}_{name.removeprefix(HELD_OUT)}": value
            for name, value in found.metrics.items()
        }
        self._watcher.evaluated(metrics, in_run=False)
        return metrics


def _repeated(rows: Sequence[Any], copies: int) -> list[Any]:
    return [row for row in rows for _ in range(copies)]


class WatchedOnline(GroupNative):
    """jrl's trainer, whose evaluations go through the trainer of TRL's shape that owns it."""

    owner: ClassVar[GroupTrainer]
    resume_argument = "resume_from_checkpoint"

    def run_evaluation(self, step: int) -> Evaluation | None:
        """Evaluates by the owner's method, which asks for jrl's own."""
        return self.owner.run_evaluation(step, self.measure)

    def measure(self, step: int) -> Evaluation | None:
        """Evaluates by jrl's own method."""
        return super().run_evaluation(step)


class GRPOTrainer(GroupTrainer):
    """Group-relative policy optimisation of completions that functions or models judge.

    Args:
      model: A name, a folder, a handle of `from_pretrained`, or what else `resolve_model` takes.
      reward_funcs: One or several of: `f(prompts, completions, completion_ids, **columns, trainer_state, log_extra,
        log_metric)`, called by keyword, which returns a number a completion, or None where it does not apply;
        `async def` too; a sequence classifier's name, folder or handle.
      args: A `GRPOConfig`.
      train_dataset: Rows with `prompt`, a text or messages; all other columns go to the reward functions.
      eval_dataset: The same, or several sets by name.
      processing_class: The tokenizer; default: that of the model's folder.
      reward_processing_classes: Tokenizers of the models among `reward_funcs`; default: theirs.
      callbacks: Of transformers.
      optimizers: (an optax transformation, None), or (None, a function from the step to the learning rate).
      quantization_config: Of transformers, for a model's name.
      peft_config: An adapter trains, and the model is frozen.
      tools: Functions, `async def` or not, that the model calls in its chat template's format.
      rollout_func: Refused.
      environment_factory: Makes objects whose public methods are tools; or several by name, chosen by a row's
        `environment`. `reset` takes columns of the row, and what it returns stands behind the prompt's last message;
        `get_reward`, if there is one, is one more reward function.
    """

    config_class: ClassVar[type[FlatArguments]] = GRPOConfig
    method_class = GRPOMethod
    TAGS = ("trl", "grpo")
    NAMES: ClassVar[Names] = {
        **_NAMES,
        **{f"grpo/{name}": of_trl for name, of_trl in _CLIPS.items()},
        "grpo/kl_term": "kl",
    }

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        given = Given.of(locals())
        if rollout_func is not None:
            raise ValueError(
                f"`rollout_func` must be None, got {rollout_func!r:.80}: rollouts are jrl's own. Give "
                "`environment_factory`, or `environment` to `jrl.train`."
            )
        iterations = None if args is None else vars(args).get("max_tool_calling_iterations")
        if iterations is not None and not tools and environment_factory is None:
            raise ValueError(
                f"`max_tool_calling_iterations` must be None without `tools` or `environment_factory`, got "
                f"{iterations}."
            )
        super().__init__(
            given,
            reward_funcs,
            reward_processing_classes,
            quantization_config,
            tools=tools or (),
            environment_factory=environment_factory,
        )


class RLOOTrainer(GroupTrainer):
    """REINFORCE with the other completions of a prompt as the baseline. Arguments as of `GRPOTrainer`.

    Args:
      model: As there.
      reward_funcs: As there.
      args: A `RLOOConfig`.
      train_dataset: As there.
      eval_dataset: As there.
      processing_class: As there.
      reward_processing_classes: As there.
      callbacks: As there.
      optimizers: As there.
      quantization_config: As there.
      peft_config: As there.
    """

    config_class: ClassVar[type[FlatArguments]] = RLOOConfig
    method_class = RLOOMethod
    TAGS = ("trl", "rloo")
    NAMES: ClassVar[Names] = {
        **_NAMES,
        **{f"rloo/{name}": of_trl for name, of_trl in _CLIPS.items()},
        "kl/per_token": "kl",
    }

    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        given = Given.of(locals())
        super().__init__(given, reward_funcs, reward_processing_classes, quantization_config)

    def _renamed(self) -> dict[str, Any]:
        clip = cast(RLOOConfig, self.config).reward_clip_range
        return super()._renamed() | ({} if clip is None else {"reward_clip": clip[1]})
