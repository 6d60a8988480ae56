"""Calibration text to token sequences: plain text, or JSON lines with a "text" (as C4 has)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedweight.checkpoint.tensorfile import sha256_file
from pagedweight.errors import UserError

JOIN = "\n\n"
"""Between documents of a JSON lines file."""
PIECE = 1 << 17
"""Characters that are tokenized at once, about."""
_LINE = re.compile(r"(?<=\S)\n(?=\w)")
_RANGE = re.compile(r"(?P<path>.+):(?P<first>\d+)-(?P<last>\d+)")


@dataclass(frozen=True)
class CalibrationChoice:
    """What the user asks for. `text`: FILE, or FILE:FIRST-LAST with inclusive document numbers."""

    text: str
    sequences: int = 16
    sequence_length: int = 2048
    seed: int = 0


@dataclass(frozen=True)
class CalibrationTokens:
    """tokens: int64 [sequences, length]; metadata: the strings of calibration.safetensors."""

    tokens: torch.Tensor
    metadata: dict[str, str]


NO_CALIBRATION = {"text": "none", "sequences": "0", "sequence_length": "0", "seed": "0"}
"""Metadata of a checkpoint that was quantized with uniform weights."""


def load_tokens(choice: CalibrationChoice, model: Path, limit: int | None) -> CalibrationTokens:
    """Tokenize with the tokenizer in `model` and cut into sequences, chosen by the seed.

    The text is one stream of tokens, cut into pieces of `sequence_length`; of those, `sequences`
    are drawn without replacement and kept in the order of the text. A tokenizer that begins texts
    with a special token begins each sequence with it. `limit`: the longest the model allows.
    Raises UserError when the file, the range or the amount of text does not do.
    """
    if choice.sequences < 1 or choice.sequence_length < 2:
        raise UserError(
            f"calibration needs at least 1 sequence of 2 tokens, not {choice.sequences} of "
            f"{choice.sequence_length}"
        )
    if limit is not None and choice.sequence_length > limit:
        raise UserError(
            f"--sequence-length {choice.sequence_length} is longer than the model's {limit} "
            f"positions; give at most {limit}"
        )
    text, path = read_text(choice.text)
    stream, start = tokenize(text, model)
    body = choice.sequence_length - len(start)
    available = len(stream) // body
    if available < choice.sequences:
        fewer = f"at most --sequences {available}, " if available else ""
        raise UserError(
            f"{choice.text} has {len(stream)} tokens, {available} sequences of "
            f"{choice.sequence_length}; give {fewer}a smaller --sequence-length, or more text"
        )
    rng = np.random.default_rng(choice.seed)
    picked = np.sort(rng.choice(available, choice.sequences, replace=False))
    rows = [start + stream[n * body : (n + 1) * body] for n in picked]
    name = choice.text.replace(str(path), path.name, 1)
    return CalibrationTokens(
        torch.tensor(rows, dtype=torch.int64),
        {
            "text": f"{name} sha256:{sha256_file(path)}",
            "sequences": str(choice.sequences),
            "sequence_length": str(choice.sequence_length),
            "seed": str(choice.seed),
        },
    )


def tokenize(text: str, model: Path) -> tuple[list[int], list[int]]:
    """(tokens of the text without special ones, tokens that begin every sequence)."""
    from transformers import AutoTokenizer  # seconds to import; only calibration needs it

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer can be loaded from {model}: {error}") from error
    start = tokenizer("").input_ids[:1]
    if start and start[0] != tokenizer.bos_token_id:
        start = []  # what an empty text has is an end, not a beginning
    stream: list[int] = []
    for ids in _in_pieces(text, lambda t: _encode(tokenizer, t)):
        stream += ids
    return stream, start


def _encode(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: a text longer than the model's context is meant to be cut
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _in_pieces(text: str, encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    """Tokens of `text` a piece at a time: a tokenizer takes a hundred times its text in memory.

    Pieces begin where one line end stands before a word, which no tokenizer in use joins. Each
    is encoded with that line end before it, whose tokens are then taken off, so that what a
    tokenizer puts before a text's first word does not appear inside.
    """
    line_end, start = encode("\n"), 0
    for match in _LINE.finditer(text):
        if match.end() - start < PIECE:
            continue
        yield _after(line_end, encode, text[start : match.end()], start > 0)
        start = match.end()
    if start < len(text):
        yield _after(line_end, encode, text[start:], start > 0)


def _after(
    line_end: list[int], encode: Callable[[str], list[int]], piece: str, inside: bool
) -> list[int]:
    if not inside:
        return encode(piece)
    ids = encode("\n" + piece)
    if ids[: len(line_end)] != line_end:
        raise UserError("this tokenizer joins line ends with the words that follow them")
    return ids[len(line_end) :]


def read_text(name: str) -> tuple[str, Path]:
    """The text that `name` (FILE or FILE:FIRST-LAST) means, and the file's path."""
    path, documents = Path(name), None
    match = _RANGE.fullmatch(name)
    if match and not path.exists():
        path = Path(match["path"])
        documents = (int(match["first"]), int(match["last"]))
    if not path.is_file():
        raise UserError(f"the text {path} is not a file")
    try:
        if path.suffix in (".jsonl", ".json"):
            return JOIN.join(_documents(path, documents)), path
        if documents:
            raise UserError(f"{path} is not JSON lines (.jsonl), so {name} cannot name documents")
        return path.read_text(encoding="utf-8"), path
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def _documents(path: Path, documents: tuple[int, int] | None) -> list[str]:
    first, last = documents or (0, None)
    found, count = [], 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            count = number + 1
            if number < first:
                continue
            if last is not None and number > last:
                break
            found.append(_document_text(path, number, line))
    if not found or (last is not None and len(found) != last - first + 1):
        raise UserError(
            f"{path} has {count} documents, numbered from 0: it does not have {first} to {last}"
            if documents
            else f"{path} has no documents"
        )
    return found


def _document_text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{path}: line {number + 1} is not JSON with a "text": {error}') from error
    if not isinstance(text, str):
        raise UserError(f'{path}: "text" of line {number + 1} is not a string')
    return text
