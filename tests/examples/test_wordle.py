# SPDX-License-Identifier: Apache-2.0
"""Wordle: feedback, texts and rewards, the optimum against brute force and by playing, and its data."""

import doctest
import itertools
import json
import random
from collections import Counter
from functools import cache

import numpy as np
import pytest

from examples.wordle import report
from examples.wordle import wordle as world
from examples.wordle.data import OPTIMAL_SHARE, episode
from examples.wordle.optimum import Search, optimal_return, random_return
from examples.wordle.tokenizer import letter_tokenizer
from examples.wordle.train import ALGORITHMS, ROW_TOKENS, recorded
from examples.wordle.train import main as train_wordle
from examples.wordle.wordle import PROMPT, WORDS, Wordle, draw_answer, feedback, spell
from examples.worlds.play import play

GAME = Wordle()


@pytest.fixture(scope="module")
def search():
    return Search(WORDS)


class TestWorld:
    def test_examples(self):
        found = doctest.testmod(world)
        assert (found.failed, found.attempted) == (0, 5)

    def test_words(self):
        assert len(WORDS) == len(set(WORDS)) == 200
        assert list(WORDS) == sorted(WORDS)
        assert all(len(word) == 5 and set(word) <= set("abcdefghijklmnopqrstuvwxyz") for word in WORDS)

    @pytest.mark.parametrize(
        ("guess", "answer", "marks"),
        [
            ("crane", "crane", "ggggg"),
            ("crane", "sloth", "bbbbb"),
            ("earth", "heart", "yyyyy"),
            ("eerie", "there", "ybybg"),  # two e in the answer: the last in its place, the first elsewhere
            ("there", "eerie", "bbyyg"),
            ("sleep", "elbow", "bgybb"),  # one e for two
            ("teeth", "earth", "bybgg"),  # a t in its place and none left; one e
            ("abbey", "babes", "yyggb"),
        ],
    )
    def test_feedback(self, guess, answer, marks):
        assert feedback(guess, answer) == marks

    def test_feedback_counts_letters(self):
        repeated = ["geese", "eerie", "sassy", "mamma", "teeth", "array", "radar"]
        for guess, answer in itertools.product([*WORDS[::7], *repeated], repeat=2):
            marks = feedback(guess, answer)
            assert [mark == "g" for mark in marks] == [a == b for a, b in zip(guess, answer, strict=True)]
            told = Counter(letter for letter, mark in zip(guess, marks, strict=True) if mark != "b")
            assert told == Counter(guess) & Counter(answer)
            for letter in told:  # those elsewhere come before those that are not told
                rest = [m for g, m in zip(guess, marks, strict=True) if g == letter and m != "g"]
                assert rest == sorted(rest, reverse=True)

    def test_a_game(self):
        state, observation = GAME.reset("ready")
        assert observation == PROMPT
        state, observation, reward, done = GAME.step(state, "e a r t h\n")
        assert (observation, reward, done) == ("y y y b b\n", -1.0, False)
        state, observation, reward, done = GAME.step(state, "ready")
        assert (observation, reward, done, state.guesses) == ("g g g g g\n", 0.0, True, 2)
        with pytest.raises(ValueError, match="over after 2 guesses"):
            GAME.step(state, "ready")

    @pytest.mark.parametrize(
        "text", ["", "\n", "zzzzz\n", "r e a d\n", "r e a d y y\n", "R E A D Y\n", "r-e-a-d-y"]
    )
    def test_what_is_no_word_costs_a_guess(self, text):
        found = GAME.step(GAME.reset("ready")[0], text)
        assert (found.observation, found.reward, found.done, found.state.guesses) == ("\n", -1.0, False, 1)

    @pytest.mark.parametrize("text", ["e a r t h\n", "?"])
    def test_the_sixth_wrong_guess_ends_a_game(self, text):
        (state, _), total = GAME.reset("ready"), 0.0
        for number in range(1, 7):
            state, _, reward, done = GAME.step(state, text)
            total += reward
            assert done == (number == 6)
        assert total == -6.0
        with pytest.raises(ValueError, match="over after 6 guesses"):
            GAME.step(state, "ready")

    def test_the_sixth_guess_may_be_right(self):
        state, _ = GAME.reset("ready")
        for _ in range(5):
            state = GAME.step(state, "earth").state
        assert GAME.step(state, "ready")[2:] == (0.0, True)

    def test_an_answer_that_is_no_word_of_the_list(self):
        with pytest.raises(ValueError, match="one of the 200 words, got 'zzzzz'"):
            GAME.reset("zzzzz")

    def test_answers_are_drawn_by_seed_and_number(self):
        drawn = [draw_answer(1, index) for index in range(300)]
        assert drawn[::-1] == [draw_answer(1, index) for index in reversed(range(300))]
        assert drawn != [draw_answer(2, index) for index in range(300)]
        assert len(set(drawn)) > 130


