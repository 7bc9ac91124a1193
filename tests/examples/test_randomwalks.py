# SPDX-License-Identifier: Apache-2.0
"""The task is trlX's, draw for draw: facts of two graphs by the generator's seed."""

import numpy as np
import pytest

from examples.randomwalks.randomwalks import UNFINISHED, make_randomwalks

SUCCESSORS_1000 = (
    "b:dju c:ekor d:alt e:bs f:dhim g:cqru h:c i:dh j:n k:bgjn l:b "
    "m:befghs n:ab o:r p:ju q:fj r:gjo s:du t:k u:bis"
)


@pytest.fixture(scope="module")
def seed_1000():
    return make_randomwalks(seed=1000)


@pytest.fixture(scope="module")
def seed_1002():
    return make_randomwalks(seed=1002)


def test_graph_of_seed_1000(seed_1000):
    letters = seed_1000.letters
    found = {
        letters[i]: "".join(letters[j] for j in np.nonzero(row)[0])
        for i, row in enumerate(seed_1000.adjacency)
    }
    assert found.pop("a") == "a"
    assert found == dict(entry.split(":") for entry in SUCCESSORS_1000.split())
    assert seed_1000.adjacency.sum() == 52  # 51 edges and the goal's loop
    np.testing.assert_array_equal(
        seed_1000.shortest, [3, 4, 2, 4, 3, 5, 5, 3, 3, 3, 4, 4, 2, 5, 4, 4, 4, 3, 4, 4]
    )


def test_walks_of_seed_1000(seed_1000):
    walks = seed_1000.walks
    assert walks[:5] == ["sda", "fda", "ebjnbdtkna", "jnbjna", "lbusdtkbui"]
    assert len(walks) == 1000
    assert sum(walk.endswith("a") for walk in walks) == 560
    lengths, counts = np.unique([len(walk) for walk in walks], return_counts=True)
    expected = {2: 38, 3: 56, 4: 93, 5: 75, 6: 66, 7: 70, 8: 55, 9: 52, 10: 495}
    assert dict(zip(lengths.tolist(), counts.tolist(), strict=True)) == expected
    assert seed_1000.eval_prompts == list("bcdefghijklmnopqrstu")


def test_optimality_of_the_walks_of_seed_1000(seed_1000):
    optimality = np.array(seed_1000.metric_fn(seed_1000.walks)["optimality"])
    assert optimality.mean() == pytest.approx(0.35151, abs=1e-5)
    assert optimality.std(ddof=1) == pytest.approx(0.40623, abs=1e-5)
    assert (optimality == 1).sum() == 184


def test_seed_1002(seed_1002):
    assert seed_1002.adjacency[1:].sum() == 42
    np.testing.assert_array_equal(
        seed_1002.shortest, [2, 3, 3, 5, 5, 3, 4, 4, 4, 2, 3, 5, 3, 4, 4, 3, 5, 4, 3, 2]
    )
    assert seed_1002.walks[:5] == ["oseotba", "qka", "jrmhnba", "cua", "qkinba"]
    assert sum(walk.endswith("a") for walk in seed_1002.walks) == 985
    optimality = np.array(seed_1002.reward_fn(seed_1002.walks))
    assert optimality.mean() == pytest.approx(0.79018, abs=1e-5)
    assert optimality.std(ddof=1) == pytest.approx(0.27737, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "length", "optimality"),
    [
        ("bda", 3, 1.0),
        ("bjna", 4, 6 / 7),
        ("ebjna", 5, 5 / 6),
        ("dlbjna", 6, 0.5),
        ("bdaaa", 3, 1.0),  # what follows the goal is ignored
        ("b", UNFINISHED, 0.0),
        ("bxa", UNFINISHED, 0.0),
        ("bddda", UNFINISHED, 0.0),
        ("eba", UNFINISHED, 0.0),
        ("bd🙂a", UNFINISHED, 0.0),
    ],
)
def test_metric_of_seed_1000(seed_1000, path, length, optimality):
    assert seed_1000.length(path) == length
    assert seed_1000.optimality(path) == pytest.approx(optimality, abs=1e-6)


@pytest.mark.parametrize("path", ["", "a", "?b"])
def test_a_path_that_starts_nowhere_is_refused(seed_1000, path):
    with pytest.raises(ValueError, match="must start at one of 'bcdefghijklmnopqrstu'"):
        seed_1000.optimality(path)
