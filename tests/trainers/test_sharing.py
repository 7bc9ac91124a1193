# SPDX-License-Identifier: Apache-2.0
"""Completions and rewards of several processes come together in the order of their rows."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jrl.distributed import PeerError, Word
from jrl.rollout import gathering as sharing
from jrl.rollout.gathering import Judging, Part, all_texts, to_main, totals
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.rewards import RewardError
from jrl.rollout.text import Texts


def part_of(numbers):
    """Rows whose texts and ids tell their number; row n has n + 1 ids."""
    names = [str(number) for number in numbers]
    return Part(
        np.asarray(numbers, np.int64),
        Texts(
            samples=[f"p{name}o{name}" for name in names],
            prompts=[f"p{name}" for name in names],
            outputs=[f"o{name}" for name in names],
            output_tokens=[[number] * (number + 1) for number in numbers],
            lengths=np.asarray([number + 1 for number in numbers], np.int32),
            stopped=np.asarray([number % 2 == 1 for number in numbers], bool),
        ),
    )


def call(reward_fn):
    return RewardCall(reward_fn, None, skip_errors=False, timeout=None, failures=Path("unused"))


def number_of(outputs):
    return [float(text[1:]) for text in outputs]


@pytest.fixture
def peer(monkeypatch):
    """What another process says, and in which order the two are: set `peer.word` and `peer.first`."""

    class Peer:
        word: Word
        first = False

        def gather(self, plain=None, arrays=None, *, failure=None):
            if failure is not None:
                raise PeerError(f"Process 0 of 2 failed: {failure}")
            words = [Word(plain, arrays), self.word]
            return words[::-1] if self.first else words

    peer = Peer()
    monkeypatch.setattr(sharing, "gather", peer.gather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return peer


def rewards_of(*scores):
    """What another process tells of its rows' rewards; to the first of them its function does not apply."""
    silent = np.arange(len(scores))[:, None] == 0
    return {"rewards": np.array(scores), "scores": np.array(scores)[:, None], "not_applicable": silent}


def test_rows_of_two_processes_are_put_in_order(peer):
    peer.word = Word(*sharing._packed(part_of([0, 3])))
    for peer.first in (False, True):
        texts = all_texts([part_of([1]), part_of([2, 4])])
        assert texts.outputs == ["o0", "o1", "o2", "o3", "o4"]
        assert texts.output_tokens == part_of(range(5)).texts.output_tokens
        np.testing.assert_array_equal(texts.stopped, part_of(range(5)).texts.stopped)


def test_rewards_follow_their_rows(peer):
    plain, arrays = sharing._packed(part_of([0, 3]))
    peer.word = Word(plain, arrays | rewards_of(0.0, 3.0))
    for peer.first in (False, True):
        judging = Judging(call(number_of), totals)
        judging.add(part_of([1]), {}, label="a")
        judging.add(part_of([]), {}, label="b")
        judging.add(part_of([2, 4]), {}, label="c")
        texts, rewards, columns = judging.together()
        np.testing.assert_array_equal(rewards, np.arange(5.0))
        np.testing.assert_array_equal(columns.scores, np.arange(5.0)[:, None])
        np.testing.assert_array_equal(columns.not_applicable, np.array([[True]] + [[False]] * 4))
        assert texts.prompts == ["p0", "p1", "p2", "p3", "p4"]


def test_a_process_without_rows_is_not_asked(peer):
    plain, arrays = sharing._packed(part_of([0, 1]))
    peer.word = Word(plain, arrays | rewards_of(5.0, 6.0))
    judging = Judging(call(lambda outputs: 1 / 0), totals)
    judging.add(part_of([]), {}, label="a")
    np.testing.assert_array_equal(judging.together().rewards, [5.0, 6.0])


def test_a_failure_waits_until_the_parts_come_together(peer, tmp_path):
    calls = []

    def fail(outputs):
        calls.append(outputs)
        raise OSError("down")

    peer.word = Word(*sharing._packed(part_of([3])))
    judging = Judging(RewardCall(fail, None, skip_errors=False, timeout=None, failures=tmp_path), totals)
    judging.add(part_of([0]), {}, label="a")
    asked = len(calls)
    judging.add(part_of([1, 2]), {}, label="b")
    assert len(calls) == asked, "after a failure the function is left alone"
    with pytest.raises(RewardError, match=r"Process 0 of 2 failed: .*OSError: down"):
        judging.together()


def test_one_process_fails_at_once(tmp_path):
    judging = Judging(RewardCall(number_of, None, skip_errors=False, timeout=None, failures=tmp_path), totals)
    part = part_of([0])
    part.texts.outputs[0] = "oops"
    with pytest.raises(RewardError, match="ValueError"):
        judging.add(part, {}, label="a")


def test_process_0_takes_all_rows(peer, monkeypatch):
    peer.word = Word(*sharing._packed(part_of([0, 3])))
    mine = part_of([1, 2])
    assert to_main(mine).texts.outputs == ["o0", "o1", "o2", "o3"]
    monkeypatch.setattr(sharing, "is_main", lambda: False)
    left = to_main(mine)
    assert (len(left.numbers), left.texts.outputs, len(left.texts.lengths)) == (0, [], 0)


def test_totals_of_numbers_and_of_rewards_per_token():
    found = totals([2.0, np.array([0.5, 0.25], np.float32), float("nan")], part_of([0, 1, 2]).texts)
    np.testing.assert_array_equal(found, [2.0, 0.75, np.nan])
