"""What the plugin relies on in vLLM, and a reader that finds it in sources without importing them.

`CONTRACT` is the whole list: when a hook module starts to use something else of vLLM, it goes here.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Source = Callable[[str], str]
"""Path inside the distribution (vllm/...) to the text of that file."""


@dataclass(frozen=True)
class Uses:
    """`name` (Class, function, Class.method or Class.attribute) defined or imported in `path`.

    `params`: for a function, parameter names that it must accept (or take **kwargs).
    """

    path: str
    name: str
    params: tuple[str, ...] = ()


_MOE = "vllm/model_executor/layers/fused_moe"
_QUANT = "vllm/model_executor/layers/quantization"

CONTRACT = (
    Uses("vllm/plugins/__init__.py", "load_general_plugins"),
    Uses("vllm/logger.py", "init_logger", ("name",)),
    Uses("vllm/config/vllm.py", "VllmConfig.compute_hash"),
    Uses("vllm/config/vllm.py", "VllmConfig.additional_config"),
    Uses(f"{_QUANT}/__init__.py", "register_quantization_config", ("quantization",)),
    Uses(f"{_QUANT}/__init__.py", "QUANTIZATION_METHODS"),
    Uses("vllm/platforms/interface.py", "Platform.device_name"),
    Uses(f"{_QUANT}/base_config.py", "QuantizationConfig.get_quant_method", ("layer", "prefix")),
    Uses(f"{_QUANT}/base_config.py", "QuantizationConfig.from_config", ("config",)),
    Uses(f"{_QUANT}/base_config.py", "QuantizationConfig.get_supported_act_dtypes"),
    Uses(f"{_QUANT}/base_config.py", "QuantizationConfig.get_min_capability"),
    Uses(f"{_QUANT}/base_config.py", "QuantizationConfig.get_config_filenames"),
    Uses("vllm/model_executor/layers/linear.py", "LinearBase"),
    Uses("vllm/model_executor/layers/linear.py", "UnquantizedLinearMethod"),
    Uses(f"{_MOE}/__init__.py", "RoutedExperts"),
    Uses(f"{_MOE}/__init__.py", "FusedMoEMethodBase"),
    Uses(f"{_MOE}/__init__.py", "FusedMoEConfig"),
    Uses(
        f"{_MOE}/fused_moe_method_base.py",
        "FusedMoEMethodBase.create_weights",
        (
            "layer",
            "num_experts",
            "hidden_size",
            "intermediate_size_per_partition",
            "params_dtype",
        ),
    ),
    Uses(
        f"{_MOE}/fused_moe_method_base.py",
        "FusedMoEMethodBase.apply",
        (
            "layer",
            "x",
            "topk_weights",
            "topk_ids",
            "shared_experts",
            "shared_experts_input",
        ),
    ),
    Uses(f"{_MOE}/fused_moe_method_base.py", "FusedMoEMethodBase.maybe_roundup_sizes"),
    Uses(f"{_MOE}/fused_moe_method_base.py", "FusedMoEMethodBase.get_fused_moe_quant_config"),
    Uses(f"{_MOE}/routed_experts.py", "RoutedExperts.expert_map"),
    Uses(f"{_MOE}/routed_experts.py", "RoutedExperts.global_num_experts"),
    Uses(f"{_MOE}/routed_experts.py", "RoutedExperts.apply_router_weight_on_input"),
    Uses(f"{_MOE}/routed_experts.py", "RoutedExperts.layer_name"),
    Uses(f"{_MOE}/config.py", "FusedMoEConfig.activation"),
    Uses(f"{_MOE}/config.py", "FusedMoEConfig.moe_parallel_config"),
    Uses(f"{_MOE}/config.py", "FusedMoEConfig.experts_per_token"),
    Uses("vllm/config/scheduler.py", "SchedulerConfig.max_num_batched_tokens"),
    Uses(f"{_MOE}/config.py", "FusedMoEParallelConfig.tp_rank"),
    Uses(f"{_MOE}/config.py", "FusedMoEParallelConfig.tp_size"),
    Uses("vllm/config/__init__.py", "get_current_vllm_config"),
    Uses("vllm/config/vllm.py", "VllmConfig.additional_config"),
    Uses("vllm/config/vllm.py", "VllmConfig.model_config"),
    Uses("vllm/config/model.py", "ModelConfig.model"),
    Uses("vllm/model_executor/models/utils.py", "extract_layer_index", ("layer_name",)),
    Uses("vllm/entrypoints/cli/main.py", "main"),
    Uses("vllm/v1/core/sched/scheduler.py", "Scheduler.schedule"),
    Uses("vllm/v1/core/sched/scheduler.py", "Scheduler.update_from_output"),
    Uses("vllm/v1/core/sched/scheduler.py", "Scheduler.has_requests"),
    Uses("vllm/v1/core/sched/scheduler.py", "Scheduler._preempt_request"),
    Uses("vllm/v1/core/sched/scheduler.py", "Scheduler.max_num_running_reqs"),
    Uses("vllm/v1/core/sched/scheduler.py", "Scheduler.kv_cache_config"),
    Uses("vllm/v1/core/sched/async_scheduler.py", "AsyncScheduler"),
    Uses("vllm/v1/core/kv_cache_manager.py", "KVCacheManager.block_pool"),
    Uses("vllm/v1/core/kv_cache_manager.py", "KVCacheManager.watermark_blocks"),
    Uses("vllm/v1/core/kv_cache_manager.py", "KVCacheManager.coordinator"),
    Uses("vllm/v1/core/kv_cache_coordinator.py", "KVCacheCoordinator.single_type_managers"),
    Uses("vllm/v1/core/single_type_kv_cache_manager.py", "SingleTypeKVCacheManager.block_size"),
    Uses("vllm/v1/core/single_type_kv_cache_manager.py", "SingleTypeKVCacheManager.kv_cache_spec"),
    Uses(
        "vllm/v1/core/kv_cache_utils.py",
        "get_kv_cache_groups",
        ("vllm_config", "kv_cache_spec"),
    ),
    Uses("vllm/v1/kv_cache_interface.py", "SlidingWindowSpec.sliding_window"),
    Uses("vllm/v1/kv_cache_interface.py", "UniformTypeKVCacheSpecs.kv_cache_specs"),
    Uses("vllm/v1/kv_cache_interface.py", "KVCacheSpec.page_size_bytes"),
    Uses("vllm/v1/core/sched/scheduler.py", "Scheduler.max_num_scheduled_tokens"),
    Uses("vllm/v1/core/block_pool.py", "BlockPool.evict_blocks", ("block_ids",)),
    Uses("vllm/v1/core/block_pool.py", "BlockPool.num_gpu_blocks"),
    Uses("vllm/v1/core/block_pool.py", "BlockPool.free_block_queue"),
    Uses("vllm/v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.remove", ("block",)),
    Uses("vllm/v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.append_n"),
    Uses("vllm/v1/worker/cpu_worker.py", "CPUWorker.determine_available_memory"),
    Uses("vllm/v1/worker/cpu_worker.py", "CPUWorker.init_device"),
    Uses("vllm/v1/worker/gpu_worker.py", "Worker.execute_model", ("scheduler_output",)),
    Uses("vllm/v1/worker/gpu_worker.py", "Worker.sample_tokens"),
    Uses("vllm/v1/worker/gpu_worker.py", "Worker.initialize_from_config"),
    Uses("vllm/v1/worker/gpu_worker.py", "Worker.determine_available_memory"),
    Uses("vllm/v1/worker/gpu_worker.py", "Worker.compile_or_warm_up_model"),
    Uses("vllm/v1/worker/gpu_worker.py", "Worker.load_model"),
    Uses("vllm/v1/worker/gpu_worker.py", "Worker.model_runner"),
    Uses("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner.profile_run"),
    Uses("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner.kv_caches"),
    Uses("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner.model_memory_usage"),
    Uses("vllm/v1/worker/gpu/model_runner.py", "GPUModelRunner.profile_run"),
    Uses("vllm/v1/worker/gpu/model_runner.py", "GPUModelRunner.kv_caches"),
    Uses("vllm/v1/worker/gpu/model_runner.py", "GPUModelRunner.model_memory_usage"),
    Uses("vllm/v1/outputs.py", "AsyncModelRunnerOutput.get_output"),
    Uses("vllm/distributed/parallel_state.py", "get_world_group"),
    Uses(
        "vllm/distributed/utils.py", "get_pp_indices", ("num_hidden_layers", "pp_rank", "pp_size")
    ),
    Uses("vllm/config/parallel.py", "ParallelConfig.tensor_parallel_size"),
    Uses("vllm/config/parallel.py", "ParallelConfig.pipeline_parallel_size"),
    Uses("vllm/config/parallel.py", "ParallelConfig.enable_expert_parallel"),
    # Ray's executor whose ranks run the same loop as multiprocessing's, and its switch.
    Uses("vllm/v1/executor/ray_executor_v2.py", "RayExecutorV2"),
    Uses("vllm/v1/executor/ray_executor_v2.py", "RayWorkerProc"),
    Uses("vllm/envs.py", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"),
    Uses("vllm/envs.py", "VLLM_DISABLE_SHARED_EXPERTS_STREAM"),
    Uses("vllm/v1/engine/llm_engine.py", "LLMEngine.add_request", ("request_id", "prompt")),
    Uses("vllm/v1/engine/llm_engine.py", "LLMEngine.has_unfinished_requests"),
    Uses("vllm/v1/engine/llm_engine.py", "LLMEngine.step"),
    Uses("vllm/sampling_params.py", "RequestOutputKind"),
    Uses("vllm/inputs/__init__.py", "TokensPrompt"),
    Uses(f"{_MOE}/activation.py", "MoEActivation"),
    Uses(f"{_MOE}/fused_moe.py", "fused_experts", ("activation",)),
    Uses(f"{_MOE}/experts/marlin_moe.py", "fused_marlin_moe", ("activation", "moe_sum", "output")),
    Uses("vllm/benchmarks/datasets/datasets.py", "SampleRequest.timestamp"),
    Uses("vllm/benchmarks/datasets/__init__.py", "SampleRequest"),
    Uses(
        "vllm/benchmarks/serve.py",
        "benchmark",
        ("input_requests", "self_timed", "ignore_eos", "extra_body", "ready_check_timeout_sec"),
    ),
    Uses("vllm/benchmarks/serve.py", "TaskType"),
)


def wheel_source(wheel: Path) -> Source:
    """Read files out of a wheel without installing it."""
    archive = zipfile.ZipFile(wheel)
    return lambda path: archive.read(path).decode()


def tree_source(site: Path) -> Source:
    """Read files of an installed distribution without importing it."""
    return lambda path: (site / path).read_text()


def broken(uses: Uses, source: Source) -> str | None:
    """None when `uses` holds in `source`, else one sentence that names what moved."""
    try:
        tree = ast.parse(source(uses.path))
    except (KeyError, FileNotFoundError):
        return f"{uses.path} is gone (it had {uses.name})"
    node = _find(tree, uses.name.split("."))
    if node is None:
        return f"{uses.name} is no longer in {uses.path}"
    if uses.params and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        missing = [name for name in uses.params if name not in _parameters(node)]
        if missing and node.args.kwarg is None:
            return f"{uses.path}: {uses.name} no longer takes {missing}"
    return None


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in every}


def _find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    for node in ast.walk(tree) if isinstance(tree, ast.Module) else ast.iter_child_nodes(tree):
        if _defines(node, names[0]):
            return node if len(names) == 1 else _member(node, names[1])
    return None


def _member(owner: ast.AST, name: str) -> ast.AST | None:
    for node in ast.iter_child_nodes(owner):
        if _defines(node, name):
            return node
    for node in ast.walk(owner):  # self.name = ..., set in a method
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr == name:
                return node
    return None


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    if isinstance(node, ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return False
