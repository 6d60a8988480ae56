"""The metrics under `pagedweight_`: their names, and reading them from a server's /metrics.

One table says which field of a `Sample` is which metric; the server writes by it and `top` reads by
it. Every metric has the label `engine`, as vLLM's do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pagedweight.errors import UserError, listing
from pagedweight.runtime.timeline import BudgetSplit, Header, Sample

INFO = "pagedweight_info"
BUDGET = "pagedweight_budget_bytes"
INFO_LABELS = ("version", "model", "precision", "levels", "block_tokens", "granule_blocks")
_TEXT_FIELDS = ("plan", "stage")


@dataclass(frozen=True)
class Metric:
    """name: without the `_total` of counters. label: besides `engine`, empty for none.

    parts: field of `Sample` by the label's value ("" without a label).
    """

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    label: str
    parts: Mapping[str, str]


METRICS = (
    Metric(
        "gauge",
        "pagedweight_bytes",
        "Bytes of one rank's budget: experts on the device, pages that come or go, backed KV, "
        "pages that neither has (the reserve not counted).",
        "state",
        {
            "device": "device_bytes",
            "in_transfer": "transfer_bytes",
            "kv": "kv_bytes",
            "free": "free_bytes",
        },
    ),
    Metric(
        "gauge",
        "pagedweight_mean_bits",
        "Mean committed bits of expert weights, by kind of linear block.",
        "kind",
        {"all": "bits", "gate_up": "bits_gate_up", "down": "bits_down"},
    ),
    Metric(
        "gauge",
        "pagedweight_kv_blocks",
        "KV blocks: wanted by running and waiting requests, held by requests, backed by memory, "
        "backed if all bits were at their floor.",
        "state",
        {
            "demanded": "kv_demanded",
            "used": "kv_used",
            "usable": "kv_usable",
            "reachable": "kv_reachable",
        },
    ),
    Metric(
        "gauge",
        "pagedweight_requests",
        "Requests in the scheduler, as of the same step as the other metrics.",
        "state",
        {"running": "running", "waiting": "waiting"},
    ),
    Metric(
        "gauge",
        "pagedweight_target_bytes",
        "Bytes that KV pressure asks of weights at this step (eq. 7), 0 without pressure.",
        "",
        {"": "target_bytes"},
    ),
    Metric(
        "gauge",
        "pagedweight_predicted_damage",
        "Predicted damage (eq. 8) of the committed bits against every stored bit.",
        "",
        {"": "damage"},
    ),
    Metric(
        "gauge",
        "pagedweight_rows_waiting",
        "Linear blocks whose bits are not yet the desired ones.",
        "",
        {"": "rows_waiting"},
    ),
    Metric(
        "gauge",
        "pagedweight_batches_under_way",
        "Transitions that have not come to an end.",
        "",
        {"": "batches"},
    ),
    Metric(
        "counter",
        "pagedweight_steps",
        "Steps scheduled.",
        "",
        {"": "step"},
    ),
    Metric(
        "counter",
        "pagedweight_transitions",
        "Linear blocks that changed bits.",
        "direction",
        {"lowered": "rows_lowered", "raised": "rows_raised"},
    ),
    Metric(
        "counter",
        "pagedweight_copy_bytes",
        "Bytes copied: upload from the host, compaction within the device.",
        "kind",
        {"upload": "copied_bytes", "compaction": "compacted_bytes"},
    ),
    Metric(
        "counter",
        "pagedweight_floor_hits",
        "Steps under pressure at which bitwidth floors left less to give than was asked for.",
        "",
        {"": "floor_hits"},
    ),
    Metric(
        "counter",
        "pagedweight_damage_taken",
        "Predicted damage (eq. 8) of all plans that lowered bits.",
        "",
        {"": "damage_taken"},
    ),
    Metric(
        "counter",
        "pagedweight_rollbacks",
        "Transitions undone because memory was refused or a copy failed.",
        "",
        {"": "rollbacks"},
    ),
    Metric(
        "counter",
        "pagedweight_preemptions",
        "Requests preempted for lack of KV blocks.",
        "",
        {"": "preemptions"},
    ),
    Metric(
        "counter",
        "pagedweight_tokens",
        "Tokens: scheduled (prompts and what is computed again included) and generated.",
        "kind",
        {"scheduled": "tokens_scheduled", "generated": "tokens_generated"},
    ),
)
GAINED = Metric(
    "gauge",
    "pagedweight_kv_blocks_gained",
    "KV blocks backed now beyond those backed at the start; negative when fewer.",
    "",
    {},
)
"""Not a field of `Sample`: usable blocks less the header's `usable_at_start`."""


