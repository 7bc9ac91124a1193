# SPDX-License-Identifier: Apache-2.0
"""Writes down what the real TRL's reward trainer computes of given scores: losses, gradients and its metrics.

    python3.11 -m venv classic && classic/bin/pip install trl==0.7.1 transformers==4.33.3 torch==2.13.0 "numpy<2"
    classic/bin/python tests/golden/make_trl_reward.py tests/golden/trl_reward_classic.npz
    python3.11 -m venv modern && modern/bin/pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0
    modern/bin/python tests/golden/make_trl_reward.py tests/golden/trl_reward_modern.npz

Each file says which versions made it. `tests/losses/test_reward_model.py` reads them, and runs this again with the
interpreter of `newest_trl.py`. The classic trainer knows neither margins nor centering, so of it the plain
loss alone is written down. The trainer's own `compute_loss` runs on a stand-in for a model whose parameters are the
scores.
"""

import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
import transformers
import trl
from trl import RewardTrainer

NUM_PAIRS = 16


def given() -> dict[str, np.ndarray]:
    """Scores of ordinary size, of extreme size, and ties; margins of both signs."""
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(size=(2, NUM_PAIRS)) * 2.0
    chosen[:4], rejected[:4] = (100.0, -100.0, 40.0, 0.5), (0.0, 0.0, -60.0, 0.5)
    margins = np.abs(rng.normal(size=NUM_PAIRS))
    margins[-4:] = (0.0, -0.5, 3.0, 100.0)
    return {
        name: x.astype(np.float32)
        for name, x in (("chosen", chosen), ("rejected", rejected), ("margins", margins))
    }


def classic(scores: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Two passes, scores as columns."""
    leaves = {name: scores[name][:, None].clone().requires_grad_() for name in ("chosen", "rejected")}
    inputs = {f"{kind}_{name}": name for name in leaves for kind in ("input_ids", "attention_mask")}

    def model(input_ids: str, attention_mask: str) -> tuple[torch.Tensor]:
        return (leaves[input_ids],)

    loss = RewardTrainer.compute_loss(SimpleNamespace(use_reward_data_collator=True), model, inputs)
    loss.backward()
    return {"plain_loss": loss.detach().numpy()} | {
        f"plain_{name}_gradient": leaf.grad[:, 0].numpy() for name, leaf in leaves.items()
    }


def modern(scores: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """One pass, all chosen rows first."""
    found = {}
    for case, coefficient, with_margin in (
        ("plain", None, False),
        ("margin", None, True),
        ("centred", 0.01, False),
        ("margin_centred", 0.01, True),
    ):
        logits = torch.cat([scores["chosen"], scores["rejected"]])[:, None].clone().requires_grad_()
        metrics = defaultdict(list)
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=False),
            args=SimpleNamespace(center_rewards_coefficient=coefficient),
            accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
            _metrics={"eval": metrics},
            _total_train_tokens=0,
        )
        inputs = {"attention_mask": torch.ones_like(logits)}
        if with_margin:
            inputs["margin"] = scores["margins"]
        output = SimpleNamespace(logits=logits)
        loss = RewardTrainer.compute_loss(trainer, lambda output=output, **inputs: output, inputs)
        loss.backward()
        gradient = logits.grad[:, 0].numpy()
        found[f"{case}_loss"] = loss.detach().numpy()
        found[f"{case}_chosen_gradient"] = gradient[:NUM_PAIRS]
        found[f"{case}_rejected_gradient"] = gradient[NUM_PAIRS:]
        for name in ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
            found[f"{case}_{name}"] = np.float32(metrics[name][0])
    return found


def computed() -> dict[str, np.ndarray]:
    """What this TRL makes of the given scores, beside them."""
    scores = {name: torch.tensor(x) for name, x in given().items()}
    is_modern = int(trl.__version__.split(".")[0]) >= 1
    return given() | (modern if is_modern else classic)(scores)


if __name__ == "__main__":
    versions = f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    np.savez(sys.argv[1], **computed(), environment=np.array(versions))
    print(versions)
