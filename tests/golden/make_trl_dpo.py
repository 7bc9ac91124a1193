# SPDX-License-Identifier: Apache-2.0
"""Writes down DPO losses of the real TRL, and their gradients, on a random ragged batch.

The classic losses, as numbers of a batch of logits, with TRL 0.7.11:

    python3.11 -m venv trl-classic
    trl-classic/bin/pip install trl==0.7.11 transformers==4.37.2 torch==2.13.0 numpy==1.26.4
    trl-classic/bin/python tests/golden/make_trl_dpo.py tests/golden/trl_dpo_classic.npz

The modern ones with TRL 1.16.0:

    python3.11 -m venv trl-modern
    trl-modern/bin/pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
    trl-modern/bin/python tests/golden/make_trl_dpo.py tests/golden/trl_dpo_modern.npz

Each case is one call of the trainer's own loss on a stand-in that holds its options; the model is a table of logits.
`tests/losses/test_dpo_parity.py` reads the files, and runs the script anew with the interpreter of
`newest_trl.py`.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

PAIRS, LENGTH, VOCAB = 5, 8, 11
BETA = 0.3

# Name of a case -> options that differ from the default.
CLASSIC: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid_smoothed": {"label_smoothing": 0.2},
    "sigmoid_reference_free": {"reference_free": True},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "kto_pair": {"loss_type": "kto_pair"},
}
_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot")
_LOSSES += ("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
MODERN: dict[str, dict[str, Any]] = {
    name: {"loss_types": [name]} | ({"label_smoothing": 0.1} if name in _SMOOTHED else {}) for name in _LOSSES
} | {
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
    "ipo_forward_kl": {"loss_types": ["ipo"], "f_divergence_type": "forward_kl"},
    "sigmoid_norm_js": {"loss_types": ["sigmoid_norm"], "f_divergence_type": "js_divergence"},
    "ld_alpha": {"ld_alpha": 0.4},
    "ld_alpha_aot": {"loss_types": ["aot"], "ld_alpha": 0.4},
    "wpo": {"use_weighting": True},
    # Not with the hinge, whose gradient TRL 1.16 cannot compute under weights.
    "wpo_apo": {"loss_types": ["apo_zero"], "use_weighting": True},
    "mpo": {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
}


def random_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Pairs of ragged completions behind ragged prompts, chosen rows first, and logits of policy and reference."""
    rng = np.random.default_rng(seed)
    prompts = np.tile(rng.integers(1, 4, PAIRS), 2)
    lengths = rng.integers(1, LENGTH - 3, 2 * PAIRS)
    columns = np.arange(LENGTH)[None, :]
    completion = (columns >= prompts[:, None]) & (columns < (prompts + lengths)[:, None])
    return {
        "ids": rng.integers(0, VOCAB, (2 * PAIRS, LENGTH)),
        "completion": completion,
        "attention": columns < (prompts + lengths)[:, None],
        "logits": rng.normal(size=(2 * PAIRS, LENGTH, VOCAB)).astype(np.float32) * 1.5,
        "ref_logits": rng.normal(size=(2 * PAIRS, LENGTH, VOCAB)).astype(np.float32),
    }


def classic_loss(
    batch: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[float, np.ndarray, dict[str, float]]:
    """(mean loss, its gradient, metrics) of TRL 0.7."""
    import torch
    from trl import DPOTrainer

    settings = {"beta": BETA, "loss_type": "sigmoid", "label_smoothing": 0.0, "reference_free": False}
    stand_in = SimpleNamespace(**(settings | options), accelerator=SimpleNamespace(device="cpu"))
    labels = torch.tensor(np.where(batch["completion"], batch["ids"], -100))
    logits = torch.tensor(batch["logits"], requires_grad=True)
    average = stand_in.loss_type == "ipo"
    sums = [
        DPOTrainer.get_batch_logps(x, labels.clone(), average_log_prob=average)
        for x in (logits, torch.tensor(batch["ref_logits"]))
    ]
    (chosen, rejected), (ref_chosen, ref_rejected) = (x.chunk(2) for x in sums)
    losses, chosen_rewards, rejected_rewards = DPOTrainer.dpo_loss(
        stand_in, chosen, rejected, ref_chosen, ref_rejected
    )
    losses.mean().backward()
    metrics = {
        "rewards/chosen": chosen_rewards.mean().item(),
        "rewards/rejected": rejected_rewards.mean().item(),
    }
    return losses.mean().item(), logits.grad.numpy(), metrics


def modern_loss(
    batch: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[float, np.ndarray, dict[str, float]]:
    """(loss, its gradient, metrics) of TRL 1.16."""
    import torch
    from trl import DPOTrainer
    from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS
    from trl.trainer.utils import _ChunkedLogProbFunction

    def model_of(logits: Any) -> Any:
        def model(*, labels: Any, **_: Any) -> Any:
            labels = labels[:, 1:]
            kept = labels != -100
            found = _ChunkedLogProbFunction.apply(
                logits[:, :-1].reshape(-1, VOCAB),
                torch.eye(VOCAB),
                None,
                labels.clamp(min=0).reshape(-1),
                1.0,
                VOCAB,
                None,
                1.0,
                ("log_probs", *OPTIONAL_OUTPUTS),
            )
            names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
            masked = (x.view(kept.shape).masked_fill(~kept, 0) for x in found)
            return SimpleNamespace(**dict(zip(names, masked, strict=True)))

        model.training = True
        return model

    defaults = {
        "beta": BETA,
        "loss_types": ["sigmoid"],
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "label_smoothing": 0.0,
        "use_weighting": False,
    }
    chosen = defaults | options
    chosen.setdefault("loss_weights", [1.0] * len(chosen["loss_types"]))
    logits = torch.tensor(batch["logits"], requires_grad=True)
    stand_in = SimpleNamespace(
        **chosen,
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        args=SimpleNamespace(
            discopop_tau=0.05, gradient_checkpointing=False, gradient_checkpointing_kwargs=None
        ),
        ref_model=model_of(torch.tensor(batch["ref_logits"])),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    stand_in.model = torch.nn.Module()
    stand_in.model.is_gradient_checkpointing = False
    inputs = {
        "input_ids": torch.tensor(batch["ids"]),
        "attention_mask": torch.tensor(batch["attention"]).long(),
        "completion_mask": torch.tensor(batch["completion"]).long(),
    }
    loss = DPOTrainer._compute_loss(stand_in, model_of(logits), inputs, return_outputs=False)
    loss.backward()
    metrics = {name: float(values[0]) for name, values in stand_in._metrics["train"].items()}
    return loss.item(), logits.grad.numpy(), metrics


def main(out_path: str) -> None:
    """Writes the batch, and loss, gradient and metrics of every case that this TRL knows."""
    is_classic = importlib.metadata.version("trl").startswith("0.7.")
    batch = random_batch()
    found: dict[str, Any] = dict(batch)
    for name, options in (CLASSIC if is_classic else MODERN).items():
        loss, gradient, metrics = (classic_loss if is_classic else modern_loss)(batch, options)
        found |= {f"loss.{name}": loss, f"gradient.{name}": gradient.astype(np.float32)}
        found |= {f"metric.{name}.{key}": value for key, value in metrics.items()}
    np.savez_compressed(out_path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
