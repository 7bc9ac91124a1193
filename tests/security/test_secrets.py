# SPDX-License-Identifier: Apache-2.0
"""No secret of a configuration, or of the environment, reaches what a run writes."""

from __future__ import annotations

import json
import logging
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig, PreTrainedTokenizerBase

import jrl
from jrl.cli import main
from jrl.trainers.cards.card import _hyperparameters
from jrl.trainers.checkpoints.resume import CheckpointError, check_config, plain
from jrl.trainers.config import secrets
from jrl.trainers.config.secrets import HIDDEN, hide_secrets, without_secrets
from jrl.trainers.loggers.loggers import make_loggers
from tests.trainers.runs import save_tiny_checkpoint, sft_config

# None of these is anybody's.
HUB = "hf_" + "aB3" * 11
PASSWORD = "correct horse"
SECRETS = (HUB, PASSWORD)


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hub_token", "HF_TOKEN", "hubToken", "use_auth_token", "my_service_token", "access-token"),
        *(
            "api_key",
            "apikey",
            "WANDB_API_KEY",
            "openaiApiKey",
            "aws_secret_access_key",
            "private_key",
            "secret",
        ),
        *("password", "db_password", "passwd", "client_secret", "credentials", "Authorization"),
        *("api_keys", "passwords", "secrets", "passphrases", "pwd", "dbPassword", "dbpassword", "password2"),
        *(
            "HFToken",
            "authtoken",
            "accessToken",
            "access_tokens",
            "hf_tokens",
            "HF_TOKEN_2",
            "APIKey",
            "sshKey",
        ),
        *(
            "wandb_key",
            "openai_key",
            "openaiKey",
            "groq_key",
            "WANDB_KEY",
            "connection_string",
            "connectionString",
        ),
        *("webhook_url", "slack_webhook", "db_dsn", "AZURE_STORAGE_CONNECTION_STRING", "sas_url"),
    ],
)
def test_a_secret_by_its_name(name):
    found = without_secrets({"train": {name: PASSWORD, "others": [{name: [PASSWORD]}]}})
    assert found == {"train": {name: HIDDEN, "others": [{name: [HIDDEN]}]}}


@pytest.mark.parametrize("name", ["password", "secrets", "credentials", "api_keys", "HFToken"])
def test_nothing_below_a_secret_name_is_shown(name):
    """Numbers too, and whatever the fields below are called; that something is switched on or missing is no secret."""
    assert without_secrets({name: 12345678, "seed": 1}) == {name: HIDDEN, "seed": 1}
    assert without_secrets({name: [1.5, ["a"]]}) == {name: [HIDDEN, [HIDDEN]]}
    values = {"value": "a", "eos_token": "b", "deep": [{"c": 1, "on": True, "off": None, "empty": ""}]}
    assert without_secrets({name: values}) == {
        name: {
            "value": HIDDEN,
            "eos_token": HIDDEN,
            "deep": [{"c": HIDDEN, "on": True, "off": None, "empty": ""}],
        }
    }


@pytest.mark.parametrize(
    "text",
    [
        HUB,
        f"a {HUB}.",
        "sk-" + "a1" * 20,
        "ghp_" + "a1" * 18,
        "AKIA" + "A1" * 8,
        "glpat-" + "a1" * 10,
        "xoxb-" + "1a" * 8,
    ],
)
def test_a_secret_by_its_looks(text):
    assert HIDDEN in hide_secrets(text)
    assert max(hide_secrets(text).split(HIDDEN), key=len) in ("", "a ", ".")


PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEpAIBAAKCAQEA\n" * 8 + "-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://host/x?token=abc123&page=2", f"https://host/x?token={HIDDEN}&page=2"),
        ("https://h/b?X-Amz-Signature=0a1b2c&v=1", f"https://h/b?X-Amz-Signature={HIDDEN}&v=1"),
        ("https://h/b?a=1&access_token=zzz", f"https://h/b?a=1&access_token={HIDDEN}"),
        ("Authorization: Bearer abc.def-123", f"Authorization: {HIDDEN}"),
        ("curl -H 'Authorization: Basic dXNlcjpwdw==' x", f"curl -H 'Authorization: {HIDDEN}' x"),
        ("use Bearer 0123456789abcdef now", f"use Bearer {HIDDEN} now"),
        (f"a {JWT} b", f"a {HIDDEN} b"),
        (f"key: {PEM} after", f"key: {HIDDEN} after"),
        (PEM[:90], HIDDEN),
        ("sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc", HIDDEN),
        ("rk_test_" + "4eC39HqLyjWD", HIDDEN),
        ("pypi-AgEIcHlwaS5vcmcCJ" + "a1" * 40, HIDDEN),
        ("gsk_" + "a1B2" * 13, HIDDEN),
        ("dapi" + "0a" * 16, HIDDEN),
        ("SG." + "a1" * 11 + "." + "b2C" * 14 + "d", HIDDEN),
        ("https://hooks.slack.com/services/T00000000/B00000000/" + "Xx" * 12, HIDDEN),
        (
            "DefaultEndpointsProtocol=https;AccountKey=abc/def==;X=1",
            f"DefaultEndpointsProtocol=https;AccountKey={HIDDEN};X=1",
        ),
    ],
)
def test_what_headers_addresses_and_services_carry(text, left):
    assert hide_secrets(text) == left


