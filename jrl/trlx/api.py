# SPDX-License-Identifier: Apache-2.0
"""trlX's `train`: the one of jrl, which returns a trainer of trlX's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jrl.api import (
    Defaults,
    check_config,
    check_data,
    check_kwargs,
    check_sampling,
    default_config,
    make_trainer,
    unpack_dataset,
)
from jrl.data.prompts import PromptSet
from jrl.distributed import join
from jrl.trainers.base import Trainer
from jrl.trainers.config import TRLConfig
from jrl.trainers.ilql import ILQLTrainer
from jrl.trainers.loop import says_what_takes_long
from jrl.trainers.ppo import PPOTrainer
from jrl.trainers.rft import RFTTrainer
from jrl.trainers.rollouts import document_start, prompt_budget
from jrl.trainers.sft import SFTTrainer
from jrl.trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from jrl.trlx.dialogue import split_samples
from jrl.trlx.functions import seed_metrics, seed_rewards
from jrl.trlx.nemo import NeMoTrainer, refuse
from jrl.trlx.pipeline.offline_pipeline import PromptPipeline
from jrl.trlx.registry import get_pipeline, get_trainer
from jrl.trlx.seed_defaults import with_seed_prompts, without_missing_tracker
from jrl.trlx.trainer import BaseRLTrainer
from jrl.trlx.trainer.accelerate_base_trainer import AccelerateRLTrainer
from jrl.trlx.trainer.accelerate_ilql_trainer import AccelerateILQLTrainer, seq2seq_pairs
from jrl.trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from jrl.trlx.trainer.accelerate_rft_trainer import AccelerateRFTTrainer
from jrl.trlx.trainer.accelerate_sft_trainer import AccelerateSFTTrainer

ADAPTERS: Mapping[type[Trainer], type[AccelerateRLTrainer]] = {
    PPOTrainer: AcceleratePPOTrainer,
    ILQLTrainer: AccelerateILQLTrainer,
    SFTTrainer: AccelerateSFTTrainer,
    RFTTrainer: AccelerateRFTTrainer,
}
"""The trlX shape of each trainer of jrl."""
_DEFAULTS = Defaults(default_ppo_config, default_ilql_config, default_sft_config)


def train(
    model_path: Any = None,
    reward_fn: Callable[..., Any] | None = None,
    dataset: tuple[Sequence[Any], Sequence[float]] | None = None,
    samples: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    config: TRLConfig | None = None,
    stop_sequences: Sequence[str] | None = None,
    *,
    logit_mask: Any = None,
    split_token: str | None = None,
) -> BaseRLTrainer:
    """Trains a language model; arguments and errors as in `jrl.train`.

    Args:
      model_path: As there.
      reward_fn: As there.
      dataset: As there.
      samples: As there.
      rewards: As there.
      prompts: As there.
      eval_prompts: As there.
      metric_fn: As there.
      config: As there; the default config has trlX's tracker.
      stop_sequences: As there.
      logit_mask: Of releases up to 0.5: (V, V), True where the column's token may not follow the row's.
      split_token: Of releases up to 0.3: ends the prompt of a sample that is one text.
    Returns:
      The trainer, after `learn()`.
    """
    if isinstance(config, TRLConfig) and issubclass(kind := get_trainer(config.train.trainer), NeMoTrainer):
        refuse(kind.__name__, kind.instead)
    if dataset is not None:
        samples, rewards = unpack_dataset(dataset, samples, rewards)
    if isinstance(reward_fn, list | tuple):
        raise ValueError(
            "`reward_fn` must be one function, as trlX has it, got a list: `jrl.train` takes several."
        )
    check_data(reward_fn, samples, rewards)
    check_config(config)
    check_sampling(prompts, eval_prompts, metric_fn, stop_sequences)
    if config is None:
        config = default_config(reward_fn, rewards, _DEFAULTS, stacklevel=3)
    if model_path is not None:
        config = config.evolve(model={"model_path": model_path})
    if logit_mask is not None:
        config = config.evolve(train={"trainer_kwargs": {"logit_mask": logit_mask}})
    if samples is not None and split_token is not None:
        samples = split_samples(samples, split_token)
    request = Request(
        with_seed_prompts(without_missing_tracker(config)),
        reward_fn=reward_fn,
        samples=samples,
        rewards=rewards,
        prompts=prompts,
        eval_prompts=eval_prompts,
        metric_fn=metric_fn,
        stop_sequences=tuple(stop_sequences or ()),
    )
    trainer = request.adapted() if request.is_native() else request.own()
    trainer.learn()
    return trainer


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of a run, checked and unpacked; the attributes are arguments of `train`."""

    config: TRLConfig = field(kw_only=False)
    reward_fn: Callable[..., Any] | None
    samples: Sequence[Any] | None
    rewards: Sequence[float] | None
    prompts: Sequence[Any] | None
    eval_prompts: Sequence[Any] | None
    metric_fn: Callable[..., Any] | None
    stop_sequences: tuple[str, ...]

    def is_native(self) -> bool:
        """True where jrl makes the trainer and reads the data: neither trainer nor pipeline has trlX's shape."""
        train = self.config.train
        trainer, pipeline = get_trainer(train.trainer), get_pipeline(train.pipeline)
        return (trainer in ADAPTERS.values() or issubclass(trainer, Trainer)) and (
            pipeline is PromptPipeline or issubclass(pipeline, PromptSet)
        )

    def adapted(self) -> AccelerateRLTrainer:
        """A trainer of jrl's own with its data, in trlX's shape."""
        join()  # before anything of JAX is computed
        with says_what_takes_long("loading model and data"):
            native = make_trainer(
                self.config,
                reward_fn=seed_rewards(self.reward_fn),
                metric_fn=seed_metrics(self.metric_fn),
                stop_sequences=self.stop_sequences,
            )
            samples = self.samples
            if isinstance(native, ILQLTrainer) and samples is not None:
                samples = seq2seq_pairs(samples, native)
            native.add_data(
                samples=samples, rewards=self.rewards, prompts=self.prompts, eval_prompts=self.eval_prompts
            )
        adapter = ADAPTERS.get(type(native), AccelerateRLTrainer)
        given = {name: vars(native)[name] for name in ("stop_sequences", "logit_mask")}
        given |= {"reward_fn": self.reward_fn, "metric_fn": self.metric_fn}
        return adapter(native.config, native=native, **given)

    def own(self) -> Any:
        """A trainer of trlX's shape, its data given in trlX's order."""
        config, train = self.config, self.config.train
        trainer_class = get_trainer(train.trainer)
        check_kwargs(trainer_class, train.trainer_kwargs)
        needed = "make_experience" if self.reward_fn is None else "add_prompt_pipeline"
        if not hasattr(trainer_class, needed):
            raise ValueError(
                f"`train.trainer`: {trainer_class.__name__} defines no `{needed}`, so it takes no data: name a trainer "
                "that is derived from it."
            )
        trainer = trainer_class(
            config,
            reward_fn=self.reward_fn,
            metric_fn=self.metric_fn,
            stop_sequences=list(self.stop_sequences),
            **train.trainer_kwargs,
        )
        start = [document_start(trainer.tokenizer)] * train.batch_size
        eval_prompts = self.eval_prompts
        if self.reward_fn is not None:
            prompts = start if self.prompts is None else self.prompts
            eval_prompts = prompts[: train.batch_size] if eval_prompts is None else eval_prompts
            trainer.add_prompt_pipeline(self._pipeline(prompts, trainer.tokenizer))
        elif self.rewards is not None:
            trainer.make_experience(self.samples, self.rewards, train.seq_length)
        else:
            trainer.make_experience(self.samples, train.seq_length)
        trainer.add_eval_pipeline(
            self._pipeline(start if eval_prompts is None else eval_prompts, trainer.tokenizer)
        )
        return trainer

    def _pipeline(self, prompts: Sequence[Any], tokenizer: Any) -> Any:
        """Prompts through the pipeline that the configuration names."""
        longest = self.config.method.gen_kwargs["max_new_tokens"]
        longest = max(longest) if isinstance(longest, list | tuple) else longest
        budget = prompt_budget(self.config.train, longest)
        seq2seq = self.config.model.model_arch_type == "seq2seq"
        return get_pipeline(self.config.train.pipeline)(
            prompts, budget, tokenizer, add_special_tokens=seq2seq
        )
