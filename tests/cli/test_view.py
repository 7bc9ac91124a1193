# SPDX-License-Identifier: Apache-2.0
"""`jrl view` in a real server, and the report in a real browser where one is installed."""

from __future__ import annotations

import base64
import hashlib
import html
import http.client
import json
import re
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

from jrl.cli import main, view
from jrl.cli.view import LOOPBACK, Pages, make_server
from jrl.trainers.cards.report import read_run, report

TOKEN = "a-token_of_this-test"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
EVIL = "</td><script>document.title = 'owned'</script>" + "a_word_without_an_end_" * 20


def a_run(folder: Path, *, steps: int = 3) -> Path:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    evaluations = [
        {"step": 8 * number, "evaluation": number, "reward/mean": number / 10} for number in range(2)
    ]
    history = [
        {"step": 4 * number, "iteration": number, "reward/mean": number / 8, "kl/per_sequence": 9.0 * number}
        for number in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, [evaluations[0], *history, evaluations[1]]))
    )
    samples = [
        {"step": step, "prompt": prompt, "output": f"{prompt} at {step}", "reward": 0.5}
        for step in (0, 8)
        for prompt in ("the cat", EVIL)
    ]
    (folder / "rollouts" / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    return folder


@pytest.fixture
def served(tmp_path):
    """A run at work, and the port on which it is served."""
    folder = a_run(tmp_path / "run")
    server = make_server([folder], TOKEN)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def get(port, path="/", host=None, token=TOKEN):
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    connection.request(
        "GET",
        path if token is None else f"{path}?token={token}",
        headers={} if host is None else {"Host": host},
    )
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def wait_for(change):
    """A page rests for a moment after it was made."""
    until = time.monotonic() + 20
    while not change() and time.monotonic() < until:
        time.sleep(0.02)
    assert change()


class TestServer:
    def test_the_page_and_its_version(self, served):
        folder, port = served
        status, page, headers = get(port)
        assert status == 200 and "mean reward went from 0 to 0.1" in page
        assert headers["Cache-Control"] == "no-store"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        status, version, _ = get(port, "/version")
        assert status == 200 and json.dumps(version) in page
        a_run(folder, steps=9)
        wait_for(lambda: get(port, "/version")[1] != version)
        _, later, _ = get(port, "/version")
        assert later != version and json.dumps(later) in get(port)[1]

    def test_nobody_else_is_answered(self, served):
        _, port = served
        assert get(port, host="attacker.example:80")[0] == 403
        assert get(port, host=f"localhost:{port}")[0] == 200
        assert get(port, host="localhost")[0] == 200
        assert get(port, host="localhost.attacker.example")[0] == 403
        for path in ("/metrics.jsonl", "/../metrics.jsonl", "//etc/passwd"):
            assert get(port, path)[0] == 404

    @pytest.mark.parametrize("path", ["/", "/version"])
    @pytest.mark.parametrize("token", [None, "", TOKEN[:-1], TOKEN + "x", "%ff%00", "\u00e4"])
    def test_the_token_is_asked_for(self, served, path, token):
        """Every user of the machine reaches its loopback."""
        status, said, _ = get(served[1], path, token=token and quote(token, safe="%"))
        assert status == 403 and said == "open the address with the token that `jrl view` printed\n"

    def test_its_own_script_alone_may_run(self, served):
        _, page, headers = get(served[1])
        allowed = re.search(r"script-src 'sha256-([^']+)';", headers["Content-Security-Policy"])
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        assert base64.b64decode(allowed[1]) == hashlib.sha256(script.encode()).digest()

    @pytest.mark.parametrize("path", ["/", "/version"])
    def test_what_cannot_be_read_now_is_one_line(self, served, capfd, path):
        folder, port = served
        (folder / "metrics.jsonl").unlink()
        (folder / "checkpoint_4").mkdir()
        (folder / "checkpoint_4" / "config.yaml").write_text("a: [")
        status, said, _ = get(port, path)
        assert status == 503 and said.count("\n") == 1 and "config.yaml is no YAML" in said
        (folder / "checkpoint_4" / "config.yaml").unlink()
        if path == "/":
            status, said, _ = get(port, path)
            assert status == 503 and "holds metrics.jsonl" in said
        a_run(folder)
        assert get(port, path)[0] == 200
        assert capfd.readouterr().err == ""

    def test_two_tabs_make_one_page_which_then_rests(self, tmp_path, monkeypatch):
        made = []

        def slow(folder):
            made.append(folder)
            time.sleep(0.2)
            return read_run(folder)

        monkeypatch.setattr(view, "read_run", slow)
        pages = Pages([a_run(tmp_path / "run")])
        with ThreadPoolExecutor(4) as pool:
            (page,) = {found.result() for found in [pool.submit(pages.page) for _ in range(4)]}
        a_run(tmp_path / "run", steps=9)
        assert pages.page() == page and json.dumps(pages.version()).encode() in page
        assert len(made) == 1

    def test_a_text_may_hold_a_lone_surrogate(self, served):
        folder, port = served
        sample = {"step": 8, "prompt": "p", "output": "\ud800", "reward": 0.5}
        (folder / "rollouts" / "rollouts.jsonl").write_text(json.dumps(sample))
        status, page, _ = get(port)
        assert status == 200 and "\\ud800" in page

    def test_it_listens_on_the_loopback_alone(self, tmp_path):
        server = make_server([a_run(tmp_path / "run")], TOKEN)
        assert server.server_address[0] == "127.0.0.1"
        server.server_close()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["nowhere"], "must be the folder of a run"),
            (["run", "--port", "70000"], "--port must be one that is free, from 0 to 65535, got 70000"),
            (["run", "--more"], "unknown flags ['--more']"),
        ],
    )
    def test_mistakes_are_one_line(self, tmp_path, monkeypatch, capsys, words, said):
        monkeypatch.chdir(a_run(tmp_path / "run").parent)
        assert main(["view", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1

    def test_a_report_on_the_disk_asks_nobody(self, tmp_path):
        page = report([read_run(a_run(tmp_path / "run"))])
        assert "fetch(" not in page and "setInterval" not in page and "http" not in page


def browse(tmp_path, *flags):
    assert BROWSER is not None
    profile = tmp_path / f"profile_{time.monotonic_ns()}"
    found = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return found.stdout


# What the browser laid out is told to the frame around the page.
MEASURE = (
    "<script>addEventListener('load', () => parent.postMessage("
    "document.documentElement.scrollWidth + '/' + innerWidth + '/' + document.title, '*'));</script></body>"
)
FRAME = (
    "<body style='margin: 0'><script>addEventListener('message', (said) => {{ document.body.dataset.said = said.data; "
    "}});</script><iframe src='report.html' width={} height={} style='border: 0'></iframe></body>"
)


# Chooses a figure and taps the second token, as a reader would.
CHOOSE = """<script>addEventListener('load', () => {
const part = document.querySelector('.tokens'), choice = part.querySelector('select');
choice.value = '%s'; choice.dispatchEvent(new Event('change'));
const tokens = [...part.querySelectorAll('.row span')]; tokens[1].click();
document.body.dataset.seen = JSON.stringify({colors: tokens.map((token) => token.style.background),
  titles: tokens.map((token) => token.title), said: part.querySelector('output').textContent,
  scale: ['.low', '.high'].map((end) => part.querySelector(end).textContent)});
});</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
class TestBrowser:
    @pytest.mark.parametrize("device", SIZES)
    def test_the_report_fits_and_obeys_no_sample(self, tmp_path, device):
        page = report([read_run(a_run(tmp_path / "run"))])
        (tmp_path / "report.html").write_text(page.replace("</body>", MEASURE), encoding="utf-8")
        width, height = SIZES[device]
        frame = tmp_path / "frame.html"  # a window is never as narrow as a phone; a frame is
        frame.write_text(FRAME.format(width, height), encoding="utf-8")
        seen = browse(tmp_path, "--window-size=1280,900", "--dump-dom", frame.as_uri())
        found = re.search(r'data-said="(\d+)/(\d+)/(\w+)"', seen)
        assert found, seen
        assert int(found[1]) == int(found[2]) == width  # nothing sticks out
        assert found[3] == "run"  # and not "owned"
        picture = tmp_path / f"{device}.png"
        browse(tmp_path, "--window-size=1280,900", f"--screenshot={picture}", frame.as_uri())
        assert picture.stat().st_size > 10_000  # an empty page has fewer

    def test_tokens_take_the_colour_of_the_chosen_figure(self, tmp_path):
        folder = a_run(tmp_path / "run")
        rows = [
            {"step": 4, "prompt": "p", "tokens": [" a", " b", " c"], "advantage": [1.0, -2.0, None]}
            | {"logprob": [-1.0, -4.0, None], "value": [0.5, 0.25, None]},
            {"step": 8, "prompt": "q", "tokens": [" d"], "advantage": [0.0], "logprob": [-2.0]},
        ]
        (folder / "rollouts" / "tokens.jsonl").write_text("\n".join(map(json.dumps, rows)))
        page, seen = report([read_run(folder)]), {}
        for name in ("advantage", "logprob"):
            (tmp_path / "report.html").write_text(page.replace("</body>", CHOOSE % name), encoding="utf-8")
            found = browse(tmp_path, "--dump-dom", (tmp_path / "report.html").as_uri())
            seen[name] = json.loads(html.unescape(re.search(r'data-seen="([^"]+)"', found)[1]))
        assert seen["advantage"]["colors"] == [
            "rgba(40, 110, 235, 0.376)",
            "rgba(235, 120, 20, 0.75)",
            "",
            "rgba(40, 110, 235, 0)",
        ]
        assert seen["advantage"]["scale"] == ["-2", "2"] and seen["logprob"]["scale"] == ["-4", "0"]
        assert seen["logprob"]["colors"][1] == "rgba(235, 120, 20, 0.75)"
        assert seen["logprob"]["said"] == '" b": advantage -2, value 0.25, logprob -4'
        assert seen["logprob"]["titles"][3] == "advantage 0, logprob -2"

    def test_the_live_page_reloads_when_the_run_goes_on(self, served, tmp_path, monkeypatch):
        folder, port = served
        given, make = [], Pages.page

        def page(pages):
            found = make(pages)
            given.append(pages.version())
            if len(given) == 1:
                a_run(folder, steps=9)
            return found

        monkeypatch.setattr(Pages, "page", page)
        seen = browse(
            tmp_path, "--virtual-time-budget=20000", "--dump-dom", f"http://{LOOPBACK}:{port}/?token={TOKEN}"
        )
        assert len(given) == 2 and given[0] != given[1]
        assert json.dumps(given[1]) in seen
