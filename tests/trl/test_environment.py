# SPDX-License-Identifier: Apache-2.0
"""Text environments, best-of-n, and a handle as scripts of torch see it."""

from __future__ import annotations

import tempfile
import warnings

import numpy as np
import pytest

from jrl.interop.accelerator import Accelerator
from jrl.trl import (
    AutoModelForCausalLM,
    AutoModelForCausalLMWithValueHead,
    BestOfNSampler,
    TextEnvironment,
    TextHistory,
)
from tests.tiny import tiny_tokenizer

CALL = "<request><echo>hi<call>"


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForCausalLMWithValueHead.from_pretrained(str(checkpoint), v_head_init_strategy="normal")


def environment(model, **options):
    tools = {"echo": lambda text: text * 60, "broken": lambda _: 1 / 0}
    return TextEnvironment(
        model,
        tiny_tokenizer(),
        tools,
        lambda texts, bonus=0: [len(text) + bonus for text in texts],
        "go ",
        **options,
    )


def test_a_history_knows_who_wrote_what():
    history = TextHistory("ab", [2, 3])
    history.append_segment("cd", [4, 5], system=False)
    history.append_segment("e", [6])
    assert history.text == "abcde" and history.last_text_segment == "e"
    query, response, mask = (np.asarray(part).tolist() for part in history.split_query_response_tokens())
    assert (query, response, mask) == ([2, 3], [4, 5, 6], [1, 1, 0])
    with pytest.raises(ValueError, match="must not be empty"):
        history.append_segment("", [1])
    history.complete(truncated=True)
    assert history.completed and history.truncated


@pytest.mark.parametrize(("segment", "answer"), [
    (CALL, "h" + "ih" * 48 + "..."), ("<request><broken>1<call>", "Tool error: division by zero"),
    ("<request><none>1<call>", "Unknown tool none."), ("<request>echo<call>", "Unknown tool call: <request>echo<call>"),
])  # fmt: skip
def test_a_call_is_answered_or_told_what_is_wrong(model, segment, answer):
    history = TextHistory("go ", [5])
    history.append_segment(segment, [6], system=False)
    assert environment(model).step(history).last_text_segment == answer + "<response>"


def test_conversations_end_at_submissions_and_plain_text(model, monkeypatch):
    turns = iter([[CALL, "nothing"], ["done <submit>"]])

    def written(self, histories):
        for history, text in zip([one for one in histories if not one.completed], next(turns), strict=True):
            history.append_segment(text, self.tokenizer(text)["input_ids"], system=False)
        return histories

    monkeypatch.setattr(TextEnvironment, "generate", written)
    queries, responses, masks, rewards, histories = environment(model).run(["x", "y"], bonus=1)
    assert [history.last_text_segment for history in histories] == ["done <submit>", "nothing"]
    assert rewards == [14, 8] and len(queries) == 2
    assert int(np.asarray(masks[1]).sum()) == len(responses[1]) == len("nothing") - 1  # "th" is one id


def test_a_conversation_beyond_its_length_ends_truncated(model):
    history = TextHistory("go ", [5, 6])
    history.append_segment(CALL, [6, 7], system=False)
    assert environment(model, max_length=4).task_end_check(history) == (False, False)
    assert environment(model, max_length=3).task_end_check(history) == (True, True)


