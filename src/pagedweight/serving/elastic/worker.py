"""vLLM's worker with elastic memory: weights and KV in one budget, plans applied between steps.

Tested with vLLM 0.32 (CPU). Relies on: CPUWorker.{load_model, determine_available_memory,
initialize_from_config, execute_model, sample_tokens, _should_warm_up_model}, the model runner's
get_kv_cache_spec, and KV being allocated by one `torch.zeros(bytes, dtype=int8)`.
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
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from pagedweight.errors import UserError
from pagedweight.runtime.messages import StepPlan, WorkerReport, merged
from pagedweight.runtime.signals import take_signals
from pagedweight.serving.elastic.kv_layout import kv_block_of_specs, kv_granules
from pagedweight.serving.elastic.scheduler import ATTRIBUTE
from pagedweight.serving.elastic.store import ElasticStore
from pagedweight.serving.elastic.tracing import BitRecorder, trace_folder
from pagedweight.serving.plugin import announce
from pagedweight.serving.store import expert_store

logger = init_logger("vllm.pagedweight")
SIGNAL_STEPS = 4
"""Steps between two reports with signals: they are larger than all the rest of a report."""


class KVOnRegion(TorchFunctionMode):
    """While active, the one allocation of `nbytes` int8 zeros is answered with `region`."""

    def __init__(self, nbytes: int, region: torch.Tensor) -> None:
        super().__init__()
        self.nbytes, self.region, self.used = nbytes, region, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        size = args[0] if args else kwargs.get("size")
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and size == self.nbytes:
            self.used = True
            return self.region
        return func(*args, **kwargs)


class ElasticCPUWorker(CPUWorker):
    """CPU worker whose experts and KV share `--memory`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        announce()
        super().load_model(*args, **kwargs)
        store = expert_store(self.vllm_config)
        if not isinstance(store, ElasticStore) or not store.states:
            raise UserError("the elastic worker needs a pagedweight checkpoint and --memory")
        self.store = store
        store.start(kv_block_of_specs(self.get_kv_cache_spec().values()))
        self.budget = store.budget
        self._plan: StepPlan | None = None
        self._recorder: BitRecorder | None = None
        if store.options.trace is not None and self.rank == 0:
            folder = trace_folder(store.options.trace)
            self._recorder = BitRecorder(folder, self.committed_bits())

    def determine_available_memory(self) -> int:
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        budget = self.budget
        return budget.reachable_blocks * budget.block.nbytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        nbytes, granules = kv_granules(kv_cache_config, self.budget.granule_blocks)
        mode = KVOnRegion(nbytes, self.store.back_kv(nbytes, granules))
        with mode:
            super().initialize_from_config(kv_cache_config)
        if not mode.used:
            raise UserError("vLLM did not allocate its KV cache as one int8 tensor of zeros")

    def execute_model(self, scheduler_output: Any) -> Any:
        plan = getattr(scheduler_output, ATTRIBUTE, None)
        if plan is not None:
            if self._plan is None:
                self.store.forget_signals()
            self._plan = plan
            self.store.worker.apply(plan)
        if self._recorder is not None and scheduler_output.total_num_scheduled_tokens:
            self._recorder.model_step(self.committed_bits())
        output = super().execute_model(scheduler_output)
        return output if output is None else self._with_report(output)

    def committed_bits(self) -> NDArray[np.int32]:
        """q of every row, int32 [rows]: what kernels read from now on."""
        return self.store.worker.mover.weights.kernel_tables.written.bits.copy()

    def bits_digest(self) -> str:
        """Digest of `committed_bits`: what ranks must have in common (asked by collective_rpc)."""
        return hashlib.sha256(self.committed_bits().tobytes()).hexdigest()

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._with_report(super().sample_tokens(grammar_output))

    def _with_report(self, output: Any) -> Any:
        if self._plan is None or output is None:
            return output
        output = copy(output)  # an empty step's output is one object shared by all
        setattr(output, ATTRIBUTE, self._report(self._plan))
        return output

    def _report(self, plan: StepPlan) -> WorkerReport:
        stats = [state.stats for state in self.store.states.values() if state.stats is not None]
        signals = take_signals(stats) if plan.step % SIGNAL_STEPS == 0 else None
        report = self.store.worker.report(signals)
        group = get_tp_group()
        if not plan.agree or group.world_size == 1:
            return report
        reports: list[WorkerReport | None] = [None] * group.world_size
        torch.distributed.all_gather_object(reports, report, group=group.cpu_group)
        return merged([found for found in reports if found is not None])
