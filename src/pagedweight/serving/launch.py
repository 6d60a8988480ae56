"""The `vllm serve` command line that serves a checkpoint with given options.

Everything that can be wrong is checked here, before vLLM spends half a minute on starting.
Relies on: `vllm serve --additional-config`. Tested with vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.errors import UserError
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.store import plan_of
from pagedweight.serving.versions import check_version, vllm_version

_FLAG = "--additional-config"


def vllm_command(path: Path, options: ServeOptions, extra: Sequence[str]) -> list[str]:
    """Arguments, interpreter first. UserError on a broken checkpoint, plan, level or flag."""
    check_version(vllm_version())
    plan_of(Checkpoint.open(path), options)
    users, rest = _take(list(extra))
    config = {**users, **options.additional_config()}
    return [
        sys.executable,
        "-m",
        "pagedweight.serving.vllm_cli",
        "serve",
        str(path),
        _FLAG,
        json.dumps(config),
        *rest,
    ]


def _take(extra: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The user's own --additional-config, parsed, and the other arguments."""
    for index, argument in enumerate(extra):
        if argument == _FLAG and index + 1 < len(extra):
            value, rest = extra[index + 1], extra[:index] + extra[index + 2 :]
        elif argument.startswith(f"{_FLAG}="):
            value, rest = argument.split("=", 1)[1], extra[:index] + extra[index + 1 :]
        else:
            continue
        try:
            users = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"{_FLAG} is not JSON ({error}): {value}") from error
        if not isinstance(users, dict):
            raise UserError(f"{_FLAG} must be a JSON object, not {value}")
        return users, rest
    return {}, extra
