"""A text cut into windows of tokens, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pagedweight.calibrate.text import read_text, tokenize
from pagedweight.checkpoint.names import text_config
from pagedweight.checkpoint.shards import read_json
from pagedweight.errors import UserError


@dataclass(frozen=True)
class WindowChoice:
    """Which windows of which text. `text`: FILE, or FILE:FIRST-LAST with inclusive documents.

    window: tokens in a window, a beginning token of the tokenizer's included. windows: how many to
    draw by `seed` without replacement, kept in the order of the text; None means all.
    """

    text: str
    window: int = 2048
    windows: int | None = None
    seed: int = 0


def cut_windows(choice: WindowChoice, model: Path) -> torch.Tensor:
    """int64 [windows, window] tokens, cut without overlap; a rest shorter than a window is left.

    Raises UserError when the text, the window or their number does not do.
    """
    limit = text_config(read_json(model / "config.json")).get("max_position_embeddings")
    if choice.window < 2:
        raise UserError(f"--window {choice.window}: a window needs 2 tokens to predict one")
    if isinstance(limit, int) and choice.window > limit:
        raise UserError(
            f"--window {choice.window} is longer than the model's {limit} positions; "
            f"give at most {limit}"
        )
    if choice.windows is not None and choice.windows < 1:
        raise UserError(f"--windows {choice.windows}: give at least 1, or leave it out for all")
    text, _path = read_text(choice.text)
    stream, start = tokenize(text, model)
    body = choice.window - len(start)
    available = len(stream) // body
    if available < max(choice.windows or 1, 1):
        raise UserError(
            f"{choice.text} has {len(stream)} tokens, {available} windows of {choice.window}; "
            f"{choice.windows or 1} needed: give a smaller --window or --windows, or more text"
        )
    picked = np.arange(available)
    if choice.windows is not None:
        rng = np.random.default_rng(choice.seed)
        picked = np.sort(rng.choice(available, choice.windows, replace=False))
    rows = [start + stream[n * body : (n + 1) * body] for n in picked]
    return torch.tensor(rows, dtype=torch.int64)


def named_texts(texts: Sequence[str]) -> dict[str, str]:
    """NAME=FILE to names and files; a file without a name is called by its stem."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or "/" in name:
            name, file = Path(text.partition(":")[0]).stem, text
        if not name or not file:
            raise UserError(f"--text {text or repr(text)}: write FILE or NAME=FILE")
        if name in found:
            raise UserError(f"two texts are called {name}: write --text OTHER={file}")
        found[name] = file
    return found


def named_choices(
    texts: Sequence[str], window: int, windows: int | None, seed: int
) -> tuple[tuple[str, WindowChoice], ...]:
    """The texts with the windows to take of each."""
    return tuple(
        (name, WindowChoice(file, window, windows, seed))
        for name, file in named_texts(texts).items()
    )
