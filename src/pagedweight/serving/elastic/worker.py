"""vLLM's CPU worker with elastic memory: weights and KV in one budget.

Tested with vLLM 0.32 (CPU). Relies on: CPUWorker.{determine_available_memory,
_should_warm_up_model}, and what `rank.py` says.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from pagedweight.serving.elastic.rank import ElasticRank


class ElasticCPUWorker(ElasticRank, CPUWorker):
    """CPU worker whose experts and KV share `--memory`."""

    def determine_available_memory(self) -> int:
        """Brings the experts in, compiles the model, and answers with what KV can reach."""
        self.start_memory()
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        return self.reachable_bytes()
