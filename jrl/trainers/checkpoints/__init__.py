# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: whole or absent, fingerprinted, kept, resumed."""

from jrl.trainers.checkpoints.checkpointer import MODEL, STATE, Checkpointer
from jrl.trainers.checkpoints.cursor import make_cursor
from jrl.trainers.checkpoints.manifest import CheckpointError, read_manifest
from jrl.trainers.checkpoints.resume import checkpoints_in, plain
from jrl.trainers.checkpoints.state_io import read_state

__all__ = [
    "MODEL",
    "STATE",
    "CheckpointError",
    "Checkpointer",
    "checkpoints_in",
    "make_cursor",
    "plain",
    "read_manifest",
    "read_state",
]
