"""Scores of the tasks, and the documents they are given."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest
from rich.console import Console

from pagedweight.errors import UserError
from pagedweight.eval.statistics import bootstrap
from pagedweight.eval.tasks import FOLDER, TASKS
from pagedweight.eval.tasks.documents import long_items, problems, read_rows
from pagedweight.eval.tasks.interval import interval
from pagedweight.eval.tasks.math_answers import boxed, normalized, same_answer
from pagedweight.eval.tasks.scoring import gsm8k, math500, retrieval, rouge_l
from pagedweight.eval.tasks.table import show_tasks

with_lm_eval = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install '.[eval]'"
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("He has 3 + 4 = 7.\n#### 1234", 1),
        ("#### 1,234.", 1),
        ("#### 1234\nQuestion: 5\n#### 6", 1),
        ("The answer is 1234", 0),
        ("#### 12345", 0),
        ("#### -1234", 0),
        ("#### ", 0),
        ("", 0),
    ],
)
def test_gsm8k_is_the_number_after_the_marks(text, value):
    assert gsm8k({"answer": "Some steps.\n#### 1,234"}, [text]) == {"exact_match": value}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{\left\{ 2 \right\}}", r"\left\{ 2 \right\}"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 9$", "9"),
        (r"\boxed{never closed", None),
        ("nothing", None),
    ],
)
def test_the_last_box(text, content):
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"\frac{1}{2}", "1/2"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"10,080", "10080"),
        (r"106^\circ", "106"),
        (r"\$18.90", "18.9"),
        (".5", "0.50"),
        (r"12\text{ cm}", "12"),
        (r"\text{Evelyn}", "Evelyn"),
        ("x = 5", "5"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"50\%", "50"),
    ],
)
def test_answers_that_mean_the_same(one, other):
    assert same_answer(one, other)
    assert same_answer(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "2"), (r"\frac{1}{2}", r"\frac{2}{1}"), ("(1,2)", "(2,1)"), ("x", "-x"), ("", "0")],
)
def test_answers_that_differ(one, other):
    assert not same_answer(one, other)


def test_math500_wants_a_box():
    doc = {"answer": r"\frac{3}{4}"}
    assert math500(doc, [r"It is $\boxed{3/4}$."]) == {"exact_match": 1}
    assert math500(doc, ["It is 3/4."]) == {"exact_match": 0}


def test_every_answer_of_the_file_is_itself(lab_moe):
    rows = read_rows(lab_moe.parents[1] / "eval" / "math500" / "test.jsonl")
    for row in rows:
        assert math500(row, [row["solution"]]) == {"exact_match": 1}, row["answer"]
        assert normalized(normalized(row["answer"])) == normalized(row["answer"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("Paragraph 4", 1), ("Paragraph 4 or 12", 0.5), ("Paragraph 14", 0), ("none", 0)],
)
def test_retrieval_shares_the_score_among_the_numbers(text, value):
    assert retrieval({"answers": ["Paragraph 4"]}, [text]) == {"retrieval": value}


@with_lm_eval
def test_rouge_l_takes_the_best_reference():
    # Longest common subsequence 3 of 4 and 3 of 3 words: F1 is 2 * .75 * 1 / 1.75.
    doc = {"answers": ["something else", "the cat sat down"]}
    assert rouge_l(doc, ["The cat sat."])["rouge_l"] == pytest.approx(6 / 7)
    assert rouge_l(doc, [""])["rouge_l"] == 0


@with_lm_eval
def test_examples_are_the_shortest_of_the_last_problems_and_not_scored(tmp_path):
    rows = [{"question": f"q{n}" + "." * (n % 7), "answer": f"#### {n}"} for n in range(40)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = problems(str(tmp_path), "p.jsonl", 3, version=1.0)
    assert [row["answer"] for row in found["shots"]] == ["#### 21", "#### 28", "#### 35"]
    assert len(found["test"]) == 37
    assert not {row["answer"] for row in found["test"]} & {"#### 21", "#### 28", "#### 35"}
    with pytest.raises(UserError, match="40 problems; 40 of them"):
        problems(str(tmp_path), "p.jsonl", 40)


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"question": "a"}\n{broken\n')
    with pytest.raises(UserError, match=r"p\.jsonl, line 2 is not JSON"):
        read_rows(tmp_path / "p.jsonl")


@with_lm_eval
def test_prompts_and_lengths_are_longbench_s(lab_moe):
    data = lab_moe.parents[1] / "eval"
    lengths = json.loads((data / "long" / "dataset2maxlen.json").read_text())
    for name, theirs in (("passage_retrieval_wiki", "passage_retrieval_en"), ("qmsum", "qmsum")):
        assert f"max_gen_toks: {lengths[theirs]}}}" in (FOLDER / f"{name}.yaml").read_text()
        item = long_items(str(data), f"long/{name}.jsonl", theirs)["test"][0]
        row = read_rows(data / "long" / f"{name}.jsonl")[0]
        assert row["context"] in item["prompt"]
        assert row["input"] in item["prompt"]


def test_every_task_has_its_file():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(TASKS)


def test_the_table_cuts_no_number_and_says_what_is_a_stand_in(capsys):
    row = {
        "label": "passage_retrieval_wiki", "caveat": "not LongBench", "metric": "exact_match",
        "value": 0.123, "low": 0.0, "high": 1.0, "items": 10, "items_in_file": 1314, "truncated": 7,
    }  # fmt: skip
    report = {"path": "OUT", "precision": None, "context": 2048, "lm_eval": "0.4.13"}
    show_tasks({**report, "tasks": [row]}, Console(highlight=False, width=80))
    shown = capsys.readouterr().out
    for text in (
        "passage_retrieval_wiki*",
        "0.123 [0.000, 1.000]",
        "10/1314",
        "  7",
        "exact_match",
    ):
        assert text in shown
    assert "* passage_retrieval_wiki: not LongBench" in shown


def test_ten_wrong_answers_do_not_rule_out_a_right_one():
    none = interval(np.zeros(10), 0)
    assert (none.mean, none.low) == (0, 0)
    assert none.high == pytest.approx(0.2775, abs=1e-4)  # Wilson's for 0 of 10
    all_right = interval(np.ones(10), 0)
    assert (all_right.low, all_right.high) == (pytest.approx(1 - none.high), 1)
    some = interval(np.array([1.0] * 3 + [0.0] * 7), 0)
    assert (some.low, some.high) == (
        pytest.approx(0.1078, abs=1e-4),
        pytest.approx(0.6032, abs=1e-4),
    )
    shares = np.array([0.0, 0.5, 1.0, 0.25])
    assert interval(shares, 3) == bootstrap(shares, 3)
