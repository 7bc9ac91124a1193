# SPDX-License-Identifier: Apache-2.0
from itertools import groupby

import pytest

from jrl.data.chat.messages import check_messages, is_dialogue
from jrl.data.chat.templates import render_answer, render_dialogue, render_prompt, with_chat_template
from tests.data.chat.chat_templates import (
    LAST_THINKS,
    MARKED,
    PLAIN,
    STRICT,
    THINKING,
    WITH_BOS,
    WITH_END,
    assistant,
    chat_tokenizer,
    user,
)

TWO_TURNS = [user("hi"), assistant("yes"), user("why"), assistant("so")]


def said(tokenizer, ids, mask):
    """Text of the masked tokens."""
    return tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])


class TestLore:
    @pytest.mark.parametrize("template", [PLAIN, MARKED, WITH_BOS, WITH_END])
    def test_lore_1_10_the_sampled_prompt_begins_the_trained_dialogue(self, template):
        tokenizer = chat_tokenizer(template)
        for number in (1, 3):
            prompt = render_prompt(tokenizer, TWO_TURNS[:number])
            ids, length, _ = render_answer(tokenizer, TWO_TURNS[:number], [TWO_TURNS[number]])
            assert ids[:length] == prompt and length == len(prompt)
            assert tokenizer.decode(prompt).endswith("<|start|>assistant:")

    def test_lore_1_10_golden_tokens(self):
        tokenizer = chat_tokenizer()
        start, end = tokenizer.convert_tokens_to_ids(["<|start|>", "<|end|>"])

        def text(words):
            return tokenizer(words, add_special_tokens=False)["input_ids"]

        expected = [start, *text("user:hi"), end, *text(" "), start, *text("assistant:")]
        assert render_prompt(tokenizer, [user("hi")]) == expected
        ids, length, _ = render_answer(tokenizer, [user("hi")], [assistant("yes")])
        assert ids == [*expected, *text("yes"), end, *text(" ")] and length == len(expected)

    def test_lore_1_10_there_is_one_bos(self):
        # This tokenizer would put BOS before ordinary text too.
        from tokenizers.processors import TemplateProcessing

        tokenizer = chat_tokenizer(WITH_BOS)
        bos = tokenizer.bos_token_id
        processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
        tokenizer.backend_tokenizer.post_processor = processor
        assert render_prompt(tokenizer, [user("hi")]).count(bos) == 1
        assert render_dialogue(tokenizer, TWO_TURNS)[0].count(bos) == 1
        with pytest.raises(ValueError, match="begins `messages` of row 3 with BOS twice"):
            render_prompt(chat_tokenizer("{{ bos_token }}" + WITH_BOS), [user("hi")], row=3)

    def test_lore_1_10_the_generation_prefix_is_prompt(self):
        tokenizer = chat_tokenizer(THINKING)
        options = {"template_kwargs": {"think": True}}
        ids, length, _ = render_answer(tokenizer, [user("hi")], [assistant("a</think>b")], **options)
        assert tokenizer.decode(ids[:length]).endswith("assistant:<think>")
        assert tokenizer.decode(ids[length:]).startswith("a</think>b")
        ids, mask = render_dialogue(tokenizer, [user("hi"), assistant("a</think>b")], **options)
        assert said(tokenizer, ids, mask) == "a</think>b<|end|>"

    def test_lore_1_10_a_template_that_changes_earlier_turns_is_refused(self):
        with pytest.raises(
            ValueError, match=r"up to message 1 of row 5 are not the beginning .* sampling starts from"
        ):
            render_dialogue(chat_tokenizer(THINKING), TWO_TURNS, row=5, template_kwargs={"think": True})


