# SPDX-License-Identifier: Apache-2.0
"""The maze: its texts and rewards, values by hand and by playing, and what its data average."""

import doctest
import json
from typing import ClassVar

import numpy as np
import pytest

from examples.maze import maze as world
from examples.maze import report
from examples.maze.data import OPTIMAL_SHARE, episode
from examples.maze.maze import CELLS, FAILURE, GOAL, MOVES, STARTS, SUCCESS, Maze, draw_start, walls
from examples.maze.optimum import (
    EVEN_CORRIDOR,
    NEXT,
    best_fixed_policy,
    blind_optimum,
    distances,
    expected_returns,
    mean_return,
    memory_optimum,
    memoryless_policy,
    mixture_policy,
    optimal_policy,
    uniform_policy,
)
from examples.maze.tokenizer import clause_tokenizer
from examples.maze.train import ALGORITHMS, MEMORY, recorded
from examples.maze.train import main as train_maze
from examples.worlds.play import play as play_world
from examples.worlds.play import remembered
from examples.worlds.train import environment

FULL, PARTLY = Maze(), Maze(shows_position=False)


def play(maze, start, choose):
    """Return of a player that is a function of observation and last action."""
    state, observation = maze.reset(start)
    total, action, done = 0.0, "", False
    while not done:
        action = choose(observation, action)
        state, observation, reward, done = maze.step(state, action)
        total += reward
    return total


class TestWorld:
    def test_examples(self):
        found = doctest.testmod(world)
        assert (found.failed, found.attempted) == (0, 4)

    def test_squares(self):
        assert (len(CELLS), len(STARTS), GOAL) == (26, 25, (8, 6))
        assert {(len(world.LAYOUT), len(line)) for line in world.LAYOUT} == {(10, 13)}
        assert all(
            sum(line[column] != line[12 - column] for column in range(13)) == 0 for line in world.LAYOUT
        )

    @pytest.mark.parametrize(
        ("start", "sentence"),
        [
            ((1, 3), "There is a wall above you."),
            ((5, 3), "There are walls to your left, below you."),
            ((1, 11), "There are walls to your right, above you, below you."),
        ],
    )
    def test_observations(self, start, sentence):
        assert PARTLY.reset(start)[1] == f"{sentence}\n"
        here = {(1, 3): "1, 3", (5, 3): "5, 3", (1, 11): "1, 1 1"}[start]
        expected = f"The goal is at position 8, 6. Your current position is at position {here}. {sentence}\n"
        assert FULL.reset(start)[1] == expected

    @pytest.mark.parametrize(
        ("text", "position", "reward"),
        [
            ("move up\n", (6, 6), -1.0),
            ("move up", (6, 6), -1.0),
            ("move left\n", (7, 6), -1.0),  # a wall
            ("move  up\n", (7, 6), -4.0),
            ("Move up\n", (7, 6), -4.0),
            ("move up\n\n", (7, 6), -4.0),
            ("move up move up", (7, 6), -4.0),
            ("", (7, 6), -4.0),
        ],
    )
    def test_actions(self, text, position, reward):
        found = FULL.step(FULL.reset((7, 6))[0], text)
        assert (found.state, found.reward, found.done) == ((position, 1), reward, False)
        assert found.observation == FULL.reset(position)[1]

    def test_the_goal_ends_an_episode(self):
        found = PARTLY.step(PARTLY.reset((7, 6))[0], "move down\n")
        assert found[1:] == (SUCCESS, 0.0, True)
        with pytest.raises(ValueError, match="over after 1 actions"):
            PARTLY.step(found.state, "move up\n")

    @pytest.mark.parametrize(("text", "total"), [("move up\n", -101.0), ("climb\n", -401.0)])
    def test_a_hundred_moves_and_one_text_more(self, text, total):
        (state, _), rewards = FULL.reset((1, 1)), []
        for _ in range(101):
            found = FULL.step(state, text)
            rewards.append(found.reward)
            assert found.done == (len(rewards) == 101)
            state = found.state
        assert (found.observation, sum(rewards), found.reward) == (FAILURE, total, -1.0)
        with pytest.raises(ValueError, match="over after 101 actions"):
            FULL.step(state, text)

    def test_the_goal_on_the_hundredth_move(self):
        state, _ = FULL.reset((7, 6))
        for _ in range(99):
            state = FULL.step(state, "move left\n").state
        assert FULL.step(state, "move down\n")[1:] == (SUCCESS, 0.0, True)
        late = FULL.step(FULL.step(state, "move left\n").state, "move down\n")
        assert late[1:] == (FAILURE, -1.0, True)

    @pytest.mark.parametrize("start", [GOAL, (0, 0), (99, 1)])
    def test_a_start_that_is_none(self, start):
        with pytest.raises(ValueError, match="an open square other than the goal"):
            FULL.reset(start)

    def test_starts_are_uniform(self):
        drawn = [draw_start(3, index) for index in range(500)]
        assert set(drawn) == set(STARTS)
        assert max(map(drawn.count, STARTS)) < 40  # of 20 each
        assert drawn[:20] == [draw_start(3, index) for index in range(20)]
        assert drawn[:20] != [draw_start(4, index) for index in range(20)]


