"""The two phases of one thread: sort pairs by expert first, add up the statistics last.

A pair is one (token, choice). Importing this module compiles it.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

from pagedweight.core.geometry import MAX_BITS, MIN_BITS
from pagedweight.kernels.cpu import params as p
from pagedweight.kernels.cpu.machine import cached_here
from pagedweight.kernels.cpu.memory import floats_at, ints_at, longs_at

with cached_here():

    @njit(cache=True, inline="always")
    def _expert_of(call, pair):
        """The expert id of a pair; negative: another rank's."""
        if call[p.WIDE_IDS]:
            return longs_at(call[p.TOPK_IDS], pair + 1)[pair]
        return np.int64(ints_at(call[p.TOPK_IDS], pair + 1)[pair])

    @njit(cache=True)
    def _check_block(call, block):
        """A fault of a block (2 e + kind) that this call is going to read, or 0."""
        bits = ints_at(call[p.BITS], block + 1)[block]
        if bits < MIN_BITS or bits > MAX_BITS:
            return p.FAULT_BITS
        planes = longs_at(call[p.PLANES] + 8 * MAX_BITS * block, MAX_BITS)
        for plane in range(bits):
            if planes[plane] == 0:
                return p.FAULT_ADDRESS
        if longs_at(call[p.TABLES], block + 1)[block] == 0:
            return p.FAULT_ADDRESS
        return 0

    @cfunc(types.int64(types.int64), cache=True, error_model="numpy")
    def route(address):
        """Fill OFFSETS and PAIRS; returns 0 or a FAULT_ code, with the offender in NEXT_TASK."""
        call = longs_at(address, p.SIZE)
        experts, pairs = call[p.EXPERTS], call[p.TOKENS] * call[p.TOP_K]
        offsets = ints_at(call[p.OFFSETS], experts + 1)
        order = ints_at(call[p.PAIRS], pairs)
        for expert in range(experts + 1):
            offsets[expert] = 0
        for pair in range(pairs):
            expert = _expert_of(call, pair)
            if expert >= experts:
                call[p.NEXT_TASK] = expert
                return p.FAULT_EXPERT
            if expert >= 0:
                offsets[expert] += 1
        end = 0
        for expert in range(experts):
            if offsets[expert] > 0:
                for block in (2 * expert, 2 * expert + 1):
                    fault = _check_block(call, block)
                    if fault:
                        call[p.NEXT_TASK] = block
                        return fault
            end += offsets[expert]
            offsets[expert] = end
        offsets[experts] = end
        for back in range(pairs):  # from the last pair on, so that each end moves to its start
            pair = pairs - 1 - back
            expert = _expert_of(call, pair)
            if expert >= 0:
                offsets[expert] -= 1
                order[offsets[expert]] = pair
        return 0

    @cfunc(types.int64(types.int64), cache=True, error_model="numpy")
    def count(address):
        """Add the real tokens' routing mass, counts and input norms to the statistics."""
        call = longs_at(address, p.SIZE)
        experts, top_k, tokens = call[p.EXPERTS], call[p.TOP_K], call[p.TOKENS]
        offsets = ints_at(call[p.OFFSETS], experts + 1)
        order = ints_at(call[p.PAIRS], tokens * top_k)
        weights = floats_at(call[p.TOPK_WEIGHTS], tokens * top_k)
        norms = floats_at(call[p.NORMS], tokens + tokens * top_k)
        mass, seen = floats_at(call[p.MASS], experts), floats_at(call[p.TOKENS_SEEN], experts)
        features = floats_at(call[p.FEATURES], 6 * experts)
        for expert in range(experts):
            for at in range(offsets[expert], offsets[expert + 1]):
                token = order[at] // top_k
                if token >= call[p.REAL_TOKENS]:
                    break  # an expert's pairs ascend by token
                weight = weights[order[at]]
                mass[expert] += weight
                seen[expert] += np.float32(1)
                for kind in range(2):
                    norm = norms[token] if kind == 0 else norms[tokens + at]
                    first = 6 * expert + 3 * kind
                    features[first] += weight * norm
                    features[first + 1] += weight * norm * norm
                    features[first + 2] = max(features[first + 2], norm)
        return 0
