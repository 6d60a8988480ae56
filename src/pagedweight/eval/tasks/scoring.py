"""Scores of one answer, each in [0, 1], by the conventions of the task's field.

The functions without an underscore are lm-eval's `process_results`: a document and the list of
texts generated for it to a value by metric name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pagedweight.eval.tasks.math_answers import boxed, same_answer

Scores = dict[str, float]
_GSM8K = re.compile(r"####\s*(-?[\d.,]*\d)")


def gsm8k(doc: Mapping[str, Any], results: Sequence[str]) -> Scores:
    """Exact match of the number after `####`, commas left out (Cobbe et al. 2021)."""
    found, wanted = (_number(text) for text in (results[0], doc["answer"]))
    return {"exact_match": float(found is not None and found == wanted)}


def math500(doc: Mapping[str, Any], results: Sequence[str]) -> Scores:
    r"""Equality of the last `\boxed{}` with the answer, both normalized (Hendrycks et al. 2021)."""
    found = boxed(results[0])
    return {"exact_match": float(found is not None and same_answer(found, doc["answer"]))}


def retrieval(doc: Mapping[str, Any], results: Sequence[str]) -> Scores:
    """LongBench's retrieval score: share of the right paragraph among all numbers given."""
    wanted = re.findall(r"Paragraph (\d+)", doc["answers"][0])
    numbers = re.findall(r"\d+", results[0])
    right = Counter(numbers)[wanted[0]]
    return {"retrieval": right / len(numbers) if numbers else 0.0}


def rouge_l(doc: Mapping[str, Any], results: Sequence[str]) -> Scores:
    """ROUGE-L F1 (Lin 2004) by the `rouge-score` package, the best of the references."""
    scores = (_rouge().score(answer, results[0])["rougeL"].fmeasure for answer in doc["answers"])
    return {"rouge_l": max(scores)}


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"])


def _number(text: str) -> str | None:
    """The first number after `####`, as GSM8K's own script reads it."""
    match = _GSM8K.search(text)
    return match[1].replace(",", "").removesuffix(".") if match else None
