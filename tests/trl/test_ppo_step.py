# SPDX-License-Identifier: Apache-2.0
"""`PPOTrainer.step` is `jrl.train`'s learner; what goes into it, what comes out, and what is refused."""

from __future__ import annotations

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.models.safetensors_io import TensorFiles
from jrl.trl.core import LengthSampler, set_seed
from jrl.trl.models import AutoModelForCausalLMWithValueHead
from jrl.trl.ppo import PPOConfig, PPOTrainer
from tests.tiny import tiny_tokenizer
from tests.trainers.runs import PROMPTS, count_vowels, save_tiny_checkpoint

# Responses of most tests are random, and not the model's own.
pytestmark = [
    pytest.mark.slow,
    # Made-up responses and a large rate: neither is what these tests are about.
    pytest.mark.filterwarnings("ignore:The mean KL per sequence", "ignore:large_update"),
]
ITERATIONS = 2
ROWS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def made(checkpoint):
    """A trainer that has compiled its programs, and its state before the first step.

    Eight samples a step, two epochs of two optimizer steps of two microbatches.
    """
    config = PPOConfig(
        batch_size=ROWS,
        mini_batch_size=2,
        gradient_accumulation_steps=2,
        ppo_epochs=2,
        learning_rate=0.1,
        use_score_scaling=True,
        use_score_norm=True,
        score_clip=1.5,
        target=1.0,
        seed=3,
        train_kwargs={"mesh": {"data": 1}},
    )
    model = AutoModelForCausalLMWithValueHead.from_pretrained(checkpoint)
    # A kernel that reads right-padded rows alone: the passes over whole rows must do without it, TRL pads as it likes.
    model.attn_implementation = "xla"
    # Gradient descent: Adam would turn the rounding of gradients that are 0 into whole steps.
    found = PPOTrainer(config, model, tokenizer=tiny_tokenizer(), optimizer="sgd")
    start = jax.tree.map(jnp.copy, found.state)
    found.step(*batch())
    found.generate([[5, 6]], max_new_tokens=2)
    return found, start


@pytest.fixture(scope="module")
def trainer(made):
    return made[0]


@pytest.fixture(scope="module")
def start(made):
    """The state before the first step."""
    return made[1]


@pytest.fixture(autouse=True)
def _from_the_start(trainer, start):
    trainer.native.state = jax.tree.map(jnp.copy, start)
    trainer.native.calls = trainer.native.draws.calls = 0


@pytest.fixture(scope="module")
def run(trainer, tmp_path_factory):
    """`jrl.train` on the configuration that the trainer made of TRL's."""
    folder = tmp_path_factory.mktemp("run")
    steps = trainer.native.steps_per_iteration * ITERATIONS
    train = {"checkpoint_dir": str(folder), "total_steps": steps, "epochs": 100, "seq_length": 32}
    config = trainer.native.config.evolve(
        train=train | {"resume_from_checkpoint": None},  # a test before may have loaded a state
        tokenizer={"tokenizer_path": trainer.native.config.model.model_path},
        method={"gen_kwargs": {"max_new_tokens": 8}, "chunk_size": 2},
    )
    return jrl.train(config=config, reward_fn=count_vowels, prompts=PROMPTS, eval_prompts=PROMPTS[:1])


