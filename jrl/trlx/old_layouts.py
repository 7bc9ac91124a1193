# SPDX-License-Identifier: Apache-2.0
"""Configurations of older trlX releases (v0.2, v0.3, v0.4) as the present six sections.

An old field that meant something goes where it stands now, with one warning that names the place. Fields that
trlX documented but did not use (`lr_ramp_steps`, `lr_decay_steps`, `weight_decay`) do what was documented.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrl.trainers.config import Layout, coerce, register_layout, warn_caller

Tree = dict[str, dict[str, Any]]
"""Section → field → value; an entry of a dictionary has a dotted name of three parts."""

_MOVED = {
    "model.tokenizer_path": "tokenizer.tokenizer_path",
    "train.learning_rate_init": "optimizer.kwargs.lr",
    "train.lr_init": "optimizer.kwargs.lr",
    "train.opt_betas": "optimizer.kwargs.betas",
    "train.opt_eps": "optimizer.kwargs.eps",
    "train.weight_decay": "optimizer.kwargs.weight_decay",
    "train.learning_rate_target": "scheduler.kwargs.eta_min",
    "train.lr_target": "scheduler.kwargs.eta_min",
}
_PIPELINES = ("PPOPipeline", "OfflinePipeline")
# OpenDelta's names for a LoRA, and PEFT's.
_LORA = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
# What ILQL sampled with before it had `gen_kwargs`; the length only where the budget has room for it.
_STEERED = {"max_new_tokens": 56, "top_k": 20, "temperature": 1.0}


def modernise(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in the present layout; one that is in it already comes back as it is, copied.

    Args:
      config: Section → field → value; left untouched. What is not a mapping of mappings passes, for whoever checks
        it.
    Raises:
      ValueError: If an old field stands beside the new one, or means nothing that jrl can do.
    """
    tree: dict[str, Any] = copy.deepcopy(dict(config))
    if not all(isinstance(section, dict) for section in tree.values()):
        return tree
    first_layout = "learning_rate_init" in tree.get("train", {})
    for old, new in _MOVED.items():
        value = _take(tree, old)
        if value is not None:
            _put(tree, new, value, old=old)
    if "optimizer" in tree:
        tree["optimizer"].setdefault("name", "adamw")
    _name_schedule(tree)
    _name_trainer(tree)
    _name_adapter(tree)
    _name_tracker(tree)
    _move_betas(tree)
    for field in ("gen_kwargs", "gen_experience_kwargs"):
        _count_new_tokens(tree, field)
    method = tree.get("method", {})
    if first_layout and str(method.get("name", "")).lower().startswith("ppo"):
        # Scores were never clipped there, and a default that clips would change the run.
        method.setdefault("cliprange_reward", None)
    return tree


def full_name(name: str, known: Mapping[str, Iterable[str]]) -> str:
    """The dotted name of a field that stands alone, as in the sweeps of trlX 0.3 to 0.5; any other name as it is.

    Args:
      name: Such as "lr" or "init_kl_coef".
      known: Section → its fields.
    """
    if "." in name or name in known:
        return name
    homes = [f"{section}.{name}" for section, names in known.items() if name in names]
    moved = [
        new for old, new in _MOVED.items() if old.partition(".")[2] == name or new.endswith(f".kwargs.{name}")
    ]
    full = next(iter(homes if len(homes) == 1 else [] if homes else moved), name)
    if full != name:
        warn_caller(f"`{name}` is `{full}` now.")
    return full


def _name_schedule(tree: Tree) -> None:
    """Ramp and decay, or the cosine of releases without them, whose period was `total_steps`."""
    ramp, decay = (
        coerce(_take(tree, name), int | None, name)
        for name in ("train.lr_ramp_steps", "train.lr_decay_steps")
    )
    if ramp is not None or decay is not None:
        kwargs = tree.get("scheduler", {}).get("kwargs", {})
        rate = coerce(
            tree.get("optimizer", {}).get("kwargs", {}).get("lr"), float | None, "the learning rate"
        )
        floor = coerce(kwargs.get("eta_min", rate), float | None, "the target of the learning rate")
        if not decay and floor != rate:
            raise ValueError(
                f"`train.lr_decay_steps` is {decay}, but the learning rate is to fall from {rate} to {floor}: say in "
                "how many steps, or leave the target out."
            )
        if not decay:
            kwargs.pop("eta_min", None)
            if decay is not None:
                warn_caller(
                    "`train.lr_decay_steps` = 0 is left out: the learning rate stays where the ramp ends."
                )
        _put(tree, "scheduler.name", "warmup_linear" if decay else "warmup_constant", old=None)
        old_ramp = "train.lr_ramp_steps" if ramp is not None else None
        _put(tree, "scheduler.kwargs.warmup_steps", ramp or 0, old=old_ramp)
        if decay:
            _put(tree, "scheduler.kwargs.total_steps", (ramp or 0) + decay, old="train.lr_decay_steps")
    elif "scheduler" in tree and "name" not in tree["scheduler"]:
        tree["scheduler"]["name"] = "cosine_annealing"
        tree["scheduler"]["kwargs"].setdefault("T_max", tree.get("train", {}).get("total_steps"))


