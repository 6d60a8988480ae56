"""`pagedweight inspect --config`: what a model will take, from its config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedweight.cli.sizes import size
from pagedweight.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.serving.elastic.budget import Budget
    from pagedweight.serving.forecast import Forecast


def forecast_report(
    path: Path, budget: str | None, reserve: str | None, bits: int | None, plan: bool
) -> dict[str, Any]:
    """Plain values for JSON and for `show_forecast`. Raises UserError."""
    from pagedweight.checkpoint.manifest import FORMAT
    from pagedweight.checkpoint.shards import read_json
    from pagedweight.serving.forecast import LEVELS, Forecast, Question
    from pagedweight.serving.options import parse_bytes

    if plan and budget is None:
        raise UserError("--plan chooses bits for a budget: give --budget, for example 24GiB")
    if plan and bits is not None:
        raise UserError("--plan and --bits exclude each other: give one of them")
    config = read_json(path / "config.json" if path.is_dir() else path)
    found = config.get("quantization_config") or {}
    if not isinstance(found, dict):
        raise UserError(f"{path}: quantization_config is {json.dumps(found)}, not an object")
    ours = found.get("quant_method") == FORMAT
    levels = _stored(path, found.get("bits")) if ours else LEVELS
    if bits is not None and bits not in levels:
        raise UserError(f"--bits {bits} is not one of the levels {', '.join(map(str, levels))}")
    room = None if budget is None else parse_bytes(budget)
    if room == 0:
        raise UserError("--budget 0: give the device's memory, for example 24GiB")
    question = Question(
        room,
        None if reserve is None else parse_bytes(reserve),
        levels,
    )
    forecast = Forecast.of(config, question)
    report = _model(path, config, forecast)
    report["levels"] = [_level(forecast, level) for level in levels]
    if found and not ours:
        report["notes"].append(
            f"the published weights are quantized already ({found.get('quant_method')}): quantize "
            "starts from an unquantized copy"
        )
    if budget is not None:
        report["budget"] = _budget(forecast)
    if plan:
        report["plan"] = _plan(forecast)
    if bits is not None:
        report["chosen_bits"] = bits
    return report


def _stored(path: Path, bits: Any) -> tuple[int, ...]:
    """Levels of a checkpoint's own config.json. Raises UserError."""
    from pagedweight.checkpoint.manifest import bits_problems

    whole = isinstance(bits, list) and all(isinstance(level, int) for level in bits)
    if not whole or bits_problems(bits):
        raise UserError(f"{path}: quantization_config has bits {json.dumps(bits)}, not levels")
    return tuple(bits)


def _model(path: Path, config: Mapping[str, Any], forecast: Forecast) -> dict[str, Any]:
    from pagedweight.serving.forecast import longest

    facts, shape = forecast.facts, forecast.facts.shape
    weights = len(facts.moe_layers) * shape.experts * 3 * shape.hidden * shape.intermediate
    notes = []
    if not forecast.one_size:
        memory = "" if forecast.can_be_elastic else "served at fixed bits, not with --memory; "
        notes.append(
            f"layers have KV of several sizes: {memory}KV tokens count every layer in full, so "
            "they are the least that fit"
        )
    return {
        "config": str(path),
        "architecture": facts.architecture,
        "num_hidden_layers": facts.num_hidden_layers,
        "moe_layers": len(facts.moe_layers),
        "experts": shape.experts,
        "top_k": facts.top_k,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "linear_blocks": forecast.context.index.rows,
        "expert_weights": weights,
        "dtype": forecast.plain.dtype,
        "unquantized_expert_bytes": weights * forecast.kv_value_bytes,
        "plane_bytes": dict(
            zip(("gate_up", "down"), forecast.context.sizes.plane_bytes, strict=True)
        ),
        "plain_bytes": forecast.plain.nbytes,
        "plain_groups": dict(forecast.plain.groups),
        "host_bytes": forecast.host_bytes,
        "kernel_table_bytes": forecast.table_bytes,
        "kv": {
            "block_tokens": forecast.question.block_tokens,
            "block_bytes": forecast.block.nbytes,
            "group_block_tokens": list(forecast.groups.block_tokens) if forecast.groups else None,
            "token_bytes": forecast.token_bytes,
            "token_bytes_beyond_windows": forecast.lasting_token_bytes,
            "positions": longest(config),
        },
        "notes": notes,
    }


def _level(forecast: Forecast, bits: int) -> dict[str, Any]:
    """All experts at `bits`: bytes, and with a budget whether it fits and what is left for KV."""
    sizes, rows = forecast.context.sizes, forecast.context.index.rows // 2
    shape, level = forecast.facts.shape, bits - sizes.lowest
    planes = rows * bits * sum(sizes.plane_bytes)
    tables = rows * int(sizes.table_bytes[:, level].sum())
    weights = rows * 3 * shape.hidden * shape.intermediate
    found = {
        "bits": bits,
        "plane_bytes": planes,
        "table_bytes": tables,
        "bytes": planes + tables,
        "held_bytes": forecast.held(bits),
        "bits_per_weight": 8 * (planes + tables) / weights,
        "least_budget": forecast.least_budget(bits),
    }
    if forecast.question.budget is not None:
        divided = forecast.at(bits)
        found["fits"] = divided is not None
        found["kv_tokens"] = _tokens(forecast, divided)
    return found


