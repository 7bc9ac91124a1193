# SPDX-License-Identifier: Apache-2.0
"""`jrl.train`: from what a user brings to a trainer that has learned."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from jrl.data.sources.arguments import is_file_name, prompt_rows, sample_rows
from jrl.data.sources.records import RecordStream
from jrl.distributed import join, on_main
from jrl.learners.config import MethodConfig, OnlineConfig
from jrl.methods import default_ilql_config, default_ppo_config, default_sft_config
from jrl.rollout.environments import check_environment
from jrl.rollout.keywords import reward_functions
from jrl.suggestions import did_you_mean
from jrl.trainers.base import Trainer
from jrl.trainers.checkpoints.run_folder import refuse_before_loading
from jrl.trainers.config.method import entry_of
from jrl.trainers.config.registry import get_pipeline, get_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.learning_rate import with_choices_for_model
from jrl.trainers.loop.activity import says_what_takes_long
from jrl.trainers.policy_trainer import PolicyTrainer

RewardFns = Callable[..., Any] | Sequence[Callable[..., Any]]
"""A reward function, or several."""
# Of every trainer's constructor; the rest of its arguments come from `train.trainer_kwargs`.
_GIVEN_BY_TRAIN = ("config", "reward_fn", "metric_fn", "stop_sequences", "environment")

Config = TypeVar("Config", bound=TRLConfig)


class Defaults(NamedTuple, Generic[Config]):
    """Factories of the default configuration: with a reward function, with rewarded samples, and with samples alone."""

    online: Callable[[], Config]
    rewarded: Callable[[], Config]
    offline: Callable[[], Config]


DEFAULTS = Defaults(default_ppo_config, default_ilql_config, default_sft_config)


def train(
    model_path: Any = None,
    reward_fn: RewardFns | None = None,
    dataset: tuple[Sequence[Any], Sequence[float]] | None = None,
    samples: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    config: TRLConfig | MethodConfig | None = None,
    stop_sequences: Sequence[str] | None = None,
    environment: Any = None,
) -> Trainer:
    """Trains a language model: online with a reward function, or offline on samples.

    Args:
      model_path: Directory or hub id of a Hugging Face checkpoint, a transformers model object of torch, or a
        transformers config object for random weights; replaces `config.model.model_path`.
      reward_fn: Called with keywords `samples`, `prompts`, `outputs`, `tokenizer`, `output_tokens` and one for each
        metadata key, as far as its signature accepts them; returns one float a sample, or one list a sample with a
        float for each of its `output_tokens`, or None where it does not apply to a sample. May be `async def`. A list
        of functions: the reward is their sum, weighed by `method.reward_weights` where the method has them.
      dataset: `(samples, rewards)`; deprecated, use those arguments.
      samples: Strings, `[prompt, output]` pairs or longer dialogues; to trainers that say so, mappings with columns, or
        a `RecordStream`. A `datasets.Dataset`, a table of pandas, the name of a file (.jsonl, .csv, .parquet, ...) or
        a generator stands for its rows.
      rewards: One a sample, for offline reinforcement learning.
      prompts: Strings, lists of messages, or dicts with `"prompt"` (a string or messages) and metadata; left untouched.
        Data sets, tables, files and generators as for `samples`. Default: the BOS text.
      eval_prompts: Likewise; default: the first `batch_size` prompts, or the BOS text.
      metric_fn: `metric_fn(samples, prompts, outputs, **metadata)` returns name → list of floats, or name → float.
      config: `config.train.trainer` chooses the algorithm. A method's section alone, such as `jrl.GRPOConfig()`: the
        default run of that method. Default: PPO where `reward_fn` is given, else ILQL where `rewards` are, else SFT.
        Without a whole configuration, learning rate, KL weight and length are chosen by the model, and said.
      stop_sequences: Texts that end a completion; with an environment, a turn.
      environment: Answers the policy turn by turn, and rewards it: a class of objects with `reset` and `step`, one an
        episode, or a function of a turn; see `jrl.rollout.environments`.
    Returns:
      The trainer, after `learn()`.
    Raises:
      ValueError: If the arguments do not say what to train on, do not fit each other or the configured trainer, or
        the configuration names a trainer, pipeline or method that is not registered.
      TypeError: If `config` is no `TRLConfig`.
    """
    trainer = prepare(
        model_path=model_path,
        reward_fn=reward_fn,
        dataset=dataset,
        samples=samples,
        rewards=rewards,
        prompts=prompts,
        eval_prompts=eval_prompts,
        metric_fn=metric_fn,
        config=config,
        stop_sequences=stop_sequences,
        environment=environment,
    )
    trainer.learn()
    return trainer


def prepare(
    *,
    model_path: Any = None,
    reward_fn: RewardFns | None = None,
    dataset: tuple[Sequence[Any], Sequence[float]] | None = None,
    samples: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    config: TRLConfig | MethodConfig | None = None,
    stop_sequences: Sequence[str] | None = None,
    environment: Any = None,
) -> Trainer:
    """The trainer that `train` would run, its model and data loaded; the arguments are those of `train`."""
    join()  # before anything of JAX is computed
    if dataset is not None:
        samples, rewards = unpack_dataset(dataset, samples, rewards)
    samples = sample_rows(samples, rewarded=rewards is not None)
    prompts = prompt_rows("prompts", prompts)
    eval_prompts = prompt_rows("eval_prompts", eval_prompts)
    if environment is not None:
        check_environment(environment)
    check_data(reward_fn, samples, rewards, environment=environment)
    check_config(config)
    check_sampling(prompts, eval_prompts, metric_fn, stop_sequences)
    if config is None:
        online = reward_fn if environment is None else environment
        config = default_config(online, rewards, DEFAULTS, stacklevel=4, model_path=model_path, by_size=True)
    elif isinstance(config, MethodConfig):
        config = config_of_method(config, model_path=model_path, stacklevel=4)
    elif model_path is not None:
        config = config.evolve(model={"model_path": model_path})
    on_main(partial(refuse_before_loading, config.train))
    with says_what_takes_long("loading model and data"):
        trainer = make_trainer(
            config,
            reward_fn=reward_fn,
            metric_fn=metric_fn,
            stop_sequences=tuple(stop_sequences or ()),
            environment=environment,
        )
        trainer.add_data(samples=samples, rewards=rewards, prompts=prompts, eval_prompts=eval_prompts)
    return trainer


def make_trainer(
    config: TRLConfig,
    *,
    reward_fn: RewardFns | None,
    metric_fn: Callable[..., Any] | None,
    stop_sequences: tuple[str, ...],
    environment: Any = None,
) -> Trainer:
    """The trainer that `config.train.trainer` names, with the arguments of `config.train.trainer_kwargs`.

    Raises:
      ValueError: If no such trainer or pipeline is registered, or the trainer does not take these arguments.
      TypeError: If what is registered is no trainer.
    """
    trainer_class = get_trainer(config.train.trainer)
    get_pipeline(config.train.pipeline)  # its name is checked before a model is loaded
    if not issubclass(trainer_class, Trainer):
        raise TypeError(
            f"`train.trainer`: {trainer_class.__name__} must be a subclass of {Trainer.__module__}.Trainer."
        )
    kwargs = config.train.trainer_kwargs
    check_kwargs(trainer_class, kwargs)
    if not issubclass(trainer_class, PolicyTrainer):
        given = {
            "reward_fn": reward_fn,
            "metric_fn": metric_fn,
            "stop_sequences": stop_sequences,
            "environment": environment,
        }
        unused = [name for name, value in given.items() if value]
        if unused:
            raise ValueError(
                f"`{unused[0]}` must not be given for {trainer_class.__name__}: its model writes no text."
            )
        return trainer_class(config, **kwargs)
    others = {} if environment is None else {"environment": environment}
    return trainer_class(
        config, reward_fn=reward_fn, metric_fn=metric_fn, stop_sequences=stop_sequences, **others, **kwargs
    )


def unpack_dataset(
    dataset: tuple[Sequence[Any], Sequence[float]],
    samples: Sequence[Any] | None,
    rewards: Sequence[float] | None,
) -> tuple[Sequence[Any], Sequence[float]]:
    """The two halves of the deprecated `dataset`."""
    warnings.warn("`dataset` is deprecated: pass `samples` and `rewards`.", DeprecationWarning, stacklevel=4)
    if samples is not None or rewards is not None:
        raise ValueError("`dataset` is `samples` and `rewards` in one: give it or them, not both.")
    if not isinstance(dataset, tuple | list) or len(dataset) != 2:
        raise ValueError(f"`dataset` must be the pair (samples, rewards), got {type(dataset).__name__}.")
    return dataset[0], dataset[1]


def check_data(
    reward_fn: RewardFns | None,
    samples: Sequence[Any] | None,
    rewards: Sequence[float] | None,
    *,
    environment: Any = None,
) -> None:
    """Says what is missing or does not fit, before anything is loaded."""
    if reward_fn is not None:
        reward_functions(reward_fn)
    if samples is None and rewards is not None:
        raise ValueError("`rewards` are those of `samples`, one each: give `samples` too.")
    if reward_fn is None and environment is None and samples is None:
        raise ValueError(
            "Nothing to train on: give `reward_fn` or `environment` (online), or `samples` (offline); got none of "
            "them, and prompts alone say nothing of what is better."
        )
    if isinstance(samples, RecordStream):
        if rewards is not None:
            raise ValueError("`rewards` need a list of `samples`, one each: a stream has no length.")
        return
    _check_list("samples", samples)
    _check_list("rewards", rewards)
    if samples is not None and rewards is not None and len(rewards) != len(samples):
        raise ValueError(
            f"`rewards` must have one entry a sample: got {len(rewards)} for {len(samples)} samples. Was one of "
            "the two lists filtered, or cut? Compare `len(samples)` and `len(rewards)` where you make them."
        )


def check_config(config: object) -> None:
    """Refuses what is no configuration; None is left to the default one."""
    if config is not None and not isinstance(config, TRLConfig | MethodConfig):
        raise TypeError(
            f"`config` must be a TRLConfig, got {type(config).__name__}. To change some fields of the default one: "
            "`jrl.default_ppo_config().evolve(train={'seed': 3})`. From a file: `jrl.TRLConfig.load_recipe(path)`."
        )


def check_sampling(
    prompts: Sequence[Any] | None,
    eval_prompts: Sequence[Any] | None,
    metric_fn: Callable[..., Any] | None,
    stop_sequences: Sequence[str] | None,
) -> None:
    """Refuses sampling arguments of a wrong type: a text alone would pass for a list of its letters."""
    _check_list("prompts", prompts)
    _check_list("eval_prompts", eval_prompts)
    if metric_fn is not None and not callable(metric_fn):
        raise ValueError(
            f"`metric_fn` must be a function, got {type(metric_fn).__name__} {metric_fn!r:.40}: give the "
            "function itself."
        )
    if isinstance(stop_sequences, str):
        raise ValueError(
            f"`stop_sequences` must be a list of texts, got the text {stop_sequences!r} alone: put it in a list, "
            f"`[{stop_sequences!r:.60}]`."
        )


def _check_list(name: str, given: Any) -> None:
    """Refuses an argument that is given and is not a list, or is empty."""
    if given is None:
        return
    if isinstance(given, os.PathLike) or is_file_name(given):
        raise ValueError(
            f"`{name}` must be a list, got the path {str(given)!r}: `jrl.read_records(path)` reads it."
        )
    if isinstance(given, str | Mapping):
        raise ValueError(
            f"`{name}` must be a list, got a single {type(given).__name__}: put it in a list, `{name}=[{given!r:.60}]`."
        )
    if not hasattr(given, "__len__"):
        raise TypeError(f"`{name}` must be a list, got {type(given).__name__}: `list(...)` makes one of it.")
    if not len(given):
        raise ValueError(f"`{name}` must hold at least one entry, got none.")


def default_config(
    reward_fn: RewardFns | None,
    rewards: Sequence[float] | None,
    defaults: Defaults[Config],
    *,
    stacklevel: int,
    model_path: Any = None,
    by_size: bool = False,
) -> Config:
    """The configuration of a run that was given none, and a warning that says which one it is.

    Args:
      reward_fn: Of the run.
      rewards: Likewise.
      defaults: To choose from.
      stacklevel: Of the warning.
      model_path: Replaces that of the default.
      by_size: Whether learning rate, KL weight and length are chosen by the model; else they are those of the seeds.
    """
    if reward_fn is not None:
        config = defaults.online()
    else:
        config = defaults.offline() if rewards is None else defaults.rewarded()
    if model_path is not None:
        config = config.evolve(model={"model_path": model_path})
    chosen = ""
    if by_size:
        config, chosen = with_choices_for_model(config)
    warnings.warn(
        f"No `config` given: using the default one for {config.train.trainer}, with model "
        f"{config.model.model_path!r}{chosen and f', {chosen}'}.",
        stacklevel=stacklevel,
    )
    return config


def config_of_method(method: MethodConfig, *, model_path: Any, stacklevel: int) -> TRLConfig:
    """The default run of a method, with what suits its model, and a warning that says what was chosen.

    Args:
      method: Its section, all of which stays.
      model_path: Replaces that of the default.
      stacklevel: Of the warning.
    Raises:
      ValueError: If the section has no entry in the table of methods.
    """
    entry = entry_of(method)
    if entry is None:
        raise ValueError(
            f"`config` must be a whole configuration, or the section of a known method, got {type(method).__name__}: "
            "`jrl.register(jrl.Method(...))` makes it known, or `jrl.default_config(method)` a whole configuration."
        )
    config = entry.default()
    config.method = copy.deepcopy(method)
    if model_path is not None:
        config = config.evolve(model={"model_path": model_path})
    config, chosen = with_choices_for_model(config, [f"method.{name}" for name in vars(method)])
    if isinstance(method, OnlineConfig) and method.num_rollouts < config.train.batch_size:
        config = config.evolve(train={"batch_size": method.num_rollouts})
        rollouts = f"`train.batch_size` {method.num_rollouts}, that of the rollouts"
        chosen = f"{chosen}; {rollouts}" if chosen else rollouts
    warnings.warn(
        f"`config` is a {type(method).__name__} alone: using the default run of `jrl {entry.name}`, with model "
        f"{config.model.model_path!r}{chosen and f', {chosen}'}.",
        stacklevel=stacklevel,
    )
    return config


def check_kwargs(trainer_class: type, kwargs: Mapping[str, Any]) -> None:
    """Names what `train.trainer_kwargs` may hold, where it holds something else."""
    accepted = _arguments(trainer_class)
    for name in kwargs:
        if name in _GIVEN_BY_TRAIN:
            raise ValueError(f"`train.trainer_kwargs.{name}`: give `{name}` to `train` itself.")
        if name not in accepted:
            raise ValueError(
                f"Unknown argument `train.trainer_kwargs.{name}`: beside what `train` gives it, "
                f"{trainer_class.__name__} takes {accepted}.{did_you_mean(name, accepted)}"
            )


def _arguments(trainer_class: type) -> list[str]:
    """Names that a constructor takes beside what `train` gives it; where it hands others on, its bases' too."""
    names: dict[str, None] = {}
    for owner in trainer_class.__mro__:
        if "__init__" in vars(owner):
            parameters = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
            names |= dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return [name for name in names if name not in _GIVEN_BY_TRAIN]