@dataclass(frozen=True)
class View:
    """What can be known of a running service: by a timeline's last line, or by /metrics.

    From /metrics, `sample.plan` and `sample.stage` are empty and times are the reader's.
    """

    version: str
    model: str
    precision: str
    levels: tuple[int, ...]
    block_tokens: int
    budget: BudgetSplit
    usable_at_start: int
    sample: Sample

    @staticmethod
    def of(header: Header, sample: Sample) -> View:
        picked = {f.name: getattr(header, f.name) for f in fields(View) if f.name != "sample"}
        return View(**picked, sample=sample)


def info_labels(header: Header) -> dict[str, str]:
    """Labels of `pagedweight_info`, which is always 1."""
    values = asdict(header) | {"levels": ",".join(map(str, header.levels))}
    return {name: str(values[name]) for name in INFO_LABELS}


def read_metrics(text: str, now: float, engine: int = 0) -> View:
    """A `View` of the text that /metrics answers; `now`: seconds since the epoch.

    UserError when the text has no metrics of ours for that engine, or those of another release.
    """
    found, info = _samples_of(text, str(engine))
    if info is None:
        raise UserError(_nothing_in(text, engine))
    try:
        values = {
            part: found[_exported(metric), key]
            for metric in METRICS
            for key, part in metric.parts.items()
        }
        budget = {f.name: int(found[BUDGET, f.name]) for f in fields(BudgetSplit)}
        gained = int(found[GAINED.name, ""])
    except KeyError as fault:
        raise UserError(
            f"/metrics has no {' '.join(fault.args[0]).strip()}: server and program must be of the "
            "same release"
        ) from None
    return View(
        version=info["version"],
        model=info["model"],
        precision=info["precision"],
        levels=tuple(int(level) for level in info["levels"].split(",")),
        block_tokens=int(info["block_tokens"]),
        budget=BudgetSplit(**budget),
        usable_at_start=int(values["kv_usable"]) - gained,
        sample=_sample(values, now),
    )


def _exported(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def _sample(values: Mapping[str, float], now: float) -> Sample:
    filled: dict[str, Any] = {"time": now, "monotonic": now} | dict.fromkeys(_TEXT_FIELDS, "")
    filled |= {"plan_damage": 0.0}
    for field in fields(Sample):
        if field.name not in filled:
            value = values[field.name]
            filled[field.name] = int(value) if field.type == "int" else value
    return Sample(**filled)


def _samples_of(
    text: str, engine: str
) -> tuple[dict[tuple[str, str], float], dict[str, str] | None]:
    """(value by exported name and label, labels of the info metric or None) of one engine."""
    labels_of = {_exported(metric): metric.label for metric in (*METRICS, GAINED)}
    labels_of[BUDGET] = "part"
    found: dict[tuple[str, str], float] = {}
    info = None
    for name, labels, value in _lines(text):
        if labels.get("engine") != engine:
            continue
        if name == INFO:
            info = labels
        elif name in labels_of:
            found[name, labels.get(labels_of[name], "")] = value
    return found, info


def _lines(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    ours = [line for line in text.splitlines() if line.startswith("pagedweight_")]
    for family in text_string_to_metric_families("\n".join(ours) + "\n"):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _nothing_in(text: str, engine: int) -> str:
    others = defaultdict(int)
    for name, labels, _ in _lines(text):
        others[labels.get("engine", "")] += name == INFO
    if others:
        return f"/metrics knows engines {listing(sorted(others))}, not engine {engine}"
    return (
        "the server's /metrics has no pagedweight metrics: it must be started by `pagedweight "
        "serve OUT --memory SIZE`"
    )
