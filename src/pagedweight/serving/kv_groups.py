"""How vLLM groups a model's layers by the KV that they keep, from their sizes alone.

Layers of one kind are one group. Where some keep all tokens and others a window, every KV block
becomes as large as the largest by holding more tokens, and the layers are dealt out to groups of
equally many, which share the memory of one (`serving/elastic/kv_layout.py`).
The rules are those of vLLM 0.26 and 0.32 (`kv_cache_utils.get_kv_cache_groups`, which a test
compares), for layouts in which a layer's blocks lie next to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pagedweight.checkpoint.architecture import KVLayer
from pagedweight.serving.elastic.budget import KVBlock


@dataclass(frozen=True)
class KVGroups:
    """block: what a block id takes, whatever the group. block_tokens: tokens that a block holds, by
    group."""

    block: KVBlock
    block_tokens: tuple[int, ...]

    def tokens(self, blocks: int) -> int:
        """Tokens for which `blocks` blocks are enough while every layer keeps them."""
        return int(blocks / sum(Fraction(1, tokens) for tokens in self.block_tokens))


def kv_groups(layers: Sequence[KVLayer], block_tokens: int, value_bytes: int) -> KVGroups | None:
    """The groups at --block-size `block_tokens`, values of `value_bytes` bytes.

    None when all layers keep the same tokens in blocks of several sizes: those are one group.
    """
    kinds = Counter((layer.values() * value_bytes, layer.window) for layer in layers)
    if len(kinds) > 1 and len({window for _, window in kinds}) == 1:
        return None
    largest = max(token_bytes for token_bytes, _ in kinds)
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.5 * fewest else fewest
    sizes: list[int] = []
    for (token_bytes, _), count in kinds.items():
        # A block that cannot be made as large by whole tokens is padded.
        longer = 1 if largest % token_bytes else largest // token_bytes
        sizes += [block_tokens * longer] * -(-count // size)
    return KVGroups(KVBlock(size, largest * block_tokens), tuple(sizes))