class TestValues:
    def test_the_optimum_by_hand(self):
        # The stem: 1, 2, 3 moves. On each side: 4, 5, 6 along the bar, 7 to 9 up, 10 at the upper junction, and
        # 11, 12 twice. 6 + 2 · 95 = 196 moves, the last of each free: (196 - 25)/25 = 6.84.
        assert distances().sum() == 196
        assert mean_return(optimal_policy()) == pytest.approx(-6.84, abs=1e-12)

    def test_always_down_by_hand(self):
        down = np.tile([0.0, 0.0, 0.0, 1.0], (len(CELLS), 1))
        found = dict(zip(CELLS, expected_returns(down), strict=True))
        stem = {(8, 6): 0, (7, 6): 0, (6, 6): -1, (5, 6): -2}
        assert found == {cell: stem.get(cell, -101) for cell in CELLS}

    @pytest.mark.parametrize("share", [0.0, OPTIMAL_SHARE, 0.3])
    def test_the_other_way_round(self, share):
        """Forwards in time: each of 100 moves costs the chance of not having arrived, and the failure once more."""
        policy, chance = mixture_policy(share), np.array([cell != GOAL for cell in CELLS]) / 25
        total = 0.0
        for _ in range(100):
            after = np.zeros(len(CELLS))
            np.add.at(after, NEXT, chance[:, None] * policy)
            after[CELLS.index(GOAL)] = 0
            chance = after
            total -= chance.sum()
        assert mean_return(policy) == pytest.approx(total - chance.sum(), abs=1e-9)

    def test_random_moves(self):
        assert mean_return(uniform_policy()) == pytest.approx(-85.8927, abs=1e-4)

    def test_playing_the_optimum_gives_its_value(self):
        names = [f"{action}\n" for action in MOVES]
        best = {
            FULL.reset(start)[1]: names[optimal_policy()[CELLS.index(start)].argmax()] for start in STARTS
        }
        played = [play(FULL, start, lambda observation, _: best[observation]) for start in STARTS]
        values = dict(zip(CELLS, expected_returns(optimal_policy()), strict=True))
        assert played == [values[start] for start in STARTS]

    def test_no_policy_is_better_anywhere(self):
        generator, best = np.random.RandomState(0), expected_returns(optimal_policy())
        for _ in range(20):
            policy = generator.dirichlet(np.full(4, 0.3), size=len(CELLS))
            assert (expected_returns(policy) <= best).all()

    @pytest.mark.parametrize(
        "policy", [np.ones((26, 4)), np.full((25, 4), 0.25), np.tile([2.0, -1, 0, 0], (26, 1))]
    )
    def test_what_is_no_policy(self, policy):
        with pytest.raises(ValueError, match=r"probabilities of shape \(26, 4\)"):
            expected_returns(policy)