def test_a_turn_of_a_real_model_is_cut_at_its_mark(model):
    env = environment(model, generation_kwargs={"max_new_tokens": 4, "do_sample": False}, max_turns=1)
    alone = [env._generate_batched([row])[0] for row in ([5, 6, 7], [8, 9])]
    both = env._generate_batched([[5, 6, 7], [8, 9]])
    for one, other in zip(alone, both, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    ids = np.asarray(env.tokenizer("a <call> b")["input_ids"])
    assert env.tokenizer.decode(env._cut(ids)) == "a <call>"


def test_best_of_n_keeps_the_best(model):
    seen = []

    def scores(texts):
        seen.append(texts)
        return [len(text.replace("e", "")) for text in texts]

    sampler = BestOfNSampler(
        model, tiny_tokenizer(), scores, lambda: 3, sample_size=5, n_candidates=2, seed=0
    )
    found = sampler.generate([[5, 6], [7, 8, 9]], do_sample=True)
    assert [len(one) for one in found] == [2, 2] and len(sampler.generate([5, 6], do_sample=True)) == 1
    best = sorted((len(text.replace("e", "")) for text in seen[0]), reverse=True)[:2]
    assert [len(text.replace("e", "")) for text in found[0]] == best
    with pytest.raises(ValueError, match="`n_candidates` must be at most"):
        BestOfNSampler(model, tiny_tokenizer(), scores, lambda: 3, sample_size=1, n_candidates=2)


def test_a_handle_is_looked_at_as_a_module(model, checkpoint):
    assert model.eval().train().to("cpu").pretrained_model is model and str(model.device) == "cpu"
    tensors = model.state_dict()
    assert (
        tensors["v_head.summary.weight"].shape
        == (1, model.config.n_embd)
        == model.v_head.summary.weight.shape
    )
    names = [name for name, _ in model.named_parameters()]
    assert all(name.startswith(("pretrained_model.", "v_head.")) for name in names)
    np.testing.assert_array_equal(
        numbers(model.get_parameter(names[0])), numbers(tensors[names[0].removeprefix("pretrained_model.")])
    )
    with pytest.raises(AttributeError, match="no parameter 'nothing'"):
        model.get_parameter("nothing")


def numbers(tensor):
    """Of NumPy, whether torch is loaded or not."""
    return np.asarray(tensor.detach() if hasattr(tensor, "detach") else tensor)


LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"]}


def test_tensors_of_an_adapted_model_are_its_base_its_head_and_the_adapter(checkpoint, tmp_path):
    plain = AutoModelForCausalLMWithValueHead.from_pretrained(str(checkpoint))
    found = AutoModelForCausalLMWithValueHead.from_pretrained(str(checkpoint), peft_config=LORA)
    base, tensors = plain.state_dict(), found.state_dict()
    for name, tensor in base.items():
        np.testing.assert_array_equal(numbers(tensors[name]), numbers(tensor))
    added = sorted(tensors.keys() - base.keys())
    layers = plain.config.n_layer
    names = [
        f"base_model.model.transformer.h.{i}.attn.c_attn.lora_{m}.weight" for i in range(layers) for m in "AB"
    ]
    assert added == names
    width = plain.config.n_embd
    of_adapter = layers * 2 * (width + 3 * width)
    assert found.num_parameters() == plain.num_parameters() + of_adapter
    assert found.num_parameters(only_trainable=True) == of_adapter + width + 1
    found.save_pretrained(tmp_path)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path)).state_dict()
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(numbers(again[name]), numbers(tensor))


def test_looking_at_tensors_writes_nothing(model, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert model.num_parameters() == sum(numbers(one).size for one in model.parameters())
    assert model.state_dict() and model.v_head.summary.bias.shape == (1,)


def test_a_temporary_folder_may_be_gone_before_its_model_is_read(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    expected = model.state_dict()
    assert found.config.n_embd == model.config.n_embd
    for name, tensor in found.state_dict().items():
        np.testing.assert_array_equal(numbers(tensor), numbers(expected[name]))


def test_a_head_of_two_layers_names_its_tensors(checkpoint, tmp_path):
    from jrl.trlx.models.modeling_ppo import AutoModelForCausalLMWithValueHead as OfTrlx

    OfTrlx.from_pretrained(str(checkpoint)).save_pretrained(tmp_path)
    found = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    with pytest.raises(AttributeError, match=r"two layers.*v_head\.0\.weight"):
        found.v_head.summary  # noqa: B018
    assert numbers(found.get_parameter("v_head.2.weight")).shape == (1, 2 * found.config.n_embd)


def test_kernels_of_few_bits_are_shown_as_the_numbers_they_stand_for(checkpoint):
    plain = AutoModelForCausalLM.from_pretrained(str(checkpoint)).state_dict()
    found = AutoModelForCausalLM.from_pretrained(
        str(checkpoint), peft_config=LORA, load_in_8bit=True
    ).state_dict()
    name = "transformer.h.0.attn.c_attn.weight"
    gap = np.abs(numbers(found[name]) - numbers(plain[name])).max()
    assert 0 < gap <= np.abs(numbers(plain[name])).max() / 127


def test_a_value_heads_dropout_is_what_was_asked_for(checkpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has no effect is said once a process
        found = AutoModelForCausalLMWithValueHead.from_pretrained(str(checkpoint), summary_dropout_prob=0.5)
    assert found.v_head.dropout.p == 0.5


def test_beams_are_refused_with_a_word(model):
    with pytest.raises(ValueError, match=r"`num_beams` must be 1: .*searches no beams"):
        model.generate([[5, 6]], num_beams=4)


@pytest.mark.parity
def test_a_forward_pass_is_transformers(model, checkpoint):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    logits, loss, values = model(ids, labels=ids)
    with torch.no_grad():
        found = theirs(ids, labels=ids)
    torch.testing.assert_close(logits, found.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss, found.loss, atol=1e-4, rtol=1e-4)
    assert values.shape == (1, 4)
    assert ids.to(Accelerator().device) is ids
    assert isinstance(model.generate(ids, max_new_tokens=2), torch.Tensor)
