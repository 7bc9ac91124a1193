# SPDX-License-Identifier: Apache-2.0
"""Recorded episodes: which ids they become, how they are cut into rows, and what each action earns."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import jrl
from jrl.data.episodes import (
    Episode,
    EpisodeSet,
    RewardedEpisodes,
    Row,
    Turn,
    Windows,
    best_episodes,
    check_causal,
    context_of,
    cut_windows,
    has_episodes,
    make_windows,
    read_episodes,
)
from tests.tiny import EOS_ID, PAD_ID, tiny_tokenizer

START = 50
RULE = Windows(prefix=(), start_token_id=START, max_length=100)
# Prompt 1 2; three turns: outputs 3, 4 5, 6; observations 7 8, nothing, 9.
EPISODE = Episode([1, 2], [Turn([3], -1.0, [7, 8]), Turn([4, 5], -2.0, []), Turn([6], 5.0, [9])], True)


def learned_of(row: Row) -> list[int]:
    """Ids of a row that are learned."""
    return [token for token, flag in zip(row.tokens, row.learned, strict=True) if flag]


def rows(windows: Windows = RULE, episode: Episode = EPISODE, **numbers: float) -> list[tuple[Any, ...]]:
    """(ids, those of them that are learned, rewards, after, return after) of every row."""
    found = cut_windows(episode, windows, **({"gamma": 0.5, "reward_scale": 1.0} | numbers))
    return [(row.tokens, learned_of(row), row.earned.tolist(), row.after, row.return_after) for row in found]


def random_episode(rng: np.random.Generator, done: bool) -> Episode:
    """Up to 7 turns of ids that all differ, so that a row shows which turns it holds."""
    ids = iter(range(1, 200))

    def some(low: int) -> list[int]:
        return [next(ids) for _ in range(rng.integers(low, 4))]

    turns = [Turn(some(1), float(rng.normal()), some(0)) for _ in range(rng.integers(1, 8))]
    return Episode(some(0), turns, done)


class TestRows:
    def test_an_episode_that_fits_is_one_row_and_its_last_observation_is_not_read(self):
        assert rows() == [([1, 2, 3, 7, 8, 4, 5, 6], [3, 4, 5, 6], [-1.0, 0.0, -2.0, 5.0], [], 0.0)]

    def test_without_context_each_observation_and_output_stand_alone(self):
        # Returns at γ = ½: 5 from the last turn on; ½·(−2 + ½·5) = 0.25 from the second on.
        assert rows(replace(RULE, context_turns=0)) == [
            ([1, 2, 3], [3], [-1.0], [7, 8], 0.25),
            ([7, 8, 4, 5], [4, 5], [0.0, -2.0], [START], 5.0),
            ([START, 6], [6], [5.0], [], 0.0),
        ]

    def test_with_a_turn_of_context_the_first_two_share_a_row(self):
        assert rows(replace(RULE, context_turns=1)) == [
            ([1, 2, 3, 7, 8, 4, 5], [3, 4, 5], [-1.0, 0.0, -2.0], [7, 8, 4, 5], 5.0),
            ([7, 8, 4, 5, 6], [6], [5.0], [], 0.0),
        ]

    def test_what_does_not_fit_loses_its_oldest_turns(self):
        # 7 tokens hold the first two turns; all three have 8.
        assert rows(replace(RULE, max_length=7)) == rows(replace(RULE, context_turns=1))

    def test_the_prompt_may_begin_every_row(self):
        found = rows(replace(RULE, context_turns=0, keep_prompt=True))
        assert [row[0] for row in found] == [[1, 2, 3], [1, 2, 7, 8, 4, 5], [1, 2, 6]]
        assert [row[3] for row in found] == [[1, 2, 7, 8], [1, 2], []]

    def test_special_tokens_begin_every_row_once(self):
        found = rows(replace(RULE, context_turns=0, prefix=(1,)))
        assert [row[0] for row in found] == [[1, 2, 3], [1, 7, 8, 4, 5], [1, 6]]

    def test_an_episode_that_was_cut_goes_on_behind_its_last_observation(self):
        cut = EPISODE._replace(done=False)
        assert rows(episode=cut)[0][3:] == ([1, 2, 3, 7, 8, 4, 5, 6, 9], 0.0)
        assert rows(replace(RULE, context_turns=0), cut)[-1][3:] == ([9], 0.0)

    def test_rewards_are_scaled_and_so_is_what_follows(self):
        found = rows(replace(RULE, context_turns=0), reward_scale=0.1)
        assert [row[4] for row in found] == pytest.approx([0.025, 0.5, 0.0])
        np.testing.assert_allclose([row[2][-1] for row in found], [-0.1, -0.2, 0.5], rtol=1e-6)

    @pytest.mark.parametrize("context_turns", [None, 0, 1, 3])
    @pytest.mark.parametrize("max_length", [7, 12, 100])
    @pytest.mark.parametrize("keep_prompt", [False, True])
    def test_every_action_is_learned_once_from_what_a_player_would_read(
        self, context_turns, max_length, keep_prompt
    ):
        rule = replace(RULE, context_turns=context_turns, max_length=max_length, keep_prompt=keep_prompt)
        rng = np.random.default_rng(0)
        for number in range(40):
            episode = random_episode(rng, done=number % 2 == 0)
            if keep_prompt:
                episode = episode._replace(prompt=episode.prompt[:1])
            found = cut_windows(episode, rule, gamma=0.5, reward_scale=1.0)
            assert max(len(row.tokens) for row in found) <= max_length
            assert max(len(row.after) for row in found) <= max_length
            learned = [token for row in found for token in learned_of(row)]
            assert learned == [token for turn in episode.turns for token in turn.output]
            assert [len(row.earned) for row in found] == [sum(row.learned) for row in found]
            for place, turn in enumerate(episode.turns):
                (row,) = (row for row in found if turn.output[0] in learned_of(row))
                room = replace(rule, max_length=max_length - len(turn.output))
                seen = context_of(Episode(episode.prompt, episode.turns[:place], False), room)
                assert row.tokens[: row.tokens.index(turn.output[0])] == seen

    def test_the_state_behind_a_row_is_that_in_which_the_next_row_acts(self):
        rng = np.random.default_rng(1)
        for number in range(40):
            episode = random_episode(rng, done=number % 2 == 0)
            found = cut_windows(episode, replace(RULE, context_turns=1), gamma=0.5, reward_scale=1.0)
            for row, following in pairwise(found):
                assert row.after == following.tokens[: following.learned.index(True)]
            assert bool(found[-1].after) == (not episode.done)

    def test_a_turn_that_does_not_fit_is_named(self):
        with pytest.raises(
            ValueError, match=r"turn 1 of episode 4 has more than 3 tokens .* raise `train\.seq_length`"
        ):
            cut_windows(EPISODE, replace(RULE, max_length=3), gamma=1.0, reward_scale=1.0, number=4)

    def test_a_player_is_told_what_it_has_no_room_for(self):
        with pytest.raises(ValueError, match="what was said last, which has 2 tokens; got 1"):
            context_of(EPISODE._replace(turns=EPISODE.turns[:1]), replace(RULE, max_length=1))


def record(
    *turns: tuple[str, float, str], prompt: str = "go", done: Any = True, **more: Any
) -> dict[str, Any]:
    named = [dict(zip(("output", "reward", "observation"), turn, strict=True)) for turn in turns]
    return {"prompt": prompt, "turns": named, "done": done, **more}


class TestReading:
    def test_each_text_is_tokenised_by_itself_and_nothing_is_added(self):
        """ "t" + "h" would be the one token "th": no sampler could have written that across two turns."""
        tokenizer = tiny_tokenizer()
        ids = tokenizer.convert_tokens_to_ids
        (episode,) = read_episodes([record(("t", 1, "h"), ("th", 2.5, ""), prompt="t")], tokenizer)
        assert episode.prompt == [ids("t")] and episode.done
        assert [turn.output for turn in episode.turns] == [[ids("t")], [ids("th")]]
        assert [turn.observation for turn in episode.turns] == [[ids("h")], []]
        assert episode.undiscounted_return == 3.5

    def test_what_goes_on_gets_no_space_of_a_first_word(self):
        """As sentencepiece does it: a space before the first word, which is a part of it; "▁h" and "he" are merges."""
        pieces = ["<pad>", "<eos>", "▁", "\n", "h", "e", "▁h", "he"]
        backend = Tokenizer(
            models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("▁", "h"), ("h", "e")])
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
        (episode,) = read_episodes([record(("h", 0.0, "he"), prompt="h")], tokenizer)
        written = [tokenizer.convert_ids_to_tokens(row) for row in (episode.prompt, *episode.turns[0][::2])]
        assert written == [["▁h"], ["h"], ["he"]]

    def test_ids_are_taken_as_they_are(self):
        tokenizer = tiny_tokenizer()
        given = record(("x", 0.0, "y"), prompt_tokens=[7, 8])
        given["turns"][0] |= {"output_tokens": [9, EOS_ID], "observation_tokens": np.array([10])}
        (episode,) = read_episodes([given], tokenizer)
        assert episode == Episode([7, 8], [Turn([9, EOS_ID], 0.0, [10])], True)

    def test_columns_without_a_value_are_none(self):
        given = record(("x", 0.0, "y"), prompt_tokens=None)
        given["turns"][0] |= {"output_tokens": None}
        assert read_episodes([given], tiny_tokenizer()) == read_episodes(
            [record(("x", 0.0, "y"))], tiny_tokenizer()
        )

    def test_lines_of_a_file_are_the_records(self, tmp_path):
        records = [record(("x", 0, "y"), ("z", -1, "")), record(("w", 2, ""), done=False)]
        path = tmp_path / "episodes.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        assert read_episodes(jrl.read_records(path), tiny_tokenizer()) == read_episodes(
            records, tiny_tokenizer()
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"turns": []}, "episode 1: `turns` must be a list of at least one turn, got"),
            ({"turns": "x"}, "episode 1: `turns` must be a list"),
            ({"done": None}, "episode 1: `done` must be true or false .* got None"),
            ({"done": 1}, "`done` must be true or false"),
            ({"prompt": None}, "episode 1: `prompt` must be a text, or `prompt_tokens` ids; got None"),
            (
                {"prompt_tokens": [1, 97]},
                r"`prompt_tokens` of row 1 must be ids of the tokenizer, in \[0, 97\)",
            ),
            ({"turns": ["x"]}, "turn 0 of episode 1 must be a mapping, got 'x'"),
            (
                {"turns": [{"output": "x", "observation": ""}]},
                "turn 0 .* `reward` must be a finite number, got None",
            ),
            ({"turns": [{"output": "x", "reward": "1", "observation": ""}]}, "finite number, got '1'"),
            ({"turns": [{"output": "x", "reward": float("nan"), "observation": ""}]}, "number, got nan"),
            ({"turns": [{"output": "x", "reward": True, "observation": ""}]}, "number, got True"),
            ({"turns": [{"output": 3, "reward": 1, "observation": ""}]}, "`output` must be a text.* got 3"),
            ({"turns": [{"output": "x", "reward": 1}]}, "`observation` must be a text.* got None"),
            (
                {"turns": [{"output": "", "reward": 1, "observation": ""}]},
                "turn 0 of episode 1: `output` has no",
            ),
        ],
    )
    def test_what_is_malformed_is_named(self, change, message):
        good = record(("x", 0.0, ""))
        with pytest.raises(ValueError, match=message):
            read_episodes([good, good | change], tiny_tokenizer())

    def test_a_sample_that_is_no_mapping_is_named(self):
        with pytest.raises(ValueError, match="episode 1 must be a mapping with `turns`, got a str"):
            read_episodes([record(("x", 0.0, "")), "text"], tiny_tokenizer())

    def test_episodes_are_known_by_their_turns(self):
        assert has_episodes([record(("x", 0.0, ""))])
        assert not any(map(has_episodes, (["text"], [{"text": "x"}], "turns", [], None)))

    def test_a_seq2seq_model_is_refused(self):
        check_causal(None)
        with pytest.raises(ValueError, match="episodes need a causal model"):
            check_causal(0)

    def test_rows_begin_with_what_a_prompt_begins_with(self):
        tokenizer = tiny_tokenizer()
        options = {"max_length": 8, "context_turns": None, "keep_prompt": False}
        assert make_windows(tokenizer, add_special_tokens=True, **options).prefix == ()
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<eos> $A", special_tokens=[("<eos>", EOS_ID)]
        )
        assert make_windows(tokenizer, add_special_tokens=True, **options).prefix == (EOS_ID,)
        assert make_windows(tokenizer, add_special_tokens=False, **options).prefix == ()


class TestBest:
    @pytest.mark.parametrize(
        ("share", "kept"), [(1.0, [0, 1, 2, 3]), (0.5, [1, 2]), (0.25, [1]), (0.3, [1, 2])]
    )
    def test_the_share_is_rounded_up_and_of_equals_the_first_stay(self, share, kept):
        returns = [-3.0, -1.0, -2.0, -2.0]
        episodes = [Episode([number], [Turn([5], value, [])], True) for number, value in enumerate(returns)]
        assert [episode.prompt[0] for episode in best_episodes(episodes, share)] == kept

    def test_a_tenth_of_thirty_is_three(self):
        episodes = [Episode([], [Turn([5], float(value), [])], True) for value in range(30)]
        assert len(best_episodes(episodes, 0.1)) == 3


def made(*episodes: Episode, context_turns: int | None = 0, seed: int = 0) -> RewardedEpisodes:
    rule = replace(RULE, context_turns=context_turns)
    return RewardedEpisodes(EpisodeSet(episodes, rule, pad_token_id=PAD_ID, seed=seed, gamma=0.5), seed=seed)


class TestBatch:
    def test_what_follows_goes_with_its_row(self):
        found = made(EPISODE)
        assert len(found) == 3
        batch = found.batch(0, 4)  # three rows, and a copy that weighs nothing
        seen = {}
        for i in range(4):
            tokens, real = batch.inputs.tokens[i], batch.inputs.attention_mask[i]
            after = batch.after.tokens[i][batch.after.attention_mask[i]].tolist()
            taken = batch.columns[i][batch.mask[i]]
            if not batch.mask[i].any():
                assert (after, batch.returns_after[i]) == ([], 0.0)
                continue
            rewards = batch.rewards[i][batch.mask[i]].tolist()
            seen[tuple(tokens[real].tolist())] = (
                tokens[taken + 1].tolist(),
                rewards,
                after,
                float(batch.returns_after[i]),
            )
        assert seen == {
            (1, 2, 3): ([3], [-1.0], [7, 8], 0.25),
            (7, 8, 4, 5): ([4, 5], [0.0, -2.0], [START], 5.0),
            (START, 6): ([6], [5.0], [], 0.0),
        }
        assert batch.after.tokens.shape == (4, 8) and batch.returns_after.dtype == np.float32

    def test_whole_episodes_have_nothing_behind_them(self):
        batch = made(EPISODE, context_turns=None).batch(0, 2)
        assert batch.after is None and batch.returns_after is None

    def test_fingerprints_tell_ends_and_rewards_apart(self):
        other = EPISODE._replace(done=False)
        rich = EPISODE._replace(turns=[*EPISODE.turns[:2], Turn([6], 6.0, [9])])
        found = [made(one, context_turns=None) for one in (EPISODE, EPISODE, other, rich)]
        assert len({one.sha256() for one in found}) == 1
        first, same, *others = (one.rewards_sha256() for one in found)
        assert first == same and len({first, *others}) == 3
