"""Tasks with answers: lm-eval task files over local data, run against the vLLM engine.

Each YAML file here is one task in lm-eval's own format; `documents` reads the data, `scoring` holds
the fields' scores, `harness` runs them. Nothing is fetched: data come from a folder of the user's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """One task: what to call it in print, its data below the data folder, its score in [0, 1].

    files: what must be there, the documents first. caveat: what a reader must know before comparing
    with published numbers; printed wherever the number is.
    """

    label: str
    files: tuple[str, ...]
    metric: str
    caveat: str = ""


_PROMPTS = "long/dataset2prompt.json"
TASKS = {
    "gsm8k": Task("GSM8K", ("gsm8k/test.jsonl",), "exact_match"),
    "math500": Task("MATH-500", ("math500/test.jsonl",), "exact_match"),
    "passage_retrieval_wiki": Task(
        "passage_retrieval_wiki",
        ("long/passage_retrieval_wiki.jsonl", _PROMPTS),
        "retrieval",
        "a stand-in for LongBench's passage_retrieval_en: not LongBench",
    ),
    "multi_news": Task("LongBench multi_news", ("long/multi_news.jsonl", _PROMPTS), "rouge_l"),
    "qmsum": Task(
        "qmsum",
        ("long/qmsum.jsonl", _PROMPTS),
        "rouge_l",
        "built from QMSum in LongBench's schema: not LongBench's own file",
    ),
}
"""By the name of the YAML file and of lm-eval's task, in the order they are printed."""
FOLDER = Path(__file__).parent
