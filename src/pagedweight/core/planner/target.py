"""TargetBytesFromKVPressure and PressureTriggered (eq. 7, Algorithm 1 lines 4 and 10)."""

from __future__ import annotations

from pagedweight.core.observation import KVPressure


def wanted_blocks(kv: KVPressure, threshold: int, expected_free: int) -> int:
    """max{0, T_blk + 1 - F_blk} in whole granules, and no more than can be backed at all."""
    short = max(0, threshold + 1 - expected_free)
    granules = -(-short // kv.granule_blocks)
    return min(granules * kv.granule_blocks, kv.unbacked_blocks)


def target_bytes_from_kv_pressure(kv: KVPressure, threshold: int, on_way_bytes: int = 0) -> int:
    """D of eq. 7 in bytes, with F_blk taken after pending prompts and growth are served.

    threshold:    T_blk in blocks.
    on_way_bytes: bytes that earlier plans are still releasing (negative: still claiming). They and
                  the pool's headroom reach KV without a new plan, so they are not asked for twice.
    """
    wanted = wanted_blocks(kv, threshold, kv.expected_free_blocks) * kv.block_bytes
    return _net(wanted, kv, on_way_bytes)


def emergency_bytes(kv: KVPressure, on_way_bytes: int = 0) -> int:
    """Bytes without which a running request is preempted or the next one never starts.

    Eq. 7 with T_blk = 0; of the waiting requests only the one at the head counts.
    """
    expected = kv.free_blocks - kv.growth_blocks - kv.head_blocks
    return _net(wanted_blocks(kv, 0, expected) * kv.block_bytes, kv, on_way_bytes)


def _net(wanted: int, kv: KVPressure, on_way_bytes: int) -> int:
    return max(0, wanted - kv.headroom_bytes - on_way_bytes) if wanted else 0


def pressure_triggered(kv: KVPressure, threshold: int) -> bool:
    """Whether free blocks, pending and growth served, are at the offload threshold or below."""
    return kv.expected_free_blocks <= threshold


def spare_bytes(kv: KVPressure, threshold: int, on_way_bytes: int = 0) -> int:
    """Bytes that a reload may take so that more than `threshold` blocks stay free (Fig. 4).

    KV gives whole granules; headroom and what is on its way are counted in. 0 at or below the
    threshold, so that a reload never brings the offload threshold nearer than that.
    """
    above = kv.expected_free_blocks - (threshold + 1)
    if above < 0:
        return 0
    granules = above // kv.granule_blocks
    from_kv = granules * kv.granule_blocks * kv.block_bytes
    return max(0, from_kv + kv.headroom_bytes + on_way_bytes)
