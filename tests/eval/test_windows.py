"""Which tokens are evaluated, and what is refused."""

import json

import pytest
import torch

from pagedweight.errors import UserError
from pagedweight.eval.windows import WindowChoice, cut_windows


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of a text about rivers and boats. " for n in range(60)))
    return path


def tokens_of(model, text):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(text.read_text()).input_ids


def test_all_windows_are_the_text_without_overlap(tiny_moe, text):
    stream = tokens_of(tiny_moe, text)
    windows = cut_windows(WindowChoice(str(text), window=32), tiny_moe)
    assert windows.shape == (len(stream) // 32, 32)
    assert windows.flatten().tolist() == stream[: windows.numel()]


def test_the_seed_draws_windows_in_the_order_of_the_text(tiny_moe, text):
    every = cut_windows(WindowChoice(str(text), window=16), tiny_moe).tolist()
    drawn = cut_windows(WindowChoice(str(text), 16, windows=5, seed=3), tiny_moe)
    places = [every.index(row) for row in drawn.tolist()]
    assert places == sorted(set(places))
    assert len(places) == 5
    again = cut_windows(WindowChoice(str(text), 16, windows=5, seed=3), tiny_moe)
    other = cut_windows(WindowChoice(str(text), 16, windows=5, seed=4), tiny_moe)
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)


def test_documents_of_json_lines(tiny_moe, tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {n} " * 20}) + "\n" for n in range(9)))
    whole = cut_windows(WindowChoice(str(path), 16), tiny_moe)
    part = cut_windows(WindowChoice(f"{path}:2-4", 16), tiny_moe)
    assert 0 < len(part) < len(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 2000}, r"has \d+ tokens, 0 windows of 2000; 1 needed"),
        ({"window": 32, "windows": 500}, r"windows of 32; 500 needed"),
        ({"window": 4096}, r"longer than the model's 2048 positions"),
        ({"window": 1}, r"needs 2 tokens"),
        ({"windows": 0}, r"--windows 0"),
    ],
)
def test_what_cannot_be_cut_is_refused(tiny_moe, text, change, message):
    with pytest.raises(UserError, match=message):
        cut_windows(WindowChoice(str(text), **change), tiny_moe)