def rollouts(run, trainer):
    """Queries, responses and scores of every iteration, as the run wrote them down."""
    found = []
    for path in sorted((run.run_dir / "rollouts").rglob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found += [line for line in lines if "output_tokens" in line]
    for begin in range(0, len(found), ROWS):
        rows = found[begin : begin + ROWS]
        queries = [trainer.tokenizer(row["prompt"])["input_ids"] for row in rows]
        yield queries, [row["output_tokens"] for row in rows], [row["reward"] for row in rows]


def batch(seed=0, longest=8, rows=ROWS):
    rng = np.random.default_rng(seed)
    queries = [rng.integers(2, 97, size) for size in rng.integers(2, 8, rows)]
    responses = [rng.integers(1, 97, size) for size in rng.integers(2, longest + 1, rows)]
    return queries, responses, [float(score) for score in rng.normal(size=rows)]


@pytest.fixture(scope="module")
def stepped(run, trainer, start):
    """State and statistics after `step` on every iteration's rollouts."""
    trainer.native.state, trainer.native.calls = jax.tree.map(jnp.copy, start), 0
    stats = [trainer.step(*rows) for rows in rollouts(run, trainer)]
    return jax.device_get(trainer.state), stats


def test_step_learns_what_train_learns(run, stepped):
    state, stats = stepped
    assert len(stats) == ITERATIONS
    # The same programs on arrays of the same shapes: to the last bit.
    jax.tree.map(np.testing.assert_array_equal, state.train.params, jax.device_get(run.params))
    jax.tree.map(np.testing.assert_array_equal, state.moments, jax.device_get(run.state.moments))
    assert state.kl_coef == run.state.kl_coef
    last = [record for record in run.history if "iteration" in record][-1]
    for name, native in (
        ("objective/kl", "kl/per_sequence"),
        ("ppo/loss/policy", "ppo/policy_loss"),
        ("ppo/loss/value", "ppo/value_loss"),
        ("ppo/policy/entropy", "ppo/entropy"),
    ):
        assert stats[-1][name] == pytest.approx(last[native], rel=1e-4, abs=1e-6)


def test_every_statistic_is_there(trainer):
    queries, responses, scores = batch()
    stats = trainer.step(queries, responses, scores)
    names = "objective/kl objective/kl_dist objective/logprobs objective/ref_logprobs objective/kl_coef"
    names += " objective/entropy ppo/mean_non_score_reward ppo/mean_scores ppo/std_scores ppo/learning_rate"
    names += " ppo/loss/policy ppo/loss/value ppo/loss/total ppo/policy/entropy ppo/policy/approxkl"
    names += " ppo/policy/policykl ppo/policy/clipfrac ppo/policy/advantages ppo/policy/advantages_mean"
    names += " ppo/policy/ratio ppo/returns/mean ppo/returns/var ppo/val/vpred ppo/val/error ppo/val/clipfrac"
    names += " ppo/val/mean ppo/val/var ppo/val/var_explained"
    names += "".join(
        f" tokens/{kind}_{what}"
        for kind in ("queries", "responses")
        for what in ("len_mean", "len_std", "dist")
    )
    laps = ["forward_pass", "compute_rewards", "compute_advantages", "optimize_step", "calc_stats", "total"]
    assert stats.keys() == set(names.split()) | {f"time/ppo/{lap}" for lap in laps}
    lengths = [len(row) for row in responses]
    width = max(len(q) + len(r) for q, r in zip(queries, responses, strict=True)) - 1
    assert stats["objective/logprobs"].shape == (ROWS, width)
    assert stats["ppo/policy/advantages"].shape == (sum(lengths),)
    assert stats["ppo/policy/ratio"].shape == (2 * sum(lengths),)
    assert stats["objective/kl"] == pytest.approx(0, abs=1e-5)  # the reference is the model itself
    np.testing.assert_array_equal(stats["tokens/responses_dist"], lengths)
    # Scores are normed by their own running moments, then clipped.
    given = np.asarray(scores)
    normed = np.clip((given - given.mean()) / given.std(ddof=1), -1.5, 1.5)
    assert stats["ppo/mean_scores"] == pytest.approx(normed.mean(), abs=1e-5)
    assert stats["ppo/std_scores"] == pytest.approx(normed.std(ddof=1), rel=1e-5)
    assert stats["ppo/learning_rate"] == 0.1


def test_rows_beyond_the_context_are_refused(trainer):
    long = [np.ones(trainer.native.lm.max_positions, np.int32)]
    inputs = trainer.prepare_model_inputs(long, [np.ones(2, np.int32)])
    with pytest.raises(ValueError, match="must have rows of at most"):
        trainer.batched_forward_pass(trainer.model, long, [np.ones(2, np.int32)], inputs)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_forward_pass_over_whole_rows_agrees_with_the_step(trainer, side):
    queries, responses, scores = batch()
    stats = trainer.step(queries, responses, scores)
    trainer.native.tokenizer.padding_side = side
    inputs = trainer.prepare_model_inputs(queries, responses)
    logprobs, logits, values, masks = trainer.batched_forward_pass(
        trainer.ref_model, queries, responses, inputs, return_logits=True
    )
    assert masks.sum(axis=1).tolist() == [len(row) for row in responses]
    assert logits.shape == (*masks.shape, 97)
    assert values.shape == masks.shape
    for row, mask in enumerate(masks != 0):
        stepped = stats["objective/ref_logprobs"][row][stats["objective/ref_logprobs"][row] != 0]
        np.testing.assert_allclose(logprobs[row][mask], stepped, atol=1e-4)
    trainer.native.tokenizer.padding_side = "right"


def test_masks_of_ragged_rows(trainer):
    queries, responses = [[5] * 3, [5] * 5], [[6] * 2, [6] * 4]
    expected = {
        "right": [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]],
        "left": [[0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]],
    }
    for side, masks in expected.items():
        trainer.native.tokenizer.padding_side = side
        inputs = trainer.prepare_model_inputs(queries, responses)
        assert trainer.batched_forward_pass(None, queries, responses, inputs)[3].tolist() == masks
        holed = trainer.batched_forward_pass(
            None, queries, responses, inputs, response_masks=[[1, 0], [1, 0, 1, 1]]
        )[3]
        assert holed.sum(axis=1).tolist() == [1, 3]
        if side == "right":
            assert holed.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1, 1]]
    trainer.native.tokenizer.padding_side = "right"