def brute_force(words, guesses):
    """Least sum of wrong guesses by trying everything."""

    @cache
    def least(left, guesses):
        if guesses == 0:
            return 0
        totals = []
        for guess in words:
            groups = {}
            for answer in left:
                groups.setdefault(feedback(guess, answer), []).append(answer)
            groups.pop("ggggg", None)
            totals.append(sum(len(group) + least(tuple(group), guesses - 1) for group in groups.values()))
        return min(totals)

    return least(tuple(words), guesses)


def groups(word):
    """Numbers of the words that each feedback to a first guess leaves."""
    marks = [feedback(WORDS[word], answer) for answer in WORDS]
    return [np.array([i for i in range(200) if marks[i] == mark]) for mark in sorted({*marks} - {"ggggg"})]


class TestOptimum:
    @pytest.mark.parametrize(
        ("words", "guesses", "total"),
        [
            (["abcde"], 6, 0),
            (["abcde", "fghij"], 6, 1),
            (["aaaaa", "bbbbb", "ccccc", "ddddd"], 6, 0 + 1 + 2 + 3),  # a guess strikes out itself
            (["aaaaa", "bbbbb", "ccccc", "ddddd"], 2, 0 + 1 + 2 + 2),  # two are not found
            (["aaaaa", "bbbbb", "ccccc", "ddddd"], 1, 0 + 1 + 1 + 1),
            (["aaaaa", "bbbbb", "ccccc", "ddddd", "abcef"], 6, 4),  # the last tells all others apart
        ],
    )
    def test_by_hand(self, words, guesses, total):
        assert Search(words).best(np.arange(len(words)), guesses)[0] == total

    @pytest.mark.parametrize("seed", range(6))
    def test_against_brute_force(self, seed):
        """Words with a common end are hard to tell apart: bounds are loose, and games are lost."""
        draw = random.Random(seed)
        ends = ["zzzz"] if seed % 2 else ["nzzz", "ozzz", "pzzz"]
        words = sorted({draw.choice("abcdefghijklm") + draw.choice(ends) for _ in range(13)})
        found = Search(words)
        for guesses in (4, 1, 3, 2):
            assert found.best(np.arange(len(words)), guesses)[0] == brute_force(words, guesses)

    def test_all_words(self, search):
        assert optimal_return(GAME) == -333 / 200
        total, word = search.best(np.arange(200), 6)
        assert (total, WORDS[word]) == (333, "crane")

    def test_playing_the_optimum_gives_its_value(self, search):
        totals = []
        for answer in WORDS:
            (state, _), history, total, done = GAME.reset(answer), [], 0.0, False
            while not done:
                _, word = search.best(search.candidates(history), 6 - state.guesses)
                state, observation, reward, done = GAME.step(state, spell(WORDS[word]))
                history.append((WORDS[word], "".join(observation.split())))
                total += reward
            totals.append(total)
        assert sum(totals) == -333
        assert min(totals) == -3  # four guesses are always enough

    def test_no_first_guess_is_better(self, search):
        """All 200 first guesses, each followed by optimal play: what branch and bound left out was no better."""
        totals = [sum(len(group) + search.best(group, 5)[0] for group in groups(word)) for word in range(200)]
        assert min(totals) == 333
        assert totals[WORDS.index("crane")] == 333

    @pytest.mark.parametrize("seed", range(4))
    def test_what_was_asked_before_changes_nothing(self, seed):
        """Sets that the search for the best first word gave up are asked for afterwards."""
        draw = random.Random(seed)
        words = sorted({draw.choice("abcdefghijklm") + 3 * draw.choice("nop") + "z" for _ in range(30)})
        asked, fresh = Search(words), Search(words)
        asked.best(np.arange(len(words)), 5)
        for guess, answer in itertools.product(words, repeat=2):
            left = asked.candidates([(guess, feedback(guess, answer))])
            assert asked.best(left, 4) == fresh.best(left, 4)

    def test_candidates(self, search):
        left = search.candidates([("crane", "bbbbb"), ("youth", feedback("youth", "silly"))])
        found = [WORDS[i] for i in left]
        assert "silly" in found
        assert all(not set(word) & set("crane") for word in found)
        assert [WORDS[i] for i in search.candidates([])] == list(WORDS)

    def test_random_words(self):
        two = Wordle(words=("aaaaa", "bbbbb"), max_guesses=2)
        assert random_return(two) == -(1 / 2 + 1 / 4)
        assert random_return(GAME) == pytest.approx(-5.8959, abs=1e-4)


