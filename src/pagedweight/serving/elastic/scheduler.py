"""vLLM's scheduler with elastic KV: the plan rides out on its output, the reports ride in.

    schedule()            observe the queues, plan, park; then vLLM schedules what is backed
    worker                applies the plan on entry to the step, reports with the step's output
    update_from_output()  hear the report: commits, finished copies, granules that are backed now

Tested with vLLM 0.32 (CPU, synchronous). Relies on: Scheduler.{__init__, schedule,
update_from_output, has_requests, add_request, finish_requests, _preempt_request, kv_cache_manager,
kv_cache_config}, KVCacheManager.{block_pool, watermark_blocks}, SchedulerOutput and
ModelRunnerOutput taking an extra attribute.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.errors import UserError
from pagedweight.runtime.controller import BlockDemand
from pagedweight.serving.elastic.control import Control
from pagedweight.serving.elastic.dealing import Parallel
from pagedweight.serving.elastic.demand import block_demand
from pagedweight.serving.elastic.kv_layout import kv_block
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.plugin import announce

logger = init_logger("vllm.pagedweight")
ATTRIBUTE = "pagedweight"
"""Extra attribute: a StepPlan on SchedulerOutput, a WorkerReport on ModelRunnerOutput."""


class _Elastic:
    """What both schedulers add to theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        announce()
        config = self.vllm_config
        self.control = Control(
            Checkpoint.open(config.model_config.model),
            ServeOptions.of(config.additional_config),
            kv_block(self.kv_cache_config.kv_cache_groups),
            self.kv_cache_manager.block_pool,
            Parallel.of_config(config.parallel_config),
            self.block_size,
            config.parallel_config.data_parallel_index,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        control = self.control
        demand = self._demand()
        plan = control.plan(demand, running=len(self.running), waiting=len(self.waiting))
        # vLLM keeps this many blocks out of reach of requests that are not running yet: they are
        # what the running ones take before new memory can arrive.
        self.kv_cache_manager.watermark_blocks = demand.growth_blocks
        output = super().schedule(*args, **kwargs)
        setattr(output, ATTRIBUTE, plan)
        control.scheduled(output.total_num_scheduled_tokens)
        return output

    def _demand(self) -> BlockDemand:
        return block_demand(self, self.control.parking.free_blocks)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        report = getattr(model_runner_output, ATTRIBUTE, None)
        if report is not None:
            self.control.hear(report)
        elif getattr(scheduler_output, ATTRIBUTE, None) is not None:
            raise UserError(
                "a step came back without the report of its ranks: this executor calls the model "
                "past pagedweight's worker; use --distributed-executor-backend mp, or Ray with "
                "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 (vLLM's default)"
            )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.control.recorder.generated(
            sum(len(out.new_token_ids) for group in outputs.values() for out in group.outputs)
        )
        return outputs

    def has_requests(self) -> bool:
        if super().has_requests():
            return True
        demand = self._demand()
        if self.control.wants_step(demand):
            return True
        self.control.recorder.idle(demand, len(self.running), len(self.waiting))
        return False

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        self.control.preemptions += 1
        return super()._preempt_request(*args, **kwargs)

    def shutdown(self) -> None:
        self.control.close()
        super().shutdown()


class ElasticScheduler(_Elastic, Scheduler):
    """For engines that wait for each step (the CPU backend)."""


class ElasticAsyncScheduler(_Elastic, AsyncScheduler):
    """For engines that schedule one step ahead (the GPU backend's default)."""
