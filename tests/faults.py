"""Ways in which a checkpoint can be wrong, for `factory.make_checkpoint(fault=...)`.

Each fault is a kind that users of other projects met; `case` is its number in this list:
1 shards missing, truncated, extra · 2 a tensor of one expert missing · 3 an expert that is never
routed to · 4 rows of zeros or nearly so · 5 NaN and Inf · 6 fewer or more experts than the config
promises · 7 unknown names · 8 shapes that do not fit · 9 things that must not be quantized ·
10 tied embeddings · 11 a type that would be changed without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Fault:
    """`stage`: where it must be found: "open" (headers), "values" (weights read), or "never" when
    the checkpoint is odd but good. `says`: what the message must name. `needs`: factory options."""

    case: int
    stage: str
    says: tuple[str, ...] = ()
    config: Callable[[dict[str, Any]], None] | None = None
    tensors: Callable[[dict[str, torch.Tensor]], None] | None = None
    folder: Callable[[Path], None] | None = None
    needs: tuple[tuple[str, Any], ...] = ()


def _set(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(changes)


def _shard(path: Path) -> Path:
    return path / "model-00002-of-00003.safetensors"


def _missing_shard(path: Path) -> None:
    _shard(path).unlink()


def _truncated_shard(path: Path) -> None:
    data = _shard(path).read_bytes()
    _shard(path).write_bytes(data[: len(data) - 100])


def _header_only(path: Path) -> None:
    _shard(path).write_bytes(_shard(path).read_bytes()[:5])


def _extra_shard(path: Path) -> None:
    (path / "model-00004-of-00003.safetensors").write_bytes(_shard(path).read_bytes())


def _index(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def _listed_only(path: Path) -> None:
    _index(path, lambda names: names.update({"model.ghost.weight": _shard(path).name}))


def _unlisted(path: Path) -> None:
    def forget(names: dict[str, str]) -> None:
        del names["model.norm.weight"]

    _index(path, forget)


def _broken_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "qwen2_moe",')


def _rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if old in n and ".experts." in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def _put(name: str, index: tuple[int, ...], value: float) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][index] = value

    return change


def _both_layouts(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 64, 48, dtype=torch.bfloat16)


def _tiny_rows(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{EXPERT}.gate_proj.weight"][3] = 0
    tensors[f"{EXPERT}.up_proj.weight"][5] = 1e-23
    tensors[f"{EXPERT}.down_proj.weight"][:] = 0


def _never_routed(tensors: dict[str, torch.Tensor]) -> None:
    """A constant first coordinate in every embedding, which the router of expert 1 abhors."""
    tensors["model.embed_tokens.weight"][:, 0] = 8.0
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[1] = 0
            tensor[1, 0] = -100.0


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{EXPERT}.up_proj.weight"
    tensors[name] = tensors[name][:40].contiguous()


def _widen(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{EXPERT}.up_proj.weight"
    tensors[name] = tensors[name].float()


def _duplicate_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _other_head(tensors: dict[str, torch.Tensor]) -> None:
    _duplicate_head(tensors)
    tensors["lm_head.weight"][7, 7] += 1


EXPERT = "model.layers.1.mlp.experts.1"
SHARDED = (("shards", 3),)
TIED = (("tied", True),)
FUSED = (("layout", "fused"),)

FAULTS = {
    "missing_shard": Fault(
        1, "open", ("model-00002-of-00003.safetensors",), folder=_missing_shard, needs=SHARDED
    ),
    "truncated_shard": Fault(
        1,
        "open",
        ("model-00002-of-00003.safetensors", "truncated"),
        folder=_truncated_shard,
        needs=SHARDED,
    ),
    "header_only": Fault(
        1,
        "open",
        ("model-00002-of-00003.safetensors", "5 bytes"),
        folder=_header_only,
        needs=SHARDED,
    ),
    "extra_shard": Fault(
        1, "open", ("model-00004-of-00003.safetensors",), folder=_extra_shard, needs=SHARDED
    ),
    "listed_only": Fault(1, "open", ("model.ghost.weight",), folder=_listed_only, needs=SHARDED),
    "unlisted": Fault(1, "open", ("model.norm.weight",), folder=_unlisted, needs=SHARDED),
    "missing_expert_tensor": Fault(
        2, "open", ("layer 1 expert 1 up",), tensors=_drop(f"{EXPERT}.up_proj.weight")
    ),
    "never_routed": Fault(3, "never", tensors=_never_routed),
    "tiny_rows": Fault(4, "never", tensors=_tiny_rows),
    "nan": Fault(
        5,
        "values",
        (f"{EXPERT}.down_proj.weight[9, 17]", "nan"),
        tensors=_put(f"{EXPERT}.down_proj.weight", (9, 17), float("nan")),
    ),
    "inf": Fault(
        5,
        "values",
        ("model.layers.2.self_attn.o_proj.weight[3, 0]", "-inf"),
        tensors=_put("model.layers.2.self_attn.o_proj.weight", (3, 0), float("-inf")),
    ),
    "fused_layer_missing": Fault(
        6,
        "open",
        ("layer 2 gate_up", "4 experts in 3 layers"),
        tensors=_drop("model.layers.2.mlp.experts.gate_up_proj"),
        needs=FUSED,
    ),
    "more_experts_promised": Fault(6, "open", ("9 of 45", "5 experts"), config=_set(num_experts=5)),
    "fewer_experts_promised": Fault(
        6, "open", ("too many", "experts.3.", "3 experts"), config=_set(num_experts=3)
    ),
    "layer_promised_dense": Fault(
        6, "open", ("layers.1.", "in 2 layers"), config=_set(mlp_only_layers=[1])
    ),
    "unknown_names": Fault(
        7, "open", ("experts.0.w_gate.weight",), tensors=_rename(".gate_proj.", ".w_gate.")
    ),
    "both_layouts": Fault(7, "open", ("experts.down_proj", "fused"), tensors=_both_layouts),
    "unknown_architecture": Fault(
        7, "open", ("'gpt_oss'", "mixtral"), config=_set(model_type="gpt_oss")
    ),
    "broken_config": Fault(7, "open", ("config.json",), folder=_broken_config),
    "wrong_shape": Fault(
        8, "open", (f"{EXPERT}.up_proj.weight", "[40, 64]", "[48, 64]"), tensors=_cut
    ),
    "zero_width": Fault(
        8, "open", ("moe_intermediate_size",), config=_set(moe_intermediate_size=0)
    ),
    "already_quantized": Fault(
        9, "open", ("awq",), config=_set(quantization_config={"quant_method": "awq"})
    ),
    "untied_without_head": Fault(
        10, "open", ("lm_head.weight",), config=_set(tie_word_embeddings=False), needs=TIED
    ),
    "tied_head_duplicate": Fault(10, "never", tensors=_duplicate_head, needs=TIED),
    "tied_head_differs": Fault(10, "values", ("lm_head.weight",), tensors=_other_head, needs=TIED),
    "mixed_types": Fault(11, "open", ("1 of F32", "35 of BF16"), tensors=_widen),
    "unknown_activation": Fault(7, "open", ("'relu2'",), config=_set(hidden_act="relu2")),
}