class TestMask:
    @pytest.mark.parametrize("template", [PLAIN, MARKED, WITH_BOS, WITH_END])
    def test_assistants_and_the_ends_of_their_turns(self, template):
        tokenizer = chat_tokenizer(template)
        ids, mask = render_dialogue(tokenizer, TWO_TURNS)
        end = "<|end|> <eos>" if template is WITH_END else "<|end|>"
        assert said(tokenizer, ids, mask) == f"yes<|end|>so{end}"

    def test_both_ways_agree(self):
        assert render_dialogue(chat_tokenizer(PLAIN), TWO_TURNS) == render_dialogue(
            chat_tokenizer(MARKED), TWO_TURNS
        )

    def test_a_template_that_writes_the_last_turn_otherwise(self):
        tokenizer = chat_tokenizer(LAST_THINKS)
        ids, mask = render_dialogue(tokenizer, TWO_TURNS)
        assert said(tokenizer, ids, mask) == "yes<|end|><think>so<|end|>"
        # Without its answer, the second question would follow the first: not every template allows that.
        alternating = (
            "{% if messages[1:] and messages[1]['role'] == 'user' %}{{ raise_exception('x') }}{% endif %}"
        )
        with pytest.raises(ValueError, match="up to message 1 are not the beginning"):
            render_dialogue(chat_tokenizer(alternating + LAST_THINKS), TWO_TURNS)

    def test_without_a_mask(self):
        ids, mask = render_dialogue(chat_tokenizer(), TWO_TURNS, with_mask=False)
        assert mask is None and ids == render_dialogue(chat_tokenizer(), TWO_TURNS)[0]

    def test_nobody_answers(self):
        ids, mask = render_dialogue(chat_tokenizer(), [user("hi")])
        assert mask == [False] * len(ids)

    def test_an_assistant_may_begin_where_the_template_marks(self):
        ids, mask = render_dialogue(chat_tokenizer(MARKED), [assistant("yes")])
        assert said(chat_tokenizer(MARKED), ids, mask) == "yes<|end|>"

    @pytest.mark.parametrize(
        "asked",
        ["\ud800", "a\ud83d\ude00b", "\ud83d" * 3, "\udc00\ud800", "\ud83d\ude00" * 4 + "\ude00\ufeff"],
    )
    def test_surrogates_before_a_turn_move_no_marker(self, asked):
        """Two halves of one character, said apart, are one to the tokenizer."""
        messages = [user(asked), assistant("yes"), user("and\ud83d\ude00?"), assistant("no")]
        tokenizer = chat_tokenizer(MARKED)
        ids, mask = render_dialogue(tokenizer, messages)
        runs = [list(part) for kept, part in groupby(range(len(ids)), key=lambda i: mask[i]) if kept]
        said_there = [tokenizer.decode([ids[i] for i in run]) for run in runs]
        assert said_there == ["yes<|end|>", "no<|end|>"]
        with pytest.raises(ValueError, match="row 2 begin with an assistant's message"):
            render_dialogue(chat_tokenizer(PLAIN), [assistant("yes")], row=2)


class TestMessages:
    def test_shared_gpt(self):
        found = check_messages([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}])
        assert found == [user("hi"), assistant("yes")]

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ("hi", "`messages` of row 4 must be a list .* got 'hi'"),
            ([], r"must be a list of at least one message .* got \[\]"),
            (
                [user("hi"), {"role": "wizard", "content": "x"}],
                r"`role` of message 1 must be one of .* 'wizard'",
            ),
            ([{"role": "user"}], "`content` of message 0 must be a text, got None"),
        ],
    )
    def test_bad_ones_are_named(self, messages, message):
        with pytest.raises(ValueError, match=message):
            check_messages(messages, row=4)

    def test_a_call_of_a_tool_may_say_nothing(self):
        message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
        assert check_messages([message]) == [message]

    def test_is_dialogue(self):
        assert (
            is_dialogue([user("hi")])
            and not is_dialogue("hi")
            and not is_dialogue([])
            and not is_dialogue(["a"])
        )


class TestTemplate:
    def test_none_is_refused_with_the_cure(self):
        with pytest.raises(ValueError, match=r"row 7 need a chat template, .* `chat_template_path`"):
            render_prompt(chat_tokenizer(None), [user("hi")], row=7)

    def test_what_it_refuses_is_named(self):
        with pytest.raises(ValueError, match="refuses `messages` of row 1: no system here"):
            render_prompt(chat_tokenizer(STRICT), [{"role": "system", "content": "a"}, user("b")], row=1)

    def test_a_prompt_ends_before_an_answer(self):
        with pytest.raises(ValueError, match="`prompt` of row 0 must not end with an assistant's message"):
            render_prompt(chat_tokenizer(), TWO_TURNS, row=0)

    def test_another_one(self, tmp_path):
        (tmp_path / "other.jinja").write_text("{{ messages[0]['content'] }}!", encoding="utf-8")
        tokenizer = chat_tokenizer()
        changed = with_chat_template(tokenizer, tmp_path / "other.jinja")
        assert changed.decode(render_prompt(changed, [user("hi")])) == "hi!"
        assert tokenizer.chat_template == PLAIN
        chat_tokenizer(MARKED).save_pretrained(tmp_path / "tokenizer")
        assert with_chat_template(tokenizer, tmp_path / "tokenizer").chat_template == MARKED

    def test_a_missing_one_is_named(self, tmp_path):
        with pytest.raises(ValueError, match="no such file"):
            with_chat_template(chat_tokenizer(), tmp_path / "none.jinja")
        chat_tokenizer(None).save_pretrained(tmp_path / "bare")
        with pytest.raises(ValueError, match="has no chat template of its own"):
            with_chat_template(chat_tokenizer(), tmp_path / "bare")

    def test_tools_and_variables_reach_it(self):
        tokenizer = chat_tokenizer("{{ tools[0]['name'] }}{{ mood }}")
        tools = [{"name": "clock"}]
        ids = render_prompt(tokenizer, [user("hi")], tools=tools, template_kwargs={"mood": "calm"})
        assert tokenizer.decode(ids) == "clockcalm"
