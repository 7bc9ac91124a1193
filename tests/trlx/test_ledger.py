# SPDX-License-Identifier: Apache-2.0
"""Where trlX's behaviour surprises, jrl's is the sound one: a test for each row D1 to D25 of the comparison in
`docs/migrating/from_trlx.md`. What a row needs at length has tests beside the code; here it is shown small.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig

import jrl
import jrl.api
from jrl.api import prepare
from jrl.data.demonstrations.completions import CompletionSet
from jrl.data.demonstrations.dialogue import DialogueSet
from jrl.data.offline import RewardedSet
from jrl.data.prompts import PromptSet
from jrl.data.selection import rising_percentiles, score_thresholds
from jrl.learners.accumulate import accumulate, layout_rows
from jrl.learners.credit import kl_per_sequence, rollout_metrics
from jrl.learners.ilql import ILQLConfig, ILQLState, init_ilql_state
from jrl.learners.online import after_rollouts
from jrl.learners.ppo import PPOConfig, ppo_recipe
from jrl.losses.policy_gradient import Targets
from jrl.models.policy import init_reference
from jrl.ops.alignment import join
from jrl.ops.masking import whiten
from jrl.ops.metrics import finalize
from jrl.ops.rewards import penalize_kl, place_scores
from jrl.ops.sampling import forbid_transitions
from jrl.rollout import collect
from jrl.rollout.gathering import Part
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.text import Texts, decode_rows
from jrl.trainers.checkpoints.state_io import fetch_state, finish_write, read_state, start_write
from jrl.trainers.config.gen_kwargs import parse_gen_kwargs
from jrl.trainers.rollouts.evaluation import Evaluator
from jrl.typing import Completions, ModelInputs, Rollouts, Scored, Sequences
from tests.learners.batches import adam, sgd
from tests.learners.ppo_parts import first_moments, ppo_state, scaled
from tests.learners.test_ilql import BATCH as ILQL_BATCH
from tests.learners.test_ilql import FROZEN, compiled, parameters
from tests.tiny import EOS_ID, PAD_ID, tiny_policy, tiny_t5_tokenizer, tiny_tokenizer
from tests.trainers.runs import REWARDED, ilql_config, save_tiny_checkpoint, sft_config

# Two rollouts of three and one actions; what stands in masked places must never count.
MASK = jnp.array([[True, True, True], [True, False, False]])
WILD = jnp.array([[0.0, 0.0, 0.0], [0.0, 1e6, -1e6]])
SPECIAL = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}


def row(*numbers: float) -> jax.Array:
    """One array of two rows: the actions' numbers, and wild ones where there is none."""
    return jnp.array([numbers[:3], (numbers[3], 0.0, 0.0)]) + WILD


def batch(logprobs: jax.Array, ref_logprobs: jax.Array) -> Rollouts:
    inputs = ModelInputs(jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4), bool))
    sequences = Sequences(inputs, jnp.zeros(2, jnp.int32), MASK)
    return Rollouts(sequences, Scored(logprobs, ref_logprobs, WILD), WILD)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """An SFT and an ILQL trainer, with data."""
    folder = tmp_path_factory.mktemp("ledger")
    checkpoint = save_tiny_checkpoint(folder / "model")
    samples, rewards = zip(*REWARDED, strict=True)
    sft = prepare(samples=samples, eval_prompts=["the"], config=sft_config(checkpoint, folder / "sft"))
    config = ilql_config(checkpoint, folder / "ilql")
    return sft, prepare(samples=samples, rewards=rewards, eval_prompts=["the"], config=config)


def test_every_row_has_a_test_and_stands_in_the_docs():
    rows = {f"D{number}" for number in range(1, 26)}
    assert {f"D{int(name[6:8])}" for name in globals() if name.startswith("test_d")} == rows
    docs = Path(__file__).parents[2] / "docs" / "migrating" / "from_trlx.md"
    cited = re.findall(r"\(((?:D\d+(?:, )?)+)\)", docs.read_text(encoding="utf-8"))
    assert {name for group in cited for name in group.split(", ")} == rows


