# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import pytest

from jrl.rollout.sampler import GenerationSettings, Sampler, check_logit_mask
from jrl.trainers.config.gen_kwargs import parse_gen_kwargs
from tests.tiny import tiny_policy

SPECIAL = dict(eos_token_id=1, pad_token_id=0)


class TestParseGenKwargs:
    def test_special_tokens_default_to_the_tokenizers(self):
        settings, sweep = parse_gen_kwargs({"max_new_tokens": 4}, **SPECIAL)
        assert (settings.eos_token_id, settings.pad_token_id, sweep) == ((1,), 0, None)
        assert settings.do_sample and settings.top_k == 0

    def test_several_eos_ids_are_no_sweep(self):
        settings, sweep = parse_gen_kwargs({"max_new_tokens": 4, "eos_token_id": [3, 5]}, **SPECIAL)
        assert settings.eos_token_id == (3, 5) and sweep is None

    def test_a_list_is_a_sweep_and_rollouts_use_its_first_value(self):
        settings, sweep = parse_gen_kwargs({"max_new_tokens": 4, "temperature": [0.7, 1.0]}, **SPECIAL)
        assert settings.temperature == 0.7 and sweep == ("temperature", (0.7, 1.0))

    def test_two_sweeps_are_refused(self):
        with pytest.raises(ValueError, match=r"one entry may be a list.*top_p.*temperature"):
            parse_gen_kwargs({"max_new_tokens": 4, "top_p": [0.5, 1.0], "temperature": [0.7, 1.0]}, **SPECIAL)

    def test_every_value_of_a_sweep_is_checked_before_the_run(self):
        with pytest.raises(ValueError, match=r"`gen_kwargs\.temperature` must be positive"):
            parse_gen_kwargs({"max_new_tokens": 4, "temperature": [0.7, 0.0]}, **SPECIAL)

    def test_unknown_names_name_the_closest(self):
        with pytest.raises(ValueError, match="Did you mean `temperature`"):
            parse_gen_kwargs({"max_new_tokens": 4, "temprature": 1.0}, **SPECIAL)

    def test_max_new_tokens_is_required(self):
        with pytest.raises(ValueError, match="`max_new_tokens` is required"):
            parse_gen_kwargs({"top_k": 3}, **SPECIAL)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_new_tokens", 0),
            ("min_new_tokens", 9),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("repetition_penalty", 0.0),
        ],
    )
    def test_values_out_of_range_are_named(self, name, value):
        with pytest.raises(ValueError, match=rf"`gen_kwargs\.{name}` must be"):
            parse_gen_kwargs({"max_new_tokens": 4, name: value}, **SPECIAL)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("temperature", "hot"), ("top_k", 2.5), ("do_sample", "false"), ("top_p", [0.9, "all"])],
    )
    def test_values_of_the_wrong_type_are_named(self, name, value):
        with pytest.raises(TypeError, match=f"`gen_kwargs.{name}` must be"):
            parse_gen_kwargs({"max_new_tokens": 4, name: value}, **SPECIAL)

    def test_an_empty_sweep_is_refused(self):
        with pytest.raises(ValueError, match="`top_k` is an empty list"):
            parse_gen_kwargs({"max_new_tokens": 4, "top_k": []}, **SPECIAL)


def test_filtered_tells_whether_log_probabilities_see_more_than_the_sampler():
    plain = GenerationSettings(max_new_tokens=4, eos_token_id=(1,), pad_token_id=0)
    assert not plain.filtered
    assert GenerationSettings(max_new_tokens=4, eos_token_id=(1,), pad_token_id=0, top_k=5).filtered
    assert GenerationSettings(max_new_tokens=4, eos_token_id=(1,), pad_token_id=0, top_p=0.9).filtered
    assert not GenerationSettings(
        max_new_tokens=4, eos_token_id=(1,), pad_token_id=0, top_p=0.9, do_sample=False
    ).filtered


class TestLogitMask:
    def test_a_token_that_none_may_follow_is_named(self):
        mask = np.zeros((3, 3), bool)
        assert check_logit_mask(mask, 3) is not None and check_logit_mask(None, 3) is None
        mask[1] = True
        with pytest.raises(ValueError, match="row 1 forbids all"):
            check_logit_mask(mask, 3)

    def test_a_fingerprint_is_no_mask(self):
        with pytest.raises(ValueError, match="holds a fingerprint alone: give the mask again"):
            check_logit_mask("array of bool (3, 3), sha256 0123", 3)

    @pytest.mark.parametrize("mask", [np.zeros((3, 4), bool), np.zeros((3, 3))])
    def test_other_shapes_and_types_are_refused(self, mask):
        with pytest.raises(ValueError, match=r"must be boolean, \(3, 3\)"):
            check_logit_mask(mask, 3)

    @pytest.mark.parametrize(("filters", "only"), [({"suppress_tokens": [3]}, 3), ({"min_new_tokens": 1}, 1)])
    def test_filters_that_leave_a_token_no_successor_are_refused(self, filters, only):
        # Only one token may follow 2, which the filter takes away: 3, or 1, which is EOS.
        mask = np.zeros((4, 4), bool)
        mask[2] = np.arange(4) != only
        settings, _ = parse_gen_kwargs({"max_new_tokens": 4, **filters}, **SPECIAL)
        sampler = Sampler(tiny_policy()[0], forbidden=check_logit_mask(mask, 4))
        with pytest.raises(ValueError, match="all that `logit_mask` lets follow token 2"):
            sampler.program(settings, 1)
        assert sampler.program(replace(settings, suppress_tokens=(), min_new_tokens=0), 1)


@pytest.mark.parametrize(
    "given", [{"num_beams": 1}, {"use_cache": False}, {"num_return_sequences": None, "typical_p": 1.0}]
)
def test_values_of_transformers_that_change_no_sample_are_accepted(given):
    plain = parse_gen_kwargs({"max_new_tokens": 4}, eos_token_id=1, pad_token_id=0)
    assert parse_gen_kwargs({"max_new_tokens": 4, **given}, eos_token_id=1, pad_token_id=0) == plain


@pytest.mark.parametrize(
    ("given", "message"),
    [({"num_beams": 4}, "jrl has no beam search"), ({"typical_p": 0.9}, "`typical_p` is not known")],
)
def test_values_of_transformers_that_would_change_samples_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        parse_gen_kwargs({"max_new_tokens": 4, **given}, eos_token_id=1, pad_token_id=0)
