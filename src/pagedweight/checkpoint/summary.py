"""What a checkpoint holds, in numbers: sizes by level, files, coverage of the calibration."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedweight.checkpoint.calibration import Calibration
from pagedweight.checkpoint.manifest import layer_file
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS


def summarize(checkpoint: Checkpoint) -> dict[str, Any]:
    """Plain values for JSON and for the table of `inspect`. Sizes in bytes."""
    manifest, shape = checkpoint.manifest, checkpoint.shape
    layers = len(checkpoint.moe_layers)
    calibration = checkpoint.calibration()
    return {
        "path": str(checkpoint.path),
        "architecture": manifest.architecture,
        "activation": manifest.activation,
        "source": dict(manifest.source),
        "experts": shape.experts,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "top_k": manifest.top_k,
        "num_hidden_layers": manifest.num_hidden_layers,
        "moe_layers": list(checkpoint.moe_layers),
        "linear_blocks": layers * shape.experts * len(KINDS),
        "expert_weights": _weights(checkpoint),
        "bits": list(checkpoint.bits),
        "table_dtype": checkpoint.table_dtype,
        "levels": [_level(checkpoint, bits) for bits in checkpoint.bits],
        "blocks": {kind: _block(checkpoint, index) for index, kind in enumerate(KINDS)},
        "files": _files(checkpoint),
        "calibration": _coverage(checkpoint, calibration),
    }


def _weights(checkpoint: Checkpoint) -> int:
    """Logical weights of all routed experts, without padding."""
    per_expert = sum(block.rows * block.cols for block in checkpoint.shape.blocks)
    return len(checkpoint.moe_layers) * checkpoint.shape.experts * per_expert


def _level(checkpoint: Checkpoint, bits: int) -> dict[str, Any]:
    """Device bytes of all experts at uniform `bits` (eq. 3), planes and tables apart."""
    blocks = len(checkpoint.moe_layers) * checkpoint.shape.experts
    planes = blocks * sum(bits * block.plane_bytes for block in checkpoint.shape.blocks)
    tables = blocks * sum(block.table_bytes(bits) for block in checkpoint.shape.blocks)
    return {
        "bits": bits,
        "plane_bytes": planes,
        "table_bytes": tables,
        "bytes": planes + tables,
        "bits_per_weight": 8 * (planes + tables) / _weights(checkpoint),
    }


def _block(checkpoint: Checkpoint, kind: int) -> dict[str, Any]:
    """One linear block of a kind: logical and padded size, bytes of each level."""
    block = checkpoint.shape.blocks[kind]
    return {
        "rows": block.rows,
        "cols": block.cols,
        "padded_rows": block.padded_rows,
        "padded_cols": block.padded_cols,
        "plane_bytes": block.plane_bytes,
        "table_bytes": {str(bits): block.table_bytes(bits) for bits in checkpoint.bits},
        "resident_bytes": {str(bits): block.resident_bytes(bits) for bits in checkpoint.bits},
    }


def _files(checkpoint: Checkpoint) -> dict[str, int]:
    files = checkpoint.manifest.files
    experts = {layer_file(layer) for layer in checkpoint.moe_layers}
    return {
        "count": len(files),
        "bytes": sum(record.bytes for record in files.values()),
        "expert_bytes": sum(r.bytes for name, r in files.items() if name in experts),
        "plain_bytes": sum(
            record.bytes
            for name, record in files.items()
            if name.endswith(".safetensors") and "/" not in name
        ),
    }


def _coverage(checkpoint: Checkpoint, calibration: Calibration) -> dict[str, Any]:
    """How well calibration reached the experts; shares are of a layer's routed tokens."""
    tokens = calibration.tokens
    share = tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1)
    return {
        **calibration.metadata,
        "routed_tokens": int(tokens.sum()),
        "unseen_experts": [
            [checkpoint.moe_layers[pos], expert] for pos, expert in calibration.unseen
        ],
        "sensitivity": calibration.sensitivity is not None,
        "residual": sorted(calibration.residual),
        "layers": [
            {
                "layer": layer,
                "seen": int((tokens[pos] > 0).sum()),
                "tokens": int(tokens[pos].sum()),
                "least_share": float(share[pos].min()),
                "largest_share": float(share[pos].max()),
            }
            for pos, layer in enumerate(checkpoint.moe_layers)
        ],
    }
