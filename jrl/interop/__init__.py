# SPDX-License-Identifier: Apache-2.0
"""Programs written for torch's libraries over jrl's: arrays, arguments, loaders, models, overrides."""

from jrl.interop.accelerator import Accelerator
from jrl.interop.arguments import check_keywords, flat_names, warn_ignored
from jrl.interop.checkpoints import read_checkpoint, write_checkpoint
from jrl.interop.loader import DataLoader
from jrl.interop.model import IGNORED_ON_SAVE, ModelOutput, TrainedModel
from jrl.interop.module_paths import register_paths
from jrl.interop.overrides import (
    checked_array,
    checked_scalar,
    jrl_class,
    own_methods,
    refuse_assigned,
    refuse_overrides,
    refuse_while_traced,
    traced,
    tracing,
)
from jrl.interop.sampling import generate_ids, sample_rows
from jrl.interop.stateful import (
    AdaptiveKLController,
    FixedKLController,
    RunningMoments,
    seed_generators,
    set_seed,
)
from jrl.interop.tensors import as_array, as_torch, batch_as, in_kind_of, is_tensor, torch_in_torch_out
from jrl.interop.untrained import UntrainedModel, special_ids

__all__ = [
    "IGNORED_ON_SAVE",
    "Accelerator",
    "AdaptiveKLController",
    "DataLoader",
    "FixedKLController",
    "ModelOutput",
    "RunningMoments",
    "TrainedModel",
    "UntrainedModel",
    "as_array",
    "as_torch",
    "batch_as",
    "check_keywords",
    "checked_array",
    "checked_scalar",
    "flat_names",
    "generate_ids",
    "in_kind_of",
    "is_tensor",
    "jrl_class",
    "own_methods",
    "read_checkpoint",
    "refuse_assigned",
    "refuse_overrides",
    "refuse_while_traced",
    "register_paths",
    "sample_rows",
    "seed_generators",
    "set_seed",
    "special_ids",
    "torch_in_torch_out",
    "traced",
    "tracing",
    "warn_ignored",
    "write_checkpoint",
]
