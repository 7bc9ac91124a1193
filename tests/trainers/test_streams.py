# SPDX-License-Identifier: Apache-2.0
"""Runs over samples that are read as the run goes on."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jrl
from jrl.data.sources.records import RecordStream
from jrl.data.sources.streams import StreamSet
from jrl.trainers.loggers.description import describe_size
from jrl.trainers.offline import OfflineTrainer
from tests.trainers.runs import repeatable, sft_config

RECORDS = [{"text": text} for text in ("the cat sat", "a dog ran off", "who me", "so it goes on", "rain")]


def stream_set(records):
    return StreamSet(RecordStream(records), lambda record, row: record, lambda rows, real: rows, seed=0)


def test_only_total_steps_ends_a_run():
    config = SimpleNamespace(train=SimpleNamespace(total_steps=70, epochs=1, batch_size=2))
    streamed = SimpleNamespace(samples=stream_set(RECORDS), config=config)
    listed = SimpleNamespace(samples=RECORDS, config=config)
    assert OfflineTrainer.num_steps.fget(streamed) == 70
    assert OfflineTrainer.num_steps.fget(listed) == 3


def test_a_run_says_that_its_samples_are_a_stream():
    assert describe_size(stream_set(RECORDS)) == "a stream of unknown length"


@pytest.mark.slow
def test_resumed_equals_never_stopped_bit_for_bit(checkpoint, tmp_path):
    def train(run_dir, **options):
        config = sft_config(checkpoint, run_dir, train={"total_steps": 8, "epochs": 1, **options})
        return jrl.train(samples=RecordStream(RECORDS), eval_prompts=["the"], config=config)

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    train(stopped, total_steps=3)
    resumed = train(stopped, resume_from_checkpoint=str(stopped))
    straight = train(whole)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, straight.state)
    records = [
        [record for record in repeatable(run.history) if "iteration" in record] for run in (resumed, straight)
    ]
    assert records[0] == records[1] and len(records[1]) == 8
