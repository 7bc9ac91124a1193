# SPDX-License-Identifier: Apache-2.0
"""`jrl view`: the report of runs at work, served on the loopback to who has the token, and kept fresh.

Every user of a machine reaches its loopback: the token in the printed address keeps the page from the others.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

from jrl.trainers.cards.report import VERSION_PATH, read_run, report, run_files
from jrl.trainers.loggers.safe_text import one_line

LOOPBACK = "127.0.0.1"
REST = 10
"""Least time between two pages that are made, in times of what the last one took."""


def add_flags(command: argparse.ArgumentParser) -> None:
    """Flags of `jrl view`."""
    command.add_argument(
        "run", nargs="+", help="folder of a run (`train.checkpoint_dir`), finished or at work"
    )
    command.add_argument("--port", type=int, default=0, help="of the loopback; default: one that is free")


def prepare(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], int]:
    """`jrl view RUN [RUN ...]`: serves the page until Ctrl-C.

    Raises:
      ValueError: If a folder holds no run, the port cannot be taken, or there are unknown flags.
    """
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")
    folders = [Path(name) for name in flags.run]
    for folder in folders:
        read_run(folder)
    try:
        token = secrets.token_urlsafe(16)
        server = make_server(folders, token, flags.port)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--port must be one that is free, from 0 to 65535, got {flags.port}: {error}."
        ) from error

    def work() -> int:
        print(
            f"http://{LOOPBACK}:{server.server_address[1]}/?token={token}  (from this machine, with this token; Ctrl-C "
            "ends it)",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
        finally:
            server.server_close()
        return 0

    return work


def make_server(folders: Sequence[Path], token: str, port: int = 0) -> ThreadingHTTPServer:
    """A server of the report on the loopback, not yet serving.

    Args:
      folders: Of runs.
      token: What a request must bring; ASCII.
      port: 0: one that is free.
    Raises:
      OSError: If the port is taken.
    """
    return ThreadingHTTPServer((LOOPBACK, port), partial(_Page, Pages(folders), token))


class Pages:
    """The page of runs at work, made anew where their files have changed; never twice at a time, nor all the time.

    Args:
      folders: Of the runs.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] = "", b""
        self._rests_until = 0.0

    def version(self) -> str:
        """Version of the page that would be given: it changes after a file of a run does."""
        with self._lock:
            return self._version()

    def page(self) -> bytes:
        """The page of this moment, or of a moment ago."""
        with self._lock:
            version = self._version()
            if self._made[0] != version:
                began = time.monotonic()
                runs = [read_run(folder) for folder in self._folders]
                page = report(runs, live_version=version).encode(errors="backslashreplace")
                self._made, now = (version, page), time.monotonic()
                self._rests_until = now + REST * (now - began)
            return self._made[1]

    def _version(self) -> str:
        if time.monotonic() < self._rests_until:
            return self._made[0]
        states = []
        for path in (path for folder in self._folders for path in run_files(folder)):
            with suppress(FileNotFoundError):
                found = path.stat()
                states.append(f"{path} {found.st_size} {found.st_mtime_ns}")
        return hashlib.sha256("\n".join(states).encode()).hexdigest()[:16]


def policy(page: bytes) -> str:
    """Content security policy of a page: it asks its own server alone, and its own script alone may run.

    Args:
      page: HTML with one script at most.
    """
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'"


class _Page(BaseHTTPRequestHandler):
    """Answers one request: the page, or its version; to who has the token and nobody else."""

    server_version = "jrl"
    sys_version = ""

    def __init__(self, pages: Pages, token: str, *arguments: object) -> None:
        self._pages, self._token = pages, token
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Gives the page, or the version."""
        path, _, given = self.path.partition("?")
        # A site of another name that resolves to this address must not read the page.
        if self.headers.get("Host", "").partition(":")[0] not in (LOOPBACK, "localhost"):
            self._say(HTTPStatus.FORBIDDEN, "the page is for this machine's own browser")
        elif path not in ("/", VERSION_PATH):
            self._say(HTTPStatus.NOT_FOUND, "there is only the page")
        elif not self._is_allowed(given):
            self._say(HTTPStatus.FORBIDDEN, "open the address with the token that `jrl view` printed")
        else:
            self._give(path)

    def _is_allowed(self, given: str) -> bool:
        token = parse_qs(given, errors="replace").get("token", [""])[0]
        return secrets.compare_digest(token.encode(errors="replace"), self._token.encode())

    def _give(self, path: str) -> None:
        """Gives what was asked for, or says in a line why not: a run at work replaces its files now and then."""
        try:
            content = self._pages.page() if path == "/" else self._pages.version().encode()
        except Exception as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, one_line(str(error)) or type(error).__name__)
            return
        self._answer(HTTPStatus.OK, content, "text/html" if path == "/" else "text/plain")

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, f"{text}\n".encode(errors="backslashreplace"), "text/plain")

    def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        with suppress(ConnectionError):  # a tab that was closed meanwhile
            self.send_response(status)
            for name, value in (
                ("Content-Type", f"{kind}; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("Content-Security-Policy", policy(content)),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing of requests: the terminal may be the run's."""
