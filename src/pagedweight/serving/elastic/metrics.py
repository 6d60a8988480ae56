"""Prometheus metrics of the scheduler's process, merged into vLLM's /metrics.

vLLM answers /metrics in the API server, the scheduler lives in the engine core. prometheus_client
joins processes through files in a folder named by PROMETHEUS_MULTIPROC_DIR, which it looks at when
it is imported: `pagedweight serve` sets it before anything starts. Without the variable (an offline
`LLM`) the metrics are in this process's own registry.
Relies on: vllm.v1.metrics.prometheus.get_prometheus_registry reading that folder when the variable
is set. Tested with vLLM 0.32.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache

from prometheus_client import Counter, Gauge

from pagedweight.runtime.metrics import BUDGET, GAINED, INFO, INFO_LABELS, METRICS, info_labels
from pagedweight.runtime.timeline import Header, Sample

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_PREFIX = "pagedweight-metrics-"


def share_metrics(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with a fresh folder in which processes share metrics, unless it names one."""
    if _FOLDER in environment:
        return dict(environment)
    return {**environment, _FOLDER: tempfile.mkdtemp(prefix=_PREFIX)}


def forget_shared_metrics() -> None:
    """Remove the folder that `share_metrics` made; one that the user named stays."""
    folder = os.environ.get(_FOLDER, "")
    if os.path.basename(folder).startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
    return Gauge(name, text, ("engine", *labels), multiprocess_mode="mostrecent")


@cache
def _counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
    return Counter(name, text, ("engine", *labels))


class Metrics:
    """Sets every metric from samples. One for each engine of a process, one after the other."""

    def __init__(self, header: Header) -> None:
        engine = str(header.engine)
        info = _gauge(INFO, "What is served; always 1.", INFO_LABELS)
        info.labels(engine=engine, **info_labels(header)).set(1)
        budget = _gauge(BUDGET, "How a rank's memory budget is divided.", ("part",))
        for part, nbytes in asdict(header.budget).items():
            budget.labels(engine, part).set(nbytes)
        self._gained = _gauge(GAINED.name, GAINED.help, ()).labels(engine)
        self._usable_at_start = header.usable_at_start
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._counted: dict[str, float] = {}
        for metric in METRICS:
            labels = (metric.label,) if metric.label else ()
            for value, field in metric.parts.items():
                own = (engine, value) if metric.label else (engine,)
                if metric.kind == "gauge":
                    of = _gauge(metric.name, metric.help, labels)
                    self._gauges[field] = of.labels(*own)
                else:
                    total = _counter(metric.name, metric.help, labels)
                    self._counters[field] = total.labels(*own)

    def write(self, sample: Sample) -> None:
        """Set gauges, add to counters what is new since the last sample."""
        for field, gauge in self._gauges.items():
            gauge.set(getattr(sample, field))
        self._gained.set(sample.kv_usable - self._usable_at_start)
        for field, counter in self._counters.items():
            value = getattr(sample, field)
            counter.inc(max(0, value - self._counted.get(field, 0)))
            self._counted[field] = value

    def flush(self) -> None:
        """Nothing waits: values are where readers look as soon as they are set."""

    def close(self) -> None:
        """Values stay as they were last; the process ends."""
