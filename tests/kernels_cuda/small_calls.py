"""Small calls of every CUDA kernel, for compute-sanitizer: it is too slow for the tests themselves.

compute-sanitizer --tool racecheck python tests/kernels_cuda/small_calls.py decode|groups|prefill
"""

from __future__ import annotations

import sys

import torch
from cuda_calls import make_call

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.cuda import decode
from pagedweight.kernels.cuda import kernel as binding
from pagedweight.kernels.cuda.kernel import CudaKernel
from pagedweight.kernels.cuda.shapes import MANY

SMALL, MORE = LayerShape(5, 130, 70), LayerShape(12, 192, 80)
KERNEL = CudaKernel()


def run(shape: LayerShape, tokens: int, top_k: int, **options) -> None:
    """One call with statistics, waited for."""
    call = make_call(torch.device("cuda", 0), shape, tokens, top_k, **options)
    out = call.run(KERNEL, call.stats())
    torch.cuda.synchronize()
    assert bool(out.isfinite().all())


def run_decode() -> None:
    """csrc/decode.cu: warps alone and in groups, every precision, float16."""
    binding.is_prefill = lambda *_: False
    decode.is_few = lambda *_: True
    for groups in ((0, 0), (0, 1), (1, 1), (2, 3)):
        decode.group_table = lambda *_, logs=groups: ((MANY, logs),)
        run(SMALL, 7, 2, planes=8)
        run(MORE, 21, 3)
    decode.group_table = lambda *args: ((4, (1, 1)), (MANY, (2, 1) if args[-1] else (0, 1)))
    run(MORE, 21, 3)
    for bits in range(2, 9):
        run(SMALL, 3, 2, low=bits, planes=bits)
    run(SMALL, 9, 2, dtype=torch.float16, table_dtype=torch.float16, activation="gelu_tanh")


def run_groups() -> None:
    """csrc/decode_groups.cu at every number of groups of tokens, warps alone and in groups."""
    binding.is_prefill = decode.is_few = lambda *_: False
    for token_groups in (1, 2, 3, 4):
        decode.choose_token_groups = lambda *_, count=token_groups: count
        for groups in ((0, 0), (1, 2), (2, 1)):
            decode.group_table = lambda *_, logs=groups: ((MANY, logs),)
            run(SMALL, 40, 2, planes=8)
    run(MORE, 45, 3)


def run_prefill() -> None:
    """csrc/prefill.cu from one token to more than a block."""
    binding.is_prefill = lambda *_: True
    for tokens in (1, 9, 145):
        run(SMALL, tokens, 2, planes=8)
    run(MORE, 60, 3)


if __name__ == "__main__":
    {"decode": run_decode, "groups": run_groups, "prefill": run_prefill}[sys.argv[1]]()