def _name_trainer(tree: Tree) -> None:
    """A trainer was called a model, and a pipeline had a name for each algorithm."""
    kind = _take(tree, "model.model_type")
    if kind is not None:
        name = str(kind).removeprefix("Accelerate").removesuffix("Model") + "Trainer"
        _put(tree, "train.trainer", name, old="model.model_type")
    device = _take(tree, "model.device")
    if device is not None:
        warn_caller(f"`model.device` = {device!r} is left out: `train.mesh` places arrays.")
    train = tree.get("train", {})
    if train.get("pipeline") in _PIPELINES:
        warn_caller(f"`train.pipeline` = {train['pipeline']!r} is `train.pipeline` = 'PromptPipeline' now.")
        train["pipeline"] = "PromptPipeline"
    if "orchestrator" in train:
        warn_caller(
            f"`train.orchestrator` = {train.pop('orchestrator')!r} is left out: `train.trainer` does its work."
        )


def _name_adapter(tree: Tree) -> None:
    """`model.delta_kwargs` of OpenDelta; only its LoRA has a counterpart of the same meaning."""
    found = _take(tree, "model.delta_kwargs")
    if found is None:
        return
    given = dict(found)
    kind, modules = str(given.pop("delta_type", "")), given.pop("modified_modules", None)
    known = {name: given.pop(name) for name in _LORA if name in given}
    if kind.lower() != "lora" or given:
        raise ValueError(
            f"`model.delta_kwargs`: {sorted(given) or kind!r} means nothing to jrl; give `model.peft_config`, such as "
            "{peft_type: LORA, r: 8, lora_alpha: 16}."
        )
    adapter = {"peft_type": "LORA"} | {_LORA[name]: value for name, value in known.items()}
    if isinstance(modules, str):
        modules = "all-linear" if modules == "all" else [modules]
    if modules is not None:
        adapter["target_modules"] = modules
    _put(tree, "model.peft_config", adapter, old="model.delta_kwargs")


def _name_tracker(tree: Tree) -> None:
    """There is one tracker now."""
    trackers = _take(tree, "train.trackers")
    if trackers is None:
        return
    names = [trackers] if isinstance(trackers, str) else list(trackers)
    if len(names) > 1:
        warn_caller(
            f"`train.trackers` = {names}: there is one tracker beside metrics.jsonl now, and the first is taken."
        )
    _put(tree, "train.tracker", names[0] if names else None, old="train.trackers")


def _move_betas(tree: Tree) -> None:
    """ILQL's list of weights of Q − V in sampling; several of them are what an evaluation sweeps over."""
    betas = _take(tree, "method.betas")
    if betas is None:
        return
    if not isinstance(betas, Sequence) or isinstance(betas, str) or not betas:
        raise ValueError(f"`method.betas` must be a list of numbers, got {betas!r}.")
    if "gen_kwargs" not in tree["method"]:
        length = min(_STEERED["max_new_tokens"], max(1, tree.get("train", {}).get("seq_length", 64) - 1))
        tree["method"]["gen_kwargs"] = _STEERED | {"max_new_tokens": length}
        warn_caller(f"`method.gen_kwargs` is missing and becomes {tree['method']['gen_kwargs']}.")
    _put(tree, "method.gen_kwargs.beta", betas[0] if len(betas) == 1 else list(betas), old="method.betas")


def _count_new_tokens(tree: Tree, field: str) -> None:
    """Lengths that counted the prompt count what is sampled; the budget grows only if no prompt would fit."""
    given = tree.get("method", {}).get(field)
    if not isinstance(given, dict):
        return
    for old, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        value = _take(tree, f"method.{field}.{old}")
        if value is not None:
            _put(tree, f"method.{field}.{new}", value, old=f"method.{field}.{old}")
            if old == "max_length":
                _make_room(tree, value)


def _make_room(tree: Tree, max_new_tokens: Any) -> None:
    train = tree.get("train", {})
    budget = train.get("seq_length")
    if isinstance(budget, int) and isinstance(max_new_tokens, int | float) and budget <= max_new_tokens:
        train["seq_length"] = budget + int(max_new_tokens)
        warn_caller(
            f"`train.seq_length` = {budget} would leave no room for a prompt beside {max_new_tokens} new tokens; it "
            f"becomes {train['seq_length']}."
        )


def _take(tree: Mapping[str, Any], name: str) -> Any:
    """Removes and returns the entry of a dotted name; None where there is none."""
    *path, last = name.split(".")
    node: Any = tree
    for part in path:
        node = node.get(part)
        if not isinstance(node, dict):
            return None
    return node.pop(last, None)


def _put(tree: Tree, name: str, value: Any, *, old: str | None) -> None:
    """Sets the entry of a dotted name, and says so where an old one meant it."""
    *path, last = name.split(".")
    node: Any = tree
    for part in path:
        node = node.setdefault(part, {})
    if node.get(last) is not None:
        given = f"`{old}`" if old else "an older field"
        raise ValueError(f"`{name}` is {node[last]!r}, and {given} means the same: give one of them.")
    node[last] = value
    if old is not None:
        warn_caller(f"`{old}` is an old name: it is now `{name}` = {value!r}.")


register_layout(Layout(modernise, full_name))
