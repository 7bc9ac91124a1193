# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a run's model, printed before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from jax.sharding import Mesh

from jrl.data.sources.streams import StreamSet
from jrl.models.classifier import Classifier
from jrl.models.cost import cache_bytes, device_bytes, format_bytes
from jrl.models.model import LanguageModel
from jrl.models.quantize import num_weights
from jrl.typing import Frozen, Params, PolicyFns


def describe_policy(
    lm: LanguageModel,
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    *,
    state: Any,
    untrained: Any,
    mesh: Mesh,
    rows: int,
    length: int,
) -> dict[str, str]:
    """Size, mesh and memory, each as one line.

    Args:
      lm: The model.
      policy: The same, as algorithms see it.
      params: What trains.
      frozen: The rest.
      state: All that trains, the optimizer's moments included.
      untrained: All that does not, the reference included.
      mesh: Where they are.
      rows: Rows of one sampling call.
      length: Tokens of one row.
    """
    is_seq2seq = lm.family.kind == "seq2seq"
    cache = cache_bytes(policy, params, frozen, mesh=mesh, rows=rows, length=length, has_context=is_seq2seq)
    return _size_and_mesh(lm.hf_config.model_type, params, frozen, mesh) | {
        "memory": (
            f"a device: trained with optimizer {format_bytes(device_bytes(state))}, frozen and reference "
            f"{format_bytes(device_bytes(untrained))}, cache {format_bytes(cache)} ({rows} x {length} tokens)"
        ),
    }


def describe_denoiser(name: str, params: Params, frozen: Frozen, *, state: Any, mesh: Mesh) -> dict[str, str]:
    """Describes a model that makes images.

    Args:
      name: What it is called.
      params: What trains.
      frozen: The rest: text encoder and decoder of images, and what an adapter leaves alone.
      state: All that trains, the optimizer's moments included.
      mesh: Where they are.
    """
    memory = (
        f"a device: trained with optimizer {format_bytes(device_bytes(state))}, frozen "
        f"{format_bytes(device_bytes(frozen))}"
    )
    return _size_and_mesh(name, params, frozen, mesh) | {"memory": memory}


def describe_scorer(
    model: Classifier, params: Params, frozen: Frozen, *, state: Any, mesh: Mesh
) -> dict[str, str]:
    """Describes a model that writes no text.

    Args:
      model: The model.
      params: What trains.
      frozen: The rest.
      state: All that trains, the optimizer's moments included.
      mesh: Where they are.
    """
    memory = (
        f"a device: trained with optimizer {format_bytes(device_bytes(state))}, frozen "
        f"{format_bytes(device_bytes(frozen))}"
    )
    return _size_and_mesh(model.hf_config.model_type, params, frozen, mesh) | {"memory": memory}


def _size_and_mesh(model_type: str, params: Params, frozen: Frozen, mesh: Mesh) -> dict[str, str]:
    return {
        "model": f"{model_type}, {describe_parameters(params, frozen)}",
        "mesh": ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
    }


def describe_parameters(params: Params, frozen: Frozen) -> str:
    """Parameters of a run's model: arrays that a step of it reads, heads and adapter included, the reference not.

    Args:
      params: What trains, arrays or shapes.
      frozen: The rest, likewise.
    Example:
      >>> import numpy as np
      >>> describe_parameters({"head": np.zeros((4, 8))}, {"trunk": np.zeros((100, 10))})
      '1,032 parameters: 32 train, 1,000 are frozen'
    """
    trained, still = num_weights(params), num_weights(frozen)
    return f"{trained + still:,} parameters: {trained:,} train, {still:,} are frozen"


WARNING = "warning"
"""Name of the line that says what is probably a mistake."""


def warn_of_batches(batch_size: int, rows: int, what: str, *, ragged: bool = False) -> dict[str, str]:
    """A line where optimizer batches and the rows that there are do not fit each other; {} where they do.

    Args:
      batch_size: `train.batch_size`.
      rows: Rows of one pass.
      what: These rows, in words.
      ragged: Whether a last batch of fewer rows is spoken of, too: it weighs as much as a whole one.
    """
    if batch_size > rows:
        return {
            WARNING: f"`train.batch_size` = {batch_size} is more than {what} ({rows:,}): every optimizer step is on "
            f"{rows:,} rows, and the rest of the batch is empty"
        }
    rest = rows % batch_size
    if ragged and rest:
        return {
            WARNING: f"`train.batch_size` = {batch_size} does not divide {what} ({rows:,}): a pass is "
            f"{rows // batch_size + 1} optimizer steps, the last of them on {rest} rows, which weighs as much as the "
            "others"
        }
    return {}


