# SPDX-License-Identifier: Apache-2.0
"""`jrl view`: the report of runs at work, served to this machine's browser alone, which keeps it fresh."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from jrl.trainers.cards.report import VERSION_PATH, read_run, report, run_files

LOOPBACK = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def add_view_flags(command: argparse.ArgumentParser) -> None:
    """Flags of `jrl view`."""
    command.add_argument(
        "run", nargs="+", help="folder of a run (`train.checkpoint_dir`), finished or at work"
    )
    command.add_argument("--port", type=int, default=0, help="of the loopback; default: one that is free")


def show_view(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], int]:
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
        server = make_server(folders, flags.port)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--port must be one that is free, from 0 to 65535, got {flags.port}: {error}."
        ) from error

    def work() -> int:
        print(
            f"http://{LOOPBACK}:{server.server_address[1]}  (this machine alone; Ctrl-C ends it)", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
        finally:
            server.server_close()
        return 0

    return work


def make_server(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """A server of the report on the loopback, not yet serving.

    Args:
      folders: Of runs.
      port: 0: one that is free.
    Raises:
      OSError: If the port is taken.
    """
    return ThreadingHTTPServer((LOOPBACK, port), partial(_Page, Pages(folders)))


class Pages:
    """The page of runs at work, made anew where their files have changed.

    Args:
      folders: Of the runs.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._made: tuple[str, bytes] = "", b""

    def version(self) -> str:
        """Changes whenever a file of a run does."""
        states = []
        for path in (path for folder in self._folders for path in run_files(folder)):
            if path.is_file():
                found = path.stat()
                states.append(f"{path} {found.st_size} {found.st_mtime_ns}")
        return hashlib.sha256("\n".join(states).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        """The page of this moment."""
        version = self.version()
        if self._made[0] != version:
            runs = [read_run(folder) for folder in self._folders]
            self._made = version, report(runs, live_version=version).encode(errors="backslashreplace")
        return self._made[1]


class _Page(BaseHTTPRequestHandler):
    """Answers one request: the page, or its version; to this machine's own browser and nobody else."""

    server_version = "jrl"
    sys_version = ""

    def __init__(self, pages: Pages, *arguments: object) -> None:
        self._pages = pages
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Gives the page, or the version."""
        # A site of another name that resolves to this address must not read the page.
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (LOOPBACK, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer(self._pages.page(), "text/html; charset=utf-8")
        elif self.path == VERSION_PATH:
            self._answer(self._pages.version().encode(), "text/plain; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", _POLICY),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing of requests: the terminal may be the run's."""
