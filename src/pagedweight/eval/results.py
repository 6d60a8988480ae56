"""Result files of the studies: what was asked, then rows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedweight.checkpoint.result_file import write_result
from pagedweight.core.policy_file import policy_to_json

if TYPE_CHECKING:
    from pagedweight.eval.frontier import Frontier
    from pagedweight.eval.study import Study

Rows = list[dict[str, Any]]


def frontier_record(told: dict[str, Any], rows: Rows, comparisons: Rows) -> dict[str, Any]:
    """quality.json; `told`: see `setting`."""
    question = (
        "mean KL(source || quantized) and perplexity of policies at equal bytes of routed experts, "
        "tables included; 95% bootstrap over windows"
    )
    return {"question": question, **told, "rows": rows, "comparisons": comparisons}


def ablation_record(told: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """ablation.json; `told`: see `setting`."""
    question = (
        "what each part of the planner is worth: mean KL without it, against the whole, paired by "
        "window, 95% bootstrap over the windows of each text"
    )
    return {"question": question, **told, "rows": rows}


def setting(study: Study) -> dict[str, Any]:
    """What was measured, on what, and how."""
    options = study.options
    return {
        "calibration": study.checkpoint.calibration().metadata,
        "policy": json.loads(policy_to_json(study.policy)),
        "load": options.load,
        "replan_tokens": options.replan_tokens,
        "pressure": {text: list(budgets) for text, budgets in study.pressure.items()} or None,
        "texts": {name: list(tokens.shape) for name, tokens in study.tokens.items()},
        "oracle_windows": options.oracle_windows,
        "seed": options.seed,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def write_results(path: Path, record: dict[str, Any]) -> None:
    """JSON, one row of a list of rows a line; under a temporary name first."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    write_result(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def save_windows(path: Path, found: Frontier) -> None:
    """KL and nll of every window, numpy's npz: `TEXT/POLICY/BUDGET/kl`, `TEXT/base_nll`."""
    arrays = {f"{text}/base_nll": nll for text, nll in found.base_nll.items()}
    for text, cells in found.cells.items():
        for (policy, budget), cell in cells.items():
            arrays[f"{text}/{policy}/{budget}/kl"] = cell.kl
            arrays[f"{text}/{policy}/{budget}/nll"] = cell.nll
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_result(path, buffer.getvalue())
