"""A real vLLM engine with elastic memory inside this process, stepped by hand and looked into.

One engine in one process: tests of this file's users run in a process of their own (`isolated`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import save_policy
from pagedweight.runtime.granules import GranuleState
from pagedweight.runtime.integrity import check_worker
from pagedweight.serving.launch import ASYNC_SCHEDULER, GPU_WORKER, SCHEDULER, WORKER
from pagedweight.serving.options import ServeOptions

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

POLICY = Policy(offload_blocks=6, reload_blocks=16, dwell_steps=8)
BLOCK = 32
ON_CPU = {"dtype": "float32", "block_size": BLOCK, "enforce_eager": True}
ON_CPU |= {"scheduler_cls": SCHEDULER, "worker_cls": WORKER}
ON_GPU = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.1,  # only checked at start
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
    "scheduler_cls": ASYNC_SCHEDULER,
    "worker_cls": GPU_WORKER,
}


class Engine:
    """`run` serves requests to their end, checking everything after every step."""

    def __init__(
        self, path: Path, folder: Path, memory: int, engine: Any = None, **flags: Any
    ) -> None:
        """`engine`: what vLLM is told beside the rest, `ON_CPU` when None; `flags`: options."""
        from vllm import LLM

        save_policy(POLICY, folder / "policy.json")
        options = ServeOptions(
            memory=memory, policy=str(folder / "policy.json"), poison=True, **flags
        )
        self.llm = LLM(
            str(path),
            max_model_len=512,
            kv_cache_memory_bytes=memory,
            enable_prefix_caching=False,
            **{"max_num_seqs": 64, **(ON_CPU if engine is None else engine)},
            additional_config=options.additional_config(),
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.control = core.scheduler.control
        self.worker = core.model_executor.driver_worker.worker
        self.memory = self.worker.store.worker
        self.names = 0
        self.checking = True

    @property
    def bits(self) -> np.ndarray:
        """Committed bits that kernels read, int32 [rows]."""
        return self.worker.committed_bits()

    @property
    def usable(self) -> int:
        return self.control.controller.granules.usable_blocks

    def add(self, prompts: list[list[int]], tokens: int) -> list[str]:
        """Queue greedy requests for exactly `tokens` tokens each."""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = []
        for prompt in prompts:
            self.names += 1
            names.append(f"r{self.names}")
            self.llm.llm_engine.add_request(names[-1], {"prompt_token_ids": prompt}, asked)
        return names

    def step(self) -> list[Any]:
        """One engine step, then every invariant; the requests that finished in it."""
        finished = [out for out in self.llm.llm_engine.step() if out.finished]
        if self.checking:  # waits for a GPU, and so hides what comes too early there
            self.check()
        return finished

    def run(self, each: Any = None, settle: bool = True) -> dict[str, list[int]]:
        """Step until nothing is left to do (or, not to settle, no request); tokens by request."""
        done: dict[str, list[int]] = {}
        scheduler = self.scheduler
        while scheduler.has_requests() if settle else scheduler.has_unfinished_requests():
            for output in self.step():
                done[output.request_id] = list(output.outputs[0].token_ids)
            if each is not None:
                each()
        return done

    def quiet(self) -> None:
        """What was submitted has finished."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def check(self) -> None:
        """Memory, page table, kernel table and vLLM's block pool agree."""
        check_worker(self.memory)
        pool, ledger = self.scheduler.kv_cache_manager.block_pool, self.control.controller.granules
        self.control.controller.table.check_integrity()
        size = ledger.granule_blocks
        usable = {*ledger.having(GranuleState.USABLE), *ledger.having(GranuleState.DRAINING)}
        assert usable <= set(self.memory.kv.backed)
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        held = {block.block_id for block in pool.blocks if block.ref_cnt or block.is_null}
        assert not free & held
        assert {b // size for b in free | held} <= usable
        assert len(free | held) == pool.num_gpu_blocks
        assert pool.num_gpu_blocks + self.control.parking.held_back == len(usable) * size


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(10, 8000, (count, length)).tolist()
