"""A real `pagedweight serve` process: started, waited for, asked for its counters, ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagedweight.errors import UserError

# A client may reuse a connection that the server is just closing for being idle; so it must not.
KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"}
START_SECONDS = 600
END_SECONDS = 60
_LOG_LINES = 12
_ERROR = re.compile(r"\b\w*Error: ")


@dataclass(frozen=True)
class Service:
    """url: without /v1. start_seconds: from the command to the first answer."""

    url: str
    start_seconds: float

    def counter(self, name: str) -> float:
        """Sum of a metric of /metrics over its labels. Raises UserError when it is absent."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        if not found:
            raise UserError(f"the server's /metrics has no {name}")
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


class Server:
    """A server process; it starts at once, `ready` waits for it and `end` ends it.

    Everything it writes goes to `log`. In a session of its own, so that all its processes end.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """`command` without a host and a port, which are added."""
        port = _free_port()
        self._url, self._log, self._start = f"http://127.0.0.1:{port}", log, time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **KEEP_ALIVE},
                start_new_session=True,
            )

    def ready(self, seconds: float = START_SECONDS) -> Service:
        """Once it answers, `seconds` after it was started at most. Raises UserError with its last
        lines when it does not come up."""
        _wait(self._process, self._url, self._log, self._start + seconds)
        return Service(self._url, time.monotonic() - self._start)

    def stop(self) -> None:
        """Ask it to end, without waiting."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> None:
        _end(self._process)


def own_command(path: Path, ours: Sequence[str], vllm: Sequence[str]) -> list[str]:
    """`pagedweight serve` on the checkpoint `path`; `ours` are its flags, `vllm` vLLM's."""
    return [sys.executable, "-m", "pagedweight.cli.main", "serve", str(path), *ours, "--", *vllm]


def stock_command(path: Path, vllm: Sequence[str]) -> list[str]:
    """vLLM's own server on the model folder `path`."""
    return [sys.executable, "-m", "pagedweight.serving.vllm_cli", "serve", str(path), *vllm]


@contextmanager
def serve(path: Path, log: Path, ours: Sequence[str], vllm: Sequence[str]) -> Iterator[Service]:
    """Serve the checkpoint `path` by `own_command`, and end the server on leaving.

    Raises UserError with its last lines when it does not come up.
    """
    server = Server(own_command(path, ours, vllm), log)
    try:
        yield server.ready()
    finally:
        server.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> None:
    """At least one look, however late it is: another server may have been waited for."""
    late = False
    while not late:
        late = time.monotonic() > deadline
        if process.poll() is not None:
            raise UserError(f"the server ended with {process.returncode}: {_last_lines(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.25)
    raise UserError(f"the server did not come up in time: {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    """The first error of a log, which later ones follow from, and its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((line for line in lines if _ERROR.search(line)), "")
    last = lines[-_LOG_LINES:]
    return " / ".join(last if first in ["", *last] else [first, "...", *last])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
