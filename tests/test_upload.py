# SPDX-License-Identifier: Apache-2.0
"""Uploads by huggingface_hub itself, to a server of this machine that answers as the hub does and keeps all."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest

import jrl
from tests.trainers.runs import REWARDED, ilql_config, save_tiny_checkpoint


class Hub(ThreadingHTTPServer):
    """The hub's answers to an upload of small files.

    Attributes:
      asked: Paths that were asked for, and what was sent with each.
      files: Of the last commit, by branch and name.
      refuses: Whether it makes no repository.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.files: dict[tuple[str, str], bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses = False
        super().__init__(("127.0.0.1", 0), Answers)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: bytes) -> Any:
        """What the hub says to a POST, or None where it refuses."""
        if "/commit/" in path:
            repository, branch = path.removeprefix("/api/models").split("/commit/")
            self.commit(branch, [json.loads(line) for line in body.splitlines()])
            return {"commitUrl": f"{self.address}{repository}/commit/1", "commitOid": "1"}
        sent = json.loads(body)
        self.asked.append((path, sent))
        if path == "/api/repos/create":
            url = f"{self.address}/{sent['organization']}/{sent['name']}"
            return None if self.refuses else {"url": url}
        if "/preupload/" in path:
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": file["path"], **modes} for file in sent["files"]]}
        return {}

    def commit(self, branch: str, lines: list[Any]) -> None:
        """Keeps the files of a commit."""
        self.asked.append(("commit", lines[0]["value"]["summary"]))
        for line in lines[1:]:
            self.files[branch, line["value"]["path"]] = base64.b64decode(line["value"]["content"])


class Answers(BaseHTTPRequestHandler):
    """One request."""

    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        said = self.server.answer(self.path, body)
        data = json.dumps({"error": "You may not write here."} if said is None else said).encode()
        self.send_response(403 if said is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        """Nothing on the screen."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub takes for the real one."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    # It lies on this machine, which may be told that there is no other.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> jrl.Trainer:
    """A trainer before its first step."""
    folder = tmp_path_factory.mktemp("run")
    made = jrl.ILQLTrainer(ilql_config(save_tiny_checkpoint(folder / "model"), folder / "ckpts"))
    samples, rewards = zip(*REWARDED, strict=True)
    made.add_data(samples=samples, rewards=rewards, prompts=None, eval_prompts=None)
    return made


def test_a_trainer_uploads_what_it_would_save_with_its_card(trainer, hub, tmp_path):
    address = trainer.push_to_hub("me/tuned", private=True, token="hf_mine")
    saved = trainer.save_pretrained(tmp_path / "saved")
    assert address == f"{hub.address}/me/tuned" and hub.tokens == {"Bearer hf_mine"}
    (_, made), *_, commit = hub.asked
    assert (made["organization"], made["name"]) == ("me", "tuned")
    assert made.get("private") or made.get("visibility") == "private"  # versions of huggingface_hub differ
    assert commit == ("commit", "End of training")
    files = {("main", path.name): path.read_bytes() for path in saved.iterdir()}
    assert hub.files.keys() == files.keys() >= {("main", "README.md"), ("main", "model.safetensors")}
    assert hub.files["main", "model.safetensors"] == files["main", "model.safetensors"]
    assert b"library_name" in hub.files["main", "README.md"]


def test_a_folder_goes_to_a_branch(hub, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    address = jrl.push_to_hub(
        tmp_path, "me/tuned", token="hf_mine", revision="second", commit_message="Again"
    )
    assert address == f"{hub.address}/me/tuned" and hub.files == {("second", "config.json"): b"{}"}
    assert [path for path, _ in hub.asked][:2] == ["/api/repos/create", "/api/models/me/tuned/branch/second"]
    assert hub.asked[-1] == ("commit", "Again")


def test_what_is_refused(hub, tmp_path):
    with pytest.raises(ValueError, match=r"`folder` must be a folder that holds a model, got .*nowhere"):
        jrl.push_to_hub(tmp_path / "nowhere", "me/tuned")
    assert not hub.asked, "nothing is made for a folder that is not there"
    hub.refuses = True
    with pytest.raises(RuntimeError, match=r"could not be pushed to: .*may not write here"):
        jrl.push_to_hub(tmp_path, "me/tuned", token="hf_mine")


def test_an_argument_of_another_type_is_no_fault_of_the_hub(hub, tmp_path):
    with pytest.raises(TypeError):
        jrl.push_to_hub(tmp_path, "me/tuned", token="hf_mine", revision=3)


def test_a_hub_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(RuntimeError, match="`repo_id` 'me/tuned' could not be pushed to: "):
        jrl.push_to_hub(tmp_path, "me/tuned", token="hf_mine")