def test_d01_whitening_counts_actions_only():
    """Of 1, 2, 3, 6: mean 3, variance with ddof 1 14/3."""
    found = whiten(row(1.0, 2.0, 3.0, 6.0), MASK)
    np.testing.assert_allclose(found[MASK], (np.array([1, 2, 3, 6]) - 3) / math.sqrt(14 / 3), rtol=1e-6)


def test_d02_the_score_lands_on_the_last_action():
    assert place_scores(jnp.array([5.0, 7.0]), MASK).tolist() == [[0.0, 0.0, 5.0], [7.0, 0.0, 0.0]]


def test_d03_the_penalty_has_the_mask_of_its_own_token():
    """The first action pays for its KL and the last one too; what follows it pays nothing."""
    logprobs, reference = row(-1.0, -2.0, -3.0, -1.0), row(-1.5, -2.0, -4.0, -3.0)
    found = penalize_kl(jnp.zeros((2, 3)), logprobs, reference, MASK, kl_coef=2.0)
    np.testing.assert_allclose(found, [[-1.0, 0.0, -2.0], [-4.0, 0.0, 0.0]], atol=1e-6)


def test_d04_the_controller_gets_k1_over_actions():
    """(0.5 + 0 + 1) and 2: mean 1.75 of log π − log π_ref; the prompt is no part of the window."""
    logprobs, reference = row(-1.0, -2.0, -3.0, -1.0), row(-1.5, -2.0, -4.0, -3.0)
    found = kl_per_sequence(batch(logprobs, reference))
    assert float(found.total / found.weight) == pytest.approx(1.75)


def test_d05_scores_are_divided_and_never_centred():
    scores = jnp.array([[0.0, 0.0, 101.0], [103.0, 0.0, 0.0]])
    found, _ = scaled(scores, MASK, first_moments(None), clip_range=None, mode="running")
    np.testing.assert_allclose(found[MASK][2:], np.array([101, 103]) / math.sqrt(2), rtol=1e-5)


def test_d06_an_eos_that_is_also_the_pad_is_an_action():
    tokens = jnp.array([[5, EOS_ID, EOS_ID], [6, 7, 8]], jnp.int32)
    lengths = jnp.array([2, 3], jnp.int32)
    prompts = ModelInputs(jnp.full((2, 2), EOS_ID, jnp.int32), jnp.array([[False, True], [True, True]]))
    completions = Completions(tokens, lengths, jnp.array([True, False]), jnp.zeros((2, 3)))
    found = join(prompts, completions, pad_token_id=EOS_ID)
    assert found.mask.tolist() == [[True, True, False], [True, True, True]]
    assert found.inputs.attention_mask.sum(axis=1).tolist() == [1 + 2, 2 + 3]


def test_d07_the_sampled_ids_are_trained():
    tokenizer = tiny_tokenizer()
    sampled = tokenizer.convert_tokens_to_ids(["t", "h"])
    assert tokenizer("th").input_ids != sampled
    texts = decode_rows(tokenizer, [[5]], np.array([sampled]), np.array([2]), eos_token_ids=[EOS_ID])
    assert texts.outputs == ["th"] and texts.output_tokens == [sampled]


def test_d08_outputs_read_the_same_in_rollouts_and_evaluation():
    assert collect.decode_rows is decode_rows and Evaluator.__annotations__["collect"] == "Collector"
    tokens = np.array([[5, 6, EOS_ID], [5, 6, 7]])
    texts = decode_rows(tiny_tokenizer(), [[5], [5]], tokens, np.array([3, 3]), eos_token_ids=[EOS_ID])
    assert "<eos>" not in "".join(texts.outputs + texts.samples)
    assert [len(tokens) for tokens in texts.output_tokens] == [3, 3]


