"""Our options leave vLLM's cache of compiled graphs alone.

vLLM hashes all of `additional_config` into the key of that cache, so that a server with another
budget, level or timeline would compile the same graph again: a minute. The routed experts are one
operator that takes a layer's number (`serving/moe_op.py`): no option of ours changes the graph.
Relies on: VllmConfig.{compute_hash, additional_config}. Tested with vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

from pagedweight.serving.options import KEY

_MARK = "_pagedweight_original"


def leave_options_out() -> None:
    """From now on in this process; a second call does nothing."""
    from vllm.config import VllmConfig

    original = VllmConfig.compute_hash
    if hasattr(original, _MARK):
        return

    def compute_hash(self: Any) -> str:
        found = self.additional_config
        if not isinstance(found, dict) or KEY not in found:
            return str(original(self))
        ours = found.pop(KEY)
        try:
            return str(original(self))
        finally:
            found[KEY] = ours

    setattr(compute_hash, _MARK, original)
    VllmConfig.compute_hash = compute_hash