def warn_of_slow_controller(target: float, horizon: int, *, iterations: int, rollouts: int) -> dict[str, str]:
    """A line where the adaptive KL weight cannot move by 20 % within a run; {} where it can.

    Args:
      target: KL per sequence that the weight is moved for, in nats.
      horizon: Rollouts over which it moves by 20 %.
      iterations: Those of the run.
      rollouts: Those of an iteration.
    """
    most = (1.0 + 0.2 * rollouts / horizon) ** iterations - 1.0
    if most >= 0.2:
        return {}
    return {
        WARNING: f"`method.target` = {target:g} can raise the KL weight by {100 * most:.2g} % at most in the run's "
        f"{iterations * rollouts:,} rollouts, for `method.horizon` = {horizon:,} of them move it by 20 %: take a "
        "larger `method.init_kl_coef`, or a shorter `method.horizon`"
    }


def warn_of_unused_evaluation_steps(num_steps: int | None, num_prompts: int) -> dict[str, str]:
    """A line where evaluations of images have a number of steps and no prompts; {} where they fit.

    Args:
      num_steps: `method.eval_num_steps`.
      num_prompts: Of `method.eval_prompts`.
    """
    if num_steps is None or num_prompts:
        return {}
    return {
        WARNING: f"`method.eval_num_steps` = {num_steps} does nothing, for `method.eval_prompts` is empty and nothing "
        "is evaluated: give some prompts, or leave it out"
    }


def join_warnings(*lines: Mapping[str, str]) -> dict[str, str]:
    """One line of several warnings; {} where there is none."""
    said = [line[WARNING] for line in lines if line]
    return {WARNING: "; ".join(said)} if said else {}


def describe_intervals(
    step: int, last_step: int, *, iteration: int, evaluation: int, checkpoint: int
) -> dict[str, str]:
    """When evaluations and checkpoints fall due: at the end of the iteration in which their interval ends.

    Args:
      step: Optimizer steps so far.
      last_step: Those at the end.
      iteration: Optimizer steps of an iteration.
      evaluation: `train.eval_interval`, in optimizer steps; 0: at the end alone.
      checkpoint: `train.checkpoint_interval`, likewise.
    Example:
      >>> describe_intervals(0, 200, iteration=16, evaluation=100, checkpoint=10000)["intervals"]
      'an iteration is 16 steps; evaluation every 100, next at 112; checkpoint every 10,000, next at 200'
    """

    def next_due(interval: int) -> int:
        end_of_interval = (step // interval + 1) * interval
        return min(step + math.ceil((end_of_interval - step) / iteration) * iteration, last_step)

    parts = [f"an iteration is {iteration:,} step{'s' if iteration > 1 else ''}"]
    for name, interval in (("evaluation", evaluation), ("checkpoint", checkpoint)):
        when = f"every {interval:,}, next at {next_due(interval):,}" if interval > 0 else "at the end"
        parts.append(f"{name} {when}")
    return {"intervals": "; ".join(parts)}


END = "ends"
"""Name of the line that says which limit ends a run before `train.total_steps`."""


def describe_end(last_step: int, *, total_steps: int, epochs: str) -> dict[str, str]:
    """A line where `train.epochs` ends a run before `train.total_steps`; {} where the steps do.

    Args:
      last_step: Optimizer steps at the end.
      total_steps: `train.total_steps`.
      epochs: `train.epochs` in words.
    Example:
      >>> describe_end(12, total_steps=1000, epochs="3 iterations")["ends"]
      'at step 12, after 3 iterations (train.epochs); train.total_steps 1,000 is not reached'
    """
    if last_step >= total_steps:
        return {}
    said = f"at step {last_step:,}, after {epochs} (train.epochs); train.total_steps {total_steps:,} is not reached"
    return {END: said}


class Sized(Protocol):
    """Tokenised data, and what did not fit.

    Attributes:
      num_truncated: Entries that were cut.
      num_dropped: Entries that were left out.
    """

    num_truncated: int
    num_dropped: int

    def __len__(self) -> int:
        """Entries that there are."""
        ...


def describe_size(data: Sized) -> str:
    """Such as "1,000, 3 cut, 1 dropped"."""
    if isinstance(data, StreamSet):
        return "a stream of unknown length"
    cut = f", {data.num_truncated} cut" if data.num_truncated else ""
    dropped = f", {data.num_dropped} dropped" if data.num_dropped else ""
    return f"{len(data):,}{cut}{dropped}"
