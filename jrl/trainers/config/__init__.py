# SPDX-License-Identifier: Apache-2.0
"""Configurations: sections, files, overrides, defaults, names."""

from jrl.trainers.config.coercion import coerce, read_yaml
from jrl.trainers.config.described import field_notes
from jrl.trainers.config.gen_kwargs import Sweep, parse_gen_kwargs
from jrl.trainers.config.layouts import Layout, register_layout
from jrl.trainers.config.method import Footprint, Method, entries, entry_of, register
from jrl.trainers.config.registry import (
    METHODS,
    PIPELINES,
    TRAINERS,
    Registry,
    get_method,
    register_method,
)
from jrl.trainers.config.secrets import without_secrets
from jrl.trainers.config.section_dicts import build_section, warn_caller
from jrl.trainers.config.sections import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
)
from jrl.trainers.config.trl_config import TRLConfig

__all__ = [
    "METHODS",
    "PIPELINES",
    "TRAINERS",
    "Footprint",
    "Layout",
    "Method",
    "ModelConfig",
    "OptimizerConfig",
    "Registry",
    "SchedulerConfig",
    "Sweep",
    "TRLConfig",
    "TokenizerConfig",
    "TrainConfig",
    "build_section",
    "coerce",
    "entries",
    "entry_of",
    "field_notes",
    "get_method",
    "parse_gen_kwargs",
    "read_yaml",
    "register",
    "register_layout",
    "register_method",
    "warn_caller",
    "without_secrets",
]