def test_d09_microbatches_change_nothing():
    """Squared errors of three actions and of one, over four actions, however the rows are cut."""
    data = jnp.array([[1.0, 2.0, 4.0], [8.0, 0.0, 0.0]])

    def objective(params, rows):
        mask = MASK[rows.ids] & rows.valid[:, None]
        return (
            jnp.sum(jnp.where(mask, (params - data[rows.ids]) ** 2, 0.0)),
            mask.sum().astype(jnp.float32),
            {},
        )

    def gradient(minibatch_size):
        layout = layout_rows(jnp.arange(2, dtype=jnp.int32), batch_size=2, minibatch_size=minibatch_size)
        return float(accumulate(objective, jnp.float32(0), jax.tree.map(lambda x: x[0], layout)).grads)

    assert gradient(1) == pytest.approx(gradient(2)) == pytest.approx(-2 * 15 / 4)


def test_d10_targets_sync_by_steps_and_the_controller_moves_once_an_iteration():
    update = compiled()  # every third step
    state: ILQLState = init_ilql_state(parameters(seed=0), sgd(0.1))
    synced = []
    for _ in range(6):
        state, metrics = update(state, FROZEN, ILQL_BATCH, jax.random.key(0))
        synced.append(float(finalize(metrics)["ilql/target_sync"]))
    assert synced == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    # 32 rollouts at twice the target, the error cut to 0.2, and four passes over them: once all the same.
    config = PPOConfig(target=6.0, horizon=10000, ppo_epochs=4)
    recipe, one = ppo_recipe(config), jnp.zeros((32, 1))
    sequences = Sequences(ModelInputs(one.astype(jnp.int32), one == 0), jnp.zeros(32, jnp.int32), one == 0)
    rollouts = Rollouts(sequences, Scored(one, one - 12.0), one)
    found, _ = after_rollouts(jnp.float32(0.1), recipe.scaling.init(), rollouts, recipe)
    assert float(found) == pytest.approx(0.1 * (1 + 0.2 * 32 / 10000))


@pytest.mark.parametrize("num_layers_unfrozen", [-1, 0, 1])
def test_d11_the_reference_is_what_trains_before_it_trained(num_layers_unfrozen):
    """And a copy: the state gives its buffers away."""
    _, params, frozen, reference = tiny_policy("gpt2", num_layers_unfrozen, num_layers=2)
    blocks = {name for name in reference if name.startswith("layers_")}
    assert blocks == {-1: {"layers_0", "layers_1"}, 0: set(), 1: {"layers_1"}}[num_layers_unfrozen]
    assert not blocks & {name for name in frozen if name.startswith("layers_")}
    own = {id(leaf) for leaf in jax.tree.leaves(init_reference(params))}
    assert not own & {id(leaf) for leaf in jax.tree.leaves(params)}


def test_d11_exports_are_plain_checkpoints(offline, tmp_path):
    sft, _ = offline
    folder = sft.save_pretrained(tmp_path / "model")
    assert AutoConfig.from_pretrained(folder).model_type == "gpt2"
    names = set(load_file(folder / "model.safetensors"))
    assert "transformer.h.0.attn.c_attn.weight" in names
    assert not [name for name in names if name.startswith(("base_model.", "frozen_head."))]


def test_d12_unknown_names_fail_and_the_base_stays():
    config = jrl.default_ppo_config()
    before = copy.deepcopy(config)
    for change in ({"train.foo": 1}, {"lrr": 1}, {"bogus.x": 1}):
        with pytest.raises(ValueError, match="Unknown"):
            jrl.TRLConfig.update(config, change)
    with pytest.raises(ValueError, match="Unknown section"):
        config.evolve(bogus={})
    changed = jrl.TRLConfig.update(config, {"optimizer.kwargs.eps": 0.5, "train": {"seed": 3}})
    assert (changed.optimizer.kwargs["eps"], changed.train.seed) == (0.5, 3)
    assert config == before


def test_d13_prompts_of_the_caller_stay():
    prompts = [{"prompt": "the cat", "label": 1}, {"prompt": "a dog", "label": 2}]
    before = copy.deepcopy(prompts)
    options = dict(max_length=8, seed=0, long_prompts="truncate")
    for _ in range(2):  # for rollouts, and again for evaluation
        found = PromptSet(prompts, tiny_tokenizer(), **options)
        assert found.metadata(np.arange(2)) == {"label": [1, 2]}
    assert prompts == before


