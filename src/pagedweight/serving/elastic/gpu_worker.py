"""vLLM's GPU worker with elastic memory, under both of its model runners.

The pool is taken before vLLM profiles, so what activations and graphs may use is what is left: a
budget that leaves too little fails at start, not under load. Nothing here waits for the GPU once
serving has begun.
Tested with vLLM 0.26 (GPU). Relies on: Worker.{determine_available_memory,
compile_or_warm_up_model, initialize_from_config, model_runner}, GPUModelRunner.{profile_run,
kv_caches, model_memory_usage}, and what `rank.py` says.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from pagedweight.errors import UserError
from pagedweight.serving.elastic.gpu_table import GpuUse, memory_table
from pagedweight.serving.elastic.rank import ElasticRank
from pagedweight.serving.kernel import warm_up

logger = init_logger("vllm.pagedweight")


class ElasticGPUWorker(ElasticRank, Worker):
    """GPU worker whose experts and KV share `--memory`."""

    def determine_available_memory(self) -> int:
        """Brings the experts in, compiles the model, measures its activations, and answers with
        what KV can reach. vLLM settles its block size only after `load_model`."""
        self.start_memory()
        config, state = self.vllm_config, next(iter(self.store.states.values()))
        tokens = config.scheduler_config.max_num_batched_tokens
        warm_up(state, config.model_config.dtype, self.store.checkpoint.top_k, tokens)
        self._limit_torch()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            with torch.inference_mode():
                self.model_runner.profile_run()
        except torch.OutOfMemoryError as error:
            pool = self.budget.pages * self.budget.page_bytes
            raise UserError(
                f"the activations of {tokens} tokens do not fit beside the {pool} bytes of experts "
                f"and KV ({error}): give less --memory or more --gpu-reserve, or lower "
                "--max-num-batched-tokens"
            ) from error
        self._activations = torch.cuda.max_memory_allocated(self.device) - before
        return self.reachable_bytes()

    def _limit_torch(self) -> None:
        """Under --gpu-memory torch gets what the pool leaves until serving begins, so that a budget
        too small fails at start; the driver's context is beside it.

        Not longer: at its limit torch gives all it has cached back to the driver and asks again,
        inside a step.
        """
        total = self.store.options.gpu_memory
        if total is not None:
            left = total - self.budget.pages * self.budget.page_bytes
            share = left / torch.cuda.mem_get_info(self.device)[1]
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        blocks = kv_cache_config.num_blocks
        for cache in self.model_runner.kv_caches:
            check_blocks_adjacent(cache, blocks, self.budget.block.layer_bytes)

    def compile_or_warm_up_model(self) -> Any:
        free = torch.cuda.mem_get_info(self.device)[0]
        result = super().compile_or_warm_up_model()
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        left = torch.cuda.mem_get_info(self.device)[0]
        use = GpuUse(
            model=int(self.model_runner.model_memory_usage),
            activations=self._activations,
            graphs=max(0, free - left),
            left=left,
        )
        if self.rank == 0:
            logger.info("memory of a rank\n%s", memory_table(self.store, use))
        return result


def check_blocks_adjacent(cache: Any, blocks: int, layer_bytes: int) -> None:
    """UserError unless a layer's blocks lie one after the other, as granules are laid out.

    cache: a layer's KV tensor as the attention backend sees it; it may count in smaller blocks.
    """
    if not isinstance(cache, torch.Tensor):
        raise UserError("elastic KV needs attention layers with one KV tensor each")
    parts, rest = divmod(cache.shape[0], blocks)
    stride = cache.stride(0) * cache.element_size() * parts
    if rest or not parts or stride != layer_bytes:
        raise UserError(
            "elastic KV needs an attention backend whose KV blocks lie next to each other; this "
            f"one has {cache.shape[0]} blocks {stride} bytes apart where {blocks} of {layer_bytes} "
            "were expected: choose another --attention-backend"
        )
