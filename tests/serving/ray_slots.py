"""Ray's executor on the CPU: vLLM offers it on GPUs only, so ranks are placed on GPUs that Ray is
told of and nobody uses. `setup` runs in every Ray process, and in the test's own."""

from __future__ import annotations


def setup() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.ray_device_key = "GPU"
    platform.device_control_id_to_physical_device_id = classmethod(lambda cls, number: int(number))