def parameters_after(trainer, start, *arguments, **options):
    trainer.native.state = jax.tree.map(jnp.copy, start)
    trainer.native.calls = 0
    trainer.step(*arguments, **options)
    return jax.device_get(trainer.native.params)


def same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


def differ(first, second):
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def test_dense_scores_and_masks_of_ones_change_nothing(trainer, start):
    queries, responses, scores = batch()
    expected = parameters_after(trainer, start, queries, responses, scores)
    dense = [np.where(np.arange(len(r)) == len(r) - 1, s, 0) for r, s in zip(responses, scores, strict=True)]
    ones = [np.ones(len(row), int) for row in responses]
    same(parameters_after(trainer, start, queries, responses, dense, response_masks=ones), expected)
    earlier = [np.roll(row, -1) for row in dense]
    differ(parameters_after(trainer, start, queries, responses, earlier), expected)


def test_tokens_outside_the_response_mask_are_not_learned(trainer, start):
    queries, responses, scores = batch()
    masks = [np.ones(len(row), int) for row in responses]
    for mask in masks:
        mask[-1] = 0
    found = parameters_after(trainer, start, queries, responses, scores, response_masks=masks)
    # A last token that counts nowhere may as well not be there, and the score stands before it.
    shorter = [row[:-1] for row in responses]
    expected = parameters_after(trainer, start, queries, shorter, scores)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)


def test_lengths_of_one_bucket_share_one_program(trainer):
    trainer.step(*batch(0))
    programs = trainer.native.update._cache_size()
    for seed in range(1, 4):
        trainer.step(*batch(seed))
    assert trainer.native.update._cache_size() == programs
    assert trainer.current_step == 4
    assert len(trainer.history) >= 4


def test_a_state_goes_on_where_it_was_saved(trainer, tmp_path):
    trainer.step(*batch(0))
    trainer.generate([np.array([5, 6])], max_new_tokens=2)
    path = trainer.save_state(tmp_path)
    watched = trainer.native.host_state()["watch"]
    coefficient = trainer.kl_ctl.value
    first = trainer.step(*batch(1))
    expected, samples = (
        jax.device_get(trainer.state),
        trainer.generate([np.array([5, 6])], max_new_tokens=4, do_sample=True),
    )
    trainer.step(*batch(2))
    trainer.load_state(path)
    assert trainer.current_step == 1
    assert trainer.kl_ctl.value == coefficient
    assert trainer.native.host_state()["watch"] == watched
    again = trainer.step(*batch(1))
    same(jax.device_get(trainer.state), expected)
    assert again["objective/kl"] == first["objective/kl"]
    np.testing.assert_array_equal(
        trainer.generate([np.array([5, 6])], max_new_tokens=4, do_sample=True)[0], samples[0]
    )


