# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of every DPO loss against the real TRL, on a random ragged batch.

The files hold what `tests/golden/make_trl_dpo.py` wrote with TRL 0.7.11 and 1.16.0. Where TRL and jrl differ on
purpose, the case says how: modern TRL smooths no labels in `sigmoid`; classic TRL has two values a pair in `kto_pair`.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses.dpo import DIVERGENCES
from jrl.ops import finalize
from tests.golden.make_trl_dpo import BETA, CLASSIC, MODERN
from tests.golden.newest_trl import PYTHON as NEWEST
from tests.golden.newest_trl import WHY_NOT
from tests.losses.dpo_cases import completions, loss_of

FOLDER = Path(__file__).parents[1] / "golden"
SCRIPT = FOLDER / "make_trl_dpo.py"
# TRL's metrics and ours.
METRICS = {
    "logps/chosen": "logps/chosen",
    "logps/rejected": "logps/rejected",
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/accuracies": "rewards/accuracies",
    "rewards/margins": "rewards/margins",
    "logits/chosen": "logits/chosen",
    "logits/rejected": "logits/rejected",
    "entropy": "dpo/entropy",
    "mean_token_accuracy": "dpo/token_accuracy",
}


def ours(options: dict[str, Any]) -> dict[str, Any]:
    """Options of `dpo_loss` for those of a case."""
    names = options.get("loss_types", [options.get("loss_type", "sigmoid")])
    weights = options.get("loss_weights", [1.0] * len(names))
    return {
        "terms": list(zip(names, weights, strict=True)),
        "beta": BETA,
        "label_smoothing": options.get("label_smoothing", 0.0),
        "divergence": DIVERGENCES[options.get("f_divergence_type", "reverse_kl")],
        "alpha": options.get("f_alpha_divergence_coef", 0.5),
        "reference_free": options.get("reference_free", False),
        "ld_alpha": options.get("ld_alpha"),
        "use_weighting": options.get("use_weighting", False),
    }


def compute(cases: dict[str, dict[str, Any]], file: Path) -> tuple[Any, dict[str, Any]]:
    """(what the file holds, (gradient, (loss, metrics)) by case): one program for all cases."""
    theirs = np.load(file)

    def loss(options: dict[str, Any], logits: Any) -> Any:
        out = loss_of(
            completions(logits, theirs["ref_logits"], theirs["ids"], theirs["completion"]), **ours(options)
        )
        return out.loss_sum / out.weight, (out.loss_sum / out.weight, out.metrics)

    @jax.jit
    def everything(logits: Any) -> dict[str, Any]:
        return {
            name: jax.grad(functools.partial(loss, options), has_aux=True)(logits)
            for name, options in cases.items()
        }

    return theirs, jax.device_get(everything(jnp.asarray(theirs["logits"])))


@pytest.fixture(scope="module")
def classic():
    return compute(CLASSIC, FOLDER / "trl_dpo_classic.npz")


@pytest.fixture(scope="module")
def modern():
    return compute(MODERN, FOLDER / "trl_dpo_modern.npz")


def assert_same(found: tuple[Any, dict[str, Any]], name: str) -> dict[str, float]:
    theirs, everything = found
    gradient, (loss, metrics) = everything[name]
    expected = theirs[f"gradient.{name}"]
    assert float(loss) == pytest.approx(float(theirs[f"loss.{name}"]), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(expected).max() > 1e-4
    return finalize(metrics)


@pytest.mark.parametrize("name", CLASSIC)
def test_classic_losses_and_gradients(classic, name):
    got = assert_same(classic, name)
    if name != "ipo":  # whose rewards are of means there; ours are of sums, as everywhere
        for metric in ("rewards/chosen", "rewards/rejected"):
            assert got[metric] == pytest.approx(float(classic[0][f"metric.{name}.{metric}"]), abs=1e-5)


@pytest.mark.parametrize("name", MODERN)
def test_modern_losses_gradients_and_metrics(modern, name):
    got = assert_same(modern, name)
    for theirs, metric in METRICS.items():
        expected = float(modern[0][f"metric.{name}.{theirs}"])
        assert got[metric] == pytest.approx(expected, rel=1e-5, abs=1e-5), metric


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.skipif(NEWEST is None, reason=WHY_NOT)
def test_the_newest_trl_says_the_same(tmp_path):
    assert NEWEST is not None
    subprocess.run([NEWEST, SCRIPT, tmp_path / "now.npz"], check=True)
    found = compute(MODERN, tmp_path / "now.npz")
    for name in MODERN:
        assert_same(found, name)
