# SPDX-License-Identifier: Apache-2.0
"""Worker: the work of `steps_trl.py` by jrl: optimizer steps of SFT, DPO or a reward model.

    python benchmarks/peers/steps_jrl.py sft|dpo|reward

Answers by `line_protocol.py`, once the program is compiled and has run, with steps of 32 rows (or pairs) in
microbatches of 8. Weights are random, in float32; every layer is trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from line_protocol import answer
from sizes import MINIBATCH, PROMPT, RESPONSE, ROWS

from jrl.bench.dpo_step import dpo_step
from jrl.bench.models import Shapes, find_subject
from jrl.bench.sft_step import sft_step
from jrl.bench.work import Stepper
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.reward_model import make_reward_model_update
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.state import init_train_state
from jrl.models.classifier import Classifier
from jrl.models.scorer import make_scorer
from jrl.typing import ComparisonBatch, ModelInputs

SHAPES = Shapes(rows=ROWS, prompt=PROMPT, response=RESPONSE, minibatch_size=MINIBATCH)


def reward_step() -> Callable[[], Any]:
    """A step on pairs of whole rows, with Adam and clipped gradients."""
    source = find_subject("gpt2-124m").source
    source.num_labels, source.pad_token_id = 1, 0
    model = Classifier.from_config(source)
    optimizer = make_optimizer("adamw", {"lr": 1e-6}, make_schedule("constant", {}), max_grad_norm=1.0)
    update = make_reward_model_update(
        make_scorer(model), optimizer, RewardConfig(), batch_size=ROWS, minibatch_size=MINIBATCH
    )

    def rows(seed: int) -> ModelInputs:
        tokens = jax.random.randint(jax.random.key(seed), (SHAPES.rows, SHAPES.length), 1, source.vocab_size)
        return ModelInputs(tokens, jnp.ones(tokens.shape, bool))

    pairs = ComparisonBatch(rows(0), rows(1), jnp.ones((SHAPES.rows,), bool), jnp.zeros((SHAPES.rows,)))
    return Stepper(update, init_train_state(model.init(jax.random.key(0)), optimizer), {}, pairs)


def main() -> None:
    """Compiles the step, then takes it on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("sft", "dpo", "reward"))
    what = parser.parse_args().what
    if what == "reward":
        step = reward_step()
    else:
        step = {"sft": sft_step, "dpo": dpo_step}[what](find_subject("gpt2-124m"), SHAPES).call

    def run() -> None:
        jax.block_until_ready(step())

    run()
    answer(run)


if __name__ == "__main__":
    main()
