# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena, with the real package: rules, chance, chats, worker processes, an iteration of GRPO."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jrl
from jrl.environments import TextArena, TextArenaChat, text_arena_prompts
from jrl.rewards import isolated_environment
from jrl.rollout.environments import Answer, World
from tests.environments.chat_models import chat_tokenizer, save_chat_model
from tests.trainers.runs import grpo_config

ta = pytest.importorskip("textarena", reason="textarena is in the extra `environments`")
GUESS = "GuessTheNumber-v0"
OFFLINE = (
    "2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Crosswords-v0", "Cryptarithm-v0", "FifteenPuzzle-v0",
    "FrozenLake-v0", GUESS, "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0", "PegJump-v0",
    "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sokoban-v0", "Sudoku-v0", "ThreeCardMonte-v0",
    "TowerOfHanoi-v0",
)  # fmt: skip


def begun(row: dict[str, Any], environment: Any = TextArena) -> World:
    metadata = {name: value for name, value in row.items() if name != "prompt"}
    return World(environment, row["prompt"], metadata, 0)


def play(row: dict[str, Any], actions: list[str], environment: Any = TextArena) -> list[Answer]:
    world, found = begun(row, environment), list[Answer]()
    for action in actions:
        found.append(world.step(action, [1]))
        if found[-1].done:
            break
    return found


def number_of(row: dict[str, Any]) -> int:
    """The number to guess, by asking for all of them."""
    (right,) = [n for n in range(1, 21) if play(row, [f"[{n}]"])[0].done]
    return right


def test_a_game_by_its_own_rules():
    rows = text_arena_prompts(GUESS, 4, seed=5)
    assert len({number_of(row) for row in rows}) > 1, "every prompt has a game of its own"
    right = number_of(rows[0])
    assert rows[0]["prompt"].startswith("[GAME] You are Player 0. You are playing Guess The Number.\n")
    wrong = right % 20 + 1
    first, *_, last = play(rows[0], [f"[{wrong}]", f"[{right}]"])
    hint = "lower" if wrong > right else "higher"
    assert first == Answer(f"\n[GAME] The target number is {hint}.\n", 0.0, False)
    assert last == Answer("\n[GAME] Congratulations! You guessed the correct number.\n", 1.0, True)


def test_invalid_actions_are_as_the_game_says():
    """One may be repeated; the second in a row ends the game with the share that was reached."""
    (row,) = text_arena_prompts(GUESS, 1)
    first, second = play(row, ["seven", "[99]", "[1]"])
    assert "You attempted an invalid move." in first.observation and not first.done and first.reward == 0
    assert second.done and "Invalid Move" in second.observation and second.reward == 0.0


@pytest.mark.parametrize("game", OFFLINE)
def test_games_without_data_are_functions_of_their_seed_and_leave_chance_outside_alone(game):
    random.seed(1)
    np.random.seed(1)
    outside = random.getstate(), np.random.get_state()[1].tolist()
    rows = text_arena_prompts(game, 2)
    assert rows == text_arena_prompts(game, 2)
    actions = ["[1]", "[up]", "[a]", "[hit]", "[0 0]", "[1]"]
    alone = play(rows[0], actions)
    assert alone and all(isinstance(answer.reward, float) for answer in alone)
    together = [begun(rows[0]), begun(rows[1]), begun(rows[0])]
    found: list[list[Answer]] = [[], [], []]
    for action in actions[: len(alone)]:
        for world, answers in zip(together, found, strict=True):
            if not answers or not answers[-1].done:
                answers.append(world.step(action, [1]))
    assert found[0] == found[2] == alone, "games that are played in turn do not share their chance"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == outside


def test_a_chat():
    tokenizer = chat_tokenizer([])
    (row,) = text_arena_prompts(GUESS, 1, tokenizer=tokenizer, system_prompt="Win.")
    assert row["prompt"].startswith("<|im_start|>system\nWin.<|im_end|>\n<|im_start|>user\n[GAME] You")
    world = begun(row, TextArenaChat)
    assert world.role == "user" and world.step("[99]", [1]).observation.startswith("[GAME] You attempted")
    with pytest.raises(ValueError, match="`system_prompt` is a chat's"):
        text_arena_prompts(GUESS, 1, system_prompt="Win.")


