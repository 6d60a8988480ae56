"""A real `pagedweight serve` process for tests: started, waited for, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve(path: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Base URL of a server on `path`; `arguments` as on the command line, `--` included."""
    port = free_port()
    split = arguments.index("--") if "--" in arguments else len(arguments)
    flags = ["--port", str(port), "--host", "127.0.0.1", *arguments[split + 1 :]]
    command = [sys.executable, "-m", "pagedweight.cli.main", "serve", str(path)]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *arguments[:split], "--", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"server ended with {process.returncode}:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"server not up after {START_SECONDS} s:\n{log.read_text()}")