@pytest.mark.parametrize("which", [0, 1], ids=["sft", "ilql"])
def test_d14_offline_trainers_generate(offline, which):
    assert len(offline[which].generate(["the", "a"])) == 2


def test_d15_samples_are_shuffled_and_a_text_ends_with_eos():
    tokenizer = tiny_tokenizer()
    found = DialogueSet(["ab", "cd", "ef", "gh"], tokenizer, max_length=8, seed=0)
    text = found.rows[0]
    assert text.tokens == [*tokenizer("ab").input_ids, EOS_ID] and text.learned == [True] * 3
    passes = [np.asarray(found.batch(step, 4).inputs.tokens)[:, 0].tolist() for step in range(3)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert len({tuple(order) for order in passes}) > 1


def test_d16_rft_learns_completions_and_reaches_its_last_percentile():
    assert rising_percentiles(0.5, 0.9, 3).tolist() == pytest.approx([0.5, 0.7, 0.9])
    scores = np.array([0.0, 1.0, 2.0, 3.0])
    thresholds = score_thresholds(scores, np.zeros(4, int), rising_percentiles(0.5, 0.9, 2), num_groups=1)
    assert [int((scores >= threshold).sum()) for threshold in thresholds[:, 0]] == [2, 1]
    options = dict(pad_token_id=PAD_ID, max_length=8, seed=0, decoder_start_token_id=None)
    found = CompletionSet([[5, 6], [7]], [[8, EOS_ID], [9, 10, EOS_ID]], **options).batch(0, 2)
    targets = np.where(found.mask, np.asarray(found.inputs.tokens)[:, 1:], -1)
    assert sorted(targets[targets >= 0].tolist()) == sorted([8, EOS_ID, 9, 10, EOS_ID])


def test_d17_the_first_output_token_of_a_seq2seq_sample_is_an_action():
    tokenizer = tiny_t5_tokenizer()
    options = dict(max_length=16, seed=0, decoder_start_token_id=PAD_ID)
    found = RewardedSet([["a", "bc"], ["d", "e"]], [1.0, 2.0], tokenizer, **options)
    assert found.rows[0].tokens == [PAD_ID, *tokenizer("bc").input_ids]
    assert found.batch(0, 2).columns[:, 0].tolist() == [0, 0]
    # Turns are not dropped in silence: what follows a pair is refused.
    with pytest.raises(ValueError, match="sample 0"):
        RewardedSet([["a", "b", "c", "d"]], [1.0], tokenizer, **options)


@pytest.mark.parametrize("clip_range", [None, False, 0])
def test_d18_dense_rewards_without_clipping(clip_range):
    """Padding of dense rewards, whatever it holds, is not counted."""
    dense = jnp.array([[1.0, 2.0, 3.0], [4.0, -jnp.inf, jnp.nan]])
    found, moments = scaled(dense, MASK, first_moments(None), clip_range=clip_range, mode="running")
    assert float(moments.running.mean) == 5.0  # of 6 and 4
    np.testing.assert_allclose(found[MASK], np.array([1, 2, 3, 4]) / math.sqrt(2), rtol=1e-6)


def test_d19_a_checkpoint_holds_all_that_the_next_iteration_reads(tmp_path):
    """Step, parameters, optimizer, KL coefficient and moments; what is drawn follows from the step alone."""
    fresh = ppo_state({"kernel": jnp.ones(3)}, adam(), PPOConfig(init_kl_coef=0.1))
    moved = jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype != bool else leaf, fresh)
    (tmp_path / "state").mkdir()
    start_write(tmp_path / "state", fetch_state(moved))()
    finish_write(tmp_path / "state")
    found = read_state(tmp_path / "state", fresh)
    jax.tree.map(np.testing.assert_array_equal, found, moved)
    assert float(found.kl_coef) == pytest.approx(1.1) and int(found.train.step) == 1
    prompts = PromptSet(list("abcdef"), tiny_tokenizer(), max_length=4, seed=3, long_prompts="error")
    whole = prompts.order(np.arange(12)).tolist()
    assert whole[6:] == prompts.order(np.arange(6, 12)).tolist()