def test_an_invalid_action_has_its_reason_and_the_game_a_number_as_reward():
    """Games of 0.7.4 that give both in the other's place."""
    for game in ("Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"):
        first, last = play(*text_arena_prompts(game, 1), ["[?]", "[?]"])
        assert "ction format" in first.observation and "ction format" in last.observation
        assert last.done and 0 <= last.reward < 1


def test_options():
    (row,) = text_arena_prompts(GUESS, 1, options={"max_number": 3})
    assert "between 1 and 3" in row["prompt"]
    assert any(play(row, [f"[{n}]"])[0].done for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        ("Guess", {}, "one that TextArena registers"),
        ("TicTacToe-v0", {}, "must be for one player"),
        ("MarketEntryGame-v0", {}, "must be for one player"),
        ("TwentyQuestions-v0", {}, "cannot be played here: ValueError: OpenRouter API key"),
    ],
)
def test_games_that_cannot_be_played_are_refused(game, options, message, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=message):
        text_arena_prompts(game, 1, options=options)


def test_data_that_are_missing_are_named(monkeypatch):
    import nltk

    def nothing(*given: Any, **options: Any) -> Any:
        raise LookupError("\n****\n  Resource 'words' not found\n")

    monkeypatch.setattr(nltk, "download", lambda *given, **options: False)
    monkeypatch.setattr(nltk.data, "find", nothing)
    monkeypatch.setattr(nltk.data, "load", nothing)
    with pytest.raises(ValueError, match=r"python -m nltk.downloader words .*Resource 'words' not found"):
        text_arena_prompts("Wordle-v0", 1)
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=r"pip install 'jrl-post\[environments\]'"):
        text_arena_prompts(GUESS, 1)


def test_in_a_worker_process_that_is_ended_and_made_anew():
    row, other = text_arena_prompts(GUESS, 2)
    actions = ["[1]", "[2]", "[3]"]
    environment = isolated_environment(TextArena, timeout=60.0, memory=None)
    try:
        world, beside = begun(row, environment), begun(other, environment)
        found = [world.step(actions[0], [1]), beside.step("[7]", [1])]
        environment.close()
        found += [world.step(action, [1]) for action in actions[1:]]
    finally:
        environment.close()
    assert [found[0], *found[2:]] == play(row, actions)


@pytest.mark.filterwarnings("ignore:.*prompts have more than", "ignore:.*no prompt has two samples")
def test_an_iteration_of_grpo(checkpoint, tmp_path):
    config = grpo_config(checkpoint, tmp_path, train={"seq_length": 120, "total_steps": 1})
    config = config.evolve(
        train={"long_prompts": "truncate"},
        method={"gen_kwargs": {"max_new_tokens": 100, "max_turns": 2, "max_turn_tokens": 3}},
    )
    trainer = jrl.train(environment=TextArena, prompts=text_arena_prompts(GUESS, 4), config=config)
    (record,) = [record for record in trainer.history if "episode/turns" in record]
    assert record["episode/turns"] > 0


@pytest.mark.filterwarnings("ignore:Rollouts are filtered")
def test_an_iteration_of_grpo_in_a_chat(tmp_path):
    tokenizer = chat_tokenizer([f"[{n}]" for n in range(1, 21)])
    model = save_chat_model(tmp_path / "model", tokenizer)
    mask = np.ones((len(tokenizer),) * 2, bool)
    guesses = tokenizer.convert_tokens_to_ids([f"[{n}]" for n in range(1, 21)])
    mask[:, guesses] = False
    mask[guesses] = True
    mask[guesses, tokenizer.eos_token_id] = False
    config = grpo_config(model, tmp_path / "run", train={"seq_length": 1024, "total_steps": 1}).evolve(
        method={"gen_kwargs": {"max_new_tokens": 250, "max_turns": 3}},
        train={"trainer_kwargs": {"logit_mask": mask}},
    )
    prompts = text_arena_prompts(GUESS, 4, tokenizer=tokenizer)
    trainer = jrl.train(environment=TextArenaChat, prompts=prompts, config=config)
    (record,) = [record for record in trainer.history if "episode/turns" in record]
    assert record["reward/mean"] >= 0 and record["episode/turns"] > 1
    text = (Path(trainer.run_dir) / "rollouts" / "rollouts.jsonl").read_text(encoding="utf-8")
    assert "The target number is" in text
