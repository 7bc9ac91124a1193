# SPDX-License-Identifier: Apache-2.0
"""No secret of a configuration, or of the environment, reaches what a run writes."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig, PreTrainedTokenizerBase

import jrl
from jrl.cli import main
from jrl.trainers.loggers import make_loggers
from jrl.trainers.model_card import _hyperparameters
from jrl.trainers.resume import CheckpointError, check_config, plain
from jrl.trainers.secrets import HIDDEN, hide_secrets, without_secrets
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
