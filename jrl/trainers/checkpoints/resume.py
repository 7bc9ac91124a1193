# SPDX-License-Identifier: Apache-2.0
"""Agreement between a checkpoint and the run that continues it, and the search for checkpoints."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl.trainers.checkpoints.manifest import CheckpointError, verify_manifest
from jrl.trainers.config.secrets import without_secrets

LOCK = "run.lock"
# Fields that older checkpoints lack, with what their runs did.
_BEFORE = {
    "train.rollouts_ahead": 0,
    "method.num_generations": 1,  # every rollout had a prompt of its own
    "method.max_sampling_rounds": 1,  # groups that were left out were not replaced
    "method.mask_truncated_completions": False,
    "method.multi_objective_aggregation": "sum_then_normalize",
    "method.router_aux_loss_coef": 0.0,
    "method.routing_replay": False,
    "method.kl_to_go": False,
    "method.overlong_penalty": 1.0,  # of no effect without a buffer, which is None as well
}
_NAME = re.compile(r"checkpoint_(\d+)")

# None of these can reach a number of the run: how long it goes on, when it looks, where things lie, who is
# told, and which checkpoints are kept. The mesh can, but in bits only; the environment's device count answers
# for it.
_FREE_FIELDS = frozenset(
    f"train.{name}"
    for name in [
        "total_steps",
        "epochs",
        "checkpoint_interval",
        "eval_interval",
        "tracker",
        "project_name",
        "run_name",
        "entity_name",
        "group_name",
        "tags",
        "logging_dir",
        "checkpoint_dir",
        "rollout_logging_dir",
        "resume_from_checkpoint",
        "overwrite",
        "keep_checkpoints",
        "save_best",
        "save_optimizer",
        "mesh",
        "sampling_mesh",
        "watch",
    ]
) | {"model.model_path", "model.attn_implementation", "tokenizer.tokenizer_path"}


def environment_record() -> dict[str, Any]:
    """Record of the environment, on which bit-identical resuming depends beside state and configuration."""
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "backend": jax.default_backend(),
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "device_kind": jax.devices()[0].device_kind,
        "xla_flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def check_environment(saved: Mapping[str, Any], notify: Callable[[str], None]) -> None:
    """Says so where the run continues under other circumstances than it was saved under."""
    current = environment_record()
    changed = [
        f"{name} {saved.get(name)!r} -> {value!r}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if changed:
        notify(f"Resuming is exact in state, not in bits: the environment differs ({', '.join(changed)}).")


def check_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuses a configuration that would silently make another run of it.

    `total_steps`, `epochs`, the intervals, tracker, paths, the mesh, the kernel of attention and what is kept on disk
    may differ.

    Args:
      saved: Plain configuration of the checkpoint, section → field → value.
      current: That of the run.
    Raises:
      CheckpointError: Naming every other field that differs, with both values.
    """
    # What is stored has no secrets, and the errors below must not tell any.
    old, new = (_flatten(without_secrets(plain(config))) for config in (saved, current))
    # Before this field existed, prompts that were sampled from had no special tokens, and samples that were read had.
    sampled = ("PPOTrainer", "RFTTrainer", "ILQLTrainer")
    if "tokenizer.truncation_side" in old:
        old.setdefault("tokenizer.add_special_tokens", old.get("train.trainer") not in sampled)
    for name, before in _BEFORE.items():
        if name in new:
            old.setdefault(name, before)
    changed = [
        f"`{name}` was {_shown(old.get(name))}, is {_shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not _is_free(name)
    ]
    if changed:
        raise CheckpointError(
            f"Cannot resume under another configuration: {'; '.join(changed)}. Put the old value back, or "
            "start a new run in another `train.checkpoint_dir`, from the checkpoint's hf_model."
        )


def checkpoints_in(run_dir: Path) -> dict[int, Path]:
    """Folders named `checkpoint_<step>`, by step, oldest first; whether they are whole is another question."""
    if not run_dir.is_dir():
        return {}
    found = ((_NAME.fullmatch(path.name), path) for path in run_dir.iterdir() if _may_be_folder(path))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _may_be_folder(path: Path) -> bool:
    """True for a folder, and for a path that cannot be looked at: then whoever reads it says so."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def may_resume(path: Path, run_dir: Path, notify: Callable[[str], None]) -> bool:
    """True where `train.resume_from_checkpoint` names something to resume; False is a fresh run, and said.

    A job that is restarted names its own folder from the first time on, when there is nothing in it yet.

    Raises:
      CheckpointError: If `path` exists but holds no checkpoint.
    """
    if not path.exists():
        notify(f"`train.resume_from_checkpoint` = {path} does not exist: starting a fresh run.")
        return False
    if _NAME.fullmatch(path.name) or checkpoints_in(path) or any(path.glob("checkpoint_*.replaced")):
        return True
    if path == run_dir and (path / LOCK).exists():
        notify(f"The run in {path} was stopped before its first checkpoint: starting a fresh run.")
        return False
    raise CheckpointError(
        f"`train.resume_from_checkpoint` = {path} exists but holds no checkpoint: neither is it a folder "
        "checkpoint_<step>, nor does it contain one. Is it a model folder, or another program's run? Set it to the "
        "`train.checkpoint_dir` of the run, or to null for a fresh one."
    )


def find_checkpoint(path: Path, notify: Callable[[str], None]) -> Path:
    """The whole checkpoint that a path means: one checkpoint itself, or the newest whole one of a run's
    folder.

    Every newer one that its manifest does not confirm is spoken of.

    Raises:
      CheckpointError: If the named checkpoint is damaged, or none in the folder is whole.
    """
    if _NAME.fullmatch(path.name):
        verify_manifest(path)
        return path
    failures = []
    for candidate in reversed(checkpoints_in(path).values()):
        try:
            verify_manifest(candidate)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        for failure in failures:
            notify(f"Not a whole checkpoint: {failure} Falling back to {candidate}.")
        return candidate
    raise CheckpointError(f"No checkpoint in {path} is whole. {' '.join(failures)}")


def plain(value: Any) -> Any:
    """A configuration value as YAML and JSON know it: tuples become lists, config objects their dictionaries.

    An array becomes a text with its fingerprint: a configuration is no place for its content.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if hasattr(value, "__array__"):
        # Its print-out would leave out what differs, and no loader would make an array of it again.
        array = np.asarray(value)
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return f"array of {array.dtype} {array.shape}, sha256 {content[:16]}"
    if hasattr(value, "to_dict"):  # a transformers config object given as `model_path`
        return plain(value.to_dict())
    return repr(value)


def _shown(value: Any) -> str:
    """A value in a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _is_free(name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in _FREE_FIELDS)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plain(tree).items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
