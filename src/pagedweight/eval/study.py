"""What `--policy`, `--frontier` and `--ablation` share: checkpoint, source, texts, budgets."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pagedweight.calibrate.measure import MeasureOptions, measure
from pagedweight.calibrate.pipeline import check_source
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.planner import PlanContext
from pagedweight.core.policies import Load, PagedPolicy, make_policy
from pagedweight.core.policy import Policy
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError
from pagedweight.eval.fleet import Fleet
from pagedweight.eval.pressure import bits_of_windows, load_pressure
from pagedweight.eval.reference import load_plain
from pagedweight.eval.stream import Lane, Progress, StreamOptions, StreamScores, score_stream
from pagedweight.eval.windows import WindowChoice, cut_windows
from pagedweight.kernels.device import device_of
from pagedweight.serving.elastic.budget import calibration_of, policy_of
from pagedweight.serving.expert_budget import parse_budget, uniform_bytes
from pagedweight.serving.options import ServeOptions

TF32 = "tf32"
"""float32 whose products round their factors to 10 bits of mantissa: CUDA's tensor cores. The
bank's weights have 7 and lose nothing."""
DTYPES = ("float32", TF32, "bfloat16", "float16")
ORACLE = "oracle"
"""The static plan of the evaluated text's own sensitivities: what no server can know."""


@dataclass(frozen=True)
class StudyOptions:
    """What is studied, and how.

    texts: (name, windows) each. policy: policy file. load, replan_tokens: what paged is put under.
    pressure: timeline whose bits paged follows, window by window. seconds: of a text, after which
    no window begins.
    seats: models side by side. oracle_windows: of a text, for its own sensitivities.
    """

    path: Path
    model: Path
    texts: tuple[tuple[str, WindowChoice], ...]
    policy: Path | None = None
    load: Load = "requests"
    replan_tokens: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    seats: int = 8
    seed: int = 0
    oracle_windows: int = 16
    pressure: Path | None = None
    seconds: float = float("inf")


class Study:
    """Everything opened and checked; `lane` makes policies, `score` runs them on a text."""

    def __init__(self, options: StudyOptions) -> None:
        """Raises UserError before anything is computed."""
        self.options = options
        _check(options)
        self.checkpoint = checkpoint = Checkpoint.open(options.path)
        self.source = SourceCheckpoint.open(options.model)
        check_source(checkpoint, self.source)
        self.sizes = SizeTable.of(checkpoint.shape, checkpoint.bits)
        self.index = BlockIndex(len(checkpoint.moe_layers), checkpoint.shape.experts)
        file = None if options.policy is None else str(options.policy)
        asked = ServeOptions(memory=1, policy=file) if file else ServeOptions()
        self.policy = policy_of(asked)
        self.calibration = calibration_of(checkpoint)
        self.tokens = {name: cut_windows(choice, options.path) for name, choice in options.texts}
        self.pressure = {} if options.pressure is None else self._follow(options.pressure)
        self._fleet: Fleet | None = None
        self._own: dict[str, PlanContext] = {}

    @property
    def fleet(self) -> Fleet:
        """The models, loaded when first needed."""
        if self._fleet is None:
            device, dtype = torch.device(self.options.device), self.options.dtype
            if dtype == TF32:
                torch.set_float32_matmul_precision("high")
                dtype = "float32"
            source = load_plain(self.options.model, getattr(torch, dtype), device)
            self._fleet = Fleet(self.checkpoint, source, dtype, self.options.device)
        return self._fleet

    def budget(self, text: str) -> int:
        """Bytes of a budget, see `parse_budget`."""
        return parse_budget(text, self.sizes, self.index)

    def context(self, policy: Policy | None = None) -> PlanContext:
        """The planner's inputs, bytes not rounded to pages."""
        return PlanContext.of(self.index, self.sizes, self.calibration, policy or self.policy)

    def lane(self, name: str, budget_bytes: int, text: str, policy: Policy | None = None) -> Lane:
        """A policy, or the oracle of `text`, at a budget. Raises UserError."""
        chosen = policy or self.policy
        context, kind = self.context(chosen), name
        if name == ORACLE:
            context, kind = self._oracle(text), "static"
        made = make_policy(kind, context, budget_bytes, self.options.seed, self.options.load)
        lane = Lane(name, made, self.calibration, chosen.prior_tokens)
        if not self.pressure or not isinstance(made, PagedPolicy):
            return lane
        budgets, moving = self.pressure[text], made
        return replace(lane, before=lambda window: moving.under(budgets[window]))

    def score(self, text: str, lanes: Sequence[Lane], progress: Progress) -> StreamScores:
        """Run all windows of a text through the source and every lane."""
        options = StreamOptions(
            self.checkpoint.top_k,
            self.options.replan_tokens,
            self.options.seats,
            self.options.seconds,
        )
        return score_stream(self.fleet, lanes, self.tokens[text], self.sizes, options, progress)

    def _follow(self, path: Path) -> dict[str, list[int]]:
        """By text, the budget of each window under the pressure of a server's run."""
        timeline = load_pressure(path)
        return {
            name: [
                uniform_bytes(bits, self.sizes, self.index)
                for bits in bits_of_windows(timeline, len(tokens))
            ]
            for name, tokens in self.tokens.items()
        }

    def _oracle(self, text: str) -> PlanContext:
        """The planner's inputs with sensitivities measured on the evaluated text itself."""
        if text not in self._own:
            tokens = self.tokens[text]
            count = min(self.options.oracle_windows, len(tokens))
            picked = np.linspace(0, len(tokens) - 1, count).round().astype(np.int64)
            how = MeasureOptions(seed=self.options.seed, device=self.options.device)
            with tempfile.TemporaryDirectory() as scratch:
                found = measure(
                    self.source,
                    self.checkpoint,
                    tokens[picked],
                    how,
                    Path(scratch),
                    lambda *_: None,
                )
            own = found.arrays["sensitivity"].astype(np.float64)
            calibration = replace(self.calibration, sensitivity=own, measured=True)
            self._own[text] = PlanContext.of(self.index, self.sizes, calibration, self.policy)
        return self._own[text]


def _check(options: StudyOptions) -> None:
    if options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype} is not one of {', '.join(DTYPES)}")
    if options.pressure is not None and options.load != "requests":
        raise UserError("--pressure comes and goes, so it needs --load requests")
    device_of(options.device)
    if options.dtype == TF32 and options.device != "cuda":
        raise UserError("--dtype tf32 is CUDA's: it goes with --device cuda")
    for name in ("seats", "oracle_windows", "replan_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: give at least 1")