class TestPartlyObserved:
    def test_memory(self):
        # In a corridor the first move is a guess. Right is wrong at (1, 4), (1, 10), (5, 8): 2 moves more, and at
        # (5, 7): 4 more; left as much. Then the way is known: 171 + 10 = 181, and 181/25 = 7.24.
        assert memory_optimum(walls) == pytest.approx(-7.24, abs=1e-12)

    def test_the_last_move_is_memory_enough(self):
        """A player who goes on through corridors, right at first, reads texts alone and gets the optimum."""
        moves = {
            "There are walls above you, below you.\n": "",
            "There are walls to your right, to your left.\n": "move down\n",
            "There is a wall above you.\n": "move down\n",
            "There are walls to your left, above you, below you.\n": "move right\n",
            "There are walls to your left, below you.\n": "move right\n",
            "There are walls to your right, above you, below you.\n": "move left\n",
            "There are walls to your right, below you.\n": "move left\n",
        }
        played = [
            play(PARTLY, start, lambda seen, last: moves[seen] or last or "move right\n") for start in STARTS
        ]
        assert sum(played) == -181

    def test_whoever_sees_the_square_needs_no_memory(self):
        assert memory_optimum(lambda cell: cell) == pytest.approx(-6.84, abs=1e-12)

    def test_without_memory_and_chance(self):
        # Always right in corridors: 13 starts never arrive, the others make 0 + 1 + ... + 11 paid moves.
        value, chosen = best_fixed_policy()
        assert value == pytest.approx(-(13 * 101 + 66) / 25, abs=1e-12)
        assert chosen["above you", "below you"] in ("move left", "move right")

    def test_without_memory_by_chance(self):
        best = mean_return(memoryless_policy(EVEN_CORRIDOR))
        assert best == pytest.approx(-12.5999898, abs=1e-7)
        for view in {walls(start) for start in STARTS}:
            now = memoryless_policy(EVEN_CORRIDOR)[[walls(cell) for cell in CELLS].index(view)]
            for move in np.eye(4):
                other = {**EVEN_CORRIDOR, view: 0.999 * now + 0.001 * move}
                assert mean_return(memoryless_policy(other)) <= best

    def test_blind(self):
        value, moves = blind_optimum()
        assert value == pytest.approx(-14.12, abs=1e-12)
        assert self.blind(moves) == 25 * value
        # No move can be left out or made otherwise.
        others = [moves[:i] + moves[i + 1 :] + ("move down",) for i in range(len(moves))]
        others += [(*moves[:i], move, *moves[i + 1 :]) for i in range(len(moves)) for move in MOVES]
        assert max(map(self.blind, others)) == 25 * value

    @staticmethod
    def blind(moves):
        def player():
            rest = iter(moves)
            return lambda *_: next(rest, "move down")

        return sum(play(PARTLY, start, player()) for start in STARTS)

    def test_more_knowledge_is_never_worse(self):
        values = [
            memory_optimum(lambda cell: cell),
            memory_optimum(walls),
            mean_return(memoryless_policy(EVEN_CORRIDOR)),
            best_fixed_policy()[0],
        ]
        assert values == sorted(values, reverse=True)


class TestData:
    def test_an_episode_is_a_function_of_seed_and_number(self):
        first = [episode(FULL, 5, index) for index in range(6)]
        assert [episode(FULL, 5, index) for index in reversed(range(6))] == first[::-1]
        assert [episode(FULL, 6, index) for index in range(6)] != first
        assert [turns[0].observation for turns in first] == [
            FULL.reset(draw_start(5, i))[1] for i in range(6)
        ]

    def test_turns_follow_from_each_other(self):
        turns = episode(PARTLY, 0, 3)
        state, observation = PARTLY.reset(draw_start(0, 3))
        for i, turn in enumerate(turns):
            assert turn.observation == observation
            state, observation, reward, done = PARTLY.step(state, turn.action)
            assert (turn.reward, done) == (reward, i == len(turns) - 1)

    def test_what_is_seen_moves_nothing(self):
        full, partly = episode(FULL, 1, 2), episode(PARTLY, 1, 2)
        assert [turn[1:] for turn in full] == [turn[1:] for turn in partly]
        assert full[0].observation.endswith(partly[0].observation)

    def test_the_mean_is_that_of_lmrl_gym(self):
        assert mean_return(mixture_policy(OPTIMAL_SHARE)) == pytest.approx(-83.0, abs=0.01)

    @pytest.mark.parametrize("share", [OPTIMAL_SHARE, 0.5])
    def test_episodes_average_the_exact_value(self, share):
        totals = [
            sum(turn.reward for turn in episode(FULL, 0, index, optimal_share=share)) for index in range(1000)
        ]
        error = np.std(totals) / len(totals) ** 0.5
        assert abs(np.mean(totals) - mean_return(mixture_policy(share))) < 3 * error

    def test_the_best_player(self):
        totals = [sum(t.reward for t in episode(FULL, 0, index, optimal_share=1.0)) for index in range(50)]
        best = dict(zip(CELLS, expected_returns(optimal_policy()), strict=True))
        assert totals == [best[draw_start(0, index)] for index in range(50)]


