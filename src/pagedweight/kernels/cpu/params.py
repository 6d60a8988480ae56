"""The one argument of every compiled phase: an int64 array of addresses and sizes.

Phases run on threads that are given a pointer and nothing else, so everything a call needs is in
this array. The two counters are shared by the threads of a phase.
"""

from __future__ import annotations

import torch

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

(
    NEXT_TASK,  # counter: the next task of this phase
    NEXT_SLOT,  # counter: the next thread's part of the scratch memory
    TOKENS,
    TOP_K,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    ACTIVATION,  # a value of ACTIVATIONS
    DTYPE,  # of x and out, a value of DTYPES
    TABLE_IS_HALF,
    WIDE_IDS,  # topk_ids is int64
    REAL_TOKENS,  # tokens that count in the statistics
    WITH_STATS,
    X,  # the contract's tensors
    TOPK_WEIGHTS,
    TOPK_IDS,
    BITS,
    PLANES,
    TABLES,
    OUT,
    MASS,
    TOKENS_SEEN,
    FEATURES,
    OFFSETS,  # int32 [E + 1]: where an expert's pairs start in PAIRS
    PAIRS,  # int32 [T k]: t k + choice, by expert, then by token
    ROWS,  # float32 [T, padded H]: x in the planes' column order
    HIDDEN_ROWS,  # float32 [T k, padded I]: act(gate) * up by place in PAIRS, same order
    NORMS,  # float32 [T + T k]: norms of x by token, of the hidden rows by place
    STRIP,  # per thread: decoded rows and products
    STRIP_BYTES,
    SUMS,  # per thread: float32 [T, 16] of out
    SUMS_BYTES,
    SIZE,  # not a field: the length of the array
) = range(33)

FAULT_EXPERT, FAULT_BITS, FAULT_ADDRESS = 1, 2, 3
"""What `route` may find wrong; it leaves the offender in NEXT_TASK (see `kernel._fault`)."""
