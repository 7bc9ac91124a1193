# SPDX-License-Identifier: Apache-2.0
"""Worker: iterations of GRPO by `jrl.trl.GRPOTrainer`: sampling, scoring, text, rewards, update.

    python benchmarks/peers/grpo_jrl.py [--model gpt2-124m]

Answers by `line_protocol.py`, after two iterations, which compile everything.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
import warnings

import jax
from grpo_work import arguments, make_config, make_rows, make_tokenizer, share_of_ones
from line_protocol import answer
from sizes import GPT2

from jrl.trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Builds the trainer, then iterates on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=tuple(GPT2), default="gpt2-124m")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native = GRPOTrainer(
            make_config(model),
            share_of_ones,
            GRPOConfig(**arguments(folder)),
            make_rows(model),
            processing_class=make_tokenizer(model),
        ).native
    numbers = itertools.count()

    def iterate() -> None:
        number = next(numbers)
        with jax.set_mesh(native.mesh):
            rollout_key, update_key = native.keys(number)
            experience = native.collect(
                native.params,
                native.frozen,
                native.ref_params,
                number,
                rollout_key,
                while_sampling=lambda: None,
                stopwatch=lambda name: contextlib.nullcontext(),
            )
            native.state, metrics = native.update(
                native.state, native.frozen, experience.rollouts, update_key
            )
            jax.block_until_ready((native.state, metrics))

    iterate()
    iterate()
    answer(iterate)


if __name__ == "__main__":
    main()
