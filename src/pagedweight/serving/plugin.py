"""Entry point of `vllm.general_plugins`: registers the quantization method in every process.

vLLM calls `register` in the API server, the engine core, every worker and the model inspection
subprocess, possibly more than once, and only logs what an import raises. So: light, idempotent,
and one line a process that says it is there (`docs/cases.md` of the field: a plugin alive in the
worker but not in the engine core).
Tested with vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import logging
import os

from pagedweight import __version__
from pagedweight.serving.versions import check_version, vllm_release, vllm_version

_announced_in: int | None = None


def register() -> None:
    """Register `--quantization pagedweight`. Raises UserError on an untested vLLM."""
    check_version(*vllm_release())
    # Importing the module registers the class; a second import does nothing.
    from pagedweight.serving import quant_config  # noqa: F401
    from pagedweight.serving.compile_key import leave_options_out

    leave_options_out()
    announce()


def announce() -> None:
    """Say once in each process that the plugin is there.

    Called wherever the plugin comes to life: the API server registers before its logging is set up,
    and a worker that was forked from the engine core is not asked to load plugins again.
    """
    global _announced_in
    from vllm.logger import init_logger

    logger = init_logger("vllm.pagedweight")
    if _announced_in == os.getpid() or not logger.isEnabledFor(logging.INFO):
        return
    _announced_in = os.getpid()
    logger.info(
        "pagedweight %s is active in process %d (vLLM %s)",
        __version__,
        os.getpid(),
        vllm_version(),
    )
