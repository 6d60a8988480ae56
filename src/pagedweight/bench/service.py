"""A real `pagedweight serve` process: started, waited for, asked for its counters, ended."""

from __future__ import annotations

import os
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


@contextmanager
def serve(path: Path, log: Path, ours: Sequence[str], vllm: Sequence[str]) -> Iterator[Service]:
    """Serve the checkpoint `path`; `ours` are flags of `pagedweight serve`, `vllm` vLLM's.

    Everything it writes goes to `log`. Raises UserError with its last lines when it does not come
    up. Ends the server, and all its processes, on leaving.
    """
    port, start = _free_port(), time.monotonic()
    command = [sys.executable, "-m", "pagedweight.cli.main", "serve", str(path), *ours]
    flags = ["--host", "127.0.0.1", "--port", str(port), *vllm]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **KEEP_ALIVE},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield Service(url, time.monotonic() - start)
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"the server ended with {process.returncode}: {_last_lines(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.25)
    raise UserError(f"the server did not come up in {START_SECONDS} s: {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