class TestPlaying:
    """The world as a trained policy meets it, here with policies whose returns are known."""

    @staticmethod
    def best(contexts):
        """Looks its square up in the observation."""
        cells = {world.describe(cell, shows_position=True): cell for cell in STARTS}
        moves = {
            cell: f"{tuple(MOVES)[i]}\n"
            for cell, i in zip(CELLS, optimal_policy().argmax(axis=1), strict=True)
        }
        return [moves[cells[text]] for text in contexts]

    def test_the_best_policy_plays_the_exact_maximum(self):
        found = play_world(FULL, STARTS, self.best, context_turns=0)
        assert found.mean() == pytest.approx(-6.84) and found.tolist() == [
            1.0 - distances()[CELLS.index(s)] for s in STARTS
        ]

    def test_a_context_holds_the_last_turns_and_what_is_seen_now(self):
        asked = []

        def answer(contexts):
            asked.append(list(contexts))
            return ["move down"] * len(contexts)

        play_world(PARTLY, [(1, 1), (7, 6)], answer, context_turns=1)
        walls_there = "There are walls to your left, above you, below you.\n"
        assert asked[0][0] == walls_there and asked[1][0] == f"{walls_there}move down\n{walls_there}"
        assert asked[2][0] == asked[1][0] and len(asked) == 101
        assert [len(each) for each in asked] == [2] * 101

    def test_a_greedy_policy_is_asked_once_about_each_context(self):
        asked = []

        def answer(contexts):
            asked.extend(contexts)
            return self.best(contexts)

        assert play_world(FULL, STARTS, remembered(answer), context_turns=0).mean() == pytest.approx(-6.84)
        assert len(asked) == 25

    def test_the_tokenizer_holds_every_text_and_gives_it_back(self):
        tokenizer = clause_tokenizer()
        texts = [world.describe(cell, shows_position=shows) for cell in CELLS for shows in (True, False)]
        for text in [*texts, SUCCESS, FAILURE, *(f"{move}\n" for move in MOVES)]:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
        assert max(len(tokenizer(text)["input_ids"]) for text in texts) == 8
        assert [len(tokenizer(f"{move}\n")["input_ids"]) for move in MOVES] == [1] * 4


class TestRecords:
    def test_an_episode_that_reached_the_goal_is_done(self):
        turns = episode(FULL, 0, 0, optimal_share=1.0)
        found = recorded(turns)
        assert found["done"] and len(found["turns"]) == len(turns)
        assert found["prompt"] == turns[0].observation and found["turns"][-1]["observation"] == SUCCESS
        assert [turn["observation"] for turn in found["turns"][:-1]] == [t.observation for t in turns[1:]]

    def test_one_that_the_limit_cut_goes_on_behind_its_hundredth_move(self):
        turns = next(found for i in range(50) if len(found := episode(FULL, 0, i, optimal_share=0.0)) == 101)
        found = recorded(turns)
        assert not found["done"] and len(found["turns"]) == 100
        assert found["turns"][-1]["observation"] == turns[100].observation


class TestEnvironment:
    def test_it_answers_as_the_world_does(self):
        near, far = environment(FULL)(), environment(FULL)()
        near.reset(start=(7, 6))
        far.reset(start=(1, 1))
        assert far.step(text="move right") == (FULL.reset((1, 2))[1], -1.0, False)
        assert near.step(text="move up") == (FULL.reset((6, 6))[1], -1.0, False)
        assert near.step(text="climb") == (FULL.reset((6, 6))[1], -4.0, False)
        assert [near.step(text="move down")[1:] for _ in range(2)] == [(-1.0, False), (0.0, True)]


class TestReport:
    RUNS: ClassVar = [
        {
            "algorithm": "ilql",
            "observed": "fully",
            "seed": seed,
            "greedy": -6.84,
            "sampled": -7.0 - seed,
            "curve": {"0": [-401, -400], "10": [-7, -8]},
        }
        for seed in (1, 0)
    ]

    def test_a_row_has_mean_and_range_over_seeds(self):
        row = "| fully | ILQL | -6.84 | -7.50 [-8.00..-7.00] | 0, 1 | -6.97 | -6.84 |"
        assert report.table(self.RUNS).splitlines()[2:] == [row]

    def test_the_curves_are_drawn(self, tmp_path):
        pytest.importorskip("matplotlib")
        report.plot(self.RUNS, tmp_path / "returns.png", "learned from recorded episodes")
        assert (tmp_path / "returns.png").stat().st_size > 10_000


SHORT = "--episodes 20 --train.total_steps 2 --train.eval_interval 2 --train.batch_size 4"
ONLINE = "--clone.train.total_steps 2 --method.num_rollouts 4 --method.chunk_size 4 --method.ppo_epochs 2"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("observed", list(MEMORY))
def test_training_ends_with_a_line_of_figures(algorithm, observed, tmp_path):
    flags = f"{SHORT} {ONLINE if algorithm == 'ppo' else ''}"
    results = tmp_path / "runs.jsonl"
    program = ["--algorithm", algorithm, "--observed", observed, "--results", str(results)]
    assert train_maze([*program, "--output-dir", str(tmp_path / "run"), *flags.split()]) == 0
    (line,) = results.read_text().splitlines()
    found = json.loads(line)
    assert (found["algorithm"], found["observed"], found["seed"]) == (algorithm, observed, 0)
    assert set(found["curve"]) == {"0", "2"} and -401 <= found["greedy"] <= -6.84