def test_a_key_of_an_unknown_service_is_told_by_its_value():
    values = {
        "my_key": "a1B2" * 8,
        "prompt_key": "question",
        "sort_key": "date",
        "key": "messages",
        "num_key_value_heads": 8,
    }
    assert without_secrets(values) == values | {"my_key": HIDDEN}


@pytest.mark.parametrize(
    "value",
    [
        "/home/someone/runs/2026-01-02/checkpoint_00001000/hf_model",
        "https://host.org/data/train.jsonl?split=train&page=2",
        "https://github.com/owner/name/tree/0123456789abcdef0123456789abcdef01234567",
        "0123456789abcdef0123456789abcdef01234567",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "123e4567-e89b-12d3-a456-426614174000",
        "meta-llama/Llama-2-7b-chat-hf",
        "sk-learn and pypi-packages, hf_model, npm_run, key_value, gsk_small",
        "a bearer of good news; the code=5 of conduct, tokens = 7",
        "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        "array of float32 (3, 4), sha256 0123456789abcdef",
        "1000",
    ],
)
def test_ordinary_values_are_left_alone(value):
    config = {"train": {"path": value, "data_sha256": {"samples": value}, "revision": value}}
    assert without_secrets(config) == config


def test_every_recipe_that_ships_is_left_alone():
    for path in (Path(__file__).parents[2] / "configs").rglob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        assert without_secrets(config) == config, path


def test_the_detectors_are_there():
    names = {type(detector).__name__ for detector in secrets._detectors()}
    assert {"AWSKeyDetector", "GitHubTokenDetector", "JwtTokenDetector", "StripeDetector"} <= names
    assert not names & set(secrets._DETECTORS_ASIDE)


def test_user_and_password_in_an_address():
    assert hide_secrets("see https://me:pw@host.org/a@b and s3://key:x@bucket") == (
        f"see https://{HIDDEN}@host.org/a@b and s3://{HIDDEN}@bucket"
    )
    assert hide_secrets("https://host.org/a@b") == "https://host.org/a@b"
    assert hide_secrets("postgres://u:p@ss@h/db") == f"postgres://{HIDDEN}@h/db"
    assert hide_secrets("postgres://u:p?a#b@h:1/db") == f"postgres://{HIDDEN}@h:1/db"
    assert hide_secrets(f"https://me:{'a.b' * 200}@host/x") == f"https://{HIDDEN}@host/x"
    assert hide_secrets("ab://u:p@h,cd://u:p@h") == f"ab://{HIDDEN}@h,cd://{HIDDEN}@h"


def test_tokens_of_texts_are_none():
    """The whole of what the default configurations and special tokens are called stays as it is."""
    defaults = [getattr(jrl, name) for name in dir(jrl) if re.fullmatch(r"default_\w+_config", name)]
    assert len(defaults) >= 6
    for default in defaults:
        values = plain(default().to_dict())
        assert without_secrets(values) == values
    # What transformers calls the tokens of a generation and of a tokenizer.
    for values in (
        GenerationConfig().to_dict(),
        dict.fromkeys(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, 7),
    ):
        assert without_secrets(values) == values
    texts = {
        f"{name}_token": "</s>"
        for name in ("eos", "bos", "pad", "unk", "additional_special", "stop", "end_of_turn")
    }
    texts |= {
        "max_new_tokens": 8,
        "token_id": 3,
        "tokens": ["a"],
        "tokenizer_path": "gpt2",
        "num_virtual_tokens": 8,
        "suppress_tokens": [1, 2],
        "label_pad_token_id": -100,
        "chars_per_token": 4.0,
        "decoder_start_token_id": 0,
        "split_token": 5,
        "keywords": ["a"],
        "num_passes": 2,
        "key": "a",
        "monkey": "b",
    }
    assert without_secrets(texts) == texts