class TestGenerate:
    def test_rows_come_back_in_order_without_padding(self, trainer):
        queries = [np.array([5, 6, 7]), np.array([8]), np.array([9, 10]), np.array([11, 12]), np.array([13])]
        found = trainer.generate(queries, batch_size=2, max_new_tokens=6, min_length=-1, top_k=0.0, top_p=1.0)
        alone = [trainer.generate(query, max_new_tokens=6)[0] for query in queries]
        for query, row, single in zip(queries, found, alone, strict=True):
            np.testing.assert_array_equal(row[: len(query)], query)
            np.testing.assert_array_equal(row, single)
            assert len(row) <= len(query) + 6
        written = trainer.generate(queries, batch_size=2, max_new_tokens=6, return_prompt=False)
        for query, row, new in zip(queries, found, written, strict=True):
            np.testing.assert_array_equal(row[len(query) :], new)

    def test_one_query_gives_one_row(self, trainer):
        found = trainer.generate(np.array([5, 6]), max_new_tokens=3, do_sample=True)
        assert found.shape[0] == 1
        assert found.shape[1] <= 5
        ours, its = trainer.generate([[5, 6]], generate_ref_response=True, max_new_tokens=3)
        np.testing.assert_array_equal(ours[0], its[0])

    def test_a_length_sampler_is_asked_once_a_call(self, trainer):
        set_seed(0)
        lengths = []

        def sampler():
            lengths.append(LengthSampler(2, 6)())
            return lengths[-1]

        queries = [np.array([5, 6])] * 4
        rows = trainer.generate(
            queries,
            sampler,
            batch_size=2,
            return_prompt=False,
            do_sample=True,
            eos_token_id=-1,
            max_new_tokens=99,
        )
        assert [len(row) for row in rows] == [lengths[0]] * 2 + [lengths[1]] * 2

    def test_draws_differ_from_call_to_call_and_repeat_with_the_seed(self, trainer):
        first, second = (trainer.generate([[5, 6]] * 4, max_new_tokens=8, do_sample=True) for _ in range(2))
        assert any(a.tolist() != b.tolist() for a, b in zip(first, second, strict=True))
        trainer.native.draws.calls = 0
        again = trainer.generate([[5, 6]] * 4, max_new_tokens=8, do_sample=True)
        assert [row.tolist() for row in again] == [row.tolist() for row in first]

    @pytest.mark.parametrize(
        ("query", "options", "message"),
        [
            (np.ones((2, 2), int), {}, "1-D array"),
            ([np.array([], int)], {}, "has no tokens"),
            ([[5]], {"num_beams": 4}, "`num_beams` must be 1"),
            ([[5]], {"max_new_tokens": 500}, "128 positions"),
            ([[5]], {"max_new_tokenz": 5}, "Did you mean `max_new_tokens`"),
        ],
    )
    def test_what_cannot_be_sampled_is_refused(self, trainer, query, options, message):
        with pytest.raises(ValueError, match=message):
            trainer.generate(query, **({"max_new_tokens": 2} | options))


def _without(rows, place, value):
    return [value if index == place else row for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, r, s: (q[:-1], r, s), "`queries` must have 8 rows"),
        (lambda q, r, s: (q, r, s[:-1]), "`scores` must have 8 rows"),
        (lambda q, r, s: (q, np.stack([np.ones(3, int)] * 8), s), "`responses` must be a list"),
        (
            lambda q, r, s: (q, _without(r, 3, np.ones((1, 3), int)), s),
            r"`responses\[3\]` must be a 1-D array",
        ),
        (lambda q, r, s: (q, _without(r, 2, []), s), r"`responses\[2\]` must hold a token"),
        (lambda q, r, s: (_without(q, 1, []), r, s), r"`queries\[1\]` must hold a token"),
        (lambda q, r, s: (q, r, _without(s, 4, [1.0] * 99)), r"`scores\[4\]` must be one number"),
        (lambda q, r, s: (q, r, _without(s, 4, [[1.0]])), r"`scores\[4\]` must be one number"),
        (lambda q, r, s: (q, r, _without(s, 5, float("nan"))), r"`scores\[5\]` must be finite"),
        (lambda q, r, s: (q, r, s, [[1]] * 8), r"`response_masks\[0\]` must have one entry"),
        (lambda q, r, s: (q, r, s, [[0] * len(x) for x in r]), r"`responses\[0\]` must hold a token that"),
        (lambda q, r, s: (_without(q, 0, [5] * 200), r, s), "row 0 has"),
    ],
)
def test_what_cannot_be_learned_is_refused(trainer, change, message):
    with pytest.raises(ValueError, match=message):
        trainer.step(*change(*batch()))
    assert trainer.current_step == 0


