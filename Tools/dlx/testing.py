"""For tests: a server on this machine that publishes one file, and no network at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock


class Publisher:
    """Answers every request with ``content`` and ``status``, and counts them; ``url`` is its address."""

    def __init__(self) -> None:
        self.content, self.status, self.requests, self.url = b"", 200, 0, ""


@contextmanager
def publisher() -> Iterator[Publisher]:
    """A `Publisher` that serves as long as the context lasts."""
    state = Publisher()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests += 1
            self.send_response(state.status)
            self.send_header("Content-Length", str(len(state.content)))
            self.end_headers()
            self.wfile.write(state.content)

        def log_message(self, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def offline(folder: Path) -> Iterator[Path]:
    """Sockets are refused, and the cache lies in a new locked folder below ``folder``, which must stay empty."""
    locked = folder / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    refuse = mock.Mock(side_effect=AssertionError("network used"))
    with mock.patch.dict(os.environ, DLX_HOME=str(locked / "home")), mock.patch.object(socket, "socket", refuse):
        yield locked
    if left := list(locked.iterdir()):
        raise AssertionError(f"written: {left}")
