"""Entry point of `vllm.general_plugins`: registers the quantization method in every process.

vLLM calls `register` in the API server, the engine core, every worker and the model inspection
subprocess, possibly more than once, and only logs what an import raises. So: light, idempotent,
and one line a process that says it is there (`docs/cases.md` of the field: a plugin alive in the
worker but not in the engine core).
Tested with vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import os

from pagedweight import __version__
from pagedweight.serving.versions import check_version, vllm_version

_registered_in: int | None = None


def register() -> None:
    """Register `--quantization pagedweight`. Raises UserError on an untested vLLM."""
    global _registered_in
    if _registered_in == os.getpid():
        return
    found = vllm_version()
    check_version(found)
    from vllm.logger import init_logger

    # Importing the module registers the class; a second import does nothing.
    from pagedweight.serving import quant_config  # noqa: F401

    _registered_in = os.getpid()
    init_logger("vllm.pagedweight").info(
        "pagedweight %s is active in process %d (vLLM %s)", __version__, os.getpid(), found
    )


def is_registered() -> bool:
    """Whether this very process has registered the plugin (a fork inherits nothing)."""
    return _registered_in == os.getpid()
