# SPDX-License-Identifier: Apache-2.0
"""Episodes: which ids are trained on, what a sample may depend on, and what becomes of a world that fails."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jrl.data.chat.rendering import reply_text
from jrl.data.prompts import PromptSet
from jrl.data.seam import continuations
from jrl.mesh import make_mesh
from jrl.models.model import make_model
from jrl.rollout import turns as turns_module
from jrl.rollout.environments import EnvironmentFailure, World, check_environment
from jrl.rollout.episode import Episode, Task
from jrl.rollout.episodes import Player, environment
from jrl.rollout.experience import scoring_program
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.rollout.slot_collector import SlotCollector
from jrl.typing import ModelInputs, PolicyFns
from tests.tiny import tiny_hf_config, tiny_tokenizer

TURNS = 8
WORDS = (
    *("the", "answer", "is", "4", "2", "7", "calc", "add", "sum", "of", "and", "result", ":", "=", "+", "?"),
    *("ok", "yes", "no", "user", "tool", "assistant"),
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESH = make_mesh(1, 1, 1, devices=jax.devices()[:1])


class Tool:
    """Answers every turn by its number, for eight turns."""

    def reset(self, seed: int) -> str:
        self.seen: list[list[int]] = []
        return ""

    def step(self, text: str, ids: list[int], turn: int) -> tuple[str, float, bool]:
        self.seen.append(ids)
        return f" = {turn} ok ?", float(turn), turn == TURNS - 1


def settings(tokenizer: Any, **more: Any) -> GenerationSettings:
    options = {"max_new_tokens": 200, "max_turns": TURNS, "max_turn_tokens": 6} | more
    return GenerationSettings(
        eos_token_id=(tokenizer.eos_token_id,), pad_token_id=tokenizer.pad_token_id, **options
    )


@functools.cache
def model(family: str = "llama", vocab_size: int = 97) -> tuple[PolicyFns, Any, Any]:
    """A tiny model with room for long rows."""
    lengths = {"n_positions": 1024} if family == "gpt2" else {"max_position_embeddings": 1024}
    lm = make_model(tiny_hf_config(family, vocab_size=vocab_size, **lengths))
    params, frozen = lm.split_params(lm.init(jax.random.key(0)), num_layers_unfrozen=-1)
    return lm.policy(num_layers_unfrozen=-1), params, frozen


def played(
    world: Any = Tool, *, slots: int = 4, count: int = 10, family: str = "llama", **more: Any
) -> list[Episode]:
    """Episodes of the tiny model; worlds are kept on them."""
    tokenizer = tiny_tokenizer()
    policy, params, frozen = model(family)
    stops = more.pop("stop_sequences", ())
    player = Player(policy, tokenizer, MESH, stops)
    prompts = [[5 + row % 3, 6, *range(7, 7 + row % 4)] for row in range(count)]
    tasks = [
        Task(row, prompt, functools.partial(World, world, "p", {"row": row}, row))
        for row, prompt in enumerate(prompts)
    ]
    options = settings(tokenizer, **more)
    return player.play(params, frozen, tasks, options, jax.random.key(0), num_slots=slots)


@pytest.fixture(scope="module")
def base() -> list[Episode]:
    return played()


class TestSamples:
    @pytest.mark.parametrize("slots", [1, 3, 10])
    def test_they_do_not_depend_on_slots(self, base, slots):
        found = played(slots=slots)
        assert [episode.ids for episode in found] == [episode.ids for episode in base]
        for a, b in zip(found, base, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)

    def test_they_do_not_depend_on_how_many_tokens_a_call_writes(self, base, monkeypatch):
        monkeypatch.setattr("jrl.rollout.episodes.WRITE_TOKENS", 4)
        monkeypatch.setattr(turns_module, "READ_WIDTH", 4)
        assert [episode.ids for episode in played()] == [episode.ids for episode in base]

    def test_the_first_turn_is_what_the_sampler_of_completions_draws(self, base):
        policy, params, frozen = model()
        tokenizer = tiny_tokenizer()
        rows = [episode.task.prompt for episode in base]
        width = max(map(len, rows))
        tokens = np.stack([np.pad(row, (width - len(row), 0)) for row in rows])
        mask = np.stack([np.arange(width) >= width - len(row) for row in rows])
        inputs = ModelInputs(jnp.asarray(tokens), jnp.asarray(mask))
        options = settings(tokenizer, max_new_tokens=6, max_turns=None, max_turn_tokens=None)
        drawn = Sampler(policy)(params, frozen, inputs, np.arange(len(rows)), options, jax.random.key(0))
        for row, episode in enumerate(base):
            first = episode.ids[: episode.turns[0]["end"]]
            assert first == drawn.tokens[row, : drawn.lengths[row]].tolist()
            np.testing.assert_allclose(
                episode.logprobs[: len(first)], drawn.logprobs[row, : len(first)], atol=1e-5
            )

    def test_every_turn_is_there_with_its_actions_and_no_others(self, base):
        for episode in base:
            assert len(episode.turns) == TURNS and episode.done
            spans = [range(turn["start"], turn["end"]) for turn in episode.turns]
            assert np.flatnonzero(episode.actions).tolist() == [place for span in spans for place in span]
            assert not any(
                logprob for logprob, own in zip(episode.logprobs, episode.actions, strict=True) if not own
            )

    def test_greedy_rows_do_not_depend_on_the_key_either(self):
        found = played(do_sample=False, slots=2, count=4)
        assert [episode.ids for episode in found] == [
            episode.ids for episode in played(do_sample=False, count=4)
        ]


WIDTH = 288
"""Of rows that are scored, with padding behind them."""


@functools.cache
def scorer() -> Callable[[Any, Any], Any]:
    """Log-probabilities of the next tokens by one pass over whole rows: one program for all of them."""
    policy, params, frozen = model()

    @jax.jit
    def score(tokens: Any, mask: Any) -> Any:
        inputs = ModelInputs(tokens, mask)
        hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        logprobs = jax.nn.log_softmax(policy.logits(params, frozen, hidden)[:, :-1])
        return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)[..., 0]

    return score


def scored(episode: Episode) -> np.ndarray:
    """Log-probabilities of the actions by one pass over the whole row."""
    length, first = len(episode.known), len(episode.task.prompt) - 1
    tokens = np.pad(np.asarray([episode.known], np.int32), ((0, 0), (0, WIDTH - length)))
    taken = np.asarray(scorer()(tokens, np.arange(WIDTH)[None] < length))[0, first : length - 1]
    return np.where(episode.actions, taken, 0.0)


class Talks:
    """Says more or less than a stop sequence takes back, in turn."""

    def step(self, turn: int) -> tuple[str, float, bool]:
        return " ok ?"[: turn % 6] * (1 + turn % 3), 0.0, False


@pytest.mark.parametrize("stops", [(), ("e",), ("ab", "cd", "ef", "gh", "  ", "xy", "qa", "uv", "ij")])
@pytest.mark.parametrize("slots", [2, 5])
def test_the_cache_holds_what_the_row_does_whatever_was_taken_back(stops, slots):
    """Stops of several tokens are found when the loop has written on; what the world says follows the cut."""
    sizes = {"max_new_tokens": 260, "max_turns": 9, "max_turn_tokens": 60}
    found = played(Talks, stop_sequences=stops, count=6, slots=slots, **sizes)
    for episode in found:
        np.testing.assert_allclose(scored(episode), episode.logprobs, atol=1e-4)


def test_knobs_are_those_of_the_call():
    """One player, two temperatures: the second is not the first's."""
    policy, params, frozen = model()
    tokenizer = tiny_tokenizer()
    player = Player(policy, tokenizer, MESH)
    tasks = [Task(row, [5, 6, 7], functools.partial(World, Tool, "p", {}, row)) for row in range(4)]

    def ids(player: Player, temperature: float) -> list[list[int]]:
        options = settings(tokenizer, temperature=temperature)
        episodes = player.play(params, frozen, tasks, options, jax.random.key(0), num_slots=4)
        return [episode.ids for episode in episodes]

    hot, cold = ids(player, 1.0), ids(player, 0.05)
    assert hot != cold == ids(Player(policy, tokenizer, MESH), 0.05)


