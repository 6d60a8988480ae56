"""What a rank adds to vLLM's worker, whatever the device: plans applied between steps, reports.

    load_model               vLLM builds the model, layers register
    start_memory             experts into the pool
    determine_available...   KV blocks that can be reached, not those that are there
    initialize_from_config   vLLM's allocation of KV answered with the reserved range
    execute_model            the step's plan first, then the step
    sample_tokens            the report rides on the step's output

Tested with vLLM 0.26 (GPU) and 0.32 (CPU). Relies on: {CPUWorker, Worker}.{load_model,
determine_available_memory, initialize_from_config, execute_model, sample_tokens,
get_kv_cache_spec, rank}, get_kv_cache_groups (what the engine will call with the same arguments),
AsyncModelRunnerOutput.get_output, and KV being allocated by `torch.zeros(bytes, dtype=int8)`, once
or once a place.
"""

from __future__ import annotations

import hashlib
from copy import copy
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from vllm.distributed.parallel_state import get_world_group
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.outputs import AsyncModelRunnerOutput

from pagedweight.errors import UserError
from pagedweight.runtime.messages import StepPlan, WorkerReport, merged
from pagedweight.serving.elastic.dealing import Parallel
from pagedweight.serving.elastic.kv_layout import kv_block, kv_layout
from pagedweight.serving.elastic.scheduler import ATTRIBUTE
from pagedweight.serving.elastic.store import ElasticStore
from pagedweight.serving.elastic.tracing import BitRecorder, trace_folder
from pagedweight.serving.plugin import announce
from pagedweight.serving.refusals import told
from pagedweight.serving.store import expert_store


class KVOnRegion(TorchFunctionMode):
    """While active, allocations of int8 zeros of the sizes of `parts` get these, one after the
    other."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        super().__init__()
        self.left = list(parts)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = args[0] if args else kwargs.get("size")
        wanted = func is torch.zeros and kwargs.get("dtype") is torch.int8
        if wanted and self.left and size == self.left[0].numel():
            return self.left.pop(0)
        return func(*args, **kwargs)


class ReportedOutput(AsyncModelRunnerOutput):
    """A step's output that is still being copied, with the report that goes with it.

    The report says how memory stood when the step was launched, so it waits for nothing.
    """

    def __init__(self, output: AsyncModelRunnerOutput, report: WorkerReport) -> None:
        self._output, self._report = output, report

    def get_output(self) -> Any:
        return with_report(self._output.get_output(), self._report)


def with_report(output: Any, report: WorkerReport) -> Any:
    """A ModelRunnerOutput that carries `report`."""
    output = copy(output)  # an empty step's output is one object shared by all
    setattr(output, ATTRIBUTE, report)
    return output


class ElasticRank:
    """Comes before vLLM's worker class among the bases."""

    vllm_config: Any
    rank: int

    @told()
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        announce()
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        store = expert_store(self.vllm_config)
        if not isinstance(store, ElasticStore) or not store.states:
            raise UserError("the elastic worker needs a pagedweight checkpoint and --memory")
        self.store = store

    @told()
    def start_memory(self) -> None:
        """Divide the budget and bring the experts in; vLLM's block size and, from 0.30 on, its KV
        layout must be settled."""
        store = self.store
        specs = self.get_kv_cache_spec()  # type: ignore[attr-defined]
        groups, config = get_kv_cache_groups(self.vllm_config, specs), self.vllm_config
        parallel = Parallel.of_config(config.parallel_config)
        if parallel.pipeline > 1 and len(groups) > 1:
            raise UserError(
                "--memory with --pipeline-parallel-size needs attention layers of one kind: how "
                f"vLLM deals {len(groups)} groups of KV blocks out to stages is not followed; "
                "serve it with --bits or --plan"
            )
        store.start(kv_block(groups), parallel, self.rank)
        self.budget = store.budget
        self._plan: StepPlan | None = None
        self._report: WorkerReport | None = None
        self._recorder: BitRecorder | None = None
        if store.options.trace is not None and self.rank == 0:
            folder = trace_folder(store.options.trace)
            self._recorder = BitRecorder(folder, self.committed_bits())

    def reachable_bytes(self) -> int:
        """KV that vLLM is told of: what can be backed at the floor."""
        return self.budget.reachable_blocks * self.budget.block.nbytes

    @told()
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        layout = kv_layout(kv_cache_config, self.budget.granule_blocks, self.budget.page_bytes)
        region = self.store.back_kv(layout.nbytes, layout.granules)
        mode = KVOnRegion([region[start : start + size] for start, size in layout.parts])
        with mode:
            super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if mode.left:
            raise UserError(
                f"vLLM did not allocate its KV cache as {len(layout.parts)} int8 tensors of zeros "
                f"({len(mode.left)} were not asked for)"
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        plan = getattr(scheduler_output, ATTRIBUTE, None)
        if plan is not None:
            if self._plan is None:
                self.store.forget_signals()
            self._plan = plan
            self.store.worker.apply(plan)
        if self._plan is not None:
            self._report = self._agreed(self._plan)
        tokens = scheduler_output.total_num_scheduled_tokens
        if self._recorder is not None and tokens:
            self._recorder.model_step(self.committed_bits())
        self.store.begin_step(tokens)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        return self._with_report(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._with_report(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def committed_bits(self) -> NDArray[np.int32]:
        """q of every row, int32 [rows]: what kernels read from now on."""
        return self.store.worker.mover.weights.kernel_tables.written.bits.copy()

    def bits_digest(self) -> str:
        """Digest of `committed_bits`: what ranks with the same rows must have in common (asked by
        collective_rpc)."""
        return hashlib.sha256(self.committed_bits().tobytes()).hexdigest()

    def committed_rows(self) -> tuple[list[int], list[int]]:
        """Rows of the model that this rank holds, and q of each (asked by collective_rpc)."""
        bits, rows = self.committed_bits().tolist(), self.store.worker.rows
        return list(range(len(bits))) if rows is None else rows.tolist(), bits

    def _with_report(self, output: Any) -> Any:
        if self._report is None or output is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return ReportedOutput(output, self._report)
        return with_report(output, self._report)

    def _agreed(self, plan: StepPlan) -> WorkerReport:
        """What goes back to the scheduler: how things stand on this rank or, when the plan says so,
        on all. They are asked on entry to the step, which stages of a pipeline all pass in order,
        although only the last has an output."""
        signals = self.store.take_signals() if plan.signals else None
        report = self.store.worker.report(signals)
        group = get_world_group()
        if not plan.agree or group.world_size == 1:
            return report
        reports: list[WorkerReport | None] = [None] * group.world_size
        torch.distributed.all_gather_object(reports, report, group=group.cpu_group)
        return merged([found for found in reports if found is not None])