def _tokens(forecast: Forecast, divided: Budget | None) -> int:
    return forecast.tokens(divided.usable_granules * divided.granule_blocks) if divided else 0


def _reachable(forecast: Forecast, divided: Budget) -> int:
    """KV tokens with all experts at the lowest bits; those of the start where bits cannot move."""
    blocks = divided.reachable_blocks if forecast.can_be_elastic else None
    return _tokens(forecast, divided) if blocks is None else forecast.tokens(blocks)


def _budget(forecast: Forecast) -> dict[str, int | None]:
    return {
        "bytes": forecast.question.budget,
        "reserve_bytes": forecast.reserve,
        "memory_bytes": forecast.memory,
        "page_bytes": forecast.page_bytes,
    }


def _plan(forecast: Forecast) -> dict[str, Any]:
    """What `serve --memory` would start with, without a calibration to tell experts apart."""
    import numpy as np

    divided = forecast.elastic()
    if divided is None:
        lowest = forecast.context.sizes.lowest
        return {"fits": False, "least_budget": forecast.least_budget(lowest)}
    levels, counts = np.unique(divided.bits, return_counts=True)
    return {
        "fits": True,
        "mean_bits": float(divided.bits.mean()),
        "blocks_at": {str(b): int(n) for b, n in zip(levels, counts, strict=True)},
        "held_bytes": divided.weight_pages * divided.page_bytes,
        "reserve_for_lowering_bytes": divided.reserve * divided.page_bytes,
        "kv_tokens": _tokens(forecast, divided),
        "lowest_bits": forecast.context.sizes.lowest,
        "kv_tokens_reachable": _reachable(forecast, divided),
        "elastic": forecast.can_be_elastic,
    }


def show_forecast(report: dict[str, Any], console: Console) -> None:
    """The model, a row for each level, and the plan."""
    moe, kv = report["moe_layers"], report["kv"]
    console.print(
        f"[bold]{report['config']}[/bold]: {report['architecture']}, {moe} MoE layers of "
        f"{report['num_hidden_layers']}, {report['experts']} experts (top {report['top_k']}), "
        f"{report['linear_blocks']:,} linear blocks, {report['expert_weights']:,} weights in them",
        soft_wrap=True,
    )
    groups = ", ".join(f"{n} {size(b)}" for n, b in report["plain_groups"].items())
    console.print(
        f"everything else, {report['dtype']}: {size(report['plain_bytes'])} ({groups})",
        soft_wrap=True,
    )
    window = ""
    if kv["token_bytes_beyond_windows"] != kv["token_bytes"]:
        window = f", {size(kv['token_bytes_beyond_windows'])} beyond the sliding windows"
    console.print(
        f"KV: {size(kv['token_bytes'])} a token{window}; host memory for all planes and tables: "
        f"{size(report['host_bytes'])}; experts unquantized: "
        f"{size(report['unquantized_expert_bytes'])}",
        soft_wrap=True,
    )
    if budget := report.get("budget"):
        console.print(
            f"budget {size(budget['bytes'])}: {size(budget['reserve_bytes'])} reserve, "
            f"{size(report['plain_bytes'])} everything else, "
            f"{size(report['kernel_table_bytes'])} addresses, "
            f"{size(budget['memory_bytes'])} for experts and KV",
            soft_wrap=True,
        )
    console.print(_table(report))
    if plan := report.get("plan"):
        _show_plan(plan, report["budget"], console)
    for note in report["notes"]:
        console.print(f"[yellow]{note}[/yellow]", soft_wrap=True)


def _table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    budgeted, chosen = "budget" in report, report.get("chosen_bits")
    table = Table(title="all routed experts at uniform bits", title_justify="left")
    names = ("bits", "experts", "in pages", "tables %", "bits per weight", "least budget")
    for name in (*names, *(("fits", "KV tokens") if budgeted else ())):
        table.add_column(name, justify="right")
    for row in report["levels"]:
        fits = ("yes" if row["fits"] else "no", f"{row['kv_tokens']:,}") if budgeted else ()
        table.add_row(
            str(row["bits"]),
            size(row["bytes"]),
            size(row["held_bytes"]),
            f"{100 * row['table_bytes'] / row['bytes']:.1f}",
            f"{row['bits_per_weight']:.3f}",
            size(row["least_budget"]),
            *fits,
            style="bold" if row["bits"] == chosen else None,
        )
    return table


def _show_plan(plan: dict[str, Any], budget: dict[str, Any], console: Console) -> None:
    if not plan["fits"]:
        console.print(
            f"plan: does not fit in {size(budget['bytes'])}; at least "
            f"{size(plan['least_budget'])} are needed"
        )
        return
    mix = ", ".join(f"{count:,} at {bits}" for bits, count in plan["blocks_at"].items())
    console.print(
        f"plan: {plan['mean_bits']:.2f} bits at the start ({mix}; no calibration known), experts "
        f"{size(plan['held_bytes'])}, KV for {plan['kv_tokens']:,} tokens",
        soft_wrap=True,
    )
    if plan["elastic"]:
        console.print(
            f"      under pressure KV grows to {plan['kv_tokens_reachable']:,} tokens at "
            f"{plan['lowest_bits']} bits: pagedweight serve OUT --memory {budget['memory_bytes']}",
            soft_wrap=True,
        )
