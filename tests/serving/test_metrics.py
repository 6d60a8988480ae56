"""Metrics: every field of a sample has one, and what is written is what `top` reads."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from prometheus_client import REGISTRY, generate_latest

from pagedweight.runtime.metrics import BUDGET, GAINED, INFO, METRICS, read_metrics
from pagedweight.runtime.timeline import BudgetSplit, Header, Sample
from pagedweight.serving.elastic.metrics import Metrics, forget_shared_metrics, share_metrics
from timelines import FIRST, HEADER, burst

NOT_METRICS = {"time", "monotonic", "plan", "stage", "plan_damage"}


def test_every_field_of_a_sample_is_one_metric():
    named = [field for metric in METRICS for field in metric.parts.values()]
    assert sorted(named) == sorted({f.name for f in fields(Sample)} - NOT_METRICS)
    assert all(metric.help.endswith(".") for metric in METRICS)
    assert all(bool(metric.label) == ("" not in metric.parts) for metric in METRICS)


def test_every_metric_and_field_is_in_the_manual():
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    names = {m.name for m in (*METRICS, GAINED)} | {INFO, BUDGET}
    names |= {f.name for kind in (Sample, Header, BudgetSplit) for f in fields(kind)}
    names |= {value for metric in METRICS for value in metric.parts if value}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_what_is_written_is_read():
    metrics, samples = Metrics(replace(HEADER, engine=7)), burst(40, preempts=3)
    for sample in samples:
        metrics.write(sample)
    view = read_metrics(generate_latest(REGISTRY).decode(), now=5.0, engine=7)
    last = replace(samples[-1], time=5.0, monotonic=5.0, plan="", stage="", plan_damage=0.0)
    assert view.sample == last
    assert view.budget == HEADER.budget
    assert (view.model, view.levels) == (HEADER.model, HEADER.levels)
    assert (view.version, view.usable_at_start) == (HEADER.version, HEADER.usable_at_start)


def test_a_second_engine_in_the_process_goes_on_counting():
    """Totals of a process never fall, as Prometheus wants it."""
    for _ in range(2):
        Metrics(replace(HEADER, engine=8)).write(replace(FIRST, rows_lowered=5))
    labels = {"engine": "8", "direction": "lowered"}
    assert REGISTRY.get_sample_value("pagedweight_transitions_total", labels) == 10


WRITE = """
from pagedweight.serving.elastic.metrics import Metrics
from timelines import HEADER, burst
metrics = Metrics(HEADER)
for sample in burst(8):
    metrics.write(sample)
"""
READ = """
import prometheus_client
from prometheus_client import multiprocess
registry = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(prometheus_client.generate_latest(registry).decode())
"""


def test_another_process_answers_for_the_scheduler(monkeypatch):
    """vLLM's API server reads what the engine core wrote, through the shared folder."""
    environment = share_metrics(dict(os.environ))
    folder = environment["PROMETHEUS_MULTIPROC_DIR"]
    environment["PYTHONPATH"] = os.path.dirname(os.path.dirname(__file__))
    try:
        assert share_metrics(environment) == environment
        subprocess.run([sys.executable, "-c", WRITE], env=environment, check=True)
        text = subprocess.run(
            [sys.executable, "-c", READ],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        view = read_metrics(text, now=0.0)
        assert view.sample.step == 8
        assert view.sample.rows_raised == burst(8)[-1].rows_raised > 0
    finally:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", folder)
        forget_shared_metrics()
    assert not os.path.exists(folder)


def test_a_folder_that_the_user_named_stays(tmp_path, monkeypatch):
    own = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    assert share_metrics(own) == own
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    forget_shared_metrics()
    assert tmp_path.is_dir()