def test_d20_a_sweep_is_of_evaluations_and_counts_for_the_best(tmp_path):
    settings, sweep = parse_gen_kwargs({"max_new_tokens": 4, "temperature": [0.5, 1.0]}, **SPECIAL)
    assert (settings.temperature, sweep) == (0.5, ("temperature", (0.5, 1.0)))  # rollouts take the first
    with pytest.raises(ValueError, match="one entry may be a list"):
        parse_gen_kwargs({"max_new_tokens": [4, 8], "temperature": [0.5, 1.0]}, **SPECIAL)

    class Complete:
        def parts(self, params, frozen, prompts, indices, settings, key, *, clock):
            output = f"{settings.temperature}"
            texts = Texts(["ab"], ["a"], [output], [[5]], np.array([1]), np.array([False]))
            yield None, Part(indices, texts)

    prompts = PromptSet(["a"], tiny_tokenizer(), max_length=4, seed=0, long_prompts="error")
    tokenizer = tiny_tokenizer()
    rewards = RewardCall(
        lambda outputs: list(map(float, outputs)),
        tokenizer,
        skip_errors=False,
        timeout=None,
        failures=tmp_path,
    )
    evaluate = Evaluator(
        Complete(), prompts, tokenizer, settings, sweep, rewards, None, 0, False, tmp_path, None
    )
    found = evaluate({}, {}, jax.random.key(0))
    assert found.metrics["reward/mean@temperature=0.5"] == 0.5
    assert found.metrics["reward/mean@temperature=1.0"] == 1.0
    assert found.score == 0.5


def test_d21_seq2seq_samples_have_a_separator():
    options = dict(max_length=8, seed=0, long_prompts="error")
    separator = PromptSet(["a"], tiny_t5_tokenizer(), decoder_start_token_id=PAD_ID, **options).separator
    assert separator == "<sep>"
    assert PromptSet(["a"], tiny_tokenizer(), **options).separator is None
    ids = [tiny_tokenizer()(letter).input_ids for letter in "ab"]
    texts = decode_rows(
        tiny_t5_tokenizer(),
        ids[:1],
        np.array(ids[1:]),
        np.array([1]),
        eos_token_ids=[EOS_ID],
        separator=separator,
    )
    assert texts.samples == ["a<sep>b"]


def test_d22_true_in_a_logit_mask_forbids():
    edges = jnp.array([[False, True, False], [False, False, True], [True, False, False]])
    found = forbid_transitions(jnp.zeros((2, 3)), jnp.array([0, 1]), ~edges)
    assert jnp.isfinite(found).tolist() == [[False, True, False], [False, False, True]]


def test_d23_nothing_is_filtered_unless_asked():
    plain, _ = parse_gen_kwargs({"max_new_tokens": 4}, **SPECIAL)
    assert (plain.top_k, plain.top_p, plain.temperature, plain.filtered) == (0, 1.0, 1.0, False)
    filtered, _ = parse_gen_kwargs({"max_new_tokens": 4, "top_k": 50}, **SPECIAL)
    assert filtered.filtered  # of which a PPO run warns


def test_d24_the_default_configuration_follows_the_data_set(monkeypatch):
    chosen = []
    monkeypatch.setattr(
        jrl.api,
        "make_trainer",
        lambda config, **rest: chosen.append(config) or SimpleNamespace(add_data=lambda **data: None),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(dataset=(["a", "b"], [0.0, 1.0]))
    assert isinstance(chosen[0].method, ILQLConfig)


def test_d25_averages_are_over_actions():
    logprobs, reference = row(-1.0, -2.0, -3.0, -1.0), row(-1.5, -2.0, -4.0, -3.0)
    targets = Targets(logprobs, WILD, WILD, WILD, MASK)
    found = finalize(rollout_metrics(batch(logprobs, reference), targets, kl_penalty="kl", prefix="ppo"))
    assert found["kl/per_token"] == pytest.approx(3.5 / 4)
    assert found["completion/length_mean"] == 2.0