def test_prompts_of_one_bucket_share_the_programs():
    policy, params, frozen = model()
    tokenizer = tiny_tokenizer()
    player = Player(policy, tokenizer, MESH)
    for length in (3, 9, 14):
        tasks = [Task(row, [5] * length, functools.partial(World, Tool, "p", {}, row)) for row in range(4)]
        player.play(
            params,
            frozen,
            tasks,
            settings(tokenizer, max_turns=2),
            jax.random.key(0),
            num_slots=4,
            prompt_width=16,
        )
    (programs,) = player._programs.values()
    assert programs._write._cache_size() == 1 and programs._read_some._cache_size() <= 2
    assert programs._begin._cache_size() == 1 and programs._read_all._cache_size() <= 1


class TestLimits:
    def test_turns(self):
        for episode in played(max_turns=3, count=4):
            assert len(episode.turns) == 3 and not episode.done and episode.over

    def test_tokens_of_a_turn(self):
        for episode in played(max_turn_tokens=2, count=4):
            assert max(turn["end"] - turn["start"] for turn in episode.turns) <= 2

    def test_tokens_of_an_episode_end_it_behind_an_action(self):
        """Whether a turn or an observation meets the limit."""
        for most in (20, 23, 31):
            for episode in played(max_new_tokens=most, count=4, max_turns=None):
                assert len(episode.ids) <= most and episode.actions[-1] and not episode.done

    def test_a_stop_sequence_ends_a_turn_and_stays_an_action(self):
        """Of one token and of several, and before the limit of a call."""
        num_stopped = 0
        for stop in ("e", " ", "ab"):
            for episode in played(stop_sequences=(stop,), count=8, max_turn_tokens=60, max_turns=2):
                for turn in episode.turns:
                    assert stop not in turn["output"]
                    ids = episode.ids[turn["start"] : turn["end"]]
                    assert stop not in tiny_tokenizer().decode(ids[:-1])
                    num_stopped += stop in tiny_tokenizer().decode(ids)
        assert num_stopped > 10


