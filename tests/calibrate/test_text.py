"""Which tokens calibration sees, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedweight.calibrate import text
from pagedweight.calibrate.text import CalibrationChoice, load_tokens
from pagedweight.errors import UserError

WORDS = [f"document number {n} speaks of rivers, boats and the {n % 7} winds. " for n in range(40)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "c4.jsonl"
    path.write_text("".join(json.dumps({"text": w, "url": "u"}) + "\n" for w in WORDS))
    return path


def load(model: Path, path: object, *numbers: int, limit: int | None = None):
    return load_tokens(CalibrationChoice(str(path), *numbers), model, limit)


def decode(model: Path, tokens) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).decode(tokens.flatten())


def test_plain_text_is_cut_into_sequences(tiny_moe: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("".join(WORDS))
    everything = load(tiny_moe, path, 1, 600)
    assert (
        decode(tiny_moe, everything.tokens)
        == "".join(WORDS)[: len(decode(tiny_moe, everything.tokens))]
    )
    cut = load(tiny_moe, path, 4, 20, 7)
    assert cut.tokens.shape == (4, 20)
    assert cut.metadata["text"].startswith("text.txt sha256:")
    assert (cut.metadata["sequences"], cut.metadata["seed"]) == ("4", "7")


def test_long_text_is_tokenized_in_pieces(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "\n".join(word.strip() for word in WORDS) + "\n\n  an indented line\nno line end here"
    whole = text.tokenize(long, tiny_moe)
    monkeypatch.setattr(text, "PIECE", 50)
    assert len(list(text._in_pieces(long, list))) > 20
    assert text.tokenize(long, tiny_moe) == whole


def test_the_seed_picks_and_repeats(tiny_moe: Path, jsonl: Path) -> None:
    first, again = load(tiny_moe, jsonl, 5, 16, 1), load(tiny_moe, jsonl, 5, 16, 1)
    other = load(tiny_moe, jsonl, 5, 16, 2)
    assert (first.tokens == again.tokens).all()
    assert (first.tokens != other.tokens).any()


def test_a_range_is_those_documents(tiny_moe: Path, jsonl: Path) -> None:
    found = decode(tiny_moe, load(tiny_moe, f"{jsonl}:10-12", 2, 16).tokens)
    whole = "\n\n".join(WORDS[10:13])
    assert found.strip()[:20] in whole
    assert "number 9 " not in found
    assert "number 13 " not in found
    last = load(tiny_moe, f"{jsonl}:39-39", 1, 8)
    assert last.metadata["text"].startswith("c4.jsonl:39-39 sha256:")
    assert decode(tiny_moe, last.tokens) in WORDS[39]


def test_sequences_begin_as_the_tokenizer_begins_texts(tiny_moe: Path, tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text.txt"
    model.mkdir()
    text.write_text("".join(WORDS))
    content = json.loads((tiny_moe / "tokenizer.json").read_text())
    bos = content["added_tokens"][0]
    word = bos["content"]
    first = {"SpecialToken": {"id": word, "type_id": 0}}
    rest = [{"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB")]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, rest[0]],
        "pair": rest,
        "special_tokens": {word: {"id": word, "ids": [bos["id"]], "tokens": [word]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((tiny_moe / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": word}))
    tokens = load(model, text, 3, 32).tokens
    assert (tokens[:, 0] == bos["id"]).all()
    assert (tokens[:, 1:] != bos["id"]).all()
    assert (load(tiny_moe, text, 3, 32).tokens != bos["id"]).all()


@pytest.mark.parametrize(
    "suffix, numbers, limit, message",
    (
        ("", (500, 16), None, "at most --sequences"),
        ("", (1, 64), 32, "at most 32"),
        ("", (0, 16), None, "at least 1 sequence"),
        (":30-40", (1, 16), None, "40 documents, numbered from 0: it does not have 30 to 40"),
        (":12-11", (1, 16), None, "does not have 12 to 11"),
    ),
)
def test_too_little_or_too_long(
    tiny_moe: Path, jsonl: Path, suffix: str, numbers, limit, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(tiny_moe, f"{jsonl}{suffix}", *numbers, limit=limit)


def test_bad_files(tiny_moe: Path, tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes(b"\xff\xfe latin")
    lines.write_text('{"text": "fine"}\n{"texts": "no"}\n')
    for path, message in (
        (tmp_path / "none.txt", "not a file"),
        (text, "not UTF-8"),
        (lines, "line 2 is not JSON with"),
        (f"{text}:0-1", "not JSON lines"),
    ):
        with pytest.raises(UserError, match=message):
            load(tiny_moe, path, 1, 4)
    lines.write_text('{"text": 5}\n')
    with pytest.raises(UserError, match="line 1 is not a string"):
        load(tiny_moe, lines, 1, 4)
    lines.write_text("")
    with pytest.raises(UserError, match="no documents"):
        load(tiny_moe, lines, 1, 4)


def test_a_model_without_a_tokenizer(tmp_path: Path, jsonl: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        load(tmp_path / "model", jsonl, 1, 4)
