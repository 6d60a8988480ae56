"""Refusals that are only known when vLLM's processes are up, told by the command that started them.

A worker's UserError reaches that command as "see root cause above", a hundred lines after what was
wrong. So the worker also writes it into a file that the command names in the environment.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedweight.errors import UserError

VARIABLE = "PAGEDWEIGHT_REFUSALS"


@contextmanager
def told() -> Iterator[None]:
    """In an engine's process: whatever is refused meanwhile is written where `as_one_sentence`
    looks."""
    try:
        yield
    except UserError as error:
        if VARIABLE in os.environ:
            Path(os.environ[VARIABLE]).write_text(str(error), encoding="utf-8")
        raise


@contextmanager
def as_one_sentence() -> Iterator[None]:
    """In the command's process: a failure for which a refusal was told, here or in a process that
    was started meanwhile, ends with that sentence last and exit code 2. Others pass."""
    with tempfile.NamedTemporaryFile(prefix="pagedweight-refused-") as file:
        os.environ[VARIABLE] = file.name
        try:
            with told():
                yield
        except Exception:
            sentence = Path(file.name).read_text(encoding="utf-8")
            if not sentence:
                raise
            print(f"pagedweight: {sentence}", file=sys.stderr, flush=True)
            sys.exit(2)
        finally:
            del os.environ[VARIABLE]
