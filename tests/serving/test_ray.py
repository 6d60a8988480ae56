"""Ranks that are Ray's actors: the same plans, the same bits. Where Ray is installed (no need of
ours).

In a process of its own, since Ray and one engine stay in it (`python test_ray.py CHECKPOINT DIR`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1100)]
MEMORY = 12 << 20
KINDS = ("tensor", "expert")


@pytest.mark.parametrize("kind", KINDS)
def test_a_burst_on_two_actors(kind, tiny_quantized, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    command = [sys.executable, __file__, str(tiny_quantized), str(tmp_path), kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "all is well" in ended.stdout


def inside(checkpoint: str, folder: Path, kind: str) -> None:
    import ray
    import ray_slots

    here = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    hook = {"worker_process_setup_hook": "ray_slots.setup", "env_vars": {"PYTHONPATH": here}}
    ray.init(num_gpus=2, num_cpus=2, include_dashboard=False, runtime_env=hook)
    ray_slots.setup()
    from vllm import LLM, SamplingParams

    from pagedweight.core.policy import Policy
    from pagedweight.core.policy_file import save_policy
    from pagedweight.runtime.timeline import Timeline
    from pagedweight.serving.launch import SCHEDULER, WORKER
    from pagedweight.serving.options import ServeOptions

    policy, timeline = folder / "policy.json", folder / "run.jsonl"
    save_policy(Policy(offload_blocks=6, reload_blocks=16, dwell_steps=8), policy)
    options = ServeOptions(memory=MEMORY, policy=str(policy), timeline=str(timeline))
    engine = LLM(
        checkpoint,
        tensor_parallel_size=2,
        enable_expert_parallel=kind == "expert",
        distributed_executor_backend="ray",
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        additional_config=options.additional_config(),
        kv_cache_memory_bytes=MEMORY,
        max_model_len=512,
        block_size=32,
        enforce_eager=True,
        dtype="float32",
    )
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    assert type(executor).__name__ == "RayExecutorV2"
    asked = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True)
    for count in (1, 24, 1):
        outputs = engine.generate([f"{n} The history of" for n in range(count)], asked)
        assert [len(out.outputs[0].token_ids) for out in outputs] == [96] * count
        first, second = engine.collective_rpc("committed_rows")
        assert (first == second) == (kind == "tensor")
        assert sorted({*first[0], *second[0]}) == list(range(128))
    engine.llm_engine.engine_core.shutdown()
    run = Timeline.load(timeline)
    bits, usable = run.column("bits"), run.column("kv_usable")
    assert bits.min() < bits[0] - 1
    assert bits[-1] == bits[0]
    assert usable.max() > usable[0]
    assert run.column("preemptions")[-1] == run.column("rollbacks")[-1] == 0
    ray.shutdown()
    print("all is well")


if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    inside(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