class TestData:
    def test_a_game_is_a_function_of_seed_and_number(self):
        first = [episode(GAME, 5, index) for index in range(6)]
        assert [episode(GAME, 5, index) for index in reversed(range(6))] == first[::-1]
        assert [episode(GAME, 6, index) for index in range(6)] != first

    def test_turns_follow_from_each_other(self):
        for index in range(20):
            turns = episode(GAME, 0, index)
            state, observation = GAME.reset(draw_answer(0, index))
            for i, turn in enumerate(turns):
                assert turn.observation == observation
                state, observation, reward, done = GAME.step(state, turn.action)
                assert (turn.reward, done) == (reward, i == len(turns) - 1)

    @pytest.mark.parametrize("share", [0.0, 1.0])
    def test_the_random_and_the_best_player(self, share):
        totals = [sum(turn.reward for turn in episode(GAME, 0, i, optimal_share=share)) for i in range(300)]
        exact = optimal_return(GAME) if share else random_return(GAME)
        assert abs(np.mean(totals) - exact) < 3 * np.std(totals) / len(totals) ** 0.5

    def test_the_mixture_lies_between(self):
        totals = [sum(turn.reward for turn in episode(GAME, 0, index)) for index in range(300)]
        assert 0 < OPTIMAL_SHARE < 1
        assert random_return(GAME) < np.mean(totals) < optimal_return(GAME)
        assert np.mean(totals) == pytest.approx(-3.83, abs=0.3)


class TestLearning:
    def test_the_tokenizer_holds_every_text_and_gives_it_back(self):
        tokenizer = letter_tokenizer()
        marks = {spell(feedback(guess, answer)) for guess in WORDS[::9] for answer in WORDS}
        texts = [PROMPT, "\n", *(f"{text}\n" for text in [*marks, *map(spell, WORDS)])]
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
            assert text == PROMPT or len(ids) == (5 if len(text) > 1 else 1)

    def test_the_longest_game_is_a_row(self):
        longest = max((episode(GAME, 0, index) for index in range(200)), key=len)
        text = "".join(turn.observation + turn.action for turn in longest)
        count = len(letter_tokenizer()(f"{text}g g g g g\n")["input_ids"])
        assert len(longest) == GAME.max_guesses and count == ROW_TOKENS

    def test_a_lost_game_is_over_like_one_that_was_won(self):
        games = [episode(GAME, 0, index) for index in range(60)]
        assert {turns[-1].reward for turns in games} == {0.0, -1.0}
        for turns in games:
            found = recorded(turns)
            assert found["done"] and found["prompt"] == PROMPT and len(found["turns"]) == len(turns)
            assert [turn["output"] for turn in found["turns"]] == [turn.action for turn in turns]

    def test_the_best_player_plays_the_exact_optimum(self, search):
        def best(contexts):
            return [spell(WORDS[guess(context.split("\n")[1:-1])]) for context in contexts]

        def guess(lines):
            history = [
                (a.replace(" ", ""), b.replace(" ", "")) for a, b in zip(lines[::2], lines[1::2], strict=True)
            ]
            candidates = search.candidates(history)
            over = len(history) >= 6 or (history and history[-1][1] == "ggggg")
            return 0 if over else search.best(candidates, 6 - len(history))[1]

        assert play(GAME, WORDS, best, context_turns=None).sum() == -333

    def test_a_row_of_the_table_and_the_curves(self, tmp_path):
        run = {"seed": 0, "greedy": -3.5, "sampled": -4.0, "curve": {"0": [-6, -6], "10": [-3.5, -4.0]}}
        runs = [run | {"algorithm": name} for name in ("ppo", "ilql")]
        rows = report.table(runs).splitlines()[2:]
        assert rows == [
            "| ILQL | -3.50 | -4.00 | 0 | -1.665 |",
            "| PPO, online | -3.50 | -4.00 | 0 | -1.665 |",
        ]
        pytest.importorskip("matplotlib")
        report.plot(runs, tmp_path / "returns.png")
        assert (tmp_path / "returns.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_training_ends_with_a_line_of_figures(algorithm, tmp_path):
    flags = "--episodes 20 --train.total_steps 2 --train.eval_interval 2 --train.batch_size 4"
    if algorithm == "ppo":
        flags += " --clone.train.total_steps 2 --method.num_rollouts 4 --method.chunk_size 4"
    results = tmp_path / "runs.jsonl"
    program = ["--algorithm", algorithm, "--results", str(results), "--output-dir", str(tmp_path / "run")]
    assert train_wordle([*program, *flags.split()]) == 0
    (line,) = results.read_text().splitlines()
    found = json.loads(line)
    assert (found["algorithm"], found["seed"]) == (algorithm, 0) and "observed" not in found
    assert set(found["curve"]) == {"0", "2"} and -6 <= found["greedy"] <= 0
