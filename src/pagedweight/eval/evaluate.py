"""`pagedweight eval`: perplexity of a checkpoint at given bits, and divergence from its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from pagedweight.calibrate.pipeline import check_source
from pagedweight.checkpoint.manifest import MANIFEST
from pagedweight.checkpoint.names import text_config
from pagedweight.checkpoint.plan import Plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.shards import read_json
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import KINDS
from pagedweight.errors import UserError
from pagedweight.eval.reference import ReferenceModel, load_plain, load_quantized
from pagedweight.eval.statistics import Floats, bootstrap, perplexity, window_kl, window_nll
from pagedweight.eval.windows import WindowChoice, cut_windows
from pagedweight.kernels.device import device_of
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.plans import plan_argument, plan_of

Engine = Literal["reference", "vllm"]
DTYPES = ("float32", "bfloat16", "float16")
Progress = Callable[[int, int], None]
"""Called with windows done and windows in all."""


@dataclass(frozen=True)
class EvalOptions:
    """What is evaluated, and how.

    path: a quantized checkpoint, or an unquantized one (then no bits, no plan). model: the source,
    for KL; reference engine only. dtype: of arithmetic; None is float32 for the reference and the
    model's own type for vLLM. device: of the reference.
    """

    path: Path
    windows: WindowChoice
    bits: int | None = None
    plan: str | None = None
    engine: Engine = "reference"
    model: Path | None = None
    dtype: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Scores:
    """By window, nats: nll [M, windows] of M models, base_nll [windows], kl [M, windows]."""

    nll: Floats
    base_nll: Floats | None = None
    kl: Floats | None = None


@dataclass(frozen=True)
class _Subject:
    """The folder under evaluation, opened and checked; `checkpoint` is None when unquantized."""

    options: EvalOptions
    tokens: torch.Tensor
    checkpoint: Checkpoint | None = None
    plan: Plan | None = None
    dtype: str = field(default="float32")


def score(
    models: Sequence[ReferenceModel],
    base: ReferenceModel | None,
    tokens: torch.Tensor,
    progress: Progress,
) -> Scores:
    """Run every window [windows, W] through `base` once and through each model."""
    nll, kl = (np.empty((len(models), len(tokens))) for _ in range(2))
    base_nll = np.empty(len(tokens))
    for number, window in enumerate(tokens):
        truth = base.logits(window) if base else None
        if truth is not None:
            base_nll[number] = window_nll(truth, window.to(truth.device))
        for row, model in enumerate(models):
            logits = model.logits(window)
            nll[row, number] = window_nll(logits, window.to(logits.device))
            if truth is not None:
                kl[row, number] = window_kl(truth, logits)
        progress(number + 1, len(tokens))
    return Scores(nll, base_nll, kl) if base else Scores(nll)


def evaluate(options: EvalOptions, progress: Progress) -> dict[str, Any]:
    """Check everything, then measure; the result is ready for JSON. Raises UserError."""
    subject = _open(options)
    if options.engine == "vllm":
        return _report(subject, Scores(_run_vllm(subject)[None]))
    device, dtype = torch.device(options.device), getattr(torch, subject.dtype)
    if subject.checkpoint is None or subject.plan is None:
        model = load_plain(options.path, dtype, device)
    else:
        model = load_quantized(subject.checkpoint, subject.plan, dtype, device)
    base = load_plain(options.model, dtype, device) if options.model else None
    return _report(subject, score([model], base, subject.tokens, progress))


def _open(options: EvalOptions) -> _Subject:
    if options.engine not in ("reference", "vllm"):
        raise UserError(f"--engine {options.engine} is not one of reference, vllm")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype} is not one of {', '.join(DTYPES)}")
    if options.model and options.engine == "vllm":
        raise UserError(
            "KL needs whole distributions, which vLLM does not give: --model goes with "
            "--engine reference"
        )
    device_of(options.device)
    dtype = options.dtype or ("float32" if options.engine == "reference" else "auto")
    asked = ServeOptions(options.bits, options.plan)
    checkpoint = plan = None
    if (options.path / MANIFEST).exists():
        checkpoint = Checkpoint.open(options.path)
        plan = plan_of(checkpoint, asked)
    else:
        SourceCheckpoint.open(options.path)
        if asked != ServeOptions():
            raise UserError(f"{options.path} is not quantized: --bits and --plan do not apply")
    if options.model:
        _check_model(options.path, checkpoint, options.model)
    return _Subject(options, cut_windows(options.windows, options.path), checkpoint, plan, dtype)


def _check_model(path: Path, checkpoint: Checkpoint | None, model: Path) -> None:
    """The source must be a whole checkpoint that predicts the same tokens; of a quantized one, the
    one that it was made from."""
    source = SourceCheckpoint.open(model)
    if checkpoint is not None:
        check_source(checkpoint, source)
    ours, theirs = (
        text_config(read_json(p / "config.json")).get("vocab_size") for p in (path, model)
    )
    if ours != theirs:
        raise UserError(f"--model {model} has {theirs} tokens in its vocabulary, {path} has {ours}")


def _run_vllm(subject: _Subject) -> Floats:
    from pagedweight.eval.vllm_engine import vllm_nll

    options = subject.options
    asked = None
    if subject.checkpoint is not None:
        asked = ServeOptions(options.bits, plan_argument(options.plan))
    return vllm_nll(options.path, asked, subject.tokens, options.dtype)


def _report(subject: _Subject, scores: Scores) -> dict[str, Any]:
    options, (count, window) = subject.options, subject.tokens.shape
    seed = options.windows.seed
    report: dict[str, Any] = {
        "path": str(options.path),
        "engine": options.engine,
        "dtype": subject.dtype,
        "text": options.windows.text,
        "window": window,
        "windows": count,
        "predictions": count * (window - 1),
        "seed": seed,
        "precision": _precision(subject),
        **measures(scores, 0, seed),
    }
    if scores.base_nll is not None:
        report["model"] = {
            "path": str(options.model),
            "perplexity": asdict(perplexity(scores.base_nll, seed)),
        }
    report["per_window"] = {"nll": scores.nll[0].tolist()}
    if scores.base_nll is not None and scores.kl is not None:
        report["per_window"]["model_nll"] = scores.base_nll.tolist()
        report["per_window"]["kl"] = scores.kl[0].tolist()
    return report


def measures(scores: Scores, row: int, seed: int) -> dict[str, Any]:
    """Perplexity of one model and, with a base, its KL and its paired NLL difference, as JSON."""
    found = {"perplexity": asdict(perplexity(scores.nll[row], seed))}
    if scores.base_nll is not None and scores.kl is not None:
        found["kl"] = asdict(bootstrap(scores.kl[row], seed))
        found["nll_difference"] = asdict(bootstrap(scores.nll[row] - scores.base_nll, seed))
    return found


def _precision(subject: _Subject) -> dict[str, Any] | None:
    """Mean bits, by kind, and the bytes of the routed experts on a device; None: unquantized."""
    if subject.checkpoint is None or subject.plan is None:
        return None
    plan = subject.plan
    return {
        "mean_bits": float(plan.mean()),
        **{kind: float(plan[:, :, n].mean()) for n, kind in enumerate(KINDS)},
        "uniform": bool((plan == plan.flat[0]).all()),
        "expert_bytes": expert_bytes(subject.checkpoint, plan),
    }


def expert_bytes(checkpoint: Checkpoint, plan: Plan) -> int:
    """Bytes of all routed experts at the bits of `plan`: the sum of M_i^b (eq. 3)."""
    return sum(
        block.resident_bytes(int(bits)) * int((plan[:, :, kind] == bits).sum())
        for kind, block in enumerate(checkpoint.shape.blocks)
        for bits in np.unique(plan[:, :, kind])
    )