def test_the_folder_is_a_checkpoint_with_trls_value_head(trainer, tmp_path):
    trainer.step(*batch())
    trainer.model.save_pretrained(tmp_path / "model")
    assert {"v_head.summary.weight", "v_head.summary.bias"} <= set(TensorFiles(tmp_path / "model"))
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "model"))
    expected = trainer.generate([[5, 6, 7]], max_new_tokens=5)[0]
    np.testing.assert_array_equal(again.generate([[5, 6, 7]], max_new_tokens=5)[0][: len(expected)], expected)
    trainer.create_model_card(tmp_path / "card", "A cat")
    assert "# A cat" in (tmp_path / "card" / "README.md").read_text()


def test_the_kl_coefficient_can_be_read_and_set(trainer):
    assert trainer.kl_ctl.value == pytest.approx(0.2)
    trainer.kl_ctl.value = 0.5
    stats = trainer.step(*batch())
    assert stats["objective/kl_coef"] == 0.5


def test_rows_can_be_checked_without_a_step(trainer):
    rows = [[5, 6]] * 2, [[7]] * 2, [1.0, 2.0]
    assert trainer._step_safety_checker(2, *rows) == (*rows, None)
    with pytest.raises(ValueError, match="`queries` must"):
        trainer._step_safety_checker(3, *rows)


def test_the_penalty_of_tokens_can_be_looked_at(trainer):
    np.testing.assert_allclose(trainer._kl_penalty([[0.5, 0.2]], [[0.4, 0.3]]), [[0.1, -0.1]], rtol=1e-6)


def test_statistics_are_logged_only_with_their_columns(trainer):
    stats = {"ppo/loss/total": 1.0}
    trainer.log_stats(stats, {"query": ["a"], "response": ["b"]}, [1.0])
    with pytest.raises(ValueError, match="no column 'ref'"):
        trainer.log_stats(stats, {"query": ["a"], "response": ["b"]}, [1.0], columns_to_log=["query", "ref"])
    with pytest.warns(UserWarning, match="neither `query` nor `response`"):
        trainer.log_stats(stats, {"text": ["a"]}, [1.0])
    assert trainer.gather_stats(stats) == stats


def test_a_minibatch_needs_its_inputs(trainer):
    zeros = np.zeros((2, 3))
    with pytest.raises(ValueError, match="`model_inputs` must be given"):
        trainer.train_minibatch(zeros, zeros, zeros, None, zeros, zeros, zeros, zeros)


def test_the_configuration_of_the_caller_is_left_alone(trainer):
    config = PPOConfig(batch_size=4, mini_batch_size=2)
    assert config.is_peft_model is None
    assert copy.deepcopy(config) == config
    assert trainer.config.is_peft_model is False
    assert trainer.config.global_batch_size == ROWS


def test_the_best_mean_score_is_pushed(trainer, monkeypatch):
    pushed = []
    monkeypatch.setattr(trainer, "push_to_hub", lambda repo_id, **options: pushed.append((repo_id, options)))
    monkeypatch.setattr(trainer.config, "push_to_hub_if_best_kwargs", {"repo_id": "a/b", "private": True})
    queries, responses, _ = batch()
    trainer.native.best_score = None
    # Scores are normed by all of the past, so that higher ones than before have a higher mean.
    for level, count in ((0.0, 1), (10.0, 2), (-10.0, 2)):
        trainer.step(queries, responses, [level + (row % 2) for row in range(ROWS)])
        assert len(pushed) == count
    assert pushed[0] == ("a/b", {"private": True})
