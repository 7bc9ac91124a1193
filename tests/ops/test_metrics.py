# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import finalize, max_metric, mean_metric, merge_metrics, min_metric, reduce_metrics
from jrl.typing import Max, Mean

X = jnp.array([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
MASK = jnp.array([[True, True, False], [True, False, False]])


class TestMetrics:
    def test_golden(self):
        record = finalize(
            {"mean": mean_metric(X, MASK), "max": max_metric(X, MASK), "min": min_metric(X - 5.0, MASK)}
        )
        assert record == {"mean": 2.0, "max": 3.0, "min": -4.0}
        assert all(type(number) is float for number in record.values())

    def test_claims_count_as_zero_and_one(self):
        assert finalize({"share": mean_metric(X > 1.5, MASK)})["share"] == pytest.approx(2 / 3)

    def test_masked_garbage_is_irrelevant(self):
        dirty = jnp.where(MASK, X, jnp.nan)
        assert finalize({"a": mean_metric(dirty, MASK), "b": max_metric(dirty, MASK)}) == {"a": 2.0, "b": 3.0}
        assert finalize({"c": min_metric(dirty, MASK)}) == {"c": 1.0}

    def test_what_nothing_contributed_to_is_left_out(self):
        nothing = jnp.zeros_like(MASK)
        assert finalize({"mean": mean_metric(X, nothing), "max": max_metric(X, nothing)}) == {}
        assert finalize({"min": min_metric(X, nothing)}) == {}

    def test_nan_stays_visible(self):
        metrics = {
            "mean": mean_metric(jnp.array([jnp.nan]), jnp.array([True])),
            "max": Max(jnp.float32(jnp.nan)),
        }
        assert np.isnan(list(finalize(metrics).values())).all()

    def test_merging_is_exact_whatever_the_split(self):
        def metrics(rows):
            found = {"mean": mean_metric(X[rows], MASK[rows]), "max": max_metric(X[rows], MASK[rows])}
            return found | {"min": min_metric(X[rows], MASK[rows])}

        whole = finalize(metrics(slice(None)))
        first, second = metrics(slice(0, 1)), metrics(slice(1, 2))
        assert finalize(merge_metrics(first, second)) == whole
        assert finalize(merge_metrics(first, {})) == finalize(first)
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), first, second)
        assert finalize(reduce_metrics(stacked)) == whole

    def test_scan_stacks_what_reduce_merges(self):
        def step(carry, row):
            x, mask = row
            found = {"mean": mean_metric(x, mask), "max": max_metric(x, mask)}
            return carry, found | {"min": min_metric(x, mask)}

        _, stacked = jax.lax.scan(step, None, (X, MASK))
        assert finalize(reduce_metrics(stacked)) == {"mean": 2.0, "max": 3.0, "min": 1.0}

    def test_one_name_is_of_one_kind(self):
        mean, maximum = Mean(jnp.float32(1), jnp.float32(1)), Max(jnp.float32(1))
        with pytest.raises(TypeError, match="metric 'loss' must be of one kind, got Mean and Max"):
            merge_metrics({"loss": mean}, {"loss": maximum})