def config_with_secrets(checkpoint: str, run_dir: Path, **train: Any) -> jrl.TRLConfig:
    """Where a user may have put one: an argument of the tokenizer's loader, a tag, a name, a path."""
    return sft_config(checkpoint, run_dir).evolve(
        tokenizer={"tokenizer_extra_configs": {"token": PASSWORD}},
        train={"tags": [HUB], "run_name": f"https://me:{PASSWORD.replace(' ', '-')}@host/run", **train},
    )


def assert_clean(text: str) -> None:
    assert not [secret for secret in (*SECRETS, PASSWORD.replace(" ", "-")) if secret in text]
    assert HIDDEN in text


class TestWhatIsWritten:
    def test_a_tracker_gets_none(self, tmp_path, monkeypatch):
        written: list[str] = []

        class Run:
            id = "1"

            def finish(self) -> None: ...

        def init(**arguments: Any) -> Run:
            written.append(json.dumps(arguments["config"]))
            return Run()

        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
        config = config_with_secrets("x", tmp_path, tracker="wandb")
        loggers = make_loggers(config, tmp_path, keep_records=None)
        loggers.start({"model": "x"}, total_steps=1, step=0)
        loggers.close()
        assert_clean("".join(written))

    def test_a_card_tells_none(self, tmp_path):
        assert_clean(_hyperparameters(config_with_secrets("x", tmp_path), "base"))

    def test_an_error_about_a_changed_configuration_tells_none(self, tmp_path):
        saved = without_secrets(plain(config_with_secrets("x", tmp_path).to_dict()))
        check_config(saved, config_with_secrets("x", tmp_path).to_dict())
        changed = config_with_secrets("x", tmp_path).evolve(
            tokenizer={"tokenizer_extra_configs": {"token": PASSWORD, "note": HUB}}
        )
        with pytest.raises(CheckpointError, match="note") as raised:
            check_config(saved, changed.to_dict())
        assert_clean(str(raised.value))

    def test_the_environment_is_not_shown(self, monkeypatch, capsys):
        for variable in ("HF_TOKEN", "WANDB_API_KEY", "XLA_FLAGS_SECRET"):
            monkeypatch.setenv(variable, HUB)
        assert main(["env"]) == 0
        assert HUB not in capsys.readouterr().out

    @pytest.mark.slow
    def test_no_file_of_a_run_holds_one(self, tmp_path, capfd, monkeypatch):
        """Checkpoint, model, card, metrics, samples, event files, and what is printed."""
        pytest.importorskip("tensorboardX")
        monkeypatch.setenv("HF_TOKEN", HUB)
        monkeypatch.setenv("WANDB_API_KEY", PASSWORD)
        run_dir = tmp_path / "run"
        config = config_with_secrets(
            save_tiny_checkpoint(tmp_path / "tiny"), run_dir, tracker="tensorboard", total_steps=2
        )
        trainer = jrl.train(samples=["the cat sat", "a dog ran", "we go", "rain falls"], config=config)
        trainer.save_pretrained(run_dir / "model")
        files = [path for path in run_dir.rglob("*") if path.is_file()]
        assert {"config.yaml", "README.md", "metrics.jsonl", "manifest.json"} <= {path.name for path in files}
        needles = [secret.encode() for secret in (*SECRETS, PASSWORD.replace(" ", "-"))]
        assert [str(path) for path in files if any(needle in path.read_bytes() for needle in needles)] == []
        assert not any(needle.decode() in "".join(capfd.readouterr()) for needle in needles)
        stored = next(run_dir.glob("checkpoint_*/config.yaml"))
        assert yaml.safe_load(stored.read_text())["tokenizer"]["tokenizer_extra_configs"]["token"] == HIDDEN
        # What was hidden does not stand in the way of going on.
        again = config.evolve(train={"total_steps": 4, "resume_from_checkpoint": str(run_dir)})
        resumed = jrl.train(samples=["the cat sat", "a dog ran", "we go", "rain falls"], config=again)
        assert resumed.history[-1]["step"] == 4


def test_looking_for_secrets_leaves_warnings_where_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """detect-secrets gives all warnings of the process to `logging` when it is first imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "detect_secrets"]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings():
        logging.captureWarnings(False)  # whatever ran before
        shown = warnings.showwarning
        secrets._detectors.__wrapped__()
        assert "detect_secrets.core.log" in sys.modules and warnings.showwarning is shown