def byte_level(**options: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **({"pad_token": "<pad>", "eos_token": "<eos>"} | options)
    )


def chat() -> PreTrainedTokenizerFast:
    found = byte_level(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    found.chat_template = CHATML
    return found


def sentencepiece() -> PreTrainedTokenizerFast:
    characters = sorted(set("".join(WORDS)))
    scores = [("<pad>", 0.0), ("<eos>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    scores += [(f"▁{word}", -2.0) for word in WORDS if len(word) > 1]
    backend = Tokenizer(models.Unigram([*scores, *((c, -4.0) for c in characters)], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def wordpiece() -> PreTrainedTokenizerFast:
    pieces = ["<pad>", "<eos>", "<unk>", *WORDS, *(f"##{c}" for c in sorted(set("".join(WORDS))))]
    backend = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, unk_token="<unk>")
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte level with a chat template": chat,
    "sentencepiece": sentencepiece,
    "wordpiece": wordpiece,
    "words": tiny_tokenizer,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_sampled_ids_are_trained_ids_over_eight_turns(kind):
    """And the policy reads what the environment said, encoded once; scoring and sampler agree on all of it."""
    tokenizer = TOKENIZERS[kind]()
    policy, params, frozen = model("gpt2", len(tokenizer))
    worlds: list[Tool] = []

    class Kept(Tool):
        role = "tool" if tokenizer.chat_template else None

        def reset(self, seed: int) -> str:
            worlds.append(self)
            return super().reset(seed)

    reply = functools.partial(reply_text, tokenizer)
    player = Player(policy, tokenizer, MESH, reply=reply)
    options = settings(tokenizer, max_new_tokens=400)
    prompts = PromptSet(
        ["calc the sum of 4 and 2 ?", "yes", "add 7"],
        tokenizer,
        max_length=64,
        seed=0,
        long_prompts="error",
    )
    score = scoring_program(
        policy,
        MESH,
        num_rows=3,
        num_generations=1,
        pad_token_id=tokenizer.pad_token_id,
        logprob_chunk_bytes=1 << 24,
        with_full_kl=False,
        with_scoring=True,
    )
    collect = SlotCollector(Sampler(policy), tokenizer, (), MESH, 3, player=player, environment=Kept)
    follow = lambda inputs, done: score(params, frozen, None, inputs, done, jnp.float32(1.0))  # noqa: E731
    parts = collect.parts(params, frozen, prompts, np.arange(3), options, jax.random.key(1), follow=follow)
    ((call, part),) = list(parts)
    rows, scored = call.followed()
    for row, world in enumerate(worlds):
        own = np.asarray(rows.mask[row])
        start = int(rows.starts[row]) + 1
        window = np.asarray(rows.inputs.tokens[row])[start : start + own.size]
        assert part.texts.turns is not None and len(part.texts.turns[row]) == TURNS
        assert window[own].tolist() == [token for ids in world.seen for token in ids]
        assert rows.inputs.tokens[row, :start].tolist() == call.batch.token_lists[row]
        spans = part.texts.turns[row]
        for before, after in itertools.pairwise(spans):
            said = window[before["end"] : after["start"]].tolist()
            text = before["observation"]
            if tokenizer.chat_template:
                text = f"<|im_end|>\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"
            (wanted,) = continuations(tokenizer, [text])
            ended = tokenizer.chat_template and window[before["end"] - 1] == tokenizer.eos_token_id
            assert said == (wanted[1:] if ended else wanted)
        found = np.asarray(scored.logprobs[row])[own]
        np.testing.assert_allclose(found, np.asarray(call.completions.logprobs[row])[own], atol=1e-4)
        assert (np.asarray(call.completions.logprobs[row])[~own] == 0).all()


class TestRewards:
    def test_each_turns_reward_sits_on_its_last_action(self):
        (episode,) = played(count=1)
        (found,) = environment([episode.turns], [None], [episode.ids])
        places = {turn["end"] - 1: turn["reward"] for turn in episode.turns}
        assert {place: reward for place, reward in enumerate(found) if reward} == {
            place: reward for place, reward in places.items() if reward
        }
        assert sum(found) == sum(range(TURNS))

    def test_a_failed_world_has_none(self):
        found = environment([[]], ["turn 2: it broke"], [[1, 2]])
        assert isinstance(found[0], EnvironmentFailure) and "it broke" in str(found[0])


def raises(row: int, turn: int) -> tuple[str, float, bool]:
    if (row, turn) == (7, 3):
        raise RuntimeError("the lamp went out")
    return " ok", 1.0, turn == 4


def huge(row: int, turn: int) -> tuple[str, float, bool]:
    return "x" * 10_000_000 if row == 7 else " ok", 1.0, turn == 4


class TestFailures:
    def test_a_world_that_raises_ends_its_row_and_no_other(self):
        found = played(raises, count=10)
        assert found[7].failure == "turn 3: `environment.step` raised RuntimeError: the lamp went out"
        assert [episode.failure is None for episode in found] == [row != 7 for row in range(10)]
        assert all(episode.done for row, episode in enumerate(found) if row != 7)

    def test_what_is_too_long_to_read_ends_the_episode_without_being_encoded(self):
        found = played(huge, count=10)
        assert [episode.done for episode in found] == [row != 7 for row in range(10)]
        assert found[7].over and len(found[7].turns) == 1 and found[7].failure is None
        assert len(found[7].turns[0]["observation"]) < 3000, "the log keeps the beginning"
        assert all(episode.world is None for episode in found)

    def test_a_first_observation_without_room_is_a_failure(self):
        class Talkative:
            def reset(self) -> str:
                return "x" * 500

            def step(self, text: str) -> tuple[str, float, bool]:
                raise AssertionError

        (episode,) = played(Talkative, count=1)
        assert episode.failure is not None and "leave no room" in episode.failure

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (None, "must return"),
            ((1, 1.0, True), "a text"),
            (("", "much", True), "finite number"),
            (("", float("nan"), True), "finite number"),
            (("", 1.0, "yes"), "True or False"),
        ],
    )
    def test_garbage_is_named(self, answer, said):
        (episode,) = played(lambda turn: answer, count=1)
        assert episode.failure is not None and said in episode.failure

    def test_a_world_that_cannot_begin(self):
        class Closed:
            def reset(self) -> str:
                raise OSError("closed")

            def step(self, text: str) -> tuple[str, float, bool]:
                raise AssertionError

        (episode,) = played(Closed, count=1)
        assert episode.failure == "`environment.reset` raised OSError: closed" and not episode.ids

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (Tool(), "Is it an object"),
            (3, "a class with `step`"),
            (type("Mute", (), {}), "must have `step`"),
            (lambda page: None, "takes `page`"),
            (type("Asks", (), {"step": lambda self, page: None}), "`environment.step` takes `page`"),
        ],
    )
    def test_no_environment(self, given, said):
        with pytest.raises(ValueError, match=said):
            check_environment(given, ["answer"])

    def test_keywords_of_metadata_are_known(self):
        check_environment(lambda text, answer: None, ["answer"])
        check_environment(lambda text, answer: None)

    def test_what_asks_for_another_keyword_is_no_failure_of_a_world(self):
        with pytest.raises(ValueError, match=r"`environment\.step` takes `page`"):
            played(lambda: type("Asks", (), {"step": lambda self, page: None})(), count=1)

    def test_no_turn_is_longer_than_it_may_be(self):
        with pytest.raises(
            ValueError, match=r"`gen_kwargs.min_new_tokens` must be at most `max_turn_tokens`, 6, .* got 7"
        ):
            settings(tiny_tokenizer(), min_new_tokens=7)
        assert settings(tiny_tokenizer(), min_new_tokens=6).min_new_tokens == 6

    def test_keys_of_metadata_that_are_taken(self):
        with pytest.raises(ValueError, match=r"\['turn'\]"):
            check_environment(Tool, ["turn", "answer"])
